"""Configs of versions 0.1 to 0.9 read to the right values; what would change the maths is refused by name."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import FIXTURES

import speculators_config
from speculators_config import ConfigError, Rope, find_target, fit_to_target, read_speculator, read_target

DRAFTS, TARGETS = FIXTURES / "drafts", FIXTURES / "targets"
TRAINED, LLAMA = DRAFTS / "eagle3_trained" / "config.json", TARGETS / "llama_gqa" / "config.json"
AUX = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"
METHODS = "speculators_config.proposal_methods"
NAME = "speculators_config.verifier.name_or_path"
ORIGINAL = "original_max_position_embeddings"
RESIDUAL = "norm_before_residual"
THETA = {"rope_theta": 5e5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
GREEDY = {"proposal_type": "greedy", "speculative_tokens": 6}
SAMPLING = {"proposal_type": "sampling", "speculative_tokens": 2}
TREE = {"proposal_type": "static_tree", "depth": 5}


def edited(folder: Path, source: Path, edits: dict) -> Path:
    """The folder, now with the config of `source` changed at dotted paths; `...` removes."""
    config = json.loads(source.read_text())
    for path, value in edits.items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return folder


def refused(read, *args, **options) -> str:
    """What `read` says, on one line: `<file>: <field>: <what is wrong>; <what to do>`."""
    with pytest.raises(ConfigError) as caught:
        read(*args, **options)
    assert re.fullmatch(r"/\S+: \S+: [^;]+; .+", message := str(caught.value)), message
    return message


def values(config, paths) -> dict:
    """{"layer.rope": config.layer.rope, ...}"""
    found = {}
    for path in paths:
        found[path] = config
        for part in path.split("."):
            found[path] = getattr(found[path], part)
    return found


# Files that the libraries wrote

DRAFT_VALUES = {
    "eagle3_31_defaults": {"norm_before_fc": True, "fc_norm": False, "norm_output": True},
    "eagle3_attention_bias": {"layer.qkv_bias": True, "layer.o_bias": True},
    "eagle3_converted": {"aux_layer_ids": None, "norm_before_residual": False},
    "eagle3_fc_norm": {"norm_before_fc": False, "fc_norm": True},
    "eagle3_four_aux": {"aux_layer_ids": (0, 3, 5, 8)},
    "eagle3_full_vocab": {"draft_vocab_size": 320, "target_vocab_size": 320},
    "eagle3_head_dim": {"layer.head_dim": 16, "layer.hidden_size": 32, "layer.n_head": 4},
    "eagle3_llama3_rope": {"layer.rope": Rope(500000.0, "llama3", 8.0, 64, 1.0, 4.0)},
    "eagle3_llama_layer_on_qwen3": {"layer.qk_norm": False, "layer.rope": Rope(1e6), "layer.norm_eps": 1e-6},
    "eagle3_mqa": {"layer.n_kv_head": 1},
    "eagle3_nbr_false": {"norm_before_residual": False},
    "eagle3_nbr_true": {"norm_before_residual": True},
    "eagle3_norm_before_fc": {"norm_before_fc": True, "fc_norm": False, "norm_output": False},
    "eagle3_norm_output": {"norm_before_fc": False, "norm_output": True},
    "eagle3_qwen3_layer": {"layer.qk_norm": True, "layer.model_type": "qwen3", "layer.windows": (None,)},
    "eagle3_sliding": {"layer.windows": (8,)},
    "eagle3_sliding_unused": {"layer.windows": (None,)},
    "eagle3_trained": {"draft_vocab_size": 64, "aux_layer_ids": (2, 4, 5), "layer.intermediate_size": 64},
    "eagle3_two_layers": {"layer.n_layer": 2, "layer.windows": (None, None)},
    "eagle3_two_layers_mixed": {"layer.n_layer": 2, "layer.windows": (None, 8)},
    "eagle3_yarn_rope": {"layer.rope": Rope(10000.0, "yarn", 4.0, 128, beta_fast=4.0, beta_slow=1.0)},
}
TARGET_VALUES = {
    "llama_gqa": {"n_layer": 8, "n_head": 4, "n_kv_head": 2, "rope": Rope(10000.0), "dtype": "float32", "tied": False},
    "llama_headdim_attnbias": {"head_dim": 16, "qkv_bias": True, "o_bias": True},
    "llama_linear_rope": {"rope": Rope(10000.0, "linear", 4.0)},
    "llama_mha": {"n_kv_head": 4},
    "llama_mqa": {"n_kv_head": 1},
    "llama_tied": {"tied": True},
    "llama_yarn": {"rope": Rope(10000.0, "yarn", 4.0, 32), "context": 128},
    "mistral_sliding": {"windows": (8, 8, 8), "qk_norm": False},
    "qwen2": {"qkv_bias": True, "o_bias": False, "qk_norm": False, "head_dim": 8, "windows": (None,) * 3},
    "qwen3": {"qkv_bias": False, "qk_norm": True, "head_dim": 16, "tied": True, "norm_eps": 1e-6},
}


@pytest.mark.parametrize("folder", sorted(DRAFTS.iterdir()), ids=lambda folder: folder.name)
def test_drafts_read_to_what_their_files_say(folder):
    config = read_speculator(folder)
    wanted = DRAFT_VALUES.get(folder.name, {}) | {"algorithm": "eagle3", "speculative_tokens": 3}
    assert values(config, wanted) == wanted
    target, notices = read_target(Path(find_target(config, None)))  # a path relative to the speculator's folder
    assert fit_to_target(config, target).aux_layer_ids == (config.aux_layer_ids or (2, 4, 5))
    assert notices == config.notices == ()  # complete files leave nothing to assume


@pytest.mark.parametrize("name", TARGET_VALUES)
def test_targets_read_to_what_their_files_say(name):
    config, notices = read_target(TARGETS / name)
    assert (values(config, TARGET_VALUES[name]), notices) == (TARGET_VALUES[name], ())


@pytest.mark.parametrize("name", ["llama_plain_theta", "llama_llama3rope"])
def test_transformers_4_and_5_spell_one_config(name, tmp_path):
    """rope_theta and rope_scaling or rope_parameters, torch_dtype or dtype; 4.53 also leaves out head_dim."""
    new, old = read_target(TARGETS / name), TARGETS / f"{name}_v4cfg"
    assert read_target(old) == new
    assert read_target(edited(tmp_path, old / "config_transformers_4_57.json", {})) == new


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": THETA | LLAMA3},
        {"rope_theta": 500000, "rope_scaling": LLAMA3},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3", "rope_type": None}},
        {"rope_scaling": THETA | LLAMA3},
        {"rope_parameters": LLAMA3, "rope_theta": 5e5},
        {"rope_parameters": THETA | LLAMA3, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": {"sliding_attention": THETA | LLAMA3}},
        {"rope_parameters": dict.fromkeys(["full_attention", "sliding_attention"], THETA | LLAMA3)},
    ],
)
def test_every_spelling_of_a_rope_is_the_same_rope(rope, tmp_path):
    edits = {f"{LAYER}.{key}": value for key, value in ({"rope_parameters": ...} | rope).items()}
    config = read_speculator(edited(tmp_path, TRAINED, edits))
    assert (config.layer.rope, config.notices) == (Rope(5e5, "llama3", 8.0, 64, 1.0, 4.0), ())


@pytest.mark.parametrize(
    ("model_type", "edits", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None,) * 8),  # without layer_types it means nothing here
        ("mistral", {"sliding_window": 8}, (8,) * 8),
        ("mistral", {"sliding_window": None}, (None,) * 8),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, (None,) * 8),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 6}, (None,) * 6 + (8, 8)),
        ("qwen3", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 4}, (None, 8) * 4),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 8}, (None,) * 8),
    ],
)
def test_layer_types_decide_on_windows_then_the_familys_own_rule(model_type, edits, windows, tmp_path):
    config, _ = read_target(edited(tmp_path, LLAMA, {"model_type": model_type, **edits}))
    assert config.windows == windows


# Published speculators, as their configs are known


def published(version: str, K: int, sizes: tuple[int, ...], layer: dict, **top) -> dict:
    """A speculator's config. sizes: hidden, intermediate, heads, key/value heads, head size, vocabulary."""
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
    methods = [{"proposal_type": "greedy", "speculative_tokens": K, "verifier_accept_k": 1, "accept_tolerance": 0.0}]
    verifier = {"architectures": [], "name_or_path": "org/target"}  # empty in good files too
    config = {"speculators_model_type": "eagle3", "speculators_version": version, "draft_vocab_size": 32000}
    config["speculators_config"] = {"algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": verifier}
    config["speculators_config"]["proposal_methods"] = methods
    config[LAYER] = {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    config[LAYER] |= dict(zip(names, sizes, strict=True)) | layer
    return config | top


PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "beta_fast": 4.0, "beta_slow": 1.0, ORIGINAL: 4096}
UNUSED_WINDOW = {"layer_types": ["full_attention"], "sliding_window": 2048, "use_sliding_window": False}
PUBLISHED = {  # the target's number of layers, the draft's config, and what it says
    "Llama-3.1-8B of SafeAILab, converted": (
        32,
        published("0.1.0.dev21", 5, (4096, 14336, 32, 8, 128, 128256), {"rope_theta": 1e4, "rope_scaling": None})
        | {"norm_before_residual": False, "torch_dtype": "float32", "target_hidden_size": None},
        {"norm_before_residual": False, "speculative_tokens": 5, "layer.rope": Rope(1e4), "aux_layer_ids": (2, 16, 29)},
    ),
    "Qwen3-32B": (
        64,
        published("0.2.0", 3, (5120, 25600, 64, 8, 128, 151936), {"rope_theta": 1000000, "rope_scaling": None})
        | {"norm_before_residual": True},
        {"layer.head_dim": 128, "layer.qk_norm": False, "layer.rope": Rope(1e6), "aux_layer_ids": (2, 32, 61)},
    ),
    "gemma-4-31B": (
        60,
        published("0.5.0", 3, (5376, 21504, 32, 16, 256, 262144), PLAIN_ROPE, dtype="bfloat16")
        | {"norm_before_residual": True, "norm_before_fc": False, AUX: [2, 30, 57]},
        {"layer.head_dim": 256, "target_hidden_size": 5376, "aux_layer_ids": (2, 30, 57), "target": "org/target"},
    ),
    "gpt-oss-20b": (
        24,
        published("0.6.0", 3, (2880, 2880, 64, 8, 64, 201088), PLAIN_ROPE)
        | {"norm_before_residual": True, "norm_before_fc": True, "draft_vocab_size": 64000},
        {"draft_vocab_size": 64000, "norm_before_fc": True, "norm_output": False, "aux_layer_ids": (2, 12, 21)},
    ),
    "0.7 with yarn and a window that is not used": (
        88,
        published("0.7.0.dev80", 3, (12288, 28672, 96, 8, 128, 32768), {"rope_parameters": YARN} | UNUSED_WINDOW)
        | {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True}
        | {AUX: [2, 44, 85]},
        {"norm_before_fc": True, "norm_output": True, "layer.windows": (None,), "aux_layer_ids": (2, 44, 85)}
        | {"layer.rope": Rope(1e6, "yarn", 32.0, 4096, beta_fast=4.0)},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_of_every_age(name, tmp_path):
    n_layer, raw, wanted = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_speculator(tmp_path)
    sizes = {"hidden_size": config.layer.hidden_size, "vocab_size": config.layer.vocab_size}
    config = fit_to_target(config, replace(read_target(LLAMA.parent)[0], n_layer=n_layer, **sizes))
    assert (values(config, wanted), config.notices) == (wanted, ())


@pytest.mark.parametrize("size", [..., None])
def test_without_a_draft_vocabulary_it_is_the_targets(size, tmp_path):
    config = read_speculator(edited(tmp_path, TRAINED, {"draft_vocab_size": size, f"{LAYER}.vocab_size": 300}))
    assert config.draft_vocab_size == config.target_vocab_size == 300


def test_unknown_keys_that_switch_nothing_on_are_tolerated(tmp_path):
    extras = {"base_model_ep_plan": None, "inference_type": "text", "max_anchors": 3072, "some_switch": False}
    extras |= {"embed_requires_grad": True, "has_no_defaults_at_init": True, "eagle_config": None}
    config = read_speculator(edited(tmp_path, TRAINED, extras))
    assert replace(config, folder=TRAINED.parent) == read_speculator(TRAINED.parent)


# Options over config over default, and all of it is said


def said(config) -> tuple[str, ...]:
    """What generate.py prints: `chosen`, and of the notices what follows the file's name."""
    return (*config.chosen, *(notice.split(": ", 1)[1] for notice in config.notices))


@pytest.mark.parametrize(
    ("methods", "named", "option", "K", "source"),
    [
        ([SAMPLING, GREEDY], "greedy", 7, 7, "--num_speculative_tokens"),
        ([SAMPLING, GREEDY], "greedy", 0, 0, "--num_speculative_tokens"),
        ([], "greedy", 7, 7, "--num_speculative_tokens"),
        ([TREE], "static_tree", 7, 7, "--num_speculative_tokens"),
        ([SAMPLING, GREEDY], "greedy", None, 6, "config"),
        ([SAMPLING, GREEDY], "sampling", None, 2, "config"),
        ([SAMPLING, GREEDY], None, None, 2, "config"),  # none is named, or none has the name: the first
        ([SAMPLING, GREEDY], "missing", None, 2, "config"),
        ([{"proposal_type": "greedy"}], "greedy", None, 3, "default"),
        ([], "greedy", None, 3, "default"),
    ],
)
def test_speculative_tokens(methods, named, option, K, source, tmp_path):
    edits = {METHODS: methods, "speculators_config.default_proposal_method": named}
    config = read_speculator(edited(tmp_path, TRAINED, edits), speculative_tokens=option)
    assert config.speculative_tokens == K
    assert f"K={K} ({source})" in config.chosen
    assert (f"{METHODS}.speculative_tokens: absent, 3 assumed" in said(config)) == (source == "default")


@pytest.mark.parametrize(
    ("edits", "option", "ids", "words"),
    [
        ({}, (1, 2), (1, 2), "aux layers 1,2 (--aux_layer_ids)"),
        ({}, None, (2, 4, 5), "aux layers 2,4,5 (config)"),
        ({AUX: ...}, None, (2, 4, 5), "aux layers 2,4,5 (default)"),
        ({AUX: None}, None, (2, 4, 5), "aux layers 2,4,5 (default)"),
    ],
)
def test_aux_layer_ids(edits, option, ids, words, tmp_path):
    """N is known with the target, of 8 layers."""
    config = read_speculator(edited(tmp_path, TRAINED, edits), aux_layer_ids=option)
    config = fit_to_target(config, read_target(FIXTURES / "targets/llama_gqa")[0])
    assert config.aux_layer_ids == ids
    assert words in config.chosen


@pytest.mark.parametrize(
    ("parameters", "option", "rope", "words"),
    [
        (THETA, 1e6, Rope(1e6), "rope default theta=1e+06 (--draft_rope_theta)"),
        (THETA | LLAMA3, 1e4, Rope(1e4, "llama3", 8.0, 64, 1.0, 4.0), "rope llama3 theta=10000 (--draft_rope_theta)"),
        ({"rope_type": "default"}, 1e6, Rope(1e6), "rope default theta=1e+06 (--draft_rope_theta)"),
        (THETA, None, Rope(5e5), "rope default theta=500000 (config)"),
        ({"rope_type": "default"}, None, Rope(1e4), "rope default theta=10000 (default)"),
    ],
)
def test_draft_rope_theta(parameters, option, rope, words, tmp_path):
    folder = edited(tmp_path, TRAINED, {f"{LAYER}.rope_parameters": parameters})
    config = read_speculator(folder, rope_theta=option)
    assert config.layer.rope == rope
    assert words in config.chosen
    assert (f"{LAYER}.rope_theta: absent, 10000 assumed" in said(config)) == words.endswith("(default)")


@pytest.mark.parametrize(
    ("edits", "option", "value", "source"),
    [
        ({}, False, False, "--norm_before_residual"),
        ({RESIDUAL: False}, True, True, "--norm_before_residual"),
        ({RESIDUAL: ...}, False, False, "--norm_before_residual"),
        ({}, None, True, "config"),
        ({RESIDUAL: False}, None, False, "config"),
        ({RESIDUAL: ...}, None, True, "default"),
        ({RESIDUAL: None}, None, True, "default"),
    ],
)
def test_norm_before_residual(edits, option, value, source, tmp_path):
    config = read_speculator(edited(tmp_path, TRAINED, edits), norm_before_residual=option)
    assert config.norm_before_residual is value
    assert f"{RESIDUAL}={str(value).lower()} ({source})" in config.chosen
    assert (f"{RESIDUAL}: absent, true assumed (as vLLM does)" in said(config)) == (source == "default")


def test_the_other_switches_are_said_where_they_are_on():
    chosen = read_speculator(DRAFTS / "eagle3_31_defaults").chosen
    assert {"norm_before_fc=true (config)", "norm_output=true (config)"} < set(chosen)
    assert not [words for words in chosen if "fc_norm" in words]


@pytest.mark.parametrize("lenience", [{"verifier_accept_k": 2}, {"accept_tolerance": 0.1}])
def test_lenient_acceptance_is_ignored_and_that_is_said(lenience, tmp_path):
    config = read_speculator(edited(tmp_path, TRAINED, {METHODS: [GREEDY | lenience]}))
    assert f"{METHODS}: lenience is ignored, verification is exact" in said(config)


# From the speculator to its target


def test_the_target_is_the_options_then_the_configs(tmp_path):
    config = read_speculator(edited(tmp_path, TRAINED, {NAME: "org/mod\xe8le"}))
    assert find_target(config, "org/other") == "org/other"
    assert find_target(config, None) == "org/mod\xe8le"
    (tmp_path / "org" / "mod\xe8le").mkdir(parents=True)
    assert find_target(config, None) == str(tmp_path / "org" / "mod\xe8le")


def test_a_target_that_begins_with_a_dot_lies_by_the_draft_and_nowhere_else(tmp_path, monkeypatch):
    (tmp_path / "a" / "draft").mkdir(parents=True)
    config = read_speculator(edited(tmp_path / "a" / "draft", TRAINED, {NAME: "../target"}))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # from where ../target is a model, and another one
    message = refused(find_target, config, None)
    assert message.endswith(f"{NAME}: ../target: no model there; was the draft moved? give --target PATH_OR_REPO")
    (tmp_path / "target").rename(tmp_path / "a" / "target")
    assert Path(find_target(config, None)).resolve() == tmp_path / "a" / "target"


@pytest.mark.parametrize("edits", [{NAME: None}, {NAME: ""}, {NAME: ...}, {"speculators_config.verifier": ...}])
def test_without_a_name_the_target_is_asked_for(edits, tmp_path):
    config = read_speculator(edited(tmp_path, TRAINED, edits))
    assert find_target(config, "org/target") == "org/target"
    assert f"{NAME}: names no target; give --target PATH_OR_REPO" in refused(find_target, config, None)


@pytest.mark.parametrize(
    ("target_sizes", "edits", "field", "words"),
    [
        ({"hidden_size": 64}, {}, "target_hidden_size", "drafts for a hidden size of 32, the target's is 64"),
        ({}, {"target_hidden_size": 48}, "target_hidden_size", "drafts for a hidden size of 48, the target's is 32"),
        ({"vocab_size": 151936}, {}, f"{LAYER}.vocab_size", "drafts for 320 tokens, the target has 151936"),
        ({"vocab_size": 32}, {}, "draft_vocab_size", "64 is more than the 32 tokens it drafts from"),
        ({}, {"draft_vocab_size": 321}, "draft_vocab_size", "321 is more than the 320 tokens it drafts from"),
        ({}, {AUX: [5, 4, 2]}, AUX, "[5, 4, 2] are not ascending"),
        ({}, {AUX: [2, 2, 5]}, AUX, "[2, 2, 5] are not ascending"),
        ({}, {AUX: [-1, 2, 5]}, AUX, "[-1, 2, 5] are not ascending layers between 0 and 8"),
        ({}, {AUX: [2, 4, 9]}, AUX, "[2, 4, 9] are not ascending layers between 0 and 8"),
        ({"n_layer": 6}, {AUX: None}, AUX, "[2, 3, 3] are not ascending layers between 0 and 6"),
        ({"n_layer": 4}, {AUX: None}, AUX, "[2, 2, 1] are not ascending layers between 0 and 4"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(target_sizes, edits, field, words, tmp_path):
    target = replace(read_target(LLAMA.parent)[0], **target_sizes)
    message = refused(fit_to_target, read_speculator(edited(tmp_path, TRAINED, edits)), target)
    assert message.startswith(f"{tmp_path}/config.json: {field}: {words}")
    assert ("--aux_layer_ids" if field == AUX else "--target") in message.split("; ")[1]


@pytest.mark.parametrize(
    ("target_sizes", "edits", "ids"),
    [
        ({}, {AUX: [0, 4, 8]}, (0, 4, 8)),  # the embeddings, and what leaves the last layer
        ({}, {AUX: [7]}, (7,)),
        ({"n_layer": 7}, {AUX: None}, (2, 3, 4)),
        ({"n_layer": 33}, {AUX: []}, (2, 16, 30)),
        ({"vocab_size": 384}, {}, (2, 4, 5)),  # padded
        ({"hidden_size": 48}, {"target_hidden_size": 48}, (2, 4, 5)),
    ],
)
def test_what_fits_the_target(target_sizes, edits, ids, tmp_path):
    target = replace(read_target(LLAMA.parent)[0], **target_sizes)
    config = fit_to_target(read_speculator(edited(tmp_path, TRAINED, edits)), target)
    assert (config.aux_layer_ids, config.target_vocab_size) == (ids, target.vocab_size)


# Refusals

OF_DECODERS = [  # field and value; what is said
    ("mlp_bias", True, "biases in the MLP are not implemented"),
    ("hidden_act", "gelu", "'gelu' is not implemented; silu is"),
    ("hidden_size", ..., "missing; is this a complete config.json"),
    ("hidden_size", None, "missing; "),
    ("hidden_size", "32", 'expected int, found "32"; correct the file'),
    ("hidden_size", 32.0, "expected int, found 32.0"),
    ("hidden_size", True, "expected int, found true"),
    ("num_hidden_layers", 0, "0 is out of range; it must be at least 1"),
    ("num_key_value_heads", 3, "4 heads do not divide into 3"),
    ("num_attention_heads", [4], "expected int, found [4]"),
    ("rms_norm_eps", float("nan"), "nan is out of range"),
    ("attention_bias", "false", 'expected bool, found "false"'),
    ("partial_rotary_factor", 0.5, "is not implemented unless it is 1"),
    ("layer_types", ["full_attention"] * 9, "9 entries for "),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "says something else than rope_parameters"),
    ("rope_parameters", [], "expected dict, found []"),
    ("rope_parameters", {"full_attention": THETA, "sliding_attention": {"rope_theta": 1e4}}, "differ between layer"),
    ("rope_parameters.rope_type", "longrope", "'longrope' is not implemented; default, linear, llama3 and yarn are"),
    ("rope_parameters.rope_type", "dynamic", "'dynamic' is not implemented"),
    ("rope_parameters.rope_type", "mrope", "'mrope' is not implemented"),
    ("rope_parameters.rope_theta", 0, "0.0 is out of range"),
    ("rope_parameters.rope_theta", "1e6", 'expected float, found "1e6"'),
    ("rope_parameters.partial_rotary_factor", 0.25, "is not implemented unless it is 1"),
    ("rope_parameters.mscale", 1.0, "is not implemented; only attention_factor is"),
    ("rope_parameters.mscale_all_dim", 0.8, "is not implemented; only attention_factor is"),
]
OF_ROPES = [  # the scaling; its wrong field; what is said
    ({"rope_type": "linear"}, "factor", "missing"),
    ({"rope_type": "linear", "factor": 0.5}, "factor", "0.5 is out of range"),
    (LLAMA3 | {ORIGINAL: None}, ORIGINAL, "missing"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor", "4.0 is not above low_freq_factor 4.0"),
    ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate", "expected bool, found 1"),
]
OF_SPECULATORS = [  # path and value; what is said
    ("speculators_model_type", "peagle", "'peagle' is not read yet; eagle3 is"),
    ("speculators_model_type", "dflash", "'dflash' is not read yet"),
    ("speculators_model_type", "eagle", "'eagle' is not read yet"),
    ("speculators_model_type", ["eagle3"], 'expected str, found ["eagle3"]'),
    ("speculators_model_type", ..., "missing, so this is no checkpoint in speculators format; "),
    ("norm_after_fc", True, "is not implemented; use a checkpoint without it"),
    ("parallel_drafting", True, "is not implemented"),
    ("eagle_config", {"norm_before_fc": True}, "is not implemented"),
    ("dflash_config", {"block_size": 8}, "is not implemented"),
    ("norm_output", "true", 'expected bool, found "true"'),
    ("norm_before_residual", 1, "expected bool, found 1"),
    (AUX, [2, "4", 5], "[2, '4', 5] are not layer numbers"),
    (AUX, [2, True, 5], "[2, True, 5] are not layer numbers"),
    (AUX, "2,4,5", 'expected list, found "2,4,5"'),
    ("draft_vocab_size", 0, "0 is out of range"),
    ("target_hidden_size", "32", 'expected int, found "32"'),
    (LAYER, ..., "missing"),
    (LAYER, "llama", 'expected dict, found "llama"'),
    (f"{LAYER}.model_type", "gemma3", "'gemma3' is not implemented as a draft layer; llama and qwen3 are"),
    (f"{LAYER}.layer_types", ["chunked_attention"], "'chunked_attention' is not implemented"),
    ("speculators_config", ..., "missing"),
    ("speculators_config.verifier", "org/target", 'expected dict, found "org/target"'),
    (NAME, ["org/target"], 'expected str, found ["org/target"]'),
    (METHODS, {}, "expected list, found {}"),
    (f"{METHODS}.0.speculative_tokens", 0, "0 is out of range"),
    (f"{METHODS}.0.speculative_tokens", "3", 'expected int, found "3"'),
    (f"{METHODS}.0.speculative_tokens", 65, "65 is more than the 64 that a chain may have; give --num_speculative_"),
    (f"{METHODS}.0.proposal_type", "static_tree", "'static_tree' is not implemented; give --num_speculative_tokens K"),
]


@pytest.mark.parametrize(("key", "value", "words"), OF_DECODERS)
@pytest.mark.parametrize(
    ("read", "source", "prefix"), [(read_speculator, TRAINED, f"{LAYER}."), (read_target, LLAMA, "")]
)
def test_decoders_we_cannot_run_are_refused(read, source, prefix, key, value, words, tmp_path):
    message = refused(read, edited(tmp_path, source, {prefix + key: value}))
    assert message.startswith(f"{tmp_path}/config.json: {prefix}{key}: {words}")


@pytest.mark.parametrize(("scaling", "key", "words"), OF_ROPES)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_incomplete_ropes_are_refused(spelling, scaling, key, words, tmp_path):
    folder = edited(tmp_path, LLAMA, {"rope_parameters": ..., "rope_theta": 1e4, spelling: scaling})
    assert refused(read_target, folder).startswith(f"{tmp_path}/config.json: {spelling}.{key}: {words}")


@pytest.mark.parametrize(("path", "value", "words"), OF_SPECULATORS)
def test_speculators_we_cannot_run_are_refused(path, value, words, tmp_path):
    message = refused(read_speculator, edited(tmp_path, TRAINED, {path: value}))
    assert message.startswith(f"{tmp_path}/config.json: {path.replace('.0.', '.')}: {words}")


@pytest.mark.parametrize(
    ("edits", "field", "words"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm", "excludes norm_before_fc, and both are on"),
        ({f"{LAYER}.layer_types": ["sliding_attention"]}, f"{LAYER}.sliding_window", "missing, though layer_types has"),
        ({f"{LAYER}.head_dim": ..., f"{LAYER}.hidden_size": 30}, f"{LAYER}.head_dim", "missing, and 30 is no multiple"),
    ],
)
def test_contradictions_are_refused(edits, field, words, tmp_path):
    message = refused(read_speculator, edited(tmp_path, TRAINED, edits))
    assert message.startswith(f"{tmp_path}/config.json: {field}: {words}")


@pytest.mark.parametrize(
    ("eagle", "says"),
    [
        ({}, "no checkpoint in speculators format; a target is given as --target"),
        ({"draft_vocab_size": 64}, "another family's draft; convert it: python convert_hf_checkpoint.py "),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "another family's draft; convert it: "),
    ],
)
def test_targets_and_drafts_of_other_families_are_no_speculators(eagle, says, tmp_path):
    """SafeAILab's, SpecForge's and ModelOpt's drafts have the config of a llama."""
    message = refused(read_speculator, edited(tmp_path, LLAMA, eagle))
    assert message.startswith(f"{tmp_path}/config.json: speculators_model_type: missing, so this is {says}")


@pytest.mark.parametrize(
    ("source", "edits", "field", "words"),
    [
        (TRAINED, {}, "speculators_model_type", "this is a speculator, not a target; give it as --speculator"),
        (LLAMA, {"model_type": ...}, "model_type", "missing"),
        (LLAMA, {"model_type": "gemma3"}, "model_type", "'gemma3' is not implemented as a target; llama, mistral,"),
        (LLAMA, {"model_type": "qwen3_moe"}, "model_type", "'qwen3_moe' is not implemented as a target"),
    ],
)
def test_what_is_no_target_of_ours_is_refused(source, edits, field, words, tmp_path):
    message = refused(read_target, edited(tmp_path, source, edits))
    assert message.startswith(f"{tmp_path}/config.json: {field}: {words}")


@pytest.mark.parametrize("read", [read_speculator, read_target])
@pytest.mark.parametrize("content", [b"", b'{"model_type": ', b"[]", b"null", b"\xff\xfe{}"])
def test_damaged_files_are_refused(read, content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    message = refused(read, tmp_path)
    assert message.startswith(f"{tmp_path}/config.json: JSON: ")
    assert message.endswith("; download the file again")


@pytest.mark.parametrize("read", [read_speculator, read_target])
def test_a_missing_file_is_refused(read, tmp_path):
    message = f"{tmp_path}: config.json: there is no such file; give the folder or Hub repo of a checkpoint"
    assert refused(read, tmp_path) == message
    (tmp_path / "config.json").mkdir()
    assert "config.json: JSON: not readable" in refused(read, tmp_path)


def test_reading_a_config_needs_the_standard_library_alone():
    """-S hides what is installed: a wrong config is answered before torch is there."""
    script = """if True:
        import sys
        from pathlib import Path
        from speculators_config import find_target, read_speculator, read_target
        read_target(Path(find_target(read_speculator(Path(sys.argv[1])), None)))
        print(*{name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names)"""
    command = [sys.executable, "-S", "-E", "-c", script, TRAINED.parent]
    run = subprocess.run(command, cwd=Path(speculators_config.__file__).parent, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert set(run.stdout.split()) == {"__main__", "speculators_config"}
