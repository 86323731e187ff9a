"""The training data on disk: numbered safetensors files, each there whole or not at all, and a manifest of what they
are of.

    text-NNNNN.safetensors    ids (n, L) int32, kinds (n, L) uint8: who wrote each token
    states-NNNNN.safetensors  of the same rows: aux (n, L, n_aux * D), entering the layers that the manifest names, one
                              behind the other; last (n, L, D), leaving the last layer, un-normed; in the target's dtype
"""

import hashlib
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from speculators_config import ConfigError, read_json

TEMPLATE, QUESTION, ANSWER, GREEDY = range(4)  # kinds: given, not written; a question's; an answer's, drawn or greedy
EDGE = 1 << 20  # bytes of either end of a weight file that tell it from others


def shard(folder: Path, kind: str, i: int) -> Path:
    return folder / f"{kind}-{i:05}.safetensors"


def count(folder: Path, kind: str) -> int:
    """How many are there from the first on without a gap."""
    return next(i for i in itertools.count() if not shard(folder, kind, i).exists())


def whole(path: Path, save: Callable[[Path], object]) -> None:
    """The file is there only when `save` has written all of it."""
    part = path.with_suffix(".part")
    save(part)
    part.replace(path)


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    whole(path, partial(save_file, {name: tensor.contiguous() for name, tensor in tensors.items()}))


def write_json(path: Path, what: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole(path, lambda part: part.write_text(json.dumps(what, indent=2) + "\n"))


def fingerprint(target: Path) -> str:
    """Of a checkpoint: its config, and names, sizes and both ends of its weight files."""
    digest = hashlib.sha256((target / "config.json").read_bytes())
    for path in sorted(target.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(EDGE))
            file.seek(-min(EDGE, path.stat().st_size), 2)
            digest.update(file.read())
    return digest.hexdigest()


def settle_manifest(folder: Path, **facts) -> None:
    """Writes folder/manifest.json, or checks that it says the same: other facts make other data.

    Raises ConfigError with the first fact that differs."""
    path, wanted = folder / "manifest.json", json.loads(json.dumps(facts))
    if not path.exists():
        return write_json(path, wanted)
    found = read_json(path)
    for name, value in wanted.items():
        if found.get(name) != value:
            wrong = f"this data was made with {found.get(name)}, now it is {value}"
            raise ConfigError(f"{path}: {name}: {wrong}; give the same again, or another --data")
