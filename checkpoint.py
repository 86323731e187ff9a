"""Opens checkpoints and maps names; names and layouts only: folder or Hub repository -> safetensors -> module.

open_checkpoint() finds the folder (of a Hub repository: the small files), fetch_weights() adds the safetensors,
stored_tensors() reads their headers, load_weights() fills a module built on the meta device, strictly.
No maths, no config fields, no tokenization here. File format: https://github.com/huggingface/safetensors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from speculators_config import ConfigError, DecoderConfig, SpeculatorConfig, read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    *("config.json", "generation_config.json", INDEX),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.*"),
)
FLOATS = ("F32", "F16", "BF16")
INTEGERS = {"torch.bool": ("BOOL",), "torch.int32": ("I32",), "torch.int64": ("I64", "I32")}
# Stored by some writers; computed, or of no use, here.
TOLERATED = (r".*rotary_emb\.inv_freq", r"verifier_(norm|lm_head)\.weight")


class Stored(NamedTuple):
    """Where a tensor lies and what its file's header says of it; dtype as safetensors spells it ("BF16", "F8_E4M3")."""

    file: Path
    name: str  # in the file; a table of these may know it under another
    shape: tuple[int, ...]
    dtype: str


# From a name to a folder.


def open_checkpoint(name: str, role: str) -> Path:
    """The folder with the config and tokenizer files of `name`, a folder or a Hub repository.

    role: "target" or "speculator"; errors name it, and the option that overrides it. The Hub is asked only where no
    folder has that name; what it sends lies in the client's cache, in a folder named by the commit.
    Raises ConfigError: no such folder or repository, no access, no network, no room.
    """
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        return Path(folder)
    if os.path.exists(folder):
        raise ConfigError(f"--{role}: {name}: a file; give the folder that holds it, with its config.json")
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
        raise ConfigError(f"--{role}: {name}: {_explain(error, role)}") from error


def _explain(error: Exception, role: str) -> str:
    """What the Hub's client complains of, and the way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # "not in the cache" is half of it; this is why it could not be fetched
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    local = f"give a local folder with --{role}"
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
        what = "pickled checkpoints are not read yet" if pickled else f"no weights, neither this file nor {INDEX}"
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
    stored, but for names that a regex of `tolerated` matches whole; those are returned, unread. Floats become `dtype`,
    integers and bools stay.
    Tied parameters stay tied, none requires a gradient; non-persistent buffers without a name here are left alone.
    Raises ConfigError: a tensor missing or left over, a shape or dtype that does not fit.
    """
    import torch
    from torch import nn

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
        tensor = torch.empty(slot.shape, dtype=dtype if slot.is_floating_point() else slot.dtype, device=device)
        views = tensor.split([stored[part].shape[0] for part in parts]) if len(parts) > 1 else [tensor]
        for part, view in zip(parts, views, strict=True):
            with _opened(stored[part].file, "pt") as file:
                view.copy_(file.get_tensor(stored[part].name))
        made[id(slot)] = nn.Parameter(tensor, requires_grad=False) if isinstance(slot, nn.Parameter) else tensor
    for name, slot in slots.items():
        if id(slot) in made:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, made[id(slot)])
    used = {part for parts in names.values() for part in parts}
    return [name for name in stored if name not in used]


def _check_fit(
    slots: dict[str, torch.Tensor],
    names: dict[str, tuple[str, ...]],
    stored: dict[str, Stored],
    tolerated: Iterable[str],
) -> None:
    """Each name has its tensors, of a dtype and shapes that fit, and no stored tensor is without a name."""
    used = {part: None for parts in names.values() for part in parts}  # in order, for the messages
    missing = [part for part in used if part not in stored]
    if missing:
        folder = next(iter(stored.values())).file.parent
        raise ConfigError(f"{folder}: {_some(missing)}: not in the weights; do they belong to this config.json?")
    for name, parts in names.items():
        slot, shapes = slots[name], [stored[part].shape for part in parts]
        readable = FLOATS if slot.is_floating_point() else INTEGERS[str(slot.dtype)]
        for part in parts:
            file, stored_name, _, dtype = stored[part]
            if dtype not in readable:  # 8-bit codes, whose scales are elsewhere, must never pass for weights
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


# From other people's names to ours.


