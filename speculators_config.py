"""What config.json says: a speculator's (format of the speculators library, versions 0.1 to 0.9) and its target's.

The only place that sees raw JSON. Every field we use is read, typed and bounded here; whatever would change the maths
and is not implemented is refused here by name. Standard library only, so that a wrong file is answered before torch is
imported. An aux layer id i always means: the residual stream *entering* layer i; i = number of layers: leaving the last
one, un-normed.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

ALGORITHMS = ("eagle3",)
TARGETS = ("llama", "mistral", "qwen2", "qwen3")  # model_type of a target's config.json
DRAFT_LAYERS = ("llama", "qwen3")  # model_type of a speculator's transformer_layer_config
MAX_SPECULATIVE_TOKENS = 64  # a round is unrolled: more only costs compile time
DEFAULT_SPECULATIVE_TOKENS = 3
MAX_PADDING = 1024  # by how much a target's embedding may be padded: another vocabulary differs by more
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Booleans that speculators writes and that do not change the forward pass.
HARMLESS = ("embed_requires_grad", "has_no_defaults_at_init", "tie_word_embeddings", "use_cache", "return_dict")


class ConfigError(Exception):
    """Something the user can fix: `<file or option>: <field or tensor>: <what is wrong>; <what to do>`, on one line."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, as written in `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""

    theta: float
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: the context before scaling, in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None = 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions


@dataclass(frozen=True)
class Quantisation:
    """Linears with weights in eight bits, as a `quantization_config` describes them."""

    codes: str  # int8 | fp8 (e4m3)
    scale: str  # the last part of the name under which a weight's scale is stored
    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: all inputs of an output, or of all
    packed: bool  # int8: four to an int32
    ignored: tuple[str, ...]  # modules that are stored plainly: names, or re:regex

    def ignores(self, module: str) -> bool:
        return any(
            re.match(name[3:], module) if name.startswith("re:") else name == module or module.startswith(f"{name}.")
            for name in self.ignored
        )


@dataclass(frozen=True)
class DecoderConfig:
    """A llama-shaped decoder: a whole target, or the draft's own layers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context: int  # max_position_embeddings, in tokens
    windows: tuple[int | None, ...]  # per layer: a query sees this many keys, itself included; None = all
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied: bool  # the head is the embedding, if the checkpoint holds no head of its own
    dtype: str | None  # as the checkpoint names it, e.g. "bfloat16"
    quantisation: Quantisation | None = None  # a target's; a draft's is in its SpeculatorConfig


@dataclass(frozen=True)
class SpeculatorConfig:
    """A draft, its proposal length and the target it was trained on."""

    folder: Path
    algorithm: str
    target: str | None  # verifier.name_or_path as written
    speculative_tokens: int  # K, tokens drafted a round
    draft_vocab_size: int
    target_hidden_size: int
    target_vocab_size: int
    aux_layer_ids: tuple[int, ...] | None  # None: the default, which needs the target's number of layers
    aux_source: str  # config | default | --aux_layer_ids
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layer: DecoderConfig
    chosen: tuple[str, ...]  # for people: each choice and where it comes from
    notices: tuple[str, ...]  # for people: what was assumed
    quantisation: Quantisation | None = None


@dataclass
class Fields:
    """Typed reading of one JSON object; every complaint names file and field."""

    path: Path
    raw: dict
    prefix: str = ""

    def error(self, key: str, wrong: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.path}: {self.prefix}{key}: {wrong}; {fix}")

    def get(self, key: str, kind: type, default=None, least: float | None = None):
        """The value of `key`, or `default` where it is absent or null; a default of `...` makes the field required."""
        value = self.raw.get(key)
        if value is None:
            if default is ...:
                raise self.error(key, "missing", "is this a complete config.json of a supported kind?")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(key, f"expected {kind.__name__}, found {json.dumps(value)[:60]}", "correct the file")
        if least is not None and not least <= value < float("inf"):
            raise self.error(key, f"{value} is out of range", f"it must be at least {least}")
        return value

    def sub(self, key: str, default=...) -> Fields:
        """The object under `key`; errors then name it by its whole path."""
        return Fields(self.path, self.get(key, dict, default), f"{self.prefix}{key}.")


def read_json(path: Path, optional: bool = False) -> dict:
    """The object in a JSON file; ConfigError where there is none. optional: {} where there is no file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        wrong = "there is no such file"
        raise ConfigError(f"{path.parent}: {path.name}: {wrong}; give the folder or Hub repo of a checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: JSON: not readable ({error}); download the file again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: JSON: expected dict, found {type(raw).__name__}; download the file again")
    return raw


