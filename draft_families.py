"""EAGLE-3 drafts of other families: what their config.json says, in the words of the speculators format.

SafeAILab (yuhuili), SpecForge, SGLang, NVIDIA ModelOpt and AngelSlim train the same draft and describe it differently;
their tensors differ in names only (convert_hf_checkpoint.draft_tensors). Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from speculators_config import FLAGS, HARMLESS, DecoderConfig, Fields, is_foreign, read_json, read_rope

# What a draft's layers take over from a llama config, as far as it is there; a target's, or another family's draft's.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SIZES += ("rms_norm_eps", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling")
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")
BIASES = ("attention_bias", "mlp_bias")
# Booleans of an eagle_config and the only value with which our forward pass is theirs.
IMPLEMENTED = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"


def speculators_json(
    layer: dict, target: tuple[str, list], K: int, draft_vocab: int, aux: tuple[int, ...], flags: dict
) -> dict:
    """config.json of the speculators format, 0.9. layer: transformer_layer_config; target: its name, its architectures;
    aux: the layers whose input feeds the draft; flags: all of FLAGS."""
    method = {"proposal_type": "greedy", "speculative_tokens": K, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    proposals = {"default_proposal_method": "greedy", "proposal_methods": [method]}
    verifier = {"name_or_path": target[0], "architectures": target[1]}
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": draft_vocab, IDS: list(aux), "embed_requires_grad": False,
        "target_hidden_size": None, "tie_word_embeddings": False, **flags, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", **proposals, "verifier": verifier},
    }  # fmt: skip


def converted_config(
    folder: Path,
    target: DecoderConfig,
    target_name: tuple[str, list],
    n_layer: int,
    aux: tuple[int, ...] | None,
    K: int,
) -> dict:
    """speculators_json() of another family's draft. n_layer: of its weights, since a config may give the target's;
    aux: the user's, in speculators' convention.

    Raises ConfigError where the file says something that speculators' forward pass does not do."""
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    if "speculators_model_type" in fields.raw:
        raise fields.error("speculators_model_type", "is in speculators format already", "give it to generate.py")
    if not is_foreign(fields.raw):
        wrong = "is none of an EAGLE-3 draft: no draft_vocab_size, eagle_config or Eagle3 architecture"
        raise fields.error("architectures", wrong, "give the folder of such a draft")
    nested = fields.sub("eagle_config", {})
    flags = read_switches(fields, nested)
    size = fields.get("draft_vocab_size", int, None, 1) or fields.get("truncated_vocab_size", int, None, 1)
    vocabulary = fields.get("vocab_size", int, ..., 1)
    layer = {key: fields.raw[key] for key in SIZES + WINDOWS + BIASES if fields.raw.get(key) is not None}
    if read_rope(fields)[1]:  # notices that there is no theta
        layer["rope_theta"] = 10000.0  # what their own code takes then
    layer |= {"model_type": fields.get("model_type", str, "llama"), "num_hidden_layers": n_layer}
    layer |= {"hidden_act": fields.get("hidden_act", str, "silu"), "tie_word_embeddings": False}
    if "layer_types" in layer:  # of the target's layers, where their number is
        layer["layer_types"] = fields.get("layer_types", list)[:n_layer]
    ids = aux or read_ids(fields, nested, target.n_layer)
    raw = speculators_json(layer, target_name, K, size or vocabulary, ids, flags)
    return raw | {"target_hidden_size": fields.get("target_hidden_size", int, None, 1)}


def read_switches(fields: Fields, nested: Fields) -> dict[str, bool]:
    """FLAGS, from both places where these families write them; a switch that we do not know is refused where it is on.

    Their norm_output says whether the head sees normed states, which it always does here; what is fed back stays raw,
    which is speculators' norm_output=false."""
    for part in (fields, nested):
        known = (*FLAGS, *HARMLESS, *BIASES, *IMPLEMENTED, "use_sliding_window")
        for key, value in part.raw.items():
            if value is True and key not in known and not key.startswith("_"):
                raise part.error(key, "is not implemented", "use a draft without it")
    for key, wanted in IMPLEMENTED.items():
        if nested.get(key, bool, wanted) != wanted:
            raise nested.error(key, f"is not implemented unless it is {str(wanted).lower()}", "use another draft")
    if nested.get("parallel_draft_step", int, 1) > 1:
        raise nested.error("parallel_draft_step", "drafts in parallel are not implemented", "use another draft")
    found = {
        key: [part.get(key, bool) for part in (fields, nested) if part.get(key, bool) is not None] for key in FLAGS
    }
    for key, values in found.items():
        if len(set(values)) > 1:
            raise fields.error(key, f"is {values[0]} here and {values[1]} in eagle_config", "correct the file")
    flags = {key: bool(values and values[0]) for key, values in found.items()}
    if False in found["norm_output"]:
        raise fields.error("norm_output", "logits of un-normed states are not implemented", "use another draft")
    return flags | {"norm_output": False}


def read_ids(fields: Fields, nested: Fields, n_layer: int) -> tuple[int, ...]:
    """The aux layers as speculators counts them. These families name the layer whose *output* is meant: one less."""
    found = [ids for ids in (nested.get(IDS, list), fields.get("aux_hidden_states_layer_ids", list)) if ids]
    if fields.raw.get(IDS) or any(ids != found[0] for ids in found):
        wrong = "beside eagle_config, a layer's input and its output are both meant by some"
        wrong = "says something else than aux_hidden_states_layer_ids" if found[1:] else wrong
        raise fields.error(IDS, wrong, "give --aux_layer_ids: the layers whose input feeds the draft")
    written: Collection[int] = found[0] if found else ()
    if not written:
        return (2, n_layer // 2, n_layer - 3)
    if not all(type(i) is int for i in written):
        raise nested.error(IDS, f"{written} are not layer numbers", "give --aux_layer_ids")
    return tuple(i + 1 for i in written)
