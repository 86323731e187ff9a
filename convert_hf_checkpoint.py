"""Other people's checkpoints: names of tensors -> ours; and other families' drafts -> the speculators format.

    python convert_hf_checkpoint.py DRAFT --target TARGET --out DIR

No maths, no config fields: what a foreign config.json means is draft_families.py's."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import (
    CODES,
    TOLERATED,
    Stored,
    check_out,
    load_tensors,
    load_weights,
    new_folder,
    open_checkpoint,
    stored_tensors,
    write_checkpoint,
)
from draft_families import converted_config
from options import Parser, directory, exit_code, id_list, number, say, underscored
from speculators_config import (
    MAX_SPECULATIVE_TOKENS,
    ConfigError,
    DecoderConfig,
    Quantisation,
    SpeculatorConfig,
    fit_to_target,
    read_json,
    read_speculator,
    read_target,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


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


# From codes and scales to weights.


def eight_bit_tensors(stored: Mapping[str, Stored], quantisation: Quantisation | None) -> dict[str, Stored]:
    """The table with codes that know their scales, under NAME.weight and NAME.weight_scale: scales as (out, groups),
    int8s unpacked. Raises ConfigError: codes without scales, of another kind, where the config knows of none."""
    if quantisation is None:
        return dict(stored)  # where load_weights finds codes it refuses them
    found = dict(stored)
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        if last == ("weight_packed" if quantisation.packed else "weight") and tensor.dtype in (*CODES, "I32"):
            if quantisation.packed:
                tensor = unpacked(found, module, tensor)
            wanted = {"int8": "I8", "fp8": "F8_E4M3"}[quantisation.codes]
            where = f"{tensor.file}: {name}"
            if tensor.dtype != wanted or len(tensor.shape) != 2:
                raise ConfigError(f"{where}: stored as {tensor.dtype}, its quantization_config says {wanted}; mend it")
            if quantisation.ignores(module):
                raise ConfigError(
                    f"{where}: stored as {tensor.dtype}, though its ignore list names it; mend the config"
                )
            scale = found.pop(f"{module}.{quantisation.scale}", None)
            if scale is None:
                raise ConfigError(f"{where}: no {module}.{quantisation.scale}; codes mean nothing without it")
            group = min(quantisation.block[1], tensor.shape[1]) if quantisation.block else tensor.shape[1]
            of = f"{module}.weight_scale"
            found[f"{module}.weight"] = tensor._replace(scale=of, group=group)
            found[of] = laid_out_scale(scale, tensor.shape, quantisation.block)
    return found


def unpacked(found: dict[str, Stored], module: str, packed: Stored) -> Stored:
    """int8s that lie four in an int32, the first in its lowest byte, each plus 128."""
    import torch

    shape = found.pop(f"{module}.weight_shape", None)
    if shape is None:
        raise ConfigError(f"{packed.file}: {packed.name}: no {module}.weight_shape; fetch the file again")
    rows, columns = (int(size) for size in shape.read())
    del found[f"{module}.weight_packed"]
    if packed.shape != (rows, -(-columns // 4)) or packed.dtype != "I32":
        wrong = f"{list(packed.shape)} int32s do not hold {rows} x {columns}"
        raise ConfigError(f"{packed.file}: {packed.name}: {wrong}; fetch the file again")

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.contiguous().view(torch.uint8)[:, :columns].int() - 128).to(torch.int8)

    return Stored(packed.file, packed.name, (rows, columns), "I8", laid_out=laid_out)


def laid_out_scale(scale: Stored, shape: tuple[int, ...], block: tuple[int, int] | None) -> Stored:
    """(), (1), (out), (out, 1) or, in blocks, one for each -> (out, groups), in fp32."""
    rows, columns = shape
    height, width = (min(block[0], rows), min(block[1], columns)) if block else (1, columns)
    made = (rows, -(-columns // width))
    grid = (-(-rows // height), made[1])
    if scale.shape not in ({grid} if block else {(), (1,), (1, 1), (rows,), grid}):
        wrong = f"stored as {list(scale.shape)}, for codes of {list(shape)}"
        raise ConfigError(f"{scale.file}: {scale.name}: {wrong}; does it belong to this config.json?")

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.float().reshape(-1, made[1]).repeat_interleave(height, dim=0)
        return tensor[:rows].expand(made)

    return Stored(scale.file, scale.name, made, scale.dtype, laid_out=laid_out)


def with_eight_bit_linears(
    model: nn.Module, names: dict[str, tuple[str, ...]], stored: Mapping[str, Stored]
) -> dict[str, tuple[str, ...]]:
    """Puts an EightBitLinear where all tensors that make a linear are codes alike; returns `names` with its scales'.

    model: built on the meta device. A linear that is made of codes and of others is held in 16 bits."""
    import torch
    from torch import nn

    from eight_bit import EightBitLinear, replace_children

    names, dtypes = dict(names), {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}

    def eight_bit(path: str, linear: nn.Linear) -> nn.Module:
        parts = [stored.get(part) for part in names.get(f"{path}.weight", ())]
        kinds = {(part.dtype, part.group) if part and part.scale else None for part in parts} or {None}
        if None in kinds or len(kinds) > 1:
            return linear
        ((dtype, group),) = kinds
        names[f"{path}.scale"] = tuple(stored[part].scale for part in names[f"{path}.weight"])
        with torch.device("meta"):
            return EightBitLinear(
                linear.in_features, linear.out_features, linear.bias is not None, dtypes[dtype], group
            )

    replace_children(model, nn.Linear, eight_bit)
    return names


def say_ignored(names: list[str]) -> None:
    """Of tensors that a checkpoint holds and nothing reads."""
    if names:
        say(f"notice: stored but not needed: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")


# From other families' drafts to the speculators format.


def convert(draft: str, target: str, out: Path, aux: tuple[int, ...] | None, K: int) -> SpeculatorConfig:
    """Writes the draft `draft` for `target`, both folders or repositories, into `out`; every tensor keeps its bits.

    Raises ConfigError: not such a draft, one that does not fit the target, or something we do not implement."""
    folder, target_folder = open_checkpoint(draft, "draft"), open_checkpoint(target, "target")
    target_config, _ = read_target(target_folder)
    if os.path.isdir(os.path.expanduser(target)):
        target = os.path.realpath(target_folder)  # to be found from anywhere, and by vLLM
    names = target, read_json(target_folder / "config.json").get("architectures", [])
    tensors = draft_weights(folder, draft)
    n_layer = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    raw = converted_config(folder, target_config, names, n_layer, aux, K)
    if "d2t" in tensors and "t2d" not in tensors:  # the same map from the other side, which speculators wants as well
        tensors["t2d"] = known_ids(tensors["d2t"], raw["transformer_layer_config"]["vocab_size"], folder)
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    raw["dtype"] = str(max(floats, key=floats.count)).removeprefix("torch.")
    with new_folder(out, "convert_hf_checkpoint.py") as scratch:
        write_checkpoint(scratch, raw, tensors, "convert_hf_checkpoint.py")
        try:
            config = fit_to_target(read_speculator(scratch, aux_layer_ids=aux), target_config)
            check_draft(config)
        except ConfigError as error:  # what is wrong came from there
            raise ConfigError(str(error).replace(str(scratch), str(folder))) from error
    return config


def draft_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A draft's tensors under speculators' names, without those that are of no use, which are named."""
    read = load_tensors(folder, name, "draft")
    renamed = draft_tensors({name: Stored(folder, name, tuple(tensor.shape), "") for name, tensor in read.items()})
    unused = [ours for ours in renamed if re.fullmatch("|".join(TOLERATED), ours)]
    say_ignored([renamed[ours].name for ours in unused])
    return {ours: read[stored.name] for ours, stored in renamed.items() if ours not in unused}


