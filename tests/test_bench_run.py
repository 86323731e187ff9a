"""The benchmark on tiny pairs, eagerly: what it counts, what it prints, what it refuses. Never how long it takes."""

import json
import multiprocessing
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from conftest import FIXTURES, open_pair

from bench import bandwidth, run
from metrics import Answer
from prompts import QUESTIONS

TRAINED = FIXTURES / "drafts/eagle3_trained"  # on targets/llama_gqa
IDS = [option for prompt in ("1,2,3,4,5", "7,8,9") for option in ("--prompt_ids", prompt)]


@pytest.fixture
def command(capsys, monkeypatch):
    """bench.run.main on the trained pair; the probe reads 1 MB, once."""
    rate = partial(bandwidth.read_bandwidth, torch.device("cpu"), 1 << 20, 1)
    monkeypatch.setattr(bandwidth, "bandwidth_meter", lambda device: nullcontext(rate))
    monkeypatch.setattr(run, "PART_CALLS", 1)

    def call(*argv):
        code = run.main(["--speculator", str(TRAINED), "--no_compile", *map(str, argv)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def record(command):
    def call(*argv):
        code, out, err = command(*IDS, "--max_new_tokens", 6, "--repeats", 1, *argv)
        assert code == 0, err
        return json.loads(out.splitlines()[-1]), out

    return call


# ---- bytes -----------------------------------------------------------------------------------------------------------


def sizes(target, draft):
    """Numbers of elements, from the configs alone: a target's layer with its norms, the draft's, and its fc."""
    t, d = target.config, draft.config.layer

    def layer(c, width):
        attention = width * (c.n_head + 2 * c.n_kv_head) * c.head_dim + c.n_head * c.head_dim * c.hidden_size
        return attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size

    fc = len(draft.config.aux_layer_ids) * t.hidden_size * d.hidden_size
    return layer(t, t.hidden_size), layer(d, 2 * d.hidden_size) + d.hidden_size, fc


@pytest.mark.parametrize("K", [1, 3])
def test_a_round_reads_the_target_once_and_the_draft_k_times(K):
    target, draft = open_pair(TRAINED)
    layer, draft_layer, fc = sizes(target, draft)
    t, d = target.config, draft.config.layer
    reads = bandwidth.pass_bytes(target, draft, K, context=100)
    assert reads == {
        "target_layers": 4 * (t.n_layer * layer + t.hidden_size),
        "target_head": 4 * t.vocab_size * t.hidden_size,
        "draft": 4 * (fc + K * (draft_layer + d.hidden_size)),  # and the norm before the head
        "draft_head": 4 * K * draft.config.draft_vocab_size * d.hidden_size,
        "cache": 4 * 100 * 2 * (t.n_layer * t.n_kv_head * t.head_dim + K * d.n_kv_head * d.head_dim),
    }


def test_a_plain_step_reads_no_draft():
    target, draft = open_pair(TRAINED)
    plain, ours = bandwidth.pass_bytes(target, None, 0, 10), bandwidth.pass_bytes(target, draft, 2, 10)
    assert (plain["draft"], plain["draft_head"]) == (0, 0)
    assert plain["target_layers"] == ours["target_layers"]
    assert plain["cache"] < ours["cache"]


def test_a_window_bounds_what_is_read_of_the_cache():
    target, draft = open_pair(FIXTURES / "drafts/eagle3_sliding")
    (window,) = draft.config.layer.windows
    per_token = 2 * 4 * draft.config.layer.n_kv_head * draft.config.layer.head_dim
    assert bandwidth.cache_bytes(draft.config.layer, window + 50, 4) == window * per_token
    assert bandwidth.cache_bytes(draft.config.layer, window - 1, 4) == (window - 1) * per_token


def test_held_bytes_count_shared_tensors_once_and_caches_apart():
    """Embedding and head that the draft takes from the target are held once, though each pass reads the head."""
    target, draft = open_pair(TRAINED)
    alone, draft.embed = bandwidth.held_bytes(draft), target.embed
    assert bandwidth.held_bytes(target, draft) < bandwidth.held_bytes(target) + alone
    draft.head = target.head
    pair = bandwidth.held_bytes(target, draft)
    assert pair == bandwidth.held_bytes(target) + bandwidth.held_bytes(draft) - bandwidth.held_bytes(
        target.embed, target.head
    )
    assert bandwidth.pass_bytes(target, draft, 2, 0)["draft_head"] == 2 * bandwidth.held_bytes(target.head)
    t, d = target.config, draft.config.layer
    slot = 2 * (t.n_layer * t.n_kv_head * t.head_dim + d.n_kv_head * d.head_dim) + t.head_dim + d.head_dim
    assert bandwidth.held_bytes(target, draft, caches=True) == 4 * 512 * slot  # keys, values and rotary tables
    assert bandwidth.held_bytes(None) == 0


# ---- the probe and the ceiling ---------------------------------------------------------------------------------------


def test_the_probe_reads_each_kind_of_page():
    rates = bandwidth.read_bandwidth(torch.device("cpu"), 1 << 20, repeats=2)
    assert "4 KB pages" in rates
    assert all(0 < rate < float("inf") for rate in rates.values())
    assert (
        bandwidth.pages(1 << 20, huge=False).sum() == (1 << 20) / 8
    )  # written to, so that they are pages of their own


def test_the_meter_measures_in_a_process_that_stays():
    before = {child.pid for child in multiprocessing.active_children()}
    with bandwidth.bandwidth_meter(torch.device("cpu"), 1 << 20, 1) as probe:
        rates = [probe() for _ in range(2)]
        started = {child.pid for child in multiprocessing.active_children()} - before
    assert len(started) == 1
    assert not started & {child.pid for child in multiprocessing.active_children()}
    assert rates[0].keys() == rates[1].keys() == bandwidth.read_bandwidth(torch.device("cpu"), 1 << 20, 1).keys()


def test_an_answer_is_held_against_what_the_memory_gave_before_and_after_it(record, monkeypatch):
    """Two questions and two arms: five probes, the fourth of which is of a slow moment."""
    gave = iter([{"4 KB": 1.0, "huge": rate} for rate in (6e9, 4e9, 4e9, 2e9, 8e9)])
    monkeypatch.setattr(bandwidth, "bandwidth_meter", lambda device: nullcontext(gave.__next__))
    asked = []
    monkeypatch.setattr(run.Arm, "share_of_ceiling", lambda arm, size: asked.append(arm.rates) or 0.5)
    numbers, _ = record("--K", 1)
    assert asked == [[5e9, 3e9], [4e9, 5e9]]
    assert next(gave, None) is None
    assert numbers["bandwidth"] == {"4 KB": 1.0, "huge": 4e9}
    for arm in numbers["arms"]:
        ceiling = 4e9 * arm["tokens_per_pass"] / (1e6 * arm["megabytes"]["sum"])
        assert arm["ceiling_tokens_per_second"] == pytest.approx(ceiling)


def test_the_share_is_the_median_over_the_answers():
    arm = run.Arm(0, None, rates=[4e9, 2e9, 1e9])
    arm.repeats.append([Answer(1, token_ids=[0] * 11, decode_seconds=1.0) for _ in range(3)])  # ten passes a second
    assert arm.share_of_ceiling(1e8) == pytest.approx(0.5)  # of 1/4, 1/2 and 1


def test_the_ceiling_is_bandwidth_over_bytes_times_acceptance():
    plain = arm(tokens_per_second=40.0, acceptance_length=0.0, megabytes=[200.0, 40.0, 0.0, 0.0, 10.0], whole=20.0)
    ours = arm(tokens_per_second=48.0, acceptance_length=1.6, megabytes=[200.0, 40.0, 30.0, 20.0, 10.0], whole=30.0)
    for record in (plain, ours):
        run.compare(record, plain, bandwidth=50e9)
    assert plain["megabytes"]["sum"] == 250
    assert plain["ceiling_tokens_per_second"] == pytest.approx(200)  # 50 GB/s over 0.25 GB
    assert (plain["speedup"], plain["plain_steps_per_pass"]) == (1, 1)
    assert ours["ceiling_tokens_per_second"] == pytest.approx(1.6 * 50 / 0.3)
    assert ours["speedup"] == pytest.approx(1.2)
    assert ours["plain_steps_per_pass"] == pytest.approx(33 / 23)
    assert ours["milliseconds"]["host"] == pytest.approx(3)


def arm(megabytes, whole, **numbers):
    parts = ("target_layers", "target_head", "draft", "draft_head", "cache")
    times = {"whole": whole, "pass": whole + 3}
    return numbers | {"milliseconds": times, "megabytes": dict(zip(parts, megabytes, strict=True))}


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_the_last_line_is_one_json_object(record):
    numbers, _ = record("--K", "3,1")
    about = {"target", "speculator", "device", "dtype", "torch", "threads", "compiled", "temperature", "questions"}
    about |= {"repeats", "max_new_tokens", "max_seq_len", "context", "bandwidth", "memory", "prefill", "arms"}
    about |= {"load_seconds", "compile_seconds"}
    assert set(numbers) == about
    assert numbers["context"] == 4 + 5 / 2  # prompts of 5 and 3 tokens; 5 steps each
    assert set(numbers["memory"]) == {"loaded", "compiled", "peak", "weights", "caches"}
    plain, one, three = numbers["arms"]
    assert [arm["K"] for arm in numbers["arms"]] == [0, 1, 3]
    assert len(three["acceptance_per_position"]) == 3
    assert (plain["rounds"], plain["tokens_per_pass"], plain["differing_answers"]) == (0, 1, 0)
    assert one["differing_answers"] == three["differing_answers"] == 0
    assert plain["emitted"] == one["emitted"] == three["emitted"] == 12
    for numbers in (plain, one, three):
        assert set(numbers["milliseconds"]) == {"first_token", "pass", "draft", "verify", "rest", "host"}
        assert sum(numbers["megabytes"].values()) == pytest.approx(2 * numbers["megabytes"]["sum"])


def test_the_report_says_first_what_limits_and_last_the_share(record):
    numbers, out = record()
    limits, measured = out.index("| target layers |"), out.index("| share of ceiling |")
    assert limits < out.index("acceptance length") < out.index("memory besides import torch") < measured
    assert "MB read in a pass, at 6 tokens of context" in out
    assert f"loaded in {numbers['load_seconds']:.1f} s, compiled in {numbers['compile_seconds']:.1f} s" in out
    assert "answers differ" not in out
    assert "every answer is plain decoding's, token for token" in out
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| K")] == ["K = 3", "K = 3"]
    numbers["arms"][1]["differing_answers"] = 2
    assert "K = 3: 2 of 2 answers differ from plain decoding's (a bug, unless an exact tie)" in run.report(numbers)
    assert "K = 3: 2 of 2 answers differ" not in run.report(numbers | {"temperature": 0.5})


def test_a_table_is_aligned():
    text = run.table("arm {arm} | tok/s {speed:.1f}", [{"arm": "plain", "speed": 8.25}, {"arm": "K = 3", "speed": 100}])
    assert text.splitlines() == ["|   arm | tok/s |", "|------:|------:|", "| plain |   8.2 |", "| K = 3 | 100.0 |"]


def test_it_measures_plain_decoding_alone(command):
    code, out, _ = command(*IDS, "--num_speculative_tokens", 0, "--max_new_tokens", 4, "--repeats", 2)
    (plain,) = json.loads(out.splitlines()[-1])["arms"]
    assert (code, plain["K"], plain["emitted"]) == (0, 0, 8)


def test_a_prompts_operations_are_those_of_the_linears_and_of_attention():
    target, draft = open_pair(FIXTURES / "drafts" / "eagle3_two_layers")
    linears = [module for model in (target, draft) for name, module in model.named_modules() if name != "head"]
    weights = sum(module.weight.numel() for module in linears if isinstance(module, torch.nn.Linear))
    configs = (target.config, draft.config.layer)
    attention = sum(2 * 10 * config.n_head * config.head_dim * config.n_layer for config in configs)
    assert bandwidth.prefill_flops(target, draft, 10) == 10 * (2 * weights + attention)


# ---- the door --------------------------------------------------------------------------------------------------------


def test_it_asks_its_own_questions_unless_told_what():
    asked = run.parse_args(["--target", "t"])
    assert (tuple(asked.prompt), asked.first_turns, asked.repeats, asked.K) == (QUESTIONS, False, 3, None)
    assert len(set(QUESTIONS)) == 6
    given = run.parse_args(["--speculator", "s", "--prompts", "q.jsonl", "--limit", "2", "--K", "5,1,5"])
    assert (given.prompt, given.first_turns, given.limit, given.K) == ([], True, 2, (1, 5))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--K", "0"], "--K: 0 is not at least 1 and at most 64; see --help"),
        (["--K", "1,two"], "--K: 'two' is not an integer; see --help"),
        (["--K", "2", "--num_speculative_tokens", "2"], "--K: excludes --num_speculative_tokens; drop one"),
        (["--repeats", "0"], "--repeats: 0 is not at least 1; see --help"),
        (["--baseline"], "--baseline: not here, where the output is always the same; drop it"),
        (["--plot", "a.pdf"], "--plot: a.pdf: is no .png file; give FILE.png"),
        (["--plot", "nowhere/a.png"], "--plot: nowhere/a.png: its folder does not exist; make it first"),
        (["--limit", "2"], "--limit, --first_turns: choose from a file; give --prompts"),
        (["--prompts", "absent.txt"], "--prompts: absent.txt: there is no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(command, argv, message):
    code, out, err = command(*argv)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith(f"error: {message}")


def test_a_draft_is_needed_for_k_and_plot(capsys):
    for option in (["--K", "2"], ["--plot", "a.png"]):
        assert run.main(["--target", "t", *option]) == 2
        assert capsys.readouterr().err == f"error: {option[0]}: needs a draft; give --speculator\n"


def test_a_plot_needs_matplotlib(command, monkeypatch, tmp_path):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    code, _, err = command("--plot", tmp_path / "a.png")
    assert (code, err) == (2, "error: --plot: needs matplotlib; pip install matplotlib\n")


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    arms = [
        {"arm": "plain", "K": 0, "acceptance_per_position": [], "tokens_per_second": 1, "ceiling_tokens_per_second": 2}
    ]
    arms.append(arms[0] | {"arm": "K = 2", "K": 2, "acceptance_per_position": [0.5, 0.2]})
    run.plot(arms, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
