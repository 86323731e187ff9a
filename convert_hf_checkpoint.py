"""Other people's checkpoints: names of tensors -> ours; and other families' drafts -> the speculators format.

    python convert_hf_checkpoint.py DRAFT --target TARGET --out DIR

No maths, no config fields: what a foreign config.json means is draft_families.py's."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import (
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
from options import Parser, exit_code, id_list, number, underscored
from speculators_config import (
    MAX_SPECULATIVE_TOKENS,
    ConfigError,
    DecoderConfig,
    SpeculatorConfig,
    fit_to_target,
    read_json,
    read_speculator,
    read_target,
)

if TYPE_CHECKING:
    import torch


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


# From other families' drafts to the speculators format.


def convert(draft: str, target: str, out: Path, aux: tuple[int, ...] | None, K: int) -> SpeculatorConfig:
    """Writes the draft `draft` for `target`, both folders or repositories, into `out`; every tensor keeps its bits.

    Raises ConfigError: not such a draft, one that does not fit the target, or something we do not implement."""
    folder, target_folder = open_checkpoint(draft, "draft"), open_checkpoint(target, "target")
    target_config, _ = read_target(target_folder)
    names = target, read_json(target_folder / "config.json").get("architectures", [])
    tensors = draft_weights(folder, draft)
    n_layer = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    raw = converted_config(folder, target_config, names, n_layer, aux, K)
    if "d2t" in tensors and "t2d" not in tensors:  # the same map from the other side, which speculators wants as well
        tensors["t2d"] = known_ids(tensors["d2t"], raw["transformer_layer_config"]["vocab_size"], folder)
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    raw["dtype"] = str(max(floats, key=floats.count)).removeprefix("torch.")
    with new_folder(out) as scratch:
        write_checkpoint(scratch, raw, tensors)
        try:
            config = fit_to_target(read_speculator(scratch), target_config)
            check_draft(config)
        except ConfigError as error:  # what is wrong came from there
            raise ConfigError(str(error).replace(str(scratch), str(folder))) from error
    return config


def draft_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A draft's tensors under speculators' names, without those that are of no use."""
    read = load_tensors(folder, name, "draft")
    renamed = draft_tensors({name: Stored(folder, name, tuple(tensor.shape), "") for name, tensor in read.items()})
    unused = re.compile("|".join(TOLERATED))
    return {ours: read[stored.name] for ours, stored in renamed.items() if not unused.fullmatch(ours)}


def known_ids(d2t: torch.Tensor, vocab_size: int, folder: Path) -> torch.Tensor:
    """(V,) bool: which target ids the offsets d2t (Vd,) lead to."""
    import torch

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
    add("--out", required=True, type=Path, metavar="DIR", help="the speculators folder to write")
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
    check_out(args.out, "speculators_model_type")
    config = convert(args.draft, args.target, args.out, args.aux_layer_ids, args.num_speculative_tokens)
    for line in (*config.notices, f"{args.out}: {', '.join(config.chosen)}"):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