def read_rope(fields: Fields) -> tuple[Rope, tuple[str, ...]]:
    """Both spellings, each key on its own (transformers 4.57 mixes them), with notices for people.

    An unknown scaling is refused by name, and so are spellings that contradict each other."""
    old, new = (fields.get(key, dict, {}) for key in ("rope_scaling", "rope_parameters"))
    if new and any(new.get(key) != value for key, value in old.items() if key != "type"):
        raise fields.error("rope_scaling", "says something else than rope_parameters", "remove the wrong one")
    scaling = fields.sub("rope_parameters" if new else "rope_scaling", {})
    by_layer_type = [key for key in ("sliding_attention", "full_attention") if key in new]
    if by_layer_type:  # speculators reads the first
        if any(other != new[by_layer_type[0]] for other in new.values() if isinstance(other, dict)):
            raise fields.error("rope_parameters", "differ between layer types", "use another checkpoint")
        scaling = scaling.sub(by_layer_type[0])
    kind = scaling.get("rope_type", str) or scaling.get("type", str, "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise scaling.error("rope_type", f"'{kind}' is not implemented", "default, linear, llama3 and yarn are")
    for key in ("mscale", "mscale_all_dim"):
        if scaling.raw.get(key) is not None:
            raise scaling.error(key, "is not implemented", "only attention_factor is")
    for part in (fields, scaling):
        if part.get("partial_rotary_factor", float, 1.0) != 1.0:
            raise part.error("partial_rotary_factor", "is not implemented unless it is 1", "use another checkpoint")
    thetas = [theta for part in (scaling, fields) if (theta := part.get("rope_theta", float, None, 1.0)) is not None]
    if len(set(thetas)) > 1:
        raise fields.error(
            "rope_theta", f"is {thetas[1]:g} here and {thetas[0]:g} in its scaling", "remove the wrong one"
        )
    theta, notices = thetas[0] if thetas else None, ()
    if theta is None:
        theta, notices = 10000.0, (f"{fields.path}: {fields.prefix}rope_theta: absent, 10000 assumed",)
    if kind == "default":
        return Rope(theta), notices
    factor = scaling.get("factor", float, ..., 1.0)
    if kind == "linear":
        return Rope(theta, kind, factor), notices
    original = scaling.get("original_max_position_embeddings", int, ... if kind == "llama3" else None, 1)
    original = original or fields.get("max_position_embeddings", int, ..., 1)
    if kind == "llama3":
        low, high = scaling.get("low_freq_factor", float, ..., 0), scaling.get("high_freq_factor", float, ..., 0)
        if high <= low:
            raise scaling.error("high_freq_factor", f"{high} is not above low_freq_factor {low}", "correct the file")
        return Rope(theta, kind, factor, original, low, high), notices
    yarn = Rope(
        theta, kind, factor, original,
        beta_fast=scaling.get("beta_fast", float, 32.0, 0), beta_slow=scaling.get("beta_slow", float, 1.0, 0),
        attention_factor=scaling.get("attention_factor", float, None, 0), truncate=scaling.get("truncate", bool, True),
    )  # fmt: skip
    return yarn, notices


def read_windows(fields: Fields, model_type: str, n_layer: int) -> tuple[int | None, ...]:
    """Per layer, its sliding window. `layer_types` decides; a `sliding_window` beside full layers means nothing."""
    window = fields.get("sliding_window", int, None, 1)
    types = fields.get("layer_types", list)
    if types is None:
        if model_type == "mistral":
            sliding = [window is not None] * n_layer
        elif model_type.startswith("qwen") and fields.get("use_sliding_window", bool, False):
            first = fields.get("max_window_layers", int, 28, 0)
            sliding = [window is not None and i >= first for i in range(n_layer)]
        else:
            sliding = [False] * n_layer
    else:
        if len(types) != n_layer:
            raise fields.error("layer_types", f"{len(types)} entries for {n_layer} layers", "correct the file")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.error("layer_types", f"'{kind}' is not implemented", "full and sliding attention are")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and window is None:
        raise fields.error("sliding_window", "missing, though layer_types has sliding layers", "correct the file")
    return tuple(window if slides else None for slides in sliding)


def read_quantisation(fields: Fields) -> Quantisation | None:
    """`quantization_config` (2024 also: `compression_config`); every layout but weights in eight bits is refused by
    name. Activations are not quantised here, whatever it says of them."""
    key = next((key for key in ("quantization_config", "compression_config") if fields.raw.get(key)), None)
    if key is None:
        return None
    config = fields.sub(key)
    method = config.get("quant_method", str, "compressed-tensors" if key == "compression_config" else ...)
    if method == "compressed-tensors":
        return read_compressed_tensors(config)
    if method != "fp8":
        raise config.error("quant_method", f"'{method}' is not implemented", "compressed-tensors and fp8 are")
    ignored = read_ignored(config, "ignored_layers") + read_ignored(config, "modules_to_not_convert")
    block = config.get("weight_block_size", list)
    if (kind := config.get("fmt", str, "e4m3")) != "e4m3":
        raise config.error("fmt", f"'{kind}' is not implemented", "e4m3 is")
    scale = "weight_scale" if block is None else "weight_scale_inv"  # a factor like the other, despite its name
    return Quantisation("fp8", scale, read_block(config, "weight_block_size", block), False, ignored)


CODES = {"int": "int8", "float": "fp8"}  # compressed-tensors' types, of 8 bits
# Names that it has for whole groups, as far as they are weights in eight bits: type and block.
PRESETS = {"FP8": ("float", None), "FP8_DYNAMIC": ("float", None), "FP8_BLOCK": ("float", [128, 128])}
PRESETS |= {"W8A16": ("int", None)}


def read_compressed_tensors(config: Fields) -> Quantisation:
    """All groups must agree on codes and blocks; what they hold is told by the weights' dtype, tensor by tensor."""
    for key in ("sparsity_config", "transform_config"):
        if (held := config.get(key, dict, {})) and held.get("format", "sparse") != "dense":
            raise config.error(key, "is not implemented", "use a checkpoint without it")
    groups = config.sub("config_groups")
    found = {read_group(groups, name) for name in groups.raw}
    if len(found) != 1:
        raise config.error(
            "config_groups", f"{len(found)} kinds of weights in one model are not implemented", "use one"
        )
    ((codes, block),) = found
    form = config.get("format", str, "float-quantized" if codes == "fp8" else "int-quantized")
    if form not in (("float-quantized", "naive-quantized") if codes == "fp8" else ("int-quantized", "pack-quantized")):
        raise config.error("format", f"'{form}' is not implemented for {codes} weights", "use another checkpoint")
    return Quantisation(codes, "weight_scale", block, form == "pack-quantized", read_ignored(config, "ignore"))


def read_group(groups: Fields, name: str) -> tuple[str, tuple[int, int] | None]:
    """One group's codes and blocks; it is a table, or a preset's name over a list of targets."""
    if not isinstance(groups.raw[name], dict):
        if name not in PRESETS:
            raise groups.error(name, "is not implemented", f"{', '.join(PRESETS)} are")
        kind, block = PRESETS[name]
        return CODES[kind], read_block(groups, name, block)
    weights = groups.sub(name).sub("weights")
    kind, strategy, block = weights.get("type", str, "int"), weights.get("strategy", str, "tensor"), None
    if (bits := weights.get("num_bits", int, 8)) != 8:
        raise weights.error("num_bits", f"{kind} weights of {bits} bits are not implemented", "use one of 8 bits")
    for key, wanted in (("symmetric", True), ("dynamic", False)):
        if weights.get(key, bool, wanted) != wanted:
            wrong = f"is not implemented unless it is {str(wanted).lower()}"
            raise weights.error(key, wrong, "use another checkpoint")
    if weights.raw.get("actorder"):
        raise weights.error("actorder", "is not implemented", "use another checkpoint")
    if kind not in CODES or strategy not in ("tensor", "channel", "group", "block"):
        raise groups.error(name, f"{kind} weights with a scale a {strategy} are not implemented", "use another")
    if kind == "int" and groups.raw[name].get("input_activations"):
        raise groups.error(name, "int activations (W8A8) are not implemented", "use one with weights alone")
    if strategy == "group":
        block = [1, weights.get("group_size", int, ..., 1)]
    elif strategy == "block":
        block = weights.get("block_structure", list, ...)
    return CODES[kind], read_block(groups, name, block)


def read_ignored(config: Fields, key: str) -> tuple[str, ...]:
    names = config.get(key, list, [])
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except (AttributeError, re.error):
            raise config.error(key, f"{json.dumps(name)} is no name and no re:regex", "correct the file") from None
    return tuple(names)


def read_block(fields: Fields, key: str, block: list | None) -> tuple[int, int] | None:
    if block is not None and not (len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise fields.error(key, f"blocks of {block} are not implemented", "use another checkpoint")
    return None if block is None else (block[0], block[1])


def read_decoder(fields: Fields, model_type: str) -> tuple[DecoderConfig, tuple[str, ...]]:
    """A llama-shaped decoder's sizes and switches, from a target's config or a draft's transformer_layer_config, and
    notices for people."""
    if fields.get("mlp_bias", bool, False):
        raise fields.error("mlp_bias", "biases in the MLP are not implemented", "use another checkpoint")
    if (act := fields.get("hidden_act", str, "silu")) != "silu":
        raise fields.error("hidden_act", f"'{act}' is not implemented", "silu is")
    hidden, n_head = fields.get("hidden_size", int, ..., 1), fields.get("num_attention_heads", int, ..., 1)
    n_layer = fields.get("num_hidden_layers", int, ..., 1)
    n_kv_head = fields.get("num_key_value_heads", int, n_head, 1)
    head_dim = fields.get("head_dim", int, None, 1)
    if head_dim is None and hidden % n_head:
        raise fields.error("head_dim", f"missing, and {hidden} is no multiple of {n_head} heads", "add it")
    if n_head % n_kv_head:
        raise fields.error("num_key_value_heads", f"{n_head} heads do not divide into {n_kv_head}", "correct the file")
    attention_bias = fields.get("attention_bias", bool, False)
    rope, notices = read_rope(fields)
    config = DecoderConfig(
        model_type=model_type,
        vocab_size=fields.get("vocab_size", int, ..., 1),
        hidden_size=hidden,
        intermediate_size=fields.get("intermediate_size", int, ..., 1),
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim or hidden // n_head,
        norm_eps=fields.get("rms_norm_eps", float, 1e-6, 0),
        rope=rope,
        context=fields.get("max_position_embeddings", int, 2048, 1),
        windows=read_windows(fields, model_type, n_layer),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias and model_type != "qwen2",
        qk_norm=model_type == "qwen3",
        tied=fields.get("tie_word_embeddings", bool, False),
        dtype=fields.get("dtype", str) or fields.get("torch_dtype", str),
    )
    return config, notices


def read_target(folder: Path) -> tuple[DecoderConfig, tuple[str, ...]]:
    """The target's config and notices for people; anything that is not llama-shaped is refused by name."""
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    if "speculators_model_type" in fields.raw:
        raise fields.error("speculators_model_type", "this is a speculator, not a target", "give it as --speculator")
    if is_foreign(fields.raw):
        raise fields.error("architectures", "this is a draft of another family, not a target", "give its target")
    model_type = fields.get("model_type", str, ...)
    if model_type not in TARGETS:
        raise fields.error("model_type", f"'{model_type}' is not implemented as a target", f"{', '.join(TARGETS)} are")
    config, notices = read_decoder(fields, model_type)
    return replace(config, quantisation=read_quantisation(fields)), notices


def read_proposal(fields: Fields, override: int | None) -> tuple[int, str, list[str]]:
    """K, where it comes from, and notices. The method named by `default_proposal_method` counts, else the first."""
    methods = fields.get("proposal_methods", list, [])
    named = fields.get("default_proposal_method", str)
    dicts = [method for method in methods if isinstance(method, dict)]
    raw = next((m for m in dicts if m.get("proposal_type") == named), dicts[0] if dicts else {})
    method, notices = Fields(fields.path, raw, f"{fields.prefix}proposal_methods."), []
    if raw.get("verifier_accept_k", 1) != 1 or raw.get("accept_tolerance", 0.0) != 0.0:
        notices.append(f"{fields.path}: {fields.prefix}proposal_methods: lenience is ignored, verification is exact")
    if override is not None:
        return override, "--num_speculative_tokens", notices
    if (kind := method.get("proposal_type", str, "greedy")) not in ("greedy", "sampling"):
        fix = "give --num_speculative_tokens K to draft a chain"
        raise method.error("proposal_type", f"'{kind}' is not implemented", fix)
    tokens = method.get("speculative_tokens", int, None, 1)
    if tokens is None:
        tokens = DEFAULT_SPECULATIVE_TOKENS
        notices.append(f"{fields.path}: {method.prefix}speculative_tokens: absent, {tokens} assumed")
        return tokens, "default", notices
    if tokens > MAX_SPECULATIVE_TOKENS:
        wrong = f"{tokens} is more than the {MAX_SPECULATIVE_TOKENS} that a chain may have"
        raise method.error("speculative_tokens", wrong, "give --num_speculative_tokens")
    return tokens, "config", notices


def read_flags(fields: Fields, norm_before_residual: bool | None) -> tuple[dict[str, bool], list[str], list[str]]:
    """The four switches of EAGLE-3's forward, with what to tell people; an unknown switch that is on is refused."""
    known = FLAGS + HARMLESS
    for key, value in fields.raw.items():
        unknown = value is True and key not in known and not key.startswith("_")  # _: transformers' own bookkeeping
        if unknown or (value and key in ("eagle_config", "dflash_config")):
            raise fields.error(key, "is not implemented", "use a checkpoint without it, or a newer generate.py")
    flags = {key: fields.get(key, bool, False) for key in FLAGS}
    source, notices = "config", []
    if norm_before_residual is not None:
        flags["norm_before_residual"], source = norm_before_residual, "--norm_before_residual"
    elif fields.raw.get("norm_before_residual") is None:
        # The library's default is False; vLLM serves such files with True, and published acceptance is vLLM's.
        flags["norm_before_residual"], source = True, "default"
        notices.append(f"{fields.path}: norm_before_residual: absent, true assumed (as vLLM does)")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise fields.error("fc_norm", "excludes norm_before_fc, and both are on", "correct the file")
    on = [f"norm_before_residual={str(flags['norm_before_residual']).lower()} ({source})"]
    return flags, on + [f"{key}=true (config)" for key in FLAGS[1:] if flags[key]], notices


def read_speculator(
    folder: Path,
    *,
    speculative_tokens: int | None = None,
    aux_layer_ids: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    norm_before_residual: bool | None = None,
) -> SpeculatorConfig:
    """Reads folder/config.json. The keyword arguments are the user's options and win over the file.

    Raises ConfigError for another algorithm, another family's layout and everything we do not implement."""
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    algorithm = fields.get("speculators_model_type", str)
    if algorithm is None:
        wrong, fix = "missing, so this is no checkpoint in speculators format", "a target is given as --target"
        if is_foreign(fields.raw):
            wrong = "missing, so this is another family's draft"
            fix = f"convert it: python convert_hf_checkpoint.py {folder} --target PATH_OR_REPO --out DIR"
        raise fields.error("speculators_model_type", wrong, fix)
    if algorithm not in ALGORITHMS:
        raise fields.error("speculators_model_type", f"'{algorithm}' is not read yet", f"{', '.join(ALGORITHMS)} is")
    layer_fields = fields.sub("transformer_layer_config")
    model_type = layer_fields.get("model_type", str, "")  # "" leaves q/k norms to the tensors: the default has changed
    if model_type and model_type not in DRAFT_LAYERS:
        wrong = f"'{model_type}' is not implemented as a draft layer"
        raise layer_fields.error("model_type", wrong, f"{' and '.join(DRAFT_LAYERS)} are")
    if read_quantisation(layer_fields) is not None:
        raise layer_fields.error("quantization_config", "belongs beside transformer_layer_config", "move it there")
    method = fields.sub("speculators_config")
    tokens, tokens_source, notices = read_proposal(method, speculative_tokens)
    flags, flags_chosen, flag_notices = read_flags(fields, norm_before_residual)
    notices += flag_notices
    layer, theta_notices = read_decoder(layer_fields, model_type)
    theta_source = "default" if theta_notices else "config"
    if rope_theta is not None:
        layer = replace(layer, rope=replace(layer.rope, theta=rope_theta))
        theta_source, theta_notices = "--draft_rope_theta", ()
    notices += theta_notices
    chosen = [f"K={tokens} ({tokens_source})", *flags_chosen]
    chosen.append(f"rope {layer.rope.kind} theta={layer.rope.theta:g} ({theta_source})")
    file_ids = fields.get("eagle_aux_hidden_state_layer_ids", list) or None
    if file_ids is not None and not all(type(i) is int for i in file_ids):
        raise fields.error("eagle_aux_hidden_state_layer_ids", f"{file_ids} are not layer numbers", "correct the file")
    ids = aux_layer_ids or (tuple(file_ids) if file_ids else None)
    return SpeculatorConfig(
        folder=folder,
        algorithm=algorithm,
        target=method.sub("verifier", {}).get("name_or_path", str) or None,
        speculative_tokens=tokens,
        draft_vocab_size=fields.get("draft_vocab_size", int, layer.vocab_size, 1),
        target_hidden_size=fields.get("target_hidden_size", int, layer.hidden_size, 1),
        target_vocab_size=layer.vocab_size,  # until fit_to_target: some targets pad theirs
        aux_layer_ids=ids,
        aux_source="--aux_layer_ids" if aux_layer_ids else "config" if ids else "default",
        layer=layer,
        chosen=tuple(chosen),
        notices=tuple(notices),
        quantisation=read_quantisation(fields),
        **flags,
    )


def is_foreign(raw: dict) -> bool:
    """Does a config.json without speculators' marks describe an EAGLE-3 draft? draft_families.py reads those."""
    keys = ("draft_vocab_size", "truncated_vocab_size", "eagle_config", "aux_hidden_states_layer_ids")
    looks = any(key in raw for key in keys) or "Eagle3" in str(raw.get("architectures"))
    return looks and "transformer_layer_config" not in raw


def find_target(config: SpeculatorConfig, override: str | None) -> str:
    """Folder or Hub id of the target: the user's option, else the config's. A path in the config may be relative to the
    speculator, and is that where it begins with a dot."""
    if override is not None:
        return override
    field = f"{config.folder / 'config.json'}: speculators_config.verifier.name_or_path"
    if config.target is None:
        raise ConfigError(f"{field}: names no target; give --target PATH_OR_REPO")
    beside, relative = config.folder / config.target, config.target.startswith(".")
    if relative and not (beside / "config.json").is_file():
        raise ConfigError(f"{field}: {config.target}: no model there; was the draft moved? give --target PATH_OR_REPO")
    return str(beside) if relative or (beside.is_dir() and not os.path.isdir(config.target)) else config.target


def fit_to_target(config: SpeculatorConfig, target: DecoderConfig) -> SpeculatorConfig:
    """The speculator with its aux layer ids filled in; ConfigError where its sizes do not fit the target's."""
    path = config.folder / "config.json"
    fix = "give the target it was trained on with --target"
    if config.target_hidden_size != target.hidden_size:
        wrong = f"drafts for a hidden size of {config.target_hidden_size}, the target's is {target.hidden_size}"
        raise ConfigError(f"{path}: target_hidden_size: {wrong}; {fix}")
    if abs(config.layer.vocab_size - target.vocab_size) > MAX_PADDING:
        wrong = f"drafts for {config.layer.vocab_size} tokens, the target has {target.vocab_size}"
        raise ConfigError(f"{path}: transformer_layer_config.vocab_size: {wrong}; {fix}")
    if config.draft_vocab_size > (most := min(config.layer.vocab_size, target.vocab_size)):
        wrong = f"{config.draft_vocab_size} is more than the {most} tokens it drafts from"
        raise ConfigError(f"{path}: draft_vocab_size: {wrong}; {fix}")
    n = target.n_layer
    ids = config.aux_layer_ids or (2, n // 2, n - 3)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > n:
        field = f"{path}: eagle_aux_hidden_state_layer_ids"
        option = config.aux_source == "--aux_layer_ids"
        where, fix = ("--aux_layer_ids", "give others") if option else (field, "give others with --aux_layer_ids")
        wrong = f"{list(ids)} are not ascending layers between 0 and {n}, the target's number of layers"
        raise ConfigError(f"{where}: {wrong}; {fix}")
    chosen = (*config.chosen, f"aux layers {','.join(map(str, ids))} ({config.aux_source})")
    return replace(config, aux_layer_ids=tuple(ids), target_vocab_size=target.vocab_size, chosen=chosen)
