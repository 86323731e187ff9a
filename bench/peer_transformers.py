"""transformers' share of bench.peers, run inside its own venv: answers the task in a file, one JSON line on stdout.

Plain decoding only: transformers has no EAGLE-3."""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """When generate handed out the prompt, the first token, the second ..."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def main(task: dict) -> None:
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["target"], dtype=torch.bfloat16).eval()
    options = {"do_sample": False, "eos_token_id": task["stop_ids"], "pad_token_id": min(task["stop_ids"], default=0)}

    def answer(prompt: list[int], max_new_tokens: int) -> dict:
        ids, clock = torch.tensor([prompt]), Clock()
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=clock, **options)
        return {"token_ids": out[0, len(prompt) :].tolist(), "decode_seconds": clock.times[-1] - clock.times[1]}

    answer(task["prompts"][0], 8)  # warm-up
    results = [answer(prompt, task["max_new_tokens"]) for prompt in task["prompts"]]
    command = (
        f"AutoModelForCausalLM.from_pretrained({task['target']!r}, dtype=torch.bfloat16).generate(do_sample=False)"
    )
    print(json.dumps({"command": command, "results": results, "totals": {}}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
