"""The ablation: each variant lacks what it says, and only while it is made. Never what that costs."""

import mmap

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
    assert kinds("one operator for all layers") == {"PackedBlock", "PackedLinear", "PackedNorm"}
    assert kinds("layers as operators") == {"PackedLinear", "PackedNorm"}
    assert kinds("our operators") == set()
    assert kinds("nothing") == {"PackedStack", "PackedLinear", "PackedNorm"}  # nothing stays in its place


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_small_pages_are_asked_for_where_huge_ones_are_left_out(monkeypatch):
    asked = []

    class Block(mmap.mmap):
        def madvise(self, advice):
            asked.append(advice)

    monkeypatch.setattr(mmap, "mmap", Block)
    for name in ("nothing", "huge pages", "nothing"):
        with ablation.LEFT_OUT[name]():
            assert not cpu_kernels.huge_block(8, torch.float32).any()
    assert asked == [mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE]


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
        (["--no_compile"], "--no_compile: what is left out here is of compiled runs; drop it"),
        (
            ["--num_speculative_tokens", "0"],
            "--speculator: missing, and rounds are measured; give one, and K of at least 1",
        ),
        (["--json"], "--json: not here, where the output is always the same; drop it"),
        (["--device", "cpu", "--max_new_tokens", "9"], "--max_new_tokens: 9: the 20 timed rounds need 80; raise it"),
    ],
    ids=["eager", "plain", "json", "short"],
)
def test_what_is_refused(capsys, argv, message):
    assert ablation.main([*TRAINED, "--prompt_ids", "1,2,3", *argv]) == 2
    assert f"error: {message}\n" in capsys.readouterr().err
