"""quantize.py: what it writes, what it leaves alone, and what it says of the difference."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, expected, open_target
from safetensors.torch import load_file, save_file
from torch import nn

import generate
import quantize
from checkpoint import new_folder, write_checkpoint
from convert_hf_checkpoint import convert
from eight_bit import EightBitLinear, dequantised
from options import exit_code
from speculators_config import ConfigError, find_target, read_speculator, read_target

TARGET, TIED = FIXTURES / "targets" / "llama_gqa", FIXTURES / "targets" / "llama_tied"
DRAFT = FIXTURES / "drafts" / "eagle3_trained"
CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def run(*argv) -> int:
    return exit_code(lambda: quantize.main([str(arg) for arg in argv]))


def write(out: Path, mode: str, *more, checkpoint: Path = TARGET) -> Path:
    assert run("--checkpoint", checkpoint, "--mode", mode, "--out", out, *more) == 0
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


# What is written.


@pytest.mark.parametrize("mode", CODES)
def test_layers_linears_become_codes_and_all_else_keeps_its_bits(mode, tmp_path):
    before, after = (
        load_file(TARGET / "model.safetensors"),
        load_file(write(tmp_path / "out", mode) / "model.safetensors"),
    )
    coded = {name for name in before if "_proj.weight" in name}
    assert set(after) == set(before) | {f"{name}_scale" for name in coded}
    for name, tensor in before.items():
        if name in coded:
            assert after[name].dtype == CODES[mode]
            assert after[f"{name}_scale"].shape == (len(tensor), 1)
            back = dequantised(after[name], after[f"{name}_scale"], tensor.size(1))
            largest = tensor.abs().amax(1, keepdim=True)
            assert ((back - tensor).abs() <= largest * {"fp8": 1 / 28, "int8": 0.51 / 127}[mode]).all()
        else:
            assert torch.equal(after[name], tensor)


@pytest.mark.parametrize("mode", CODES)
def test_the_config_says_so_and_the_rest_is_copied(mode, tmp_path):
    out = write(tmp_path / "out", mode)
    raw, quantisation = config_of(out), read_target(out)[0].quantisation
    added = {"quantization_config", "written_by"}
    assert {key: value for key, value in raw.items() if key not in added} == config_of(TARGET)
    assert (quantisation.codes, quantisation.ignored) == (mode, ("lm_head",))
    group = raw["quantization_config"]["config_groups"]["group_0"]
    assert (group["input_activations"] is None) == (mode == "int8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (TARGET / name).read_bytes()


@pytest.mark.parametrize("mode", CODES)
@torch.inference_mode()
def test_what_was_written_is_read(mode, tmp_path):
    want, target = expected(TARGET), open_target(write(tmp_path / "out", mode))
    assert sum(isinstance(module, EightBitLinear) for module in target.modules()) == 4 * 8
    ids = want["input_ids"]
    logits = target.logits(target(ids, torch.arange(ids.size(1))[None])[0])
    away = (logits - want["logits"]).abs().max()
    assert 0 < away < {"fp8": 1.5, "int8": 0.3}[mode]


def test_it_says_what_became_codes(tmp_path, capsys):
    out = write(tmp_path / "out", "int8", "--also_heads", "--also_draft", DRAFT)
    said = capsys.readouterr().err.splitlines()[-2:]
    linears = {TARGET: 7 * config_of(TARGET)["num_hidden_layers"] + 1, DRAFT: 9}  # heads among them, and the draft's fc
    for line, folder, source in zip(said, (out, out / "speculator"), linears, strict=True):
        of = len(load_file(source / "model.safetensors"))
        assert line.startswith(f"{folder}: {linears[source]} of its {of} tensors in int8, the others as in {source}; ")


@pytest.mark.parametrize("mode", CODES)
@torch.inference_mode()
def test_a_tied_embedding_stays_and_the_head_gets_a_copy(mode, tmp_path):
    out = write(tmp_path / "out", mode, "--also_heads", checkpoint=TIED)
    before, after = load_file(TIED / "model.safetensors"), load_file(out / "model.safetensors")
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert after["lm_head.weight"].dtype == CODES[mode]
    assert config_of(out)["tie_word_embeddings"] is False
    quantization = config_of(out)["quantization_config"]
    assert quantization["ignore"] == []
    assert quantization["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]  # vLLM's head is no Linear
    target, want = open_target(out), expected(TIED)
    assert isinstance(target.head, EightBitLinear)
    ids = want["input_ids"]
    logits = target.logits(target(ids, torch.arange(ids.size(1))[None])[0])
    assert (logits - want["logits"]).abs().max() < 0.15 * want["logits"].abs().max()


@pytest.mark.parametrize("mode", CODES)
def test_twice_gives_the_same_bytes_and_nothing_is_left_beside(mode, tmp_path):
    first = contents(write(tmp_path / "out", mode, "--also_draft", DRAFT))
    assert contents(write(tmp_path / "out", mode, "--also_draft", DRAFT)) == first
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_breaks_off_leaves_what_was_there(there, tmp_path, monkeypatch):
    before = contents(write(tmp_path / "out", "int8")) if there else {}

    def interrupt(path, tensors):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "save_tensors", interrupt)
    assert run("--checkpoint", TARGET, "--mode", "fp8", "--out", tmp_path / "out") == 130
    assert contents(tmp_path) == {f"out/{name}": held for name, held in before.items()}


def test_an_interrupt_while_the_new_takes_the_olds_place_loses_neither(tmp_path, monkeypatch):
    before, real, moved = contents(write(tmp_path / "out", "int8")), Path.rename, []

    def rename(path, to):
        moved.append(to)
        if len(moved) == 2:  # the old one is away, the new one not yet there
            raise KeyboardInterrupt
        return real(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    assert run("--checkpoint", TARGET, "--mode", "fp8", "--out", tmp_path / "out") == 130
    assert contents(tmp_path) == {f"out/{name}": held for name, held in before.items()}


def test_a_run_that_is_terminated_leaves_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "save_tensors", lambda path, tensors: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            run("--checkpoint", TARGET, "--mode", "fp8", "--out", tmp_path / "out")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "save_tensors", full)
    assert run("--checkpoint", TARGET, "--mode", "fp8", "--out", tmp_path / "out") == 2
    assert "cannot be written ([Errno 28] No space left on device); make room" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["NOTES.txt", "README.md", "adapter_model.safetensors", "speculator/mine.bin"])
def test_a_folder_with_other_files_is_not_replaced(name, tmp_path, capsys):
    out = write(tmp_path / "out", "fp8", "--also_draft", DRAFT)
    (out / name).write_text("mine")
    assert run("--checkpoint", TARGET, "--mode", "fp8", "--out", out) == 2
    assert f"--out: {out}: holds {name}, not written by quantize.py" in capsys.readouterr().err
    assert (out / name).read_text() == "mine"


@pytest.mark.parametrize("kind", ["original", "backup", "converted", "trained"])
def test_only_what_the_same_command_wrote_is_replaced(kind, tmp_path, capsys):
    out, held = tmp_path / "out", "a checkpoint"
    if kind in ("original", "backup"):  # a model of the user's, beside the weights; an earlier result, kept
        write(out, "fp8")
        shutil.copytree(TARGET if kind == "original" else write(tmp_path / "backup", "int8"), out / kind)
        (out / kind / "expected.safetensors").unlink(missing_ok=True)
        held = kind
    elif kind == "converted":
        convert(str(FIXTURES / "third_party" / "specforge"), str(TARGET), out, None, 3)
    else:
        raw, tensors = config_of(DRAFT), load_file(DRAFT / "model.safetensors")
        with new_folder(out, "train.eagle3") as made:
            write_checkpoint(made, raw, tensors, "train.eagle3")
    before = contents(out)
    assert run("--checkpoint", TARGET, "--mode", "fp8", "--out", out) == 2
    assert f"--out: {out}: holds {held}" in capsys.readouterr().err
    assert contents(out) == before


def test_what_came_while_it_ran_is_not_replaced(tmp_path):
    def written_meanwhile():
        with new_folder(tmp_path / "out", "quantize.py"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "thesis.txt").write_text("mine")

    with pytest.raises(ConfigError, match="holds thesis.txt"):
        written_meanwhile()
    assert contents(tmp_path) == {"out/thesis.txt": b"mine"}


def test_the_folder_that_one_stands_in_is_replaced(tmp_path, monkeypatch):
    out = write(tmp_path / "out", "fp8")
    monkeypatch.chdir(out)
    write(Path("../out"), "int8")
    assert contents(out) == contents(write(tmp_path / "other", "int8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_out_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("~/out", "fp8")
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_is_no_number_is_refused(tmp_path, capsys):
    shutil.copytree(TARGET, tmp_path / "in")
    path, name = tmp_path / "in" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 4] = float("nan")
    save_file(tensors, path)
    assert run("--checkpoint", tmp_path / "in", "--mode", "fp8", "--out", tmp_path / "out") == 2
    assert f"{name}: holds NaN or infinity" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@torch.inference_mode()
def test_large_checkpoints_are_written_in_shards(tmp_path, monkeypatch):
    whole = load_file(write(tmp_path / "whole", "fp8") / "model.safetensors")
    monkeypatch.setattr(quantize, "SHARD", 40_000)
    out = write(tmp_path / "out", "fp8")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    sharded = {name: tensor for file in files for name, tensor in load_file(out / file).items()}
    assert index["weight_map"].keys() == sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name].float(), whole[name].float()) for name in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    open_target(out)


# Drafts.


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("mode", CODES)
def test_a_draft_becomes_codes_in_a_folder_of_its_own(mode, heads, tmp_path):
    out = write(tmp_path / "out", mode, "--also_draft", DRAFT, *(["--also_heads"] if heads else []))
    before, after = load_file(DRAFT / "model.safetensors"), load_file(out / "speculator" / "model.safetensors")
    linears = (
        {name for name in before if "_proj.weight" in name} | {"fc.weight"} | ({"lm_head.weight"} if heads else set())
    )
    assert {name for name in after if after[name].dtype == CODES[mode]} == linears
    assert all(torch.equal(after[name], before[name]) for name in before if name not in linears)
    assert {f"{name}_scale" for name in linears} <= set(after)


@pytest.mark.parametrize("mode", CODES)
@pytest.mark.parametrize("draft", ["16 bits", "eight bits"])
def test_acceptance_hardly_changes_in_eight_bits(mode, draft, tmp_path, capsys):
    """A draft in 16 bits beside a target in eight is the usual pair: nothing of the target's may touch the draft."""
    out = write(tmp_path / "out", mode, "--also_draft", DRAFT)

    def acceptance(speculator, target) -> float:
        runs = json.loads((DRAFT / "expected_runs.json").read_text())["runs"][:5]
        prompts = [part for run in runs for part in ("--prompt_ids", ",".join(map(str, run["prompt_ids"])))]
        argv = ["--speculator", str(speculator), "--target", str(target), *prompts, "--no_compile", "--dtype", "fp32"]
        assert generate.main([*argv, "--max_new_tokens", "48", "--ignore_eos", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["totals"]["acceptance_length"]

    capsys.readouterr()
    plain = acceptance(DRAFT, TARGET)
    assert plain > 1.3
    eight = acceptance(DRAFT if draft == "16 bits" else out / "speculator", out)
    assert abs(eight / plain - 1) < 0.25, (eight, plain)


def test_a_written_draft_names_the_target_it_lies_in(tmp_path, monkeypatch):
    out = write(tmp_path / "out", "fp8", "--also_draft", DRAFT)
    monkeypatch.chdir(FIXTURES / "targets" / "llama_tied")  # where .. is a folder, too
    assert Path(find_target(read_speculator(out / "speculator"), None)).resolve() == out
    assert generate.main(["--speculator", str(out / "speculator"), "--prompt_ids", "1,2", "--no_compile"]) == 0


def test_a_draft_that_names_no_target_gets_one(tmp_path):
    shutil.copytree(DRAFT, tmp_path / "draft")
    raw = config_of(DRAFT)
    del raw["speculators_config"]["verifier"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    out = write(tmp_path / "out", "fp8", "--also_draft", tmp_path / "draft")
    assert Path(find_target(read_speculator(out / "speculator"), None)).resolve() == out


def test_a_drafts_other_names_are_known(tmp_path):
    shutil.copytree(DRAFT, tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    save_file({f"model.{name.replace('layers.0', 'midlayer')}": t for name, t in load_file(path).items()}, path)
    plain = write(tmp_path / "plain", "int8", "--also_draft", DRAFT, "--also_heads")
    other = write(tmp_path / "other", "int8", "--also_draft", tmp_path / "draft", "--also_heads")
    assert contents(plain / "speculator").keys() == contents(other / "speculator").keys()
    weights = [load_file(folder / "speculator" / "model.safetensors") for folder in (plain, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_draft_without_a_head_of_its_own_has_none_to_quantise(tmp_path):
    shutil.copytree(FIXTURES / "drafts" / "eagle3_full_vocab", tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}, path)
    out = write(tmp_path / "out", "fp8", "--also_heads", "--also_draft", tmp_path / "draft")
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert config_of(out / "speculator")["quantization_config"]["ignore"] == ["lm_head"]
    assert generate.main(["--speculator", str(out / "speculator"), "--prompt_ids", "1,2", "--no_compile"]) == 0


# What is refused.


@pytest.mark.parametrize("case", ["ct_dynamic", "ct_int_channel", "ct_int_packed"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", None])
def test_codes_are_not_quantised_again(case, key, tmp_path, capsys):
    shutil.copytree(FIXTURES / "eight_bit" / case, tmp_path / "in")
    raw = config_of(tmp_path / "in")
    held = raw.pop("quantization_config")
    (tmp_path / "in" / "config.json").write_text(json.dumps(raw | ({key: held} if key else {})))
    assert run("--checkpoint", tmp_path / "in", "--mode", "fp8", "--out", tmp_path / "out") == 2
    wrong = (
        "no linears of a decoder" if not key and case == "ct_int_packed" else "is quantised already; give the 16-bit"
    )
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--checkpoint: missing; give it, or --compare A B"),
        (["--checkpoint", TARGET, "--out", "OUT"], "--mode: missing"),
        (["--checkpoint", TARGET, "--mode", "fp8"], "--out: missing"),
        (["--checkpoint", TARGET, "--mode", "int4", "--out", "OUT"], "--mode: invalid choice: 'int4'"),
        (["--compare", TARGET, TARGET, "--out", "OUT"], "--out: does not go with --compare; drop it"),
        (["--compare", TARGET, TARGET, "--also_heads"], "--also_heads, --also_draft: do not go with --compare"),
        (["--checkpoint", TARGET, "--mode", "fp8", "--out", "OUT", "--prompts", "x"], "--prompts: goes with --compare"),
        (["--checkpoint", "no/where", "--mode", "fp8", "--out", "OUT"], "--checkpoint: no/where: no such folder"),
        (
            ["--checkpoint", DRAFT, "--mode", "fp8", "--out", "OUT"],
            "this is a speculator, not a target; give it as --also_draft",
        ),
        (["--checkpoint", TARGET, "--mode", "fp8", "--out", TARGET], f"--out: {TARGET}: holds {TARGET}, which is read"),
        (["--checkpoint", TARGET, "--mode", "fp8", "--out", TIED.parent], f"holds {TARGET}, which is read"),
        (
            ["--checkpoint", TARGET, "--mode", "fp8", "--out", TIED],
            f"{TIED}: holds expected.safetensors, not written by quantize.py",
        ),
        (
            ["--checkpoint", TARGET, "--mode", "fp8", "--out", "/dev/null/x"],
            "--out: /dev/null/x: cannot be written (",
        ),
        (
            ["--checkpoint", TARGET, "--mode", "fp8", "--out", "/dev/null"],
            "--out: /dev/null: a link, a file, or a folder without a name is not replaced",
        ),
        (["--checkpoint", TARGET, "--mode", "fp8", "--out", "OUT", "--limit", 3], "--limit: goes with --prompts"),
        (
            ["--checkpoint", FIXTURES / "third_party" / "specforge", "--mode", "fp8", "--out", "OUT"],
            "architectures: this is a draft of another family, not a target; give its target",
        ),
        (
            [
                "--checkpoint",
                TARGET,
                "--mode",
                "fp8",
                "--out",
                "OUT",
                "--also_draft",
                FIXTURES / "third_party/specforge",
            ],
            "third_party/specforge --target PATH_OR_REPO --out DIR",
        ),
        (["--compare", TARGET, DRAFT], "this is a speculator, not a target; give it as --speculator of generate.py"),
        (["--compare", TARGET, "no/where"], "--compare: no/where: no such folder"),
        (["--compare", TARGET, TARGET, "--limit", 3], "--limit: goes with --prompts; drop it"),
        (["--checkpoint", TARGET, "--mode", "fp8", "--out", "OUT", "--max_new_tokens", 3], "goes with --compare"),
        (
            [
                "--checkpoint",
                FIXTURES / "targets" / "llama_headdim_attnbias",
                "--mode",
                "fp8",
                "--out",
                "OUT",
                "--also_draft",
                DRAFT,
            ],
            "eagle_aux_hidden_state_layer_ids: [2, 4, 5] are not ascending layers between 0 and",
        ),
        (
            ["--checkpoint", FIXTURES / "eight_bit" / "ct_dynamic", "--mode", "fp8", "--out", "OUT"],
            "quantization_config: is quantised already; give the 16-bit one",
        ),
        (
            ["--checkpoint", TARGET, "--mode", "fp8", "--out", "OUT", "--also_draft", TARGET],
            "speculators_model_type: missing",
        ),
        (
            ["--compare", TARGET, FIXTURES / "tokenizers" / "bpe_qwen"],
            "config.json: there is no such file; give the folder or Hub repo of a checkpoint",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(argv, message, tmp_path, capsys):
    assert run(*(tmp_path / "out" if arg == "OUT" else arg for arg in argv)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out").exists()


# Comparing.


def compared(a: Path, b: Path, capsys) -> tuple[float, float]:
    """KL and the share of equal best tokens, as printed."""
    assert run("--compare", a, b, "--max_new_tokens", 12) == 0
    found = re.fullmatch(
        r"(\d+) tokens of 6 answers of \S+, in fp32: KL to \S+ ([\d.]+) nats a token, at most [\d.]+; "
        r"the same best token ([\d.]+) %\n",
        capsys.readouterr().out,
    )
    assert found
    assert 6 <= int(found[1]) <= 72
    return float(found[2]), float(found[3])


def test_a_checkpoint_differs_in_nothing_from_itself_and_less_from_int8_than_from_fp8(tmp_path, capsys):
    assert compared(TARGET, TARGET, capsys) == (0.0, 100.0)
    fp8, int8 = (compared(TARGET, write(tmp_path / mode, mode), capsys)[0] for mode in CODES)
    assert 0 < int8 < fp8 < 0.1


def test_two_models_are_no_versions_of_one(tmp_path, capsys):
    shutil.copytree(TARGET, tmp_path / "padded")
    path = tmp_path / "padded" / "model.safetensors"
    wide = {"model.embed_tokens.weight", "lm_head.weight"}
    padded = {name: nn.functional.pad(t, (0, 0, 0, 64)) if name in wide else t for name, t in load_file(path).items()}
    save_file(padded, path)
    raw = config_of(TARGET) | {"vocab_size": 384}
    (tmp_path / "padded" / "config.json").write_text(json.dumps(raw))
    assert run("--compare", TARGET, tmp_path / "padded") == 2
    assert "--compare: vocabularies of 320 and 384 tokens; give two versions" in capsys.readouterr().err