def layer_names(ours: str, theirs: str, config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """One decoder layer, in the names of transformers and speculators: ours are fused, theirs several."""
    names = {
        f"{ours}.block.attention.qkv.weight": tuple(f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"),
        f"{ours}.block.attention.out.weight": (f"{theirs}.self_attn.o_proj.weight",),
        f"{ours}.block.mlp_norm.weight": (f"{theirs}.post_attention_layernorm.weight",),
        f"{ours}.block.mlp.gate_up.weight": (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"),
        f"{ours}.block.mlp.down.weight": (f"{theirs}.mlp.down_proj.weight",),
    }
    if config.qkv_bias:
        names[f"{ours}.block.attention.qkv.bias"] = tuple(f"{theirs}.self_attn.{part}_proj.bias" for part in "qkv")
    if config.o_bias:
        names[f"{ours}.block.attention.out.bias"] = (f"{theirs}.self_attn.o_proj.bias",)
    if config.qk_norm:
        names[f"{ours}.block.attention.q_norm.weight"] = (f"{theirs}.self_attn.q_norm.weight",)
        names[f"{ours}.block.attention.k_norm.weight"] = (f"{theirs}.self_attn.k_norm.weight",)
    return names


def target_names(config: DecoderConfig, stored: Mapping[str, Stored]) -> dict[str, tuple[str, ...]]:
    """model.Transformer's parameters -> the tensors of a llama-shaped checkpoint.

    No `head.weight` where the head is tied: the checkpoint stores none and its config says so. A stored head is used,
    whatever the config says; one that is neither stored nor tied is missing, which load_weights reports."""
    names = {"embed.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    for i in range(config.n_layer):
        names[f"layers.{i}.norm.weight"] = (f"model.layers.{i}.input_layernorm.weight",)
        names |= layer_names(f"layers.{i}", f"model.layers.{i}", config)
    if "lm_head.weight" in stored or not config.tied:
        names["head.weight"] = ("lm_head.weight",)
    return names


def draft_tensors(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """A draft's tensors under the names of today's speculators format: some converters kept EAGLE's or a prefix.

    Raises ConfigError where two tensors would get one name."""
    renamed = {}
    for name, tensor in stored.items():
        ours = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
        if ours in renamed:
            raise ConfigError(f"{tensor.file}: {name}: the same tensor as {renamed[ours].name}; remove one of them")
        renamed[ours] = tensor
    return renamed


def eagle3_names(
    config: SpeculatorConfig, stored: Mapping[str, Stored]
) -> tuple[SpeculatorConfig, dict[str, tuple[str, ...]]]:
    """eagle3.Eagle3's parameters -> the tensors of a speculators checkpoint; the config, settled by what is stored.

    Embedding and head are named only where they are stored; q/k norms too, where the config names no model_type (what
    that means has changed between versions). Raises ConfigError where config and tensors contradict each other."""
    path, layer = config.folder / "config.json", config.layer
    if not layer.model_type:
        layer = replace(layer, qk_norm="layers.0.self_attn.q_norm.weight" in stored)
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if len(layers) != layer.n_layer:
        wrong = f"the config says {layer.n_layer}, the weights hold {len(layers)}"
        raise ConfigError(f"{path}: transformer_layer_config.num_hidden_layers: {wrong}; correct the file")
    width, n = config.target_hidden_size, len(config.aux_layer_ids)
    if "fc.weight" in stored and stored["fc.weight"].shape[-1] != n * width:
        wrong = f"{n} layers of {width} do not make the {stored['fc.weight'].shape[-1]} columns of fc.weight"
        field = f"{path}: eagle_aux_hidden_state_layer_ids"
        where, fix = (
            (config.aux_source, "give others")
            if config.aux_source.startswith("--")
            else (field, "give --aux_layer_ids")
        )
        raise ConfigError(f"{where}: {wrong}; {fix}")
    names = {
        "fc.weight": ("fc.weight",),
        "norm.weight": ("norm.weight",),
        "first.embed_norm.weight": ("layers.0.input_layernorm.weight",),
        "first.feature_norm.weight": ("layers.0.hidden_norm.weight",),
        **layer_names("first", "layers.0", layer),
    }
    for i in range(1, layer.n_layer):
        names[f"layers.{i - 1}.norm.weight"] = (f"layers.{i}.input_layernorm.weight",)
        names |= layer_names(f"layers.{i - 1}", f"layers.{i}", layer)
    if config.norm_before_fc:
        names["input_norm.weight"] = ("input_norm.weight",)
    if config.fc_norm:
        names |= {f"fc_norm.{i}.weight": (f"fc_norm.{i}.weight",) for i in range(n)}
    own = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight", "d2t": "d2t", "t2d": "t2d"}
    names |= {ours: (theirs,) for ours, theirs in own.items() if theirs in stored}
    if config.draft_vocab_size < layer.vocab_size:
        names |= {"d2t": ("d2t",), "head.weight": ("lm_head.weight",)}  # neither can be had from the target
    if layer.hidden_size != width:
        names |= {"embed.weight": ("embed_tokens.weight",), "head.weight": ("lm_head.weight",)}
    return replace(config, layer=layer), names
