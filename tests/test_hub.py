"""The real Hub client against a small Hub on the loopback interface: what it fetches, what is said when it fails."""

import errno
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from checkpoint import _explain

ROOT = Path(__file__).parent.parent
SHARDED = Path(__file__).parent / "fixtures" / "targets" / "llama_sharded"
SMALL = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
]
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
OTHERS = [
    "README.md",
    "consolidated.safetensors",
    "model.safetensors",
    "original/model.safetensors",
    "pytorch_model.bin",
]
OPEN, FETCH = ("open", "org/sharded", "target"), ("fetch", "org/sharded", "target")

# Runs each case and prints its result on one line.
CASES = """
import json, sys
from checkpoint import fetch_weights, open_checkpoint, stored_tensors
from speculators_config import ConfigError
for call, name, role in json.loads(sys.argv[1]):
    try:
        folder = open_checkpoint(name, role)
        folder = fetch_weights(folder, name, role) if call == "fetch" else folder
        print(folder.name, len(stored_tensors(folder)) if call == "fetch" else sorted(p.name for p in folder.iterdir()))
    except ConfigError as error:
        print(f"error: {error}")
"""


@dataclass
class Hub:
    """Repositories: their files, or else the (status, X-Error-Code) that everything about them answers."""

    repos: dict[str, dict[str, bytes] | tuple[int, str]]
    refused: str = "/nothing"  # part of the paths that are refused as gated
    moving: bool = False  # whether the branch moves on each time that it is asked for
    port: int = 0
    commit: str = "a" * 40
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path
    tokens: set[str | None] = field(default_factory=set)

    def fetched(self) -> list[str]:
        """COMMIT/FILE of the files asked for, in that order."""
        return [path.split("/resolve/")[1] for method, path in self.requests if method == "GET" and "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    """/api/models/NAME/revision/main, /api/models/NAME/tree/COMMIT, /NAME/resolve/COMMIT/FILE; anything else is 404."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        if path == "/api/agent-harnesses":  # the client asks for this once a day, whatever it is used for
            return self.answer(404)
        hub.requests.append((self.command, path))
        hub.tokens.add(self.headers.get("Authorization"))
        name, what, rest = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/(.+)", path).groups()
        repo = hub.repos.get(name, (404, "RepoNotFound")) if hub.refused not in path else (401, "GatedRepo")
        if isinstance(repo, tuple):
            return self.answer(repo[0], headers={"X-Error-Code": repo[1]})
        if what == "revision":
            answer = self.answer(200, json.dumps({"id": name, "sha": hub.commit}).encode())
            hub.commit = "b" * 40 if hub.moving else hub.commit
            return answer
        if what == "tree":
            tree = [{"type": "file", "path": file, "size": len(data), "oid": "0" * 40} for file, data in repo.items()]
            return self.answer(200, json.dumps(tree).encode())
        commit, file = rest.split("/", 1)
        if file not in repo:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha1(repo[file]).hexdigest()
        return self.answer(200, repo[file], {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in SHARDED.iterdir()}
    files |= {file: file.encode() for file in ("tokenizer.json", "chat_template.jinja", *OTHERS)}
    hub = Hub({"org/sharded": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Serving", (Handler,), {"hub": hub}))
    hub.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


def run(port: int, home: Path, *cases: tuple[str, str, str], **env: str) -> list[str]:
    """One line for each case, from a fresh process that knows no Hub but the one on this port."""
    # The user's proxies, Hub settings and HOME, where a token may lie, stay out.
    kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
    kept |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HOME": str(home), "HF_HOME": str(home / "hf")}
    command = [sys.executable, "-c", CASES, json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env={**kept, **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stdout  # bars and warnings go to stderr, and an error is one line
    return lines


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_only_what_is_needed_is_fetched_and_only_once(hub, tmp_path):
    opened, fetched = run(hub.port, tmp_path, OPEN, FETCH)
    assert opened == f"{hub.commit} {SMALL}"
    assert fetched == f"{hub.commit} 30"
    files = [path.removeprefix(f"{hub.commit}/") for path in hub.fetched()]
    assert (sorted(files[: len(SMALL)]), sorted(files[len(SMALL) :])) == (SMALL, SHARDS)

    hub.requests.clear()
    again = run(hub.port, tmp_path, OPEN, FETCH)
    assert again == [f"{hub.commit} {sorted(SMALL + SHARDS)}", fetched]
    assert set(hub.requests) == {("GET", "/api/models/org/sharded/revision/main")}, "more than asking what is newest"

    hub.requests.clear()
    assert run(hub.port, tmp_path, OPEN, FETCH, HF_HUB_OFFLINE="1") == again
    assert hub.requests == []


def test_a_hub_that_is_down(hub, tmp_path):
    """Its port is closed: a complete cache serves, anything else is an error."""
    cached = run(hub.port, tmp_path, FETCH)
    *served, error = run(closed_port(), tmp_path, FETCH, ("open", "org/other", "speculator"))
    assert served == cached
    start = "error: --speculator: org/other: no such folder, and the speculator repository cannot be fetched ("
    assert error.startswith(start + "ConnectError: ")
    assert error.endswith("; check the network, HF_ENDPOINT and HF_HOME, or give a local folder as --speculator")


def test_without_an_index_the_single_file_is_fetched_with_the_token(hub, tmp_path):
    hub.repos["org/single"] = {file: (SHARDED / SHARDS[2]).read_bytes() + file.encode() for file in OTHERS}
    hub.repos["org/single"] |= {"config.json": b"{}", "model.safetensors": (SHARDED / SHARDS[2]).read_bytes()}
    assert run(hub.port, tmp_path, ("fetch", "org/single", "speculator"), HF_TOKEN="hf_secret") == [f"{hub.commit} 5"]
    assert hub.fetched() == [f"{hub.commit}/config.json", f"{hub.commit}/model.safetensors"]
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(("index", "weights", "tensors"), [(True, SHARDS, 30), (False, ["model.safetensors"], 5)])
def test_the_weights_are_of_the_commit_of_the_config_though_the_branch_moves(hub, tmp_path, index, weights, tensors):
    if not index:
        del hub.repos["org/sharded"]["model.safetensors.index.json"]
        hub.repos["org/sharded"]["model.safetensors"] = (SHARDED / SHARDS[2]).read_bytes()
    hub.moving, first = True, hub.commit
    assert run(hub.port, tmp_path, FETCH) == [f"{first} {tensors}"]
    assert hub.commit != first
    assert {f"{first}/{file}" for file in ("config.json", *weights)} <= set(hub.fetched())
    assert {path.split("/")[0] for path in hub.fetched()} == {first}
    assert hub.tokens == {None}


def test_refusals_name_the_repository_its_role_and_the_way_out(hub, tmp_path):
    hub.refused = "/org/gated-files/resolve/"  # as on the Hub: the page is public, the files are not
    hub.repos |= {
        "org/gated-files": {"config.json": b"{}"},
        "org/gated": (401, "GatedRepo"),
        "org/not-granted": (403, "GatedRepo"),
        "org/bad-token": (401, ""),
        "org/forbidden": (403, ""),
        "org/private": (401, "RepoNotFound"),
        "org/branchless": (404, "RevisionNotFound"),
        "org/broken": (500, ""),
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b""},
    }
    token = "set HF_TOKEN to a token that may read it (accept the licence on its page), or give a local folder as --"
    refused = "the Hub refuses access to the {1} repository ({0}); " + token + "{1}"
    unseen = "no such folder, and the Hub shows no such {1} repository ({0}); check the name, " + token + "{1}"
    failed = "the Hub answers {0} for the {1} repository; try again later, or give a local folder as --{1}"
    expected = {
        ("org/gated-files", "target"): refused.format(401, "target"),
        ("org/gated", "target"): refused.format(401, "target"),
        ("org/not-granted", "speculator"): refused.format(403, "speculator"),
        ("org/bad-token", "speculator"): refused.format(401, "speculator"),
        ("org/forbidden", "target"): refused.format(403, "target"),
        ("org/private", "target"): unseen.format(401, "target"),
        ("org/typo", "speculator"): unseen.format(404, "speculator"),
        ("org/branchless", "target"): unseen.format(404, "target"),
        ("org/broken", "speculator"): failed.format(500, "speculator"),
    }
    cases = [("open", *case) for case in expected] + [("fetch", "org/pickled", "speculator")]
    *lines, pickled = run(hub.port, tmp_path, *cases)
    assert lines == [f"error: --{role}: {name}: {text}" for (name, role), text in expected.items()]
    assert "model.safetensors: no weights, neither this file nor" in pickled
    assert not any("pytorch_model.bin" in path for path in hub.fetched())


def test_offline_what_is_not_cached_is_an_error(hub, tmp_path):
    run(hub.port, tmp_path, OPEN)
    cases = OPEN, FETCH, ("open", "org/other", "speculator")
    opened, *errors = run(hub.port, tmp_path, *cases, HF_HUB_OFFLINE="1")
    assert opened == f"{hub.commit} {SMALL}"
    text = "error: --{0}: {1}: no such folder, and HF_HUB_OFFLINE is set: the {0} repository is not all cached; "
    text += "unset it, or give a local folder as --{0}"
    assert errors == [text.format("target", "org/sharded"), text.format("speculator", "org/other")]


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>"], ids=["nothing", "a page"]
)
def test_what_is_no_hub(answer, tmp_path):
    """Connections that are cut, and a network's own log-in page, which answers everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        (line,) = run(server.getsockname()[1], tmp_path, OPEN)
    assert line.startswith(
        "error: --target: org/sharded: no such folder, and the target repository cannot be fetched ("
    )


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "hf").write_text("a file where HF_HOME should be a folder")
    (line,) = run(hub.port, tmp_path, OPEN)
    assert line.startswith(
        "error: --target: org/sharded: no such folder, and the target repository cannot be fetched ("
    )
    assert "HF_HOME" in line


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError(f"Data processing error: IO Error: {os.strerror(errno.ENOSPC)} (os error 28)"),  # hf_xet's manner
    ],
)
def test_a_full_disk(error):
    assert _explain(error, "target") == (
        "no space left on the disk for the target repository; "
        "point HF_HOME to a larger one, or give a local folder as --target"
    )
