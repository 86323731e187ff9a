"""Other families' drafts become speculators folders that draft as their own code does (fixtures/third_party)."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, expected, open_pair
from safetensors.torch import load_file, save_file

import generate
from convert_hf_checkpoint import convert, main
from options import exit_code
from speculators_config import ConfigError, read_speculator

THIRD_PARTY = FIXTURES / "third_party"
TARGET = FIXTURES / "targets" / "llama_gqa"
CASES = sorted(path.name for path in THIRD_PARTY.iterdir())


def converted(case: str | Path, out: Path, aux=None) -> dict:
    convert(str(THIRD_PARTY / case), str(TARGET), out, aux, 3)
    return json.loads((out / "config.json").read_text())


def edited(case: str, folder: Path, tensors=dict, **config) -> Path:
    """A copy with another config and other tensors; a value of `...` removes the key."""
    shutil.copytree(THIRD_PARTY / case, folder)
    raw = json.loads((folder / "config.json").read_text()) | config
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors(tensors_of(case)), folder / "model.safetensors")
    return folder


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    safe = THIRD_PARTY / case / "model.safetensors"
    return load_file(safe) if safe.exists() else torch.load(safe.with_name("pytorch_model.bin"), weights_only=True)


# What comes out.


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_converted_draft_drafts_as_its_own_code_does(case, tmp_path):
    converted(case, tmp_path / "out")
    want = expected(THIRD_PARTY / case)
    _, draft = open_pair(tmp_path / "out")
    T, logits = want["input_ids"].size(1), []
    x = draft(want["input_ids"], draft.fuse(want["aux"]), torch.arange(T)[None])
    first = want["prefill_logits" if "prefill_logits" in want else "logits_step0"]
    torch.testing.assert_close(draft.logits(x), first, atol=1e-4, rtol=0)

    def pick(row, step):
        logits.append(row[0])
        return row.argmax(-1), None

    rows = torch.arange(T)[None]
    tokens, _ = draft.propose(want["input_ids"], want["aux"], rows, torch.tensor([T - 1]), 4, pick)
    assert tokens[0].tolist() == want["chain_tokens"].tolist()
    torch.testing.assert_close(torch.stack(logits), want["chain_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_keeps_its_bits_and_a_second_run_gives_the_same_bytes(case, tmp_path):
    converted(case, tmp_path / "out")
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors_of(case).items():
        ours = written.pop(name.replace("midlayer.", "layers.0."))
        assert ours.dtype == tensor.dtype
        assert torch.equal(ours, tensor), name
    assert set(written) <= {"t2d"}
    converted(case, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("case", CASES)
def test_what_other_readers_guess_is_written_out(case, tmp_path):
    raw = converted(case, tmp_path / "out")
    assert raw["norm_before_residual"] is False
    assert raw["norm_output"] is False
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert raw["transformer_layer_config"]["rope_theta"] == 10000.0
    assert raw["dtype"] == "float32"
    assert not read_speculator(tmp_path / "out").notices


def test_a_map_of_one_side_gets_the_other(tmp_path):
    converted("nvidia_modelopt", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["t2d"], tensors_of("specforge")["t2d"])


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}, "rope_theta": ...},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}},
            "rope_theta": ...,
        },
    ],
)
def test_rope_keeps_its_theta_and_its_scaling(config, tmp_path):
    folder = edited("specforge", tmp_path / "in", **config)
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    rope = read_speculator(tmp_path / "out").layer.rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 500000.0)


def test_a_prefix_and_inverse_frequencies_are_dropped_and_that_is_said(tmp_path, capsys):
    def prefixed(tensors):
        renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return renamed | {"model.midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}

    folder = edited("specforge", tmp_path / "in", prefixed)
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    unused = "model.midlayer.self_attn.rotary_emb.inv_freq"
    assert capsys.readouterr().err == f"notice: stored but not needed: {unused}\n"
    plain = converted("specforge", tmp_path / "plain")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == plain
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()


def test_the_number_of_layers_is_that_of_the_weights(tmp_path):
    """Public files exist that give the target's."""
    types = ["full_attention"] * 40
    folder = edited("specforge", tmp_path / "in", num_hidden_layers=40, layer_types=types)
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    assert read_speculator(tmp_path / "out").layer.n_layer == 1


def test_other_spellings_of_vocabulary_and_layers(tmp_path):
    """AngelSlim's and nebius' keys; the user's ids win."""
    config = {"draft_vocab_size": ..., "truncated_vocab_size": 64, "eagle_config": ...}
    folder = edited("specforge", tmp_path / "in", **config, aux_hidden_states_layer_ids=[0, 1, 7])
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    assert read_speculator(tmp_path / "out").aux_layer_ids == (1, 2, 8)
    assert read_speculator(tmp_path / "out").draft_vocab_size == 64
    assert converted("specforge", tmp_path / "out", (1, 3, 5))["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]


def test_a_switch_in_the_nested_table_counts(tmp_path):
    eagle_config = {"norm_before_residual": True}
    folder = edited("specforge", tmp_path / "in", eagle_config=eagle_config)
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    assert read_speculator(tmp_path / "out").norm_before_residual


# What is refused.


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["PAYLOAD"],)


