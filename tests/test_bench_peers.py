"""The comparison with other engines, without any: what is asked, what they print, what becomes of one that fails."""

import json
import sys
from argparse import Namespace

import pytest
from conftest import FIXTURES

from bench import peer_llama_cpp, peer_setup, peer_vllm, peers
from bench.peer_setup import Peer, PeerError, convert_once, set_up
from tokenizer import load_tokenizer

SPECULATOR, TARGET = FIXTURES / "drafts/eagle3_trained", FIXTURES / "targets/llama_gqa"
OPTIONS = ["--speculator", str(SPECULATOR), "--target", str(TARGET)]
# As printed by llama-server b11434, shortened to what is read and its neighbours.
COMPLETION = """{"index": 0, "content": " Leaves are", "tokens": [2105, 2, 198], "stop": true, "tokens_predicted": 3,
  "timings": {"cache_n": 0, "prompt_n": 48, "prompt_ms": 51.307, "predicted_n": 3, "predicted_ms": 25.5,
  "predicted_per_second": 78.43, "draft_n": 3, "draft_n_accepted": 1}}"""
SERVER_METRICS = """# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 64
# HELP llamacpp:spec_decode_num_accepted_tokens_total Speculative: Total draft tokens accepted by the target model
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 17
llamacpp:spec_decode_num_drafts_total 43
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 13
"""


