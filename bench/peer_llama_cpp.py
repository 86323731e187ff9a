"""llama.cpp's share of bench.peers: serves the task in a file with llama-server, asks it, one JSON line on stdout.

Greedy as llama-server does it; it ends an answer at each token that the GGUF file marks as an end."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

COUNTERS = {"rounds": "spec_decode_num_drafts_total", "accepted": "spec_decode_num_accepted_tokens_total"}


def server_command(task: dict, port: int) -> list[str]:
    command = [task["server"], "-m", task["target"], "-t", str(task["threads"]), "-c", str(task["context"])]
    command += ["-np", "1", "--port", str(port), "--metrics"]
    if task["K"]:
        command += ["-md", task["speculator"], "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(task["K"])]
    return command


def ask(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return response.read().decode()


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    """Returns once the model is loaded; exits where the server does."""
    while server.poll() is None:
        try:
            ask(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    sys.exit(f"error: llama-server ended with exit code {server.returncode}")


def read_counters(text: str) -> dict[str, int]:
    """From the text of /metrics: since the server started; absent, and so 0, where it decodes plainly."""
    values = dict(re.findall(r"^llamacpp:(\w+) (\S+)$", text, flags=re.MULTILINE))
    return {ours: int(float(values.get(theirs, 0))) for ours, theirs in COUNTERS.items()}


def read_answer(text: str) -> dict:
    """From the text of /completion; predicted_ms leaves out the pass over the prompt, which makes the first token."""
    reply = json.loads(text)
    return {"token_ids": reply["tokens"], "decode_seconds": reply["timings"]["predicted_ms"] / 1000}


def main(task: dict) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", server_command(task, port)
    fixed = {"temperature": 0, "cache_prompt": False, "return_tokens": True}
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        wait_until_ready(server, url)
        ask(f"{url}/completion", {"prompt": task["prompts"][0], "n_predict": 8, **fixed})  # warm-up
        before = read_counters(ask(f"{url}/metrics"))
        body = {"n_predict": task["max_new_tokens"], **fixed}
        results = [read_answer(ask(f"{url}/completion", {"prompt": ids, **body})) for ids in task["prompts"]]
        after = read_counters(ask(f"{url}/metrics"))
    finally:
        server.terminate()
        server.wait()  # so that its memory is part of ours
    totals = {name: after[name] - before[name] for name in after}
    print(json.dumps({"command": shlex.join(command), "results": results, "totals": totals}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
