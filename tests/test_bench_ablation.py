"""The ablation: each variant lacks what it says, and only while it is made. Never what that costs."""

import pytest
import torch
from conftest import FIXTURES
from test_cpu_kernels import config, fill

import cpu_kernels
import generate
from bench import ablation
from model import Transformer

TRAINED = ["--speculator", str(FIXTURES / "drafts/eagle3_trained"), "--target", str(FIXTURES / "targets/llama_gqa")]


def kinds(left_out):
    """The kinds of operator in a model that was made without `left_out`."""
    model = fill(Transformer(config(), (), tied=False), torch.float32)
    with ablation.LEFT_OUT[left_out]():
        try:
            cpu_kernels.install(model)
        except OSError as error:
            pytest.skip(str(error))
    return {type(module).__name__ for module in model.modules() if type(module).__name__.startswith("Packed")}


def test_each_variant_lacks_what_it_says():
    assert kinds("nothing") == {"PackedStack", "PackedLinear", "PackedNorm"}  # the head, and the norm before it
    assert kinds("huge pages") == kinds("dropping torch's checks") == kinds("nothing")
    assert kinds("one operator for all layers") == {"PackedBlock", "PackedLinear", "PackedNorm"}
    assert kinds("layers as operators") == {"PackedLinear", "PackedNorm"}
    assert kinds("our operators") == set()
    assert kinds("nothing") == {"PackedStack", "PackedLinear", "PackedNorm"}  # nothing stays in its place


def test_torchs_checks_stay_on_where_dropping_them_is_left_out(monkeypatch):
    asked = {}
    monkeypatch.setattr(ablation, "torch_compile", lambda call, **how: asked.update(how))
    with ablation.LEFT_OUT["dropping torch's checks"]():
        torch.compile(
            None, options={"size_asserts": False, "guard_filter_fn": None, "max_autotune": True}, dynamic=False
        )
    assert asked == {"options": {"max_autotune": True}, "dynamic": False}


def test_the_table_compares_with_everything_in(monkeypatch, capsys):
    """Eagerly, where nothing is there to leave out: the harness."""
    monkeypatch.setattr(ablation, "TURNS", 1)
    monkeypatch.setattr(ablation, "STEPS", 2)
    monkeypatch.setattr(generate, "make_plan", eagerly(generate.make_plan))
    assert ablation.main([*TRAINED, "--prompt_ids", "1,2,3", "--device", "cpu"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0][0] == "left out"
    assert [row[0] for row in rows[2:]] == list(ablation.LEFT_OUT)
    assert (rows[2][2], rows[2][4]) == ("1.00", "1.00")


def eagerly(make_plan):
    def make(args):
        args.compile = False
        return make_plan(args)

    return make


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no_compile"], "bench.ablation: compares compiled rounds on a CPU; give --speculator and --device cpu"),
        (["--device", "cpu", "--max_new_tokens", "9"], "--max_new_tokens: 20 rounds may make 80; give as many"),
    ],
    ids=["eager", "short"],
)
def test_what_is_refused(capsys, argv, message):
    assert ablation.main([*TRAINED, "--prompt_ids", "1,2,3", *argv]) == 2
    assert f"error: {message}\n" in capsys.readouterr().err