def test_a_pickle_with_a_payload_is_refused_and_does_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PAYLOAD", str(tmp_path / "ran"))
    folder = tmp_path / "in"
    shutil.copytree(THIRD_PARTY / "safeailab_eagle3", folder)
    torch.save(tensors_of("safeailab_eagle3") | {"midlayer.x": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin: not loaded: broken, or it holds more than tensors"):
        convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(), protocol=2))
    with pytest.raises(ConfigError, match="pytorch_model.bin: not loaded: broken, or it holds more than tensors"):
        convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("content", [[1, 2], {"midlayer.x": 3}, {3: torch.ones(1)}])
def test_a_pickle_of_something_else_is_refused(content, tmp_path):
    shutil.copytree(THIRD_PARTY / "safeailab_eagle3", tmp_path / "in")
    torch.save(content, tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin: not loaded: no table of tensors"):
        convert(str(tmp_path / "in"), str(TARGET), tmp_path / "out", None, 3)


def test_safetensors_are_preferred_to_a_pickle(tmp_path):
    folder = edited("specforge", tmp_path / "in")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)


def nested(**more) -> dict:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]} | more}


def plus(**more):
    return lambda tensors: tensors | {name.replace("_", ".", 1): tensor for name, tensor in more.items()}


DOORS = [
    (
        nested(use_aux_hidden_state=False),
        dict,
        "eagle_config.use_aux_hidden_state: is not implemented unless it is true",
    ),
    (nested(use_mtp_layernorm=True), dict, "eagle_config.use_mtp_layernorm: is not implemented unless it is false"),
    (nested(use_last_layernorm=False), dict, "eagle_config.use_last_layernorm: is not implemented unless it is true"),
    (nested(parallel_draft_step=2), dict, "eagle_config.parallel_draft_step: drafts in parallel are not implemented"),
    (nested(has_new_trick=True), dict, "eagle_config.has_new_trick: is not implemented"),
    ({"has_new_trick": True}, dict, "config.json: has_new_trick: is not implemented"),
    ({"norm_output": False}, dict, "norm_output: logits of un-normed states are not implemented"),
    (nested(fc_norm=False) | {"fc_norm": True}, dict, "fc_norm: is True here and False in eagle_config"),
    (nested(eagle_aux_hidden_state_layer_ids=["1"]), dict, r"layer_ids: \['1'\] are not layer numbers"),
    (nested(eagle_aux_hidden_state_layer_ids=[1, 3, 8]), dict, r"\[2, 4, 9\] are not ascending layers between 0 and 8"),
    (nested(eagle_aux_hidden_state_layer_ids=[1, 3]), dict, "2 layers of 32 do not make the 96 columns of fc.weight"),
    (
        {"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        dict,
        "layer_ids: beside eagle_config, a layer's input and its output are both meant by some; give --aux_layer_ids",
    ),
    (nested() | {"aux_hidden_states_layer_ids": [0, 1, 7]}, dict, "layer_ids: says something else than aux_hidden"),
    ({"vocab_size": ...}, dict, "config.json: vocab_size: missing"),
    ({"hidden_size": 24}, dict, "target_hidden_size: drafts for a hidden size of 24, the target's is 32"),
    ({"vocab_size": 32000}, dict, "vocab_size: drafts for 32000 tokens, the target has 320"),
    ({"draft_vocab_size": 32}, dict, r"stored as \[64, 32\], the model has \[32, 32\]"),
    ({"model_type": "gemma"}, dict, "model_type: 'gemma' is not implemented as a draft layer"),
    ({"speculators_model_type": "eagle3"}, dict, "is in speculators format already; give it to generate.py"),
    ({}, plus(fc_bias=torch.ones(32)), "fc.bias: stored, but nothing in the model takes it"),
    ({}, plus(d2t=torch.full((64,), 300)), "d2t: its offsets lead to ids 300..363"),
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door[2][:60])
def test_what_would_change_the_maths_or_does_not_fit_is_refused_by_name(door, tmp_path):
    config, tensors, message = door
    folder = edited("specforge", tmp_path / "in", tensors, **config)
    with pytest.raises(ConfigError, match=message) as caught:
        convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    assert str(caught.value).startswith(str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_offsets_without_a_mask_are_checked_too(tmp_path):
    def moved(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != "t2d"} | {"d2t": torch.full((64,), 300)}

    folder = edited("specforge", tmp_path / "in", moved)
    with pytest.raises(ConfigError, match="d2t: leads outside the 320 tokens of its config"):
        convert(str(folder), str(TARGET), tmp_path / "out", None, 3)


def test_offsets_that_are_none_are_refused(tmp_path):
    def scalar(tensors):
        return {name: t for name, t in tensors.items() if name != "t2d"} | {"d2t": torch.tensor(3)}

    folder = edited("specforge", tmp_path / "in", scalar)
    with pytest.raises(ConfigError, match=r"d2t: \[\] of torch.int64, no offsets"):
        convert(str(folder), str(TARGET), tmp_path / "out", None, 3)


def test_tensors_that_share_their_memory_are_written_apart(tmp_path):
    """A pickle keeps them together."""
    shutil.copytree(THIRD_PARTY / "safeailab_eagle3_other_hidden", tmp_path / "in")
    tensors = tensors_of("safeailab_eagle3_other_hidden")
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"][:64]
    torch.save(tensors, tmp_path / "in" / "pytorch_model.bin")
    convert(str(tmp_path / "in"), str(TARGET), tmp_path / "out", None, 3)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["embed_tokens.weight"][:64])


def test_a_target_is_no_draft(tmp_path):
    with pytest.raises(ConfigError, match="is none of an EAGLE-3 draft"):
        convert(str(TARGET), str(TARGET), tmp_path / "out", None, 3)


# The command.


def run(*argv, capsys) -> tuple[int, str]:
    code = exit_code(lambda: main([str(arg) for arg in argv]))
    return code, capsys.readouterr().err


def test_a_target_in_a_folder_is_found_from_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(THIRD_PARTY.parent)
    out = tmp_path / "out"
    assert run("third_party/specforge", "--target", "targets/llama_gqa", "--out", out, capsys=capsys)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert generate.main(["--speculator", str(out), "--prompt_ids", "1,2", "--no_compile"]) == 0


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ("1,3,99", "--aux_layer_ids: [1, 3, 99] are not ascending"),
        ("1,3", "--aux_layer_ids: 2 layers of 32 do not make"),
    ],
)
def test_ids_that_do_not_fit_are_the_options(ids, wrong, tmp_path, capsys):
    draft = THIRD_PARTY / "specforge"
    code, said = run(draft, "--target", TARGET, "--out", tmp_path / "out", "--aux_layer_ids", ids, capsys=capsys)
    assert (code, said.startswith(f"error: {wrong}")) == (2, True), said


