"""Checkpoints on disk: folder or Hub repository -> safetensors -> module, and back into a folder.

open_checkpoint() finds the folder (of a Hub repository: the small files), fetch_weights() adds the safetensors,
stored_tensors() reads their headers, load_weights() fills a module built on the meta device, strictly; new_folder()
writes one, whole or not at all. No maths, no config fields, no names of tensors, no tokenization here.
File format: https://github.com/huggingface/safetensors."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from speculators_config import ConfigError, read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    *("config.json", "generation_config.json", INDEX),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.*"),
)
# The commands that write folders, and what else than a checkpoint they put there. Each says so in the config.json of
# what it writes, and replaces nothing else.
WRITERS = {"quantize.py": (), "convert_hf_checkpoint.py": (), "train.eagle3": ("README.md",)}
FLOATS = ("F32", "F16", "BF16")
CODES = ("I8", "F8_E4M3")  # of weights in eight bits: nothing without their scales
EXACT = {
    "torch.bool": ("BOOL",), "torch.int32": ("I32",), "torch.int64": ("I64", "I32"), "torch.int8": ("I8",),
    "torch.float8_e4m3fn": ("F8_E4M3",),
}  # fmt: skip
# Stored by some writers; computed, or of no use, here.
TOLERATED = (r".*rotary_emb\.inv_freq", r"verifier_(norm|lm_head)\.weight", r".*\.(input|output|[qkv])_scale")


class Stored(NamedTuple):
    """Where a tensor lies and what its file's header says of it; dtype as safetensors spells it ("BF16", "F8_E4M3").
    Where `laid_out` makes it from what the file holds, shape and dtype are those of the result."""

    file: Path
    name: str  # in the file; a table of these may know it under another
    shape: tuple[int, ...]
    dtype: str
    scale: str | None = None  # of codes: the name of their scales in the same table
    group: int = 0  # of codes: the inputs that share a scale
    laid_out: Callable[[torch.Tensor], torch.Tensor] | None = None

    def read(self) -> torch.Tensor:
        with _opened(self.file, "pt") as file:
            tensor = file.get_tensor(self.name)
        return tensor if self.laid_out is None else self.laid_out(tensor)


# From a name to a folder.


def open_checkpoint(name: str, role: str) -> Path:
    """The folder with the config and tokenizer files of `name`, a folder or a Hub repository.

    role: "target", "speculator" or "draft"; errors name it, and the option that overrides it. The Hub is asked only
    where no folder has that name; what it sends lies in the client's cache, in a folder named by the commit.
    Raises ConfigError: no such folder or repository, no access, no network, no room.
    """
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        return Path(folder)
    if os.path.exists(folder):
        raise ConfigError(f"{_option(role)}: {name}: a file; give the folder that holds it, with its config.json")
    return _download(name, role, SMALL_FILES, revision=None)


def fetch_weights(folder: Path, name: str, role: str) -> Path:
    """Adds the weights to what open_checkpoint(name, role) returned: from the Hub the index's shards, of the same
    commit, else model.safetensors, and no other copy.

    What the cache holds is not fetched again, so a complete cache serves offline. Raises as open_checkpoint does.
    """
    if os.path.isdir(os.path.expanduser(name)):
        return folder
    files = set(_weight_map(folder).values()) if (folder / INDEX).exists() else {WEIGHTS}
    return _download(name, role, files, revision=folder.name)


def _download(name: str, role: str, files: Iterable[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # here: local folders need neither the client nor its import time
    from huggingface_hub.errors import HTTPError  # base of the errors of whichever HTTP library the client uses

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=sorted(files)))
    # OSError: offline, the disk. ValueError: a name that can't be a repository's, an answer that isn't the Hub's.
    # RuntimeError: whatever goes wrong, a full disk included, in hf_xet, which transfers large files.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_option(role)}: {name}: {_explain(error, role)}") from error


def _option(role: str) -> str:
    return "DRAFT" if role == "draft" else f"--{role}"  # the one that is not an option


def _explain(error: Exception, role: str) -> str:
    """What the Hub's client complains of, and the way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # "not in the cache" is half of it; this is why it could not be fetched
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    local = f"give a local folder as {_option(role)}"
    token = f"set HF_TOKEN to a token that may read it (accept the licence on its page), or {local}"
    gone = isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError))  # or hidden from us

    if isinstance(error, errors.HFValidationError):
        return "no such folder, and no name of a Hub repository; check the path, or give OWNER/NAME"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"no such folder, and HF_HUB_OFFLINE is set: the {role} repository is not all cached; unset it, or {local}"
        )
    if gone and not isinstance(error, errors.GatedRepoError):
        return f"no such folder, and the Hub shows no such {role} repository ({status}); check the name, {token}"
    if status in (401, 403):
        return f"the Hub refuses access to the {role} repository ({status}); {token}"
    if status is not None:
        return f"the Hub answers {status} for the {role} repository; try again later, or {local}"
    if os.strerror(errno.ENOSPC) in str(error):
        return f"no space left on the disk for the {role} repository; point HF_HOME to a larger one, or {local}"
    what = f"no such folder, and the {role} repository cannot be fetched"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{what} ({reason}); check the network, HF_ENDPOINT and HF_HOME, or {local}"