def known_ids(d2t: torch.Tensor, vocab_size: int, folder: Path) -> torch.Tensor:
    """(V,) bool: which target ids the offsets d2t (Vd,) lead to."""
    import torch

    if d2t.ndim != 1 or not d2t.numel() or d2t.is_floating_point():
        raise ConfigError(f"{folder}: d2t: {list(d2t.shape)} of {d2t.dtype}, no offsets; is it this file's?")
    ids = d2t + torch.arange(len(d2t))
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ConfigError(f"{folder}: d2t: leads outside the {vocab_size} tokens of its config; is it this file's?")
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def check_draft(config: SpeculatorConfig) -> None:
    """Opens a written draft as generate.py does, but for what it shares with the target. Raises ConfigError."""
    import torch

    from eagle3 import Eagle3

    stored = draft_tensors(stored_tensors(config.folder))
    config, names = eagle3_names(config, stored)
    with torch.device("meta"):
        draft = Eagle3(config, own=names)
    load_weights(draft, names, stored, device="cpu", dtype=torch.bfloat16)
    draft.settle(None, None)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="convert_hf_checkpoint.py", allow_abbrev=False, description="Converts a draft to speculators.")
    add = parser.add_argument
    add("draft", metavar="DRAFT", help="folder or repository: SafeAILab, SpecForge, SGLang, ModelOpt, AngelSlim")
    add("--target", required=True, metavar="PATH_OR_REPO", help="the model that it drafts for")
    add("--out", required=True, type=directory, metavar="DIR", help="the speculators folder to write")
    add("--aux_layer_ids", type=id_list, metavar="IDS", help="layers whose input feeds the draft (default: its own)")
    add(
        "--num_speculative_tokens",
        type=number(int, 1, MAX_SPECULATIVE_TOKENS),
        default=3,
        metavar="K",
        help="(default: %(default)s)",
    )
    return parser.parse_args([underscored(arg) for arg in argv])


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    check_out(args.out, "convert_hf_checkpoint.py", args.draft, args.target)
    config = convert(args.draft, args.target, args.out, args.aux_layer_ids, args.num_speculative_tokens)
    chosen = ", ".join(config.chosen).replace(" (config)", "")  # ours, that is: the converter wrote it
    for line in (*config.notices, f"{args.out}: {chosen}; layers are counted by what enters them"):
        say(line)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