def test_a_target_that_is_another_familys_draft_is_refused(tmp_path, capsys):
    draft = THIRD_PARTY / "specforge"
    code, said = run(draft, "--target", draft, "--out", tmp_path / "out", capsys=capsys)
    assert (code, "this is a draft of another family, not a target; give its target" in said) == (2, True), said


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    draft, out = THIRD_PARTY / "specforge", tmp_path / "out"
    code, said = run(draft, "--target", TARGET, "--out", out, "--num-speculative-tokens", 5, capsys=capsys)
    chosen = "K=5, norm_before_residual=false, rope default theta=10000, aux layers 2,4,5"
    assert said == f"{out}: {chosen}; layers are counted by what enters them\n"
    assert code == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere/to/be", "--target", TARGET, "--out", "OUT"], "error: DRAFT: nowhere/to/be: no such folder"),
        ([THIRD_PARTY / "specforge", "--target", "a/b/c", "--out", "OUT"], "error: --target: a/b/c: no such folder"),
        ([THIRD_PARTY / "specforge", "--out", "OUT"], "error: options: the following arguments are required: --target"),
        ([THIRD_PARTY / "specforge", "--target", TARGET, "--out", THIRD_PARTY], "third_party: holds "),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(argv, message, tmp_path, capsys):
    argv = [tmp_path / "out" if arg == "OUT" else arg for arg in argv]
    code, said = run(*argv, capsys=capsys)
    assert message in said
    assert (code, said.count("\n"), list(tmp_path.iterdir())) == (2, 1, []), said


def test_generate_says_how_to_convert(capsys):
    folder = THIRD_PARTY / "safeailab_eagle3"
    assert generate.main(["--speculator", str(folder), "--target", str(TARGET), "--prompt_ids", "1,2"]) == 2
    assert f"python convert_hf_checkpoint.py {folder} --target PATH_OR_REPO --out DIR" in capsys.readouterr().err


def test_a_layer_that_nobody_trained_is_noticed(tmp_path, capsys):
    """Converters of some months saved a random layer; acceptance is then all that suffers."""

    def random_layer(tensors):
        torch.manual_seed(0)
        layer = {name: tensor for name, tensor in tensors.items() if name.startswith("midlayer")}
        fresh = {name: torch.ones_like(t) if t.ndim == 1 else torch.randn_like(t) * 0.02 for name, t in layer.items()}
        return tensors | fresh

    folder = edited("specforge", tmp_path / "in", random_layer)
    convert(str(folder), str(TARGET), tmp_path / "out", None, 3)
    converted("specforge", tmp_path / "sound")
    for name, looks_untrained in (("out", True), ("sound", False)):
        open_pair(tmp_path / name)
        assert ("the first layer looks untrained" in capsys.readouterr().err) == looks_untrained
