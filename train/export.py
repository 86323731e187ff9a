"""Stage 4: a trained draft as a folder of the speculators format, 0.9: what generate.py, vLLM and llama.cpp open."""

from pathlib import Path

import torch

from checkpoint import new_folder, write_checkpoint
from convert_hf_checkpoint import eagle3_names
from draft_families import SIZES, speculators_json
from eagle3 import Eagle3
from speculators_config import SpeculatorConfig, read_json


def config_json(
    target: Path, name: str, K: int, layers: int, draft_vocab: int, aux: tuple[int, ...], flags: dict
) -> dict:
    """config.json of a draft for the target in a folder, known as `name`; flags: the four switches."""
    raw = read_json(target / "config.json")
    layer = {key: raw[key] for key in SIZES if key in raw} | {"model_type": "llama", "num_hidden_layers": layers}
    layer |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    return speculators_json(layer, (name, raw.get("architectures", [])), K, draft_vocab, aux, flags)


def export(draft: Eagle3, config: SpeculatorConfig, out: Path, dtype: torch.dtype, card: str) -> None:
    """Writes `out`, whole or not at all, with config.folder's config.json. The embedding is the target's: it stays out,
    and every reader borrows it."""
    layer, tensors = config.layer, {}
    widths = [layer.n_head * layer.head_dim, layer.n_kv_head * layer.head_dim, layer.n_kv_head * layer.head_dim]
    ours = dict(draft.named_parameters()) | dict(draft.named_buffers())
    stored = {"lm_head.weight"} | {name for name in ("d2t", "t2d") if name in ours}
    stored |= {f"layers.{i}." for i in range(layer.n_layer)}
    for name, theirs in eagle3_names(config, dict.fromkeys(stored))[1].items():
        tensor = ours[name].detach().to(dtype if ours[name].is_floating_point() else None)
        parts = tensor.split(widths) if len(theirs) == 3 else tensor.chunk(len(theirs))
        tensors |= {their: part.contiguous() for their, part in zip(theirs, parts, strict=True)}
    raw = read_json(config.folder / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
    with new_folder(out, "train.eagle3") as scratch:
        write_checkpoint(scratch, raw, tensors, "train.eagle3")
        (scratch / "README.md").write_text(card)
