"""Stage 4: a trained draft as a folder of the speculators format, 0.9: what generate.py, vLLM and llama.cpp open."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from convert_hf_checkpoint import eagle3_names
from eagle3 import Eagle3
from speculators_config import SpeculatorConfig, read_json

# What the draft's layers take over from the target's config, as far as it is there.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SIZES += ("rms_norm_eps", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling")


def config_json(
    target: Path, name: str, K: int, layers: int, draft_vocab: int, aux: tuple[int, ...], flags: dict
) -> dict:
    """config.json of a draft for the target in a folder, known as `name`; flags: the four switches."""
    raw = read_json(target / "config.json")
    layer = {key: raw[key] for key in SIZES if key in raw} | {"model_type": "llama", "num_hidden_layers": layers}
    layer |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    method = {"proposal_type": "greedy", "speculative_tokens": K, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": name, "architectures": raw.get("architectures", [])}
    proposals = {"default_proposal_method": "greedy", "proposal_methods": [method]}
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": draft_vocab, "eagle_aux_hidden_state_layer_ids": list(aux), "embed_requires_grad": False,
        "target_hidden_size": None, "tie_word_embeddings": False, **flags, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", **proposals, "verifier": verifier},
    }  # fmt: skip


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
    scratch = out.with_name(out.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    raw = read_json(config.folder / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
    (scratch / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (scratch / "README.md").write_text(card)
    save_file(tensors, scratch / "model.safetensors")
    (scratch / "model.safetensors").chmod(0o644)  # which safetensors makes its writer's alone
    shutil.rmtree(out, ignore_errors=True)
    scratch.rename(out)
