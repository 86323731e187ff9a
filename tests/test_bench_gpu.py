"""The GPU's script, with small shapes on the CPU: that each step of it runs, and what it counts. Never how fast it is.

And what a CPU can tell of a round's fitness for a CUDA graph: it reads nothing back and takes nothing from the host."""

import json
import subprocess
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from conftest import FIXTURES, open_pair
from torch.utils._python_dispatch import TorchDispatchMode

import speculate
from bench import bandwidth, gpu, run
from sampling import verify_greedy
from speculate import Decoder, State, build_steps, cache_slots

TRAINED = FIXTURES / "drafts/eagle3_trained"  # on targets/llama_gqa
PAIR = ["--speculator", str(TRAINED), "--target", str(FIXTURES / "targets/llama_gqa")]
SCRIPT = "bench/gpu.sh"
CPU = torch.device("cpu")


@pytest.fixture
def script(capsys, monkeypatch):
    """bench.gpu.main on the trained pair, eagerly: exit code, lines on stdout, stderr. The probe reads 1 MB, once."""
    rate = partial(bandwidth.read_bandwidth, CPU, 1 << 20, 1)
    monkeypatch.setattr(bandwidth, "bandwidth_meter", lambda device: nullcontext(rate))
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda *args: rate())
    monkeypatch.setattr(run, "PART_CALLS", 1)
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setattr(gpu, "CHECKED_ROUNDS", 4)

    def call(*argv):
        code = gpu.main(["--device", "cpu", "--tiny", "--no_compile", *PAIR, *argv])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


# ---- the script ------------------------------------------------------------------------------------------------------


def test_every_step_runs(script):
    code, lines, err = script()
    assert code == 0, err
    record = json.loads(lines[-1])
    assert set(record) == {"device", "torch", "checks", "demo", "linears", "synthetic"}
    assert sum(line.endswith(": ok") for line in lines) == len(gpu.CHECKED_KS) + 3  # and the three measurements
    assert sum(line.endswith(": skipped: no CUDA") for line in lines) == 4
    assert [arm["K"] for arm in record["demo"]["arms"]] == [0, 3]
    assert [set(linear) for linear in record["linears"]] == [{"rows", "bf16", "int8", "fp8", "_scaled_mm"}] * 3
    arms = record["synthetic"]["arms"]
    assert [(arm["K"], arm["goal"]) for arm in arms] == [(0, 0.85), (3, 0.75), (5, 0.75)]
    for arm in arms:
        seconds = arm["milliseconds_per_round"] / 1e3
        assert arm["tokens_per_second"] == pytest.approx(arm["forced_acceptance_length"] / seconds)
        rate = arm["gigabytes_per_round"] / seconds
        assert arm["gigabytes_per_second"] == pytest.approx(rate)
        assert arm["share_of_bandwidth"] == pytest.approx(1e9 * rate / record["synthetic"]["copy_bandwidth"])
    begin = next(i for i, line in enumerate(lines) if "forced" in line)  # every number of the synthetic pair says so
    assert ["synthetic" in line for line in lines[begin:-1]] == [True] * (1 + len(gpu.FORCED) + 1)


@torch.inference_mode()
def test_the_linears_that_are_compared_say_the_same():
    torch.manual_seed(0)
    calls, x = gpu.linear_calls(64, 96, CPU), torch.randn(4, 64).bfloat16()
    wanted = calls["bf16"][1](x).float()
    for name, off in (("int8", 0.02), ("fp8", 0.06), ("_scaled_mm", 0.09)):
        assert (calls[name][1](x).float() - wanted).abs().max() < off * wanted.abs().max(), name
        assert 2 * calls[name][0] == calls["bf16"][0]


@pytest.fixture
def only_checks(monkeypatch):
    """Nothing is measured on the demo pair."""
    monkeypatch.setattr(run, "measure", lambda plan: {})
    monkeypatch.setattr(run, "report", lambda record: "")


@pytest.mark.usefixtures("only_checks")
def test_a_failed_check_is_one_line_and_exit_code_1(script, monkeypatch):
    real, wrong = gpu.answer, speculate.Round([0], 0, [0])

    def tampered(decoder, prompt):
        done = real(decoder, prompt)
        asked.append(decoder.state.K)
        return [*done[:-1], wrong] if asked.count(4) == 1 and decoder.state.K == 4 else done

    asked = []
    monkeypatch.setattr(gpu, "answer", tampered)
    code, lines, _ = script()
    failed = [line for line in lines if "FAILED" in line]
    assert (code, len(failed)) == (1, 2)  # the other is the JSON object
    assert failed[0].startswith(f"eager = eager, K = 4: FAILED: prompt 1: {wrong}, eagerly Round(")
    assert json.loads(failed[1])["synthetic"]  # all else ran


@pytest.mark.usefixtures("only_checks")
def test_what_torch_raises_is_a_failed_check(script, monkeypatch):
    def break_down(*rest):
        raise RuntimeError("skipping cudagraphs\nand more")

    monkeypatch.setattr(gpu, "measure_synthetic", break_down)
    code, lines, err = script()
    assert (code, lines[-2]) == (1, "the synthetic pair is measured: FAILED: RuntimeError: skipping cudagraphs")
    assert "Traceback" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.startswith("error: --device: ")


def test_the_shell_script_is_sound_and_short():
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    with open(SCRIPT, encoding="utf-8") as file:
        assert len(file.readlines()) < 40