def record(tokens: int, seconds: float, **totals: int) -> dict:
    """What a run of one prompt gives."""
    results = [{"token_ids": list(range(tokens)), "decode_seconds": seconds}]
    return {"results": results, "totals": totals, "peak_mb": 300.4, "command": "engine --fast"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A place for peers that holds none."""
    for module in (peers, peer_setup):
        monkeypatch.setattr(module, "HOME", tmp_path / "peers")
    (tmp_path / "peers").mkdir()
    return tmp_path / "peers"


@pytest.fixture
def peer(monkeypatch):
    """Puts in the place of all peers one named `other` that is made by the given function."""

    def replace(make, **options) -> None:
        monkeypatch.setattr(peer_setup, "PEERS", found := {"other": Peer(("other==1.2",), "no time", make, **options)})
        monkeypatch.setattr(peers, "PEERS", found)

    return replace


# ---- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "options: the following arguments are required: --speculator; see --help"),
        (["--speculator", "x", "--peers", "vllm,vlm"], "--peers: 'vlm' is none of llama.cpp, vllm, transformers"),
        (["--speculator", "x", "--rounds", "0"], "--rounds: 0 is not at least 1; see --help"),
        (["--speculator", "x", "--num_speculative_tokens", "0"], "--num_speculative_tokens: 0 is not at least 1"),
        ([*OPTIONS, "--prompts", "none.txt"], "--prompts: none.txt: there is no such file"),
        (["--speculator", "none/such/folder"], "none/such/folder"),
    ],
)
def test_mistakes_end_in_one_line(argv, message, capsys, home):
    assert peers.main(argv) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert out == ""
    assert list(home.iterdir()) == []


def test_engines_get_the_prompts_that_generate_makes(tmp_path):
    """Dashes are accepted; the context is rounded up so that another prompt compiles nothing new."""
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["Hello world", "Why?"]}\n{"prompt": "What is your name?"}\n')
    options = [*OPTIONS, "--prompts", str(file), "--limit", "1", "--max-new-tokens", "20"]
    task = peers.make_task(peers.parse_args(options))
    (prompt,) = task["prompts"]
    assert prompt == load_tokenizer(TARGET).encode_chat([{"role": "user", "content": "Hello world"}])
    assert task["questions"] == ["--prompts", str(file), "--first_turns", "--limit", "1"]
    assert (task["K"], task["max_new_tokens"], task["context"]) == (3, 20, 512)
    assert (task["speculator"], task["target"]) == (str(SPECULATOR), str(TARGET))
    assert task["stop_ids"] == [313, 316, 317]
    command = peers.our_command(task, tmp_path)
    assert command[1:4] == ["generate.py", "--speculator", str(SPECULATOR)]
    assert command[-len(task["questions"]) :] == task["questions"]


def test_our_own_questions_are_the_default():
    options = peers.question_options(peers.parse_args(OPTIONS), 2)
    assert options == ["--prompt", peers.QUESTIONS[0], "--prompt", peers.QUESTIONS[1]]


# ---- what they print -------------------------------------------------------------------------------------------------


def test_llama_cpp_is_read():
    assert peer_llama_cpp.read_answer(COMPLETION) == {"token_ids": [2105, 2, 198], "decode_seconds": 0.0255}
    assert peer_llama_cpp.read_counters(SERVER_METRICS) == {"rounds": 43, "accepted": 17}
    assert peer_llama_cpp.read_counters("llamacpp:tokens_predicted_total 64\n") == {"rounds": 0, "accepted": 0}


def test_llama_cpp_drafts_only_where_asked():
    task = {"server": "s", "target": "t.gguf", "speculator": "d.gguf", "threads": 2, "context": 512, "K": 0}
    assert "d.gguf" not in peer_llama_cpp.server_command(task, 80)
    assert peer_llama_cpp.server_command(task | {"K": 5}, 80)[-2:] == ["--spec-draft-n-max", "5"]


def test_vllm_is_read():
    """A vector has no `value`."""
    values = {"num_drafts": 43, "num_draft_tokens": 129, "num_accepted_tokens": 20}
    metrics = [Namespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in values.items()]
    metrics.append(Namespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[14, 5, 1]))
    assert peer_vllm.read_counters(Namespace(get_metrics=lambda: metrics)) == {"rounds": 43, "accepted": 20}
    assert peer_vllm.read_counters(Namespace(get_metrics=lambda: [])) == {"rounds": 0, "accepted": 0}


def test_a_run_reads_the_last_object_and_measures_memory(home):
    """Whatever else an engine prints; all of its threads are limited."""
    code = "import json, os; print('{not} it'); x = b'x' * (80 << 20)\n"
    code += "print(json.dumps({'results': [], 'threads': os.environ['OMP_NUM_THREADS']})); print('bye')"
    done = peers.run("other", lambda task, file: [sys.executable, "-c", code], {"threads": 1})
    assert (done["results"], done["threads"]) == ([], "1")
    assert 80 < done["peak_mb"] < 800
    assert done["command"].startswith(sys.executable)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('{}'); raise ValueError('no such draft')", "exit code 1 (ValueError: no such draft)"),
        ("pass", "exit code 0 (no output)"),
    ],
)
def test_a_run_that_fails_says_why(code, reason, home):
    with pytest.raises(PeerError) as caught:
        peers.run("other", lambda task, file: [sys.executable, "-c", code], {"threads": 1})
    assert reason in str(caught.value)


# ---- setting up ------------------------------------------------------------------------------------------------------


def test_a_peer_is_set_up_once_and_git_does_not_see_it(home, peer, capsys):
    made = []
    peer(lambda folder, packages, log: made.append(packages))
    assert [set_up("other"), set_up("other")] == [home / "other"] * 2
    assert made == [("other==1.2",)]
    assert (home / ".gitignore").read_text() == "*\n"
    assert capsys.readouterr().err == ".peers/other: setting up other==1.2 (once; no time)\n"


def test_a_set_up_that_fails_is_tried_again(home, peer):
    command = [sys.executable, "-c", "print('some'); print('ERROR: no such package'); print('more'); exit(1)"]
    peer(lambda folder, packages, log: peer_setup.call(command, log))
    for _ in range(2):
        with pytest.raises(PeerError, match=r"failed \(ERROR: no such package\); see .peers/other.log"):
            set_up("other")


def test_a_checkpoint_is_converted_once_and_never_half(home, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write = "import sys; open(sys.argv[-1], 'w').write('all'); sys.exit(int(sys.argv[1]))"
    with pytest.raises(PeerError):
        convert_once(home, model, model, ".gguf", [sys.executable, "-c", write, "1"])
    assert not list(home.glob("model-*"))
    done = [convert_once(home, model, model, ".gguf", [sys.executable, "-c", write, "0"]) for _ in range(2)]
    assert done[0] == done[1]
    assert done[0].read_text() == "all"
    (model / "config.json").write_text("{ }")
    assert convert_once(home, model, model, ".gguf", [sys.executable, "-c", write, "0"]) != done[0]


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compared(home, peer, monkeypatch, capsys):
    """peers.main with a peer `other`, and what `run` gives in place of real runs; the table and the JSON line."""

    def compare(run, make=lambda *_: None, **options) -> tuple[str, dict]:
        peer(make, **options)
        monkeypatch.setattr(peers, "run", run)
        assert peers.main([*OPTIONS, "--peers", "other", "--rounds", "3", "--max_new_tokens", "9"]) == 0
        *text, line = capsys.readouterr().out.splitlines()
        return "\n".join(text), json.loads(line)

    return compare


def test_medians_and_ratios(compared, monkeypatch):
    """Where one thread is clearly the faster, it is used; the odd run out does not count."""
    monkeypatch.setattr(peers.os, "sched_getaffinity", lambda process: {0, 1})
    runs = []

    def run(name, command, task):
        runs.append((name, task["threads"], task["K"]))
        slow = task["threads"] if len(runs) <= 4 else 3 if len(runs) == 7 else 1
        seconds = {"ours": 1, "other": 2}[name] * slow / (1 + (task["K"] > 0))
        return record(9, seconds, rounds=4 * (task["K"] > 0), accepted=3)

    text, line = compared(run)
    ours, other = line["engines"]["ours"], line["engines"]["other"]
    assert [arm["tokens_per_second"] for arm in (ours["plain"], ours["speculative"])] == [8, 16]
    assert other["speeds"] == {"plain": 4, "speculative": 8, "best": 8}
    assert other["ours_over_it"] == {"plain": 2, "speculative": 2, "best": 2}
    assert other["speculative"]["acceptance_length"] == 1.75
    assert "acceptance_length" not in other["plain"]
    assert runs[-4:] == [("ours", 1, 0), ("ours", 1, 3), ("other", 1, 0), ("other", 1, 3)]
    row = next(row for row in text.splitlines() if row.startswith("| other"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["other", "1.2", "1", "4.0", "8.0", "1.750", "300 / 300", "2.00", "2.00", "2.00"]
    assert "other, speculative: engine --fast" in text


@pytest.mark.parametrize(("speeds", "threads"), [((40, 41), 2), ((40, 39), 2), ((40, 30), 1)])
def test_one_thread_has_to_be_clearly_faster(speeds, threads, monkeypatch):
    """vLLM decoded plainly as fast on one of two cores, and speculated a tenth more slowly."""
    monkeypatch.setattr(peers.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(peers, "run", lambda name, command, task: record(41, 40 / speeds[task["threads"] - 1]))
    assert peers.best_threads("other", None, {}) == threads


def test_a_peer_that_cannot_be_set_up_becomes_a_row_with_the_reason(compared):
    def make(folder, packages, log):
        raise PeerError("cmake is not installed")

    text, line = compared(lambda name, command, task: record(9, 1.0), make)
    assert "| not measured, because cmake is not installed" in text
    assert line["engines"]["other"]["reason"] == "cmake is not installed"
    assert line["engines"]["ours"]["plain"]["tokens_per_second"] == 8


def test_an_arm_that_fails_leaves_the_other(compared):
    def run(name, command, task):
        if name == "other" and task["K"]:
            raise PeerError("it ended with exit code 1")
        return record(9, 1.0)

    text, line = compared(run)
    assert "other, speculative: not measured, because it ended with exit code 1" in text
    assert line["engines"]["other"]["speeds"] == {"plain": 8, "best": 8}


def test_a_peer_without_drafts_is_not_asked_to_speculate(compared):
    def run(name, command, task):
        assert name == "ours" or task["K"] == 0
        return record(9, 1.0)

    assert "other, speculative: not measured, because no EAGLE-3" in compared(run, plain_only="no EAGLE-3")[0]


def test_ours_failing_leaves_the_peers(compared):
    def run(name, command, task):
        if name == "ours":
            raise PeerError("it ended with exit code 2 (error: --compile)")
        return record(9, 1.0)

    text, line = compared(run)
    assert "| not measured, because it ended with exit code 2 (error: --compile)" in text
    assert line["engines"]["other"]["ours_over_it"] == {}