# From a folder to headers.


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder, by name, from the headers alone: no weight is read.

    The index decides which files count; without one it is model.safetensors. Raises ConfigError: no weights or pickled
    ones, a file or tensor of the index missing, a file or the index not readable.
    """
    weight_map = _weight_map(folder) if (folder / INDEX).exists() else {}
    shards = sorted(set(weight_map.values())) or [WEIGHTS]
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent and weight_map:
        raise ConfigError(
            f"{folder / INDEX}: {_some(absent)}: {len(absent)} of {len(shards)} files listed here do not exist; "
            "incomplete download? fetch the folder again (or delete a stale index beside a whole model.safetensors)"
        )
    if absent:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        what = "pickled weights are not run" if pickled else f"no weights, neither this file nor {INDEX}"
        raise ConfigError(f"{folder}: {_some(pickled or [WEIGHTS])}: {what}; give a checkpoint saved as safetensors")

    stored = {}
    for shard in shards:
        with _opened(folder / shard, "numpy") as file:  # for headers any framework serves that is quick to import
            for name in sorted(file.keys()):
                # A copy in another shard is passed over; what the index forgot is kept, for load_weights to judge.
                if weight_map.setdefault(name, shard) == shard:
                    header = file.get_slice(name)
                    stored[name] = Stored(folder / shard, name, tuple(header.get_shape()), header.get_dtype())
    lost = [name for name in weight_map if name not in stored]
    if lost:
        path = folder / weight_map[lost[0]]
        raise ConfigError(f"{path}: {_some(lost)}: in the index, not in the file; fetch the folder again")
    if not stored:
        raise ConfigError(f"{folder / WEIGHTS}: no tensors in it; give a checkpoint with weights")
    return stored


def _weight_map(folder: Path) -> dict[str, str]:
    """tensor -> file, from the index. Files are plain names: none outside the folder, no wildcards to download by."""
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: weight_map: not a table from tensors to files; fetch the folder again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ConfigError(f"{path}: {name}: {file!r} is no safetensors file of this folder; fetch the folder again")
    return weight_map


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path}: not readable as safetensors ({error}); incomplete download? fetch it again"
        ) from error


def load_tensors(folder: Path, name: str, role: str) -> dict[str, torch.Tensor]:
    """Every tensor of what open_checkpoint(name, role) returned, as it is stored: from safetensors, or where there are
    none from pytorch_model.bin. Raises ConfigError as stored_tensors does, and for a pickle of anything but tensors."""
    fetch_weights(folder, name, role)
    path, read = folder / PICKLED, {}
    safe = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    if not safe and not os.path.isdir(os.path.expanduser(name)):
        _download(name, role, [PICKLED], revision=folder.name)
    if not safe and path.exists():
        return _unpickled(path)
    for stored in stored_tensors(folder).values():
        read[stored.name] = stored.read()
    return read


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        what = "broken, or it holds more than tensors, which could run code"
        raise ConfigError(f"{path}: not loaded: {what}; fetch it again, or give safetensors") from error
    named = isinstance(read, dict) and all(isinstance(name, str) for name in read)
    if not named or not all(isinstance(tensor, torch.Tensor) for tensor in read.values()):
        raise ConfigError(f"{path}: not loaded: no table of tensors; give a checkpoint saved as safetensors")
    return read


# From headers to a module.


def load_weights(
    module: nn.Module,
    names: dict[str, tuple[str, ...]],
    stored: dict[str, Stored],
    *,
    tolerated: Iterable[str] = (),
    device: torch.device | str,
    dtype: torch.dtype,
) -> list[str]:
    """Fills a module built on the meta device, strictly both ways; everything is checked before a weight is read.

    names: our parameter or buffer -> the stored tensors that make it, one below the other (dim 0). Nothing else may be
    stored, but for names that a regex of `tolerated` matches whole; those are returned, unread. Parameters become
    `dtype`, also from codes with their scales; buffers keep the dtype that they have in the module.
    Tied parameters stay tied, none requires a gradient; non-persistent buffers without a name here are left alone.
    Raises ConfigError: a tensor missing or left over, a shape or dtype that does not fit.
    """
    import torch
    from torch import nn

    from eight_bit import dequantised

    slots = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    named = {id(slots.get(name)) for name in names}
    unnamed = [name for name, slot in module.state_dict(keep_vars=True).items() if id(slot) not in named]
    unknown = names.keys() - slots.keys()
    assert not unknown | set(unnamed), f"not in the module: {unknown}; not in the names: {unnamed}"
    _check_fit(slots, names, stored, tolerated)

    made = {}  # by the id of the tensor it replaces: tied names share one
    # The pages of a mapped file count as resident memory until it is closed: each tensor opens its file anew. The
    # largest go first, so that the peak is the weights and a small tensor, not the weights and the embeddings twice.
    for name in sorted(names, key=lambda name: -slots[name].numel()):
        slot, parts = slots[name], names[name]
        kept = slot.dtype if not isinstance(slot, nn.Parameter) else dtype
        tensor = torch.empty(slot.shape, dtype=kept, device=device)
        views = tensor.split([stored[part].shape[0] for part in parts]) if len(parts) > 1 else [tensor]
        for part, view in zip(parts, views, strict=True):
            read, scale = stored[part].read(), stored[part].scale
            if scale is not None and isinstance(slot, nn.Parameter):
                read = dequantised(read, stored[scale].read(), stored[part].group)
            view.copy_(read)
        made[id(slot)] = nn.Parameter(tensor, requires_grad=False) if isinstance(slot, nn.Parameter) else tensor
    for name, slot in slots.items():
        if id(slot) in made:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, made[id(slot)])
    used = _used(names, stored)
    return [name for name in stored if name not in used]


def _used(names: dict[str, tuple[str, ...]], stored: dict[str, Stored]) -> dict[str, None]:
    """What is read for `names`, in order; codes take their scales along."""
    parts = {part: None for parts in names.values() for part in parts}
    return parts | {stored[part].scale: None for part in parts if part in stored and stored[part].scale}


def _check_fit(
    slots: dict[str, torch.Tensor],
    names: dict[str, tuple[str, ...]],
    stored: dict[str, Stored],
    tolerated: Iterable[str],
) -> None:
    """Each name has its tensors, of a dtype and shapes that fit, and no stored tensor is without a name."""
    used = _used(names, stored)
    missing = [part for part in used if part not in stored]
    if missing:
        folder = next(iter(stored.values())).file.parent
        raise ConfigError(f"{folder}: {_some(missing)}: not in the weights; do they belong to this config.json?")
    for name, parts in names.items():
        slot, shapes = slots[name], [stored[part].shape for part in parts]
        readable = EXACT.get(str(slot.dtype), FLOATS)
        for part in parts:
            file, stored_name, _, dtype, scale, *_ = stored[part]
            if dtype not in readable and scale is None:  # codes must never pass for weights
                what = f"stored as {dtype}, not as {' or '.join(readable)}"
                raise ConfigError(f"{file}: {stored_name}: {what}; give a checkpoint that stores it so, unquantised")
        height = sum(shape[0] for shape in shapes) if len(shapes) > 1 and all(shapes) else None
        if {shape if height is None else (height, *shape[1:]) for shape in shapes} != {tuple(slot.shape)}:
            got = " + ".join(str(list(shape)) for shape in shapes)
            what = f"stored as {got}, the model has {list(slot.shape)}"
            raise ConfigError(
                f"{stored[parts[0]].file}: {' + '.join(parts)}: {what}; do they belong to this config.json?"
            )
    patterns = [re.compile(pattern) for pattern in tolerated]
    left = [name for name in stored if name not in used and not any(p.fullmatch(name) for p in patterns)]
    if left:
        what = "stored, but nothing in the model takes it; do they belong to this config.json?"
        raise ConfigError(f"{stored[left[0]].file}: {_some(left)}: {what}")


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# To a folder.


def check_out(out: Path, writer: str, *sources: str) -> None:
    """ConfigError unless the folder `out` can be written: it is not there, or is empty, or holds an earlier result of
    the same command and nothing else. writer: one of WRITERS; sources: names of what is read, which may not lie in it.
    """
    if out.is_symlink() or out.name in ("", "..") or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out: {out}: a link, a file, or a folder without a name is not replaced; give another")
    for source in map(os.path.expanduser, sources):
        if os.path.isdir(source) and Path(source).resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"--out: {out}: holds {source}, which is read; give another")
    held, written = sorted(out.rglob("*")), (*SMALL_FILES, WEIGHTS, "model-*-of-*.safetensors", *WRITERS[writer])
    folders = [folder for folder in (out, *held) if held and folder.is_dir()]
    foreign = [path for path in held if path not in folders and not any(path.match(name) for name in written)]
    foreign += [folder for folder in folders if folder not in (out, out / "speculator") or not _wrote(writer, folder)]
    if foreign:
        what = _some([str(path.relative_to(out)) for path in foreign if path != out] or ["a checkpoint"])
        raise ConfigError(f"--out: {out}: holds {what}, not written by {writer}; give another")


def _wrote(writer: str, folder: Path) -> bool:
    return read_json(folder / "config.json", optional=True).get("written_by") == f"eagle-fast {writer}"


@contextmanager
def new_folder(out: Path, writer: str) -> Iterator[Path]:
    """A folder that becomes `out`, in place of what was there, once the block has ended without an error.

    Raises ConfigError where it cannot be written, or holds by then what check_out would not have replaced."""
    try:
        out = out.parent.resolve() / out.name  # which may be where one stands
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"--out: {out}: cannot be written ({error.strerror}); give another") from error
    made, before = scratch / out.name, scratch / "before"
    try:
        made.mkdir()
        yield made
        check_out(out, writer)
        if out.exists():
            out.rename(before)
        made.rename(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--out: {out}: cannot be written ({error}); make room, or give another") from error
    finally:
        if before.exists() and not out.exists():  # interrupted between the two
            before.rename(out)
        shutil.rmtree(scratch, ignore_errors=True)


def write_checkpoint(folder: Path, raw: dict, tensors: dict[str, torch.Tensor], writer: str) -> None:
    """config.json and model.safetensors. writer: one of WRITERS."""
    write_config(folder, raw, writer)
    save_tensors(folder / WEIGHTS, tensors)


def write_config(folder: Path, raw: dict, writer: str) -> None:
    text = json.dumps(raw | {"written_by": f"eagle-fast {writer}"}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Bit for bit; tensors that share their memory are written one by one."""
    from safetensors.torch import save_file

    alone, seen = {}, set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        alone[name] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    save_file(alone, path, {"format": "pt"})
    path.chmod(0o644)  # which safetensors makes its writer's alone