# ---- the synthetic pair ----------------------------------------------------------------------------------------------


def test_the_bytes_of_the_8b_shapes():
    """Against those that performance numbers are published with: 6.979 B weights in linears and 0.525 B in the head;
    the draft 374.3 M a step, its head among them, and 50.3 M once a round. Norms are counted here, and are few."""
    target, draft = gpu.synthetic_pair(*gpu.synthetic_configs(tiny=False), torch.device("meta"))
    reads = {K: bandwidth.pass_bytes(target, draft, K, context=0) for K in (0, 1, 3, 5)}
    assert reads[0]["target_layers"] / 2 == pytest.approx(6.979e9, rel=1e-3)
    assert reads[0]["target_head"] / 2 == pytest.approx(0.525e9, rel=1e-3)
    drafting = {K: (parts["draft"] + parts["draft_head"]) / 2 for K, parts in reads.items()}
    steps = [(drafting[b] - drafting[a]) / (b - a) for a, b in pairwise((1, 3, 5))]
    assert steps == pytest.approx([374.3e6] * 2, rel=1e-3)
    assert drafting[1] - steps[0] == pytest.approx(50.3e6, rel=1e-3)
    assert drafting[0] == 0
    per_token = bandwidth.pass_bytes(target, draft, 0, context=1)["cache"]
    assert per_token == 131072
    # A round at K = 3 on 4.8 TB/s.
    assert sum(reads[3].values()) / 4.8e12 == pytest.approx(3.62e-3, rel=2e-3)


def test_its_draft_proposes_tokens_of_the_target():
    target, draft = gpu.synthetic_pair(*gpu.synthetic_configs(tiny=True), CPU)
    draft.settle(target.embed, target.head)  # refuses a wrong vocabulary map


def test_the_forced_patterns_have_the_published_means():
    assert {K: 1 + sum(pattern) / len(pattern) for K, pattern in gpu.FORCED.items()} == {0: 1, 3: 2.60, 5: 3.32}
    for K, pattern in gpu.FORCED.items():
        assert {0, K} <= set(pattern) <= set(range(K + 1))
        assert gpu.TIMED_ROUNDS % len(pattern) == 0


def test_rounds_accept_by_the_pattern_and_no_longer(monkeypatch):
    monkeypatch.setattr(gpu, "CHECKED_ROUNDS", 6)
    target, draft = gpu.synthetic_pair(*gpu.synthetic_configs(tiny=True), CPU)
    steps, state = make_steps(target, draft, 3)
    decoder = Decoder(steps, state)
    _, *free = gpu.answer(decoder, [1, 2, 3])
    with gpu.forced_acceptance((3, 0, 2), CPU):
        _, *forced = gpu.answer(decoder, [1, 2, 3])
    assert [done.accepted for done in forced] == [3, 0, 2] * 2
    assert state.length.item() == len(decoder.ids) - 1 == 3 + sum(len(done.emitted) for done in forced)
    assert speculate.verify_greedy is verify_greedy
    assert gpu.answer(decoder, [1, 2, 3])[1:] == free


def make_steps(target, draft, K, **sampling):
    for model in (target, draft):
        model.allocate(1, cache_slots(512))
    weight, width = target.norm.weight, len(target.aux_layer_ids) * target.config.hidden_size
    state = State(1, K, width, cache_slots(512), weight.dtype, weight.device, **sampling)
    return build_steps(target, draft, state, compiled=False), state


# ---- a round touches no host state -----------------------------------------------------------------------------------

SAMPLED = {"temperature": 0.7, "top_k": 40}
NUCLEUS = {"temperature": 0.7, "top_p": 0.9}
HOST = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),  # a number for Python
    *("nonzero", "masked_select", "unique", "_unique2", "repeat_interleave"),  # a shape that depends on values
    *("lift_fresh", "lift", "scalar_tensor", "from_blob", "_pin_memory"),  # a tensor from what Python holds
}


class NoHost(TorchDispatchMode):
    """Raises at operators that read from the device or bring something to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in HOST, f"{func} inside a round"
        if name in ("index", "index_put", "index_put_"):  # a mask for an index: its true entries are counted
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), f"{func} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [{}, SAMPLED, NUCLEUS], ids=["greedy", "sampled", "nucleus"])
@pytest.mark.parametrize("K", [0, 3])
def test_a_round_touches_no_host_state(K, sampling):
    steps, state = make_steps(*open_pair(TRAINED), K, **sampling)
    Decoder(steps, state).start([1, 2, 3])
    with torch.inference_mode(), NoHost():
        for _ in range(3):
            steps.round()


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("K", [0, 3])
def test_a_round_needs_no_values(K, sampling):
    """On the meta device there are none to read, and no other device's tensor goes with its own."""
    target, draft = gpu.synthetic_pair(*gpu.synthetic_configs(tiny=True), torch.device("meta"))
    result = make_steps(target, draft, K, **sampling)[0].round()
    assert (result.device.type, result.shape) == ("meta", (1, K + 2))


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.tensor(3),
        lambda x: x.index_put_((x > 0,), x[:1]),
    ],
)
def test_host_state_would_be_noticed(touch):
    x = torch.ones(3)
    with NoHost(), pytest.raises(AssertionError, match="inside a round|by a mask"):
        touch(x)
