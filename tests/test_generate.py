"""The command, end to end, on a tiny trained pair: what it prints, when it stops, and what it refuses.

Mostly in this process, eagerly; real processes where exit codes, signals and pipes are the matter."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
import torch
from conftest import FIXTURES, open_target
from safetensors.torch import load_file, save_file

import generate
from options import parse_args
from prompts import Dialogue
from speculators_config import ConfigError
from tokenizer import load_tokenizer

SPECULATOR = FIXTURES / "drafts/eagle3_trained"
TARGET = FIXTURES / "targets/llama_gqa"  # what the speculator's config names; context 512, vocabulary 320
STRANGER = FIXTURES / "drafts/eagle3_nbr_true"  # a draft of the same sizes with random weights
RUNS = json.loads((SPECULATOR / "expected_runs.json").read_text())["runs"]
HELLO, VERSE, *_ = PROMPTS = [run["prompt_ids"] for run in RUNS[:5]]  # K = 3, and no stop ids
HELLO_IDS, VERSE_IDS = (run["token_ids"] for run in RUNS[:2])  # HELLO_IDS: 199 316 193 134 120 26 ...
EOT = 316  # the tokenizer's EOS; config.json and generation_config.json name it too
TURNS = ("Hello world", "What is your name?", "Why?")
METRICS = {
    "rounds": int,
    "proposed": int,
    "accepted": int,
    "emitted": int,
    "acceptance_length": float,
    "acceptance_rate": float,
    "acceptance_per_position": list,
    "conditional_acceptance_per_position": list,
}
NO_TOKENIZER = dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"))


class Run(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """generate.main with the speculator, if not another; the last of two options counts."""

    def run(*argv) -> Run:
        code = generate.main(["--speculator", str(SPECULATOR), "--no_compile", *map(str, argv)])
        return Run(code, *capsys.readouterr())

    return run


@pytest.fixture
def record(command):
    """What a run with --json --trace prints: one line with one object."""

    def run(*argv) -> dict:
        done = command("--json", "--trace", *argv)
        assert done.code == 0, done.err
        assert done.out.endswith("}\n")
        assert done.out.count("\n") == 1
        return json.loads(done.out)

    return run


@pytest.fixture
def results(record):
    return lambda *argv: record(*argv)["results"]


@pytest.fixture
def refusal(command):
    """The error line of a run that ends at the door."""
    return lambda *argv: error_line(command(*argv))


def error_line(done: Run) -> str:
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.err
    return errors[0].removeprefix("error: ")


def ids(*prompts: list[int]) -> list[str]:
    """The options that ask these prompts."""
    return [option for prompt in prompts for option in ("--prompt_ids", ",".join(map(str, prompt)))]


def said(result: dict) -> tuple[list[int], list[dict]]:
    """All that must not depend on what else a process does: the tokens, and the draft's part in them."""
    return result["token_ids"], result["trace"]


def ending(result: dict) -> tuple[list[int], str]:
    return result["token_ids"], result["finish_reason"]


def types(entry: dict) -> dict[str, type]:
    return {key: type(value) for key, value in entry.items()}


def edited(source: Path, folder: Path, changes: dict[str, dict | str | None]) -> Path:
    """A copy of a checkpoint: per file, keys to change in its JSON, another text, or None to leave it out."""
    folder.mkdir()
    for path in source.iterdir():
        change = changes.get(path.name, {})
        if isinstance(change, dict) and change:
            change = json.dumps(json.loads(path.read_text()) | change)
        if isinstance(change, str):
            (folder / path.name).write_text(change)
        elif change is not None:
            (folder / path.name).symlink_to(path)
    return folder


def asked(*turns: str, raw: bool = False, system: str | None = None, heard: list[dict] = ()) -> list[int]:
    """The prompt ids of the last turn, after the answers `heard` to those before it."""
    dialogue = Dialogue(load_tokenizer(TARGET), raw, system)
    for text, result in zip(turns, heard, strict=False):
        dialogue.ask(text)
        dialogue.hear(result["text"], result["token_ids"])
    return dialogue.ask(turns[-1])


def type_into(monkeypatch, typed: bytes, terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8")
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)


# ---- the JSON object -------------------------------------------------------------------------------------------------


def test_json_has_the_keys_and_types_of_the_contract(record):
    whole = record(*ids(HELLO, VERSE), "--max_new_tokens", 8, "--baseline")
    top = {"target": str, "speculator": str, "algorithm": str, "num_speculative_tokens": int}
    top |= {"device": str, "dtype": str, "compiled": bool, "max_seq_len": int}
    top |= {"load_seconds": float, "compile_seconds": float, "results": list, "totals": dict}
    entry = {"prompt_tokens": int, "token_ids": list, "text": str, "finish_reason": str}
    entry |= {"prefill_seconds": float, "decode_seconds": float, "tokens_per_second": float}
    entry |= METRICS | {"trace": list, "baseline": dict}
    plain = {"token_ids": list, "decode_seconds": float, "tokens_per_second": float}
    plain |= {"speedup": float, "first_divergence": type(None)}
    assert types(whole) == top
    for result in whole["results"]:
        assert types(result) == entry
        assert types(result["baseline"]) == plain
        assert all(types(done) == {"proposed": list, "accepted": int, "emitted": list} for done in result["trace"])
    assert types(whole["totals"]) == METRICS | {"tokens_per_second": float, "speedup": float}
    assert Path(whole["target"]).resolve() == TARGET.resolve()
    assert (whole["speculator"], whole["algorithm"]) == (str(SPECULATOR), "eagle3")
    assert (whole["device"], whole["dtype"], whole["compiled"]) == ("cpu", "float32", False)
    assert (whole["num_speculative_tokens"], whole["max_seq_len"]) == (3, len(VERSE) + 8)


def test_json_of_plain_decoding(capsys):
    options = ["--target", str(TARGET), *ids(HELLO), "--max_new_tokens", "5", "--ignore_eos", "--json", "--no_compile"]
    assert generate.main(options) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["speculator"], whole["algorithm"], whole["num_speculative_tokens"]) == (None, None, 0)
    assert whole["results"][0]["token_ids"] == HELLO_IDS[:5]
    assert not {"trace", "baseline"} & whole["results"][0].keys()
    assert "speedup" not in whole["totals"]


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_golden_runs(results, run, tmp_path):
    """Tokens, every round and the metrics, as computed without any cache."""
    stops = {"eos_token_id": run["stop_ids"]}
    changes = {"config.json": stops, "generation_config.json": stops} | NO_TOKENIZER
    target, K = edited(TARGET, tmp_path / "target", changes), run["num_speculative_tokens"]
    options = ["--target", target] if run["stop_ids"] else ["--ignore_eos"]
    options += ["--num_speculative_tokens", K, "--max_new_tokens", run["max_new_tokens"]]
    (result,) = results(*ids(run["prompt_ids"]), *options)
    compared = (METRICS.keys() | {"token_ids", "trace"}) & run.keys()
    assert {key: result[key] for key in compared} == {key: run[key] for key in compared}
    assert len(compared) == len(METRICS) - 1 + 2  # the conditional acceptance follows from the trace:
    reached = [sum(done["accepted"] >= i for done in run["trace"]) for i in range(K + 1)]
    conditional = [after / before if before else None for before, after in zip(reached, reached[1:], strict=False)]
    assert result["conditional_acceptance_per_position"] == conditional
    assert result["finish_reason"] == ("stop" if run["stop_ids"] else "length")
    assert result["emitted"] == 1 + sum(len(done["emitted"]) for done in result["trace"])
    assert result["tokens_per_second"] == pytest.approx((result["emitted"] - 1) / result["decode_seconds"])


def test_history_changes_nothing_and_totals_are_ratios_of_sums(record):
    """Prompts of several lengths in one process: each as if it were alone."""
    whole, runs = record(*ids(*PROMPTS), "--ignore_eos", "--max_new_tokens", 48), RUNS[: len(PROMPTS)]
    totals = whole["totals"]
    assert [said(result) for result in whole["results"]] == [said(run) for run in runs]
    sums = {key: sum(run[key] for run in runs) for key in ("rounds", "proposed", "accepted", "emitted")}
    assert {key: totals[key] for key in sums} == sums
    assert totals["acceptance_length"] == 1 + sums["accepted"] / sums["rounds"]
    assert totals["acceptance_rate"] == sums["accepted"] / sums["proposed"]
    reached = [sum(done["accepted"] > i for run in runs for done in run["trace"]) for i in range(3)]
    assert totals["acceptance_per_position"] == [count / sums["rounds"] for count in reached]
    seconds = sum(result["decode_seconds"] for result in whole["results"])
    assert totals["tokens_per_second"] == pytest.approx((sums["emitted"] - len(runs)) / seconds)


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", range(6))
def test_greedy_tokens_do_not_depend_on_k(record, K):
    options = ("--ignore_eos", "--max_new_tokens", 48, "--num_speculative_tokens", K, "--baseline")
    whole = record(*ids(HELLO, VERSE), *options)
    for result, token_ids in zip(whole["results"], (HELLO_IDS, VERSE_IDS), strict=True):
        plain = result["baseline"]
        assert result["token_ids"] == plain["token_ids"] == token_ids
        assert plain["first_divergence"] is None
        assert plain["speedup"] == pytest.approx(result["tokens_per_second"] / plain["tokens_per_second"])
    assert whole["num_speculative_tokens"] == K
    assert (whole["totals"]["accepted"] > 0) == (K > 0)


def test_no_drafting_has_no_rounds(results):
    (result,) = results(*ids(HELLO), "--num_speculative_tokens", 0, "--max_new_tokens", 4, "--ignore_eos")
    assert said(result) == (HELLO_IDS[:4], [])
    assert [result[key] for key in METRICS] == [0, 0, 0, 4, 0.0, 0.0, [], []]


def test_one_token_has_no_rounds(record):
    whole = record(*ids(HELLO), "--max_new_tokens", 1)
    for numbers in (*whole["results"], whole["totals"]):
        assert [numbers[key] for key in METRICS] == [0, 0, 0, 1, 0.0, 0.0, [0.0] * 3, [None] * 3]
        assert numbers["tokens_per_second"] == 0.0


def test_first_divergence_and_its_margin(results, command, monkeypatch):
    """A plain answer with another token at 3: the index, and the gap of the target's two best logits there."""
    decode = generate.Session.decode

    def tampered(session, prompt, answer, *rest, **options):
        decode(session, prompt, answer, *rest, **options)
        if options.get("plain"):
            answer.token_ids[3] += 1

    monkeypatch.setattr(generate.Session, "decode", tampered)
    options = (*ids(HELLO), "--ignore_eos", "--max_new_tokens", 8, "--baseline")
    (result,) = results(*options)
    target, sequence = open_target(TARGET), torch.tensor([HELLO + HELLO_IDS[:3]])
    x, _ = target(sequence, torch.arange(sequence.size(1))[None])
    best, second = target.logits(x[0, -1]).topk(2).values.tolist()
    assert result["baseline"]["first_divergence"] == {"index": 3, "margin": pytest.approx(best - second, abs=1e-4)}
    assert re.search(r"other tokens from 3 on, .* \d\.\d+ apart", command(*options).err)


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_16_bits_are_lossless_up_to_rounding_and_draft_as_well(record, dtype, name):
    options = (*ids(*PROMPTS), "--ignore_eos", "--max_new_tokens", 48)
    whole, exact = record(*options, "--dtype", dtype, "--baseline"), record(*options, "--dtype", "fp32")
    assert (whole["dtype"], exact["dtype"]) == (name, "float32")
    parted = [result["baseline"]["first_divergence"] for result in whole["results"]]
    assert all(divergence is None or divergence["margin"] < 0.1 for divergence in parted)
    near = pytest.approx(exact["totals"]["acceptance_length"], abs=0.1)  # measured: 1.56 and 1.57
    assert whole["totals"]["acceptance_length"] == near


@pytest.mark.parametrize(
    ("written", "options", "dtype", "notice"),
    [
        ("bfloat16", (), "bfloat16", False),
        ("float16", (), "float16", False),
        ("float16", ("--dtype", "fp32"), "float32", False),
        (None, (), "bfloat16", True),
        (None, ("--dtype", "fp16"), "float16", False),
    ],
)
def test_dtype_is_the_configs_unless_asked_for(command, tmp_path, written, options, dtype, notice):
    target = edited(TARGET, tmp_path / "target", {"config.json": {"dtype": written}})
    done = command(*ids(HELLO), "--target", target, "--max_new_tokens", 2, "--json", *options)
    assert json.loads(done.out)["dtype"] == dtype
    assert (f"notice: {target / 'config.json'}: dtype: absent, bfloat16 assumed\n" in done.err) == notice


def test_door_of_a_dtype_that_is_not_implemented(refusal, tmp_path):
    target = edited(TARGET, tmp_path / "target", {"config.json": {"dtype": "float64"}})
    message = refusal(*ids(HELLO), "--target", target, "--max_new_tokens", 2)
    assert message == "--dtype: the target's float64 is not implemented; give bf16, fp16 or fp32"


# ---- compiled --------------------------------------------------------------------------------------------------------


def test_a_compiled_run_is_one_graph_each_for_prefill_round_and_plain_step(record, tmp_path, monkeypatch):
    """The command's own compile path: what eager says, compiled before the first answer and never again.

    A context of 2048 makes the caches of test_speculate.py's size, so that Inductor's cache serves both."""
    target = edited(TARGET, tmp_path / "target", {"config.json": {"max_position_embeddings": 2048}})
    options = (*ids(HELLO, VERSE), "--target", target, "--max_seq_len", 2048, "--max_new_tokens", 24, "--ignore_eos")
    eager = record(*options, "--baseline")
    counted, counters, reply = [], torch._dynamo.utils.counters, generate.Session.reply

    def count():
        counted.append({name: dict(counter) for name, counter in counters.items() if counter})

    def counting(session, *rest, **named):
        count()
        answer = reply(session, *rest, **named)
        count()
        return answer

    monkeypatch.setattr(generate.Session, "reply", counting)
    torch._dynamo.reset()
    counters.clear()
    compiled = record(*options, "--baseline", "--compile")
    assert counted[0]["stats"]["unique_graphs"] == 3
    assert counted == counted[:1] * 4
    assert (compiled["compiled"], eager["compiled"], eager["compile_seconds"]) == (True, False, 0.0)
    assert compiled["compile_seconds"] > 0
    for ours, wanted in zip(compiled["results"], eager["results"], strict=True):
        assert said(ours) == said(wanted)
        assert ours["baseline"]["token_ids"] == wanted["token_ids"]


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[1, "--top_k", 1], [1, "--top_p", 1e-6], [1e-6]], ids=["top_k", "top_p", "cold"])
def test_sampling_without_choice_is_greedy(results, options):
    (result,) = results(*ids(VERSE), "--ignore_eos", "--max_new_tokens", 48, "--temperature", *options)
    assert said(result) == said(RUNS[1])


def test_seed_restarts_with_every_prompt(results):
    def sample(*prompts, seed=0):
        options = ("--temperature", 1, "--seed", seed, "--ignore_eos", "--max_new_tokens", 24)
        return [said(result) for result in results(*ids(*prompts), *options)]

    (alone,) = sample(HELLO)
    assert sample(HELLO, HELLO) == [alone, alone]
    assert sample(VERSE, PROMPTS[2], HELLO)[2] == alone
    assert sample(HELLO, seed=1) != [alone]
    assert alone[0] != HELLO_IDS[:24]


# ---- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "token_ids"),
    [
        (134, [319], "<|reserved_special_token_1|>", [199, EOT, 193, 134]),  # 319 is that token, and never comes
        (319, [26, 120], "<|reserved_special_token_1|>", [199, EOT, 193, 134, 120]),
        (None, 193, "<|reserved_special_token_1|>", [199, EOT, 193]),
        ([120], None, "<|eot_id|>", [199, EOT]),
        (199, 26, "<|eot_id|>", [199]),  # the first token, which comes from the prefill
    ],
    ids=["config", "generation", "generation_int", "tokenizer", "at_once"],
)
def test_stop_ids_are_united(results, tmp_path, config, generation, tokenizer, token_ids):
    changes = {"config.json": {"eos_token_id": config}, "generation_config.json": {"eos_token_id": generation}}
    changes |= {"tokenizer_config.json": {"eos_token": tokenizer}, "special_tokens_map.json": None}
    target = edited(TARGET, tmp_path / "target", changes)
    options = (*ids(HELLO), "--target", target, "--max_new_tokens", 12)
    (result,) = results(*options)
    assert ending(result) == (token_ids, "stop")
    assert result["text"] == load_tokenizer(TARGET).decode(token_ids[:-1])  # also where the EOS is an ordinary token
    (result,) = results(*options, "--ignore_eos")
    assert ending(result) == (HELLO_IDS[:12], "length")


def test_budget_is_met_exactly(results):
    for budget in range(1, 13):
        options = ("--num_speculative_tokens", 5, "--max_new_tokens", budget, "--ignore_eos")
        (result,) = results(*ids(VERSE), *options)
        assert ending(result) == (VERSE_IDS[:budget], "length")
        assert budget == result["emitted"] == 1 + sum(len(done["emitted"]) for done in result["trace"])
        assert all(len(done["proposed"]) == 5 for done in result["trace"])
        assert all(done["accepted"] <= len(done["emitted"]) for done in result["trace"])


def test_eos_on_the_last_token_of_the_budget_is_a_stop(results):
    (result,) = results(*ids(HELLO), "--max_new_tokens", 2)
    assert ending(result) == ([199, EOT], "stop")


def test_stop_texts_end_at_the_token_that_completes_them(results, command):
    """Pieces from all over the answer: across tokens, inside accepted blocks, at the end of the budget."""
    options = (*ids(VERSE), "--num_speculative_tokens", 5, "--ignore_eos")
    (whole,) = results(*options, "--max_new_tokens", 24)
    text, decode, ends = whole["text"], load_tokenizer(TARGET).decode, set()
    assert max(done["accepted"] for done in whole["trace"]) >= 4
    for begin in range(0, len(text) - 3, 2):
        stop = text[begin : begin + 3]
        n = next(n for n in range(1, 25) if stop in decode(VERSE_IDS[:n]))
        (result,) = results(*options, "--max_new_tokens", n, f"--stop={stop}")
        assert ending(result) == (VERSE_IDS[:n], "stop")
        assert result["text"] == text[: text.index(stop)]
        assert n == result["emitted"] == 1 + sum(len(done["emitted"]) for done in result["trace"])
        assert command(*options, f"--stop={stop}").out == result["text"] + "\n"
        ends.add(n)
    assert len(ends) > 5


def test_first_of_several_stops_wins_and_half_a_stop_is_text(results):
    options = (*ids(VERSE), "--ignore_eos", "--max_new_tokens", 24)
    (whole,) = results(*options)
    text = whole["text"]
    half = text[-2:] + "never"
    (result,) = results(*options, "--stop", half)
    assert (result["text"], result["finish_reason"]) == (text, "length")
    late, early = text[8:10], text[4:6]
    (result,) = results(*options, "--stop", half, "--stop", late, "--stop", early)
    assert result["text"] == text[: min(text.index(late), text.index(early))]


# ---- text and prompts ------------------------------------------------------------------------------------------------


def test_stdout_is_the_text_in_whole_characters(capsysbinary, monkeypatch):
    """The model speaks in byte fragments, valid or not: what streams is the JSON's text, and the library's."""
    write, pieces = generate.write, []
    monkeypatch.setattr(generate, "write", lambda text: (pieces.append(text), write(text)))
    library = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for prompt in PROMPTS:
        argv = ["--speculator", str(SPECULATOR), "--no_compile", "--ignore_eos", "--max_new_tokens", "48", *ids(prompt)]
        assert generate.main([*argv, "--json"]) == 0
        (result,) = json.loads(capsysbinary.readouterr().out)["results"]
        assert generate.main(argv) == 0
        assert capsysbinary.readouterr().out.decode("utf-8") == "".join(pieces) == result["text"] + "\n"
        decoded = library.decode([token for token in result["token_ids"] if token != EOT])
        assert decoded in (result["text"], result["text"] + "\ufffd")  # the library marks an unfinished end
        assert len(pieces) > 12
        pieces.clear()


@pytest.mark.parametrize("options", [{}, {"raw": True}, {"system": "Be brief."}], ids=["template", "raw", "system"])
def test_prompt_goes_through_the_template(results, options):
    prompt = asked("Hello world", **options)
    flags = {"raw": ["--raw"], "system": ["--system", "Be brief."]}
    extra = [flag for key in options for flag in flags[key]]
    (by_text,) = results("--prompt", "Hello world", *extra, "--max_new_tokens", 8)
    (by_ids,) = results(*ids(prompt), "--max_new_tokens", 8)
    assert by_text["prompt_tokens"] == len(prompt)
    assert said(by_text) == said(by_ids)


def test_prompts_of_all_kinds_in_their_order(results, tmp_path):
    def lengths(*argv):
        return [result["prompt_tokens"] for result in results(*argv, "--max_new_tokens", 2, "--max_seq_len", 512)]

    questions = [{"prompt": "One."}, {"question_id": 81, "turns": ["Two words.", "And more."]}, {"turns": ["4"]}]
    jsonl, txt = tmp_path / "questions.jsonl", tmp_path / "lines.txt"
    jsonl.write_text("".join(json.dumps(question) + "\n" for question in questions))
    txt.write_text("One.\n\nTwo words.\n")
    one, two, four = (len(asked(text)) for text in ("One.", "Two words.", "4"))
    assert lengths("--prompts", txt) == [one, two]
    assert lengths("--prompts", txt, "--limit", 1) == [one]
    assert lengths("--prompts", jsonl, "--first_turns") == [one, two, four]
    first, second, third, fourth = lengths("--prompts", jsonl)
    assert (first, second, fourth) == (one, two, four)
    assert third > len(asked("Two words.", "And more.", heard=[{"text": "", "token_ids": []}]))
    assert lengths(*ids(HELLO), "--prompts", txt, "--prompt", "4") == [four, one, two, len(HELLO)]


def test_stdin_is_one_prompt(results, monkeypatch):
    type_into(monkeypatch, b"Two\nlines\n")
    (result,) = results("--max_new_tokens", 2)
    assert result["prompt_tokens"] == len(asked("Two\nlines"))


@pytest.mark.parametrize("sampling", [(), ("--temperature", 1, "--seed", 3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("raw", [False, True], ids=["template", "raw"])
def test_kept_caches_change_nothing(results, tmp_path, raw, sampling):
    """A later turn, on caches kept from those before it, is answered as by a fresh process given that history."""
    (tmp_path / "talk.jsonl").write_text(json.dumps({"turns": TURNS}))
    options = ("--max_new_tokens", 24, "--max_seq_len", 512, "--num_speculative_tokens", 5, *sampling)
    talk = results("--prompts", tmp_path / "talk.jsonl", *options, *(["--raw"] if raw else []))
    assert len(talk) == 3
    for turn, result in enumerate(talk):
        (fresh,) = results(*ids(asked(*TURNS[: turn + 1], raw=raw, heard=talk[:turn])), *options)
        assert result["prompt_tokens"] == fresh["prompt_tokens"]
        assert said(result) == said(fresh)


def test_target_without_tokenizer_answers_ids(results, refusal, tmp_path):
    target = edited(TARGET, tmp_path / "target", NO_TOKENIZER)
    (result,) = results(*ids(HELLO), "--target", target, "--max_new_tokens", 5, "--ignore_eos")
    assert (result["token_ids"], result["text"]) == (HELLO_IDS[:5], "")
    for options in (["--prompt", "hi"], [*ids(HELLO), "--stop", "x"], ["--interactive"]):
        message = refusal(*options, "--target", target)
        assert message == f"{target}: tokenizer.json: missing, and texts need it; add it, or give only --prompt_ids"


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_chat_answers_as_a_conversation_from_a_file(results, command, tmp_path, monkeypatch):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"turns": TURNS}))
    talk = results("--prompts", tmp_path / "talk.jsonl", "--max_new_tokens", 24, "--max_seq_len", 512)
    typed = "\n\n".join(TURNS).encode()  # an empty line asks nothing; the last line has no end
    type_into(monkeypatch, typed)
    done = command("--interactive", "--max_new_tokens", 24)
    assert (done.code, done.out) == (0, "".join(result["text"] + "\n" for result in talk))
    assert len(re.findall(r"\[(?:stop|length)\] \d+ prompt tokens; ", done.err)) == 3
    type_into(monkeypatch, typed, terminal=True)  # a terminal and no prompt: the same without the option
    assert command("--max_new_tokens", 24).out == done.out


def test_conversations_end_when_the_context_is_full(command, tmp_path, monkeypatch):
    size = len(asked(TURNS[0])) + 4
    full = ("--max_seq_len", size, "--max_new_tokens", 4, "--ignore_eos")
    type_into(monkeypatch, "\n".join(TURNS).encode())
    done = command("--interactive", *full)
    assert done.code == 0
    assert f"notice: all {size} tokens are used; start again, or with a larger --max_seq_len" in done.err
    (tmp_path / "talk.jsonl").write_text(json.dumps({"turns": TURNS}))
    done = command("--prompts", tmp_path / "talk.jsonl", *full, "--json")
    assert done.code == 0
    assert [result["emitted"] for result in json.loads(done.out)["results"]] == [4]
    assert f"notice: all {size} tokens are used; left out: turn 2 and what follows" in done.err


# ---- the context's end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", range(6))
@pytest.mark.parametrize("context", [64, 512])
def test_context_is_usable_to_its_last_token(record, tmp_path, context, K):
    target = edited(TARGET, tmp_path / "target", {"config.json": {"max_position_embeddings": context}})
    prompt = random.Random(0).choices(range(300), k=context - 12)
    options = (*ids(prompt), "--target", target, "--max_new_tokens", 12, "--ignore_eos", "--baseline")
    whole = record(*options, "--num_speculative_tokens", K)
    (result,) = whole["results"]
    assert whole["max_seq_len"] == context
    assert (result["emitted"], result["finish_reason"]) == (12, "length")
    assert result["token_ids"] == result["baseline"]["token_ids"]


@pytest.mark.parametrize(
    ("new", "max_seq_len", "message"),
    [
        (52, (), "--max_new_tokens: prompt 1 has 13 tokens, with 52 new ones more than 64; lower it or shorten "),
        (52, (64,), "--max_new_tokens: prompt 1 has 13 tokens, with 52 new ones more than 64; lower it or shorten "),
        (8, (20,), "--max_seq_len: prompt 1 has 13 tokens, with 8 new ones more than 20; raise it or shorten "),
        (8, (65,), "--max_seq_len: 65 is more than the target's context of 64; lower it"),
    ],
)
def test_what_does_not_fit_is_refused_before_loading(refusal, tmp_path, new, max_seq_len, message):
    changes = {"config.json": {"max_position_embeddings": 64}, "model.safetensors": None}
    target = edited(TARGET, tmp_path / "target", changes)
    options = [option for size in max_seq_len for option in ("--max_seq_len", size)]
    assert refusal(*ids(HELLO), "--target", target, "--max_new_tokens", new, *options).startswith(message)


# ---- doors -----------------------------------------------------------------------------------------------------------

EARLY_DOORS = {  # answered before torch is imported, which takes seconds
    "no target folder": (["--target", "./no/such"], r"--target: \./no/such: no such folder"),
    "no speculator folder": (["--speculator", "./no/such"], r"--speculator: \./no/such: no such folder"),
    "speculator as target": (["--target", str(SPECULATOR)], "speculators_model_type: this is a speculator"),
    "target as speculator": (["--speculator", str(TARGET)], "speculators_model_type: missing"),
    "unknown architecture": (["--target", str(FIXTURES / "targets/gpt_oss_later")], "'gpt_oss' is not implemented"),
    "id past the vocabulary": (ids([5, 320]), r"--prompt_ids: prompt 2 has ids outside 0\.\.319, the target's vocab"),
    "negative id": (["--prompt_ids=-1,5"], r"--prompt_ids: prompt 2 has ids outside 0\.\.319"),
    "no such layers": (["--aux_layer_ids", "2,4,9"], r"\[2, 4, 9\] are not ascending layers between 0 and 8"),
    "prompt file of a strange kind": (["--prompts", "README"], r"README: .* give \.txt or \.jsonl"),
    "no prompt file": (["--prompts", "no_such.txt"], r"no_such\.txt: there is no such file"),
    "empty prompt": (["--prompt", " "], "--prompt: is empty; give a text"),
    "system message for ids": (["--system", "Be brief."], "--system: --prompt_ids are taken as they are; drop it"),
    "top_k past 32 bits": (["--top_k", str(2**31)], f"--top_k: {2**31} is not at least 1 and at most 2.*; see --help"),
    "unknown option": (["--temprature", "1"], "options: .*--temprature.*; see --help"),
}


@pytest.mark.parametrize("door", EARLY_DOORS)
def test_door(refusal, door):
    options, message = EARLY_DOORS[door]
    assert re.search(message, refusal(*ids(HELLO), *options))


def test_early_doors_do_not_wait_for_torch():
    program = """if True:
        import json, sys, generate
        for argv in json.loads(sys.argv[1]):
            assert generate.main(argv) == 2, argv
        assert "torch" not in sys.modules"""
    doors = [["--speculator", str(SPECULATOR), *ids(HELLO), *options] for options, _ in EARLY_DOORS.values()]
    process = start("-c", program, json.dumps(doors))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b""), err.decode()
    assert err.count(b"error: ") == len(doors)


def test_door_of_sizes_that_do_not_fit(refusal, tmp_path):
    target = edited(TARGET, tmp_path / "target", {"config.json": {"hidden_size": 64}})
    wrong = "target_hidden_size: drafts for a hidden size of 32, the target's is 64; give the target it was trained on"
    assert wrong in refusal(*ids(HELLO), "--target", target)


def test_door_of_a_speculator_that_names_no_target(refusal, tmp_path):
    method = json.loads((SPECULATOR / "config.json").read_text())["speculators_config"] | {"verifier": {}}
    speculator = edited(SPECULATOR, tmp_path / "speculator", {"config.json": {"speculators_config": method}})
    message = refusal("--speculator", speculator, *ids(HELLO))
    assert re.search(r"verifier\.name_or_path: names no target; give --target", message)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_door_of_a_broken_file(refusal, tmp_path, name):
    target = edited(TARGET, tmp_path / "target", {name: "{"})
    assert refusal(*ids(HELLO), "--target", target).startswith(f"{target / name}: ")


def test_door_of_missing_weights(refusal, tmp_path):
    shard = "model-00002-of-00003.safetensors"
    target = edited(FIXTURES / "targets/llama_sharded", tmp_path / "target", {shard: None})
    message = refusal("--target", target, *ids([1, 2]), "--max_new_tokens", 4, "--aux_layer_ids", "0,1,2")
    assert f"{shard}: 1 of 3 files listed here do not exist; incomplete download?" in message


def test_door_of_a_bad_prompt_line(refusal, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "fine"}\n{"question": "which?"}\n')
    assert refusal("--prompts", path).startswith(f"{path}: line 2: no JSON object with `prompt`")


def test_door_of_a_system_message_without_template(refusal, tmp_path):
    target = edited(TARGET, tmp_path / "target", {"tokenizer_config.json": {"chat_template": None}})
    message = refusal("--prompt", "hi", "--system", "Be brief.", "--target", target)
    assert message == f"--system: {target} has no chat template to put it in; drop it"


def test_door_of_a_tokenizer_from_elsewhere(refusal, tmp_path):
    """Ids that the target has no embedding for: on a GPU this would be a device assert without a word."""
    added = json.loads((TARGET / "tokenizer.json").read_text())["added_tokens"]
    changes = {"tokenizer.json": {"added_tokens": [*added, added[-1] | {"id": 320, "content": "<|extra|>"}]}}
    target = edited(TARGET, tmp_path / "target", changes)
    message = refusal("--prompt", "<|extra|>", "--target", target)
    assert message.startswith(f"{target}: tokenizer: prompt 1 has ids outside 0..319")


def test_door_of_several_processes(refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refusal(*ids(HELLO)).startswith("WORLD_SIZE: several processes are not implemented")


@pytest.mark.parametrize(
    ("device", "there", "message"),
    [
        ("cuda", torch.cuda.is_available, r"--device: .*CUDA.*; use --device cpu, or install a CUDA build of torch"),
        ("mps", torch.backends.mps.is_available, "--device: there is no MPS device; use --device cpu"),
    ],
)
def test_door_of_a_missing_device(refusal, device, there, message):
    if there():
        pytest.skip(f"there is a device for {device}")
    assert re.fullmatch(message, refusal(*ids(HELLO), "--device", device, "--max_new_tokens", 4))


@pytest.mark.parametrize(
    ("typed", "terminal", "message"),
    [
        (b"", False, "stdin: holds no prompt; give one there or with --prompt"),
        (b" \n\n", False, "stdin: holds no prompt; give one there or with --prompt"),
        (b"caf\xe9", False, "stdin: is not utf-8 text (unexpected end of data); convert it"),
        (b"hello", True, "--json: does not go with a chat in the terminal; give --prompt or --prompts"),
    ],
)
def test_door_of_stdin(refusal, monkeypatch, typed, terminal, message):
    type_into(monkeypatch, typed, terminal)
    assert refusal("--json") == message


@pytest.mark.parametrize("options", [(), ("--interactive",), ("--json",)], ids=str)
def test_door_of_a_closed_stdin(refusal, monkeypatch, options):
    monkeypatch.setattr(sys, "stdin", None)
    assert refusal(*options) == "stdin: is closed; give a prompt with --prompt"


@pytest.mark.parametrize("reason", ["No working C++ compiler found", "Failed to find C compiler.", "a bug"])
def test_door_of_a_machine_without_compiler(reason):
    """torch's own exceptions, as it raises them for the CPU and for a GPU; what is no fault of the user's passes."""
    from torch._inductor.exc import InductorError

    class Uncompiled:
        def warm_up(self, plain_too):
            raise InductorError(RuntimeError(reason), None)

    raised, message = (
        (InductorError, "a bug") if reason == "a bug" else (ConfigError, r"^torch.compile: .*; install g\+\+")
    )
    with pytest.raises(raised, match=message):
        generate.compile_steps(Uncompiled(), plain_too=False)


# ---- notices ---------------------------------------------------------------------------------------------------------


def test_a_draft_that_is_never_accepted_is_doubted(command):
    options = (*ids(HELLO), "--ignore_eos", "--max_new_tokens")
    done = command("--speculator", STRANGER, *options, 24)
    assert "notice: none of 69 drafted tokens was accepted: was this draft trained on this target?" in done.err
    assert "acceptance length 1.00" in done.err
    assert "was accepted" not in command("--speculator", STRANGER, *options, 8).err  # too few rounds to say
    assert "was accepted" not in command(*options, 24).err


def test_choices_are_printed_with_their_source(command):
    options = (*ids(HELLO), "--max_new_tokens", 2)
    by_config = "eagle3, K=3 (config), norm_before_residual=true (config), rope default theta=10000 (config)"
    assert by_config + ", aux layers 2,4,5 (config)\n" in command(*options).err
    overrides = ("--num_speculative_tokens", 4, "--norm_before_residual", "false")
    overrides += ("--draft-rope-theta", 5000, "--aux_layer_ids", "1,2,3")
    printed = command(*options, *overrides).err
    assert "K=4 (--num_speculative_tokens), norm_before_residual=false (--norm_before_residual)" in printed
    assert "theta=5000 (--draft_rope_theta), aux layers 1,2,3 (--aux_layer_ids)\n" in printed


@pytest.mark.parametrize(("K", "longest", "notice"), [(3, 24, False), (3, 25, True), (0, 25, False)])
def test_a_draft_of_a_smaller_context_than_the_run_is_mentioned(command, tmp_path, K, longest, notice):
    layer = json.loads((SPECULATOR / "config.json").read_text())["transformer_layer_config"]
    changes = {"config.json": {"transformer_layer_config": layer | {"max_position_embeddings": 24}}}
    speculator = edited(SPECULATOR, tmp_path / "speculator", changes)
    options = ("--target", TARGET, "--num_speculative_tokens", K, "--max_new_tokens", longest - len(HELLO))
    done = command("--speculator", speculator, *ids(HELLO), *options)
    assert done.code == 0
    assert ("notice: the draft's context is 24 tokens; past it acceptance may fall\n" in done.err) == notice


def test_what_the_draft_borrows_and_what_is_not_needed_is_said(command, tmp_path):
    """A reduced vocabulary needs a head of its own; eagle3_full_vocab may borrow the target's."""

    def printed(case, *dropped, extra=()):
        folder = edited(FIXTURES / "drafts" / case, tmp_path / f"{case}{len(dropped)}", {"model.safetensors": None})
        tensors = load_file(FIXTURES / "drafts" / case / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
        save_file(tensors | {name: torch.ones(32) for name in extra}, folder / "model.safetensors")
        done = command("--speculator", folder, "--target", TARGET, *ids(HELLO), "--max_new_tokens", 2)
        assert done.code == 0
        return done.err

    assert "draft: embedding the target's, head the draft's own\n" in printed("eagle3_no_embed")
    assert "draft: embedding the draft's own, head the target's\n" in printed("eagle3_full_vocab", "lm_head.weight")
    borrowed = printed("eagle3_full_vocab", "lm_head.weight", "embed_tokens.weight")
    assert "draft: embedding the target's, head the target's\n" in borrowed
    assert "not needed" not in borrowed
    unused = ["layers.0.self_attn.rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight"]
    full = printed("eagle3_full_vocab", extra=unused[1:])
    assert "draft: embedding the draft's own, head the draft's own\n" in full
    assert "notice: stored but not needed: verifier_lm_head.weight, verifier_norm.weight\n" in full
    assert f"not needed: {', '.join(unused)} ...\n" in printed(
        "eagle3_own_embed", extra=[*unused, "x.rotary_emb.inv_freq"]
    )


@pytest.mark.parametrize(
    ("context", "options", "tokens"),
    [(512, (), 512), (4096, (), 4096), (8192, (), 4096), (8192, ("--max_seq_len", "6000"), 6000)],
)
def test_a_chat_has_the_targets_context_or_4096_tokens(tmp_path, context, options, tokens):
    target = edited(TARGET, tmp_path / "target", {"config.json": {"max_position_embeddings": context}})
    argv = ["--speculator", str(SPECULATOR), "--target", str(target), "--interactive", *options]
    assert generate.make_plan(parse_args(argv)).max_seq_len == tokens


# ---- processes -------------------------------------------------------------------------------------------------------


def start(*argv, stdin=subprocess.DEVNULL, **environment) -> subprocess.Popen:
    def interruptible():  # a shell that runs the tests in the background has them ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        cwd=FIXTURES.parent.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        preexec_fn=interruptible,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def start_long_run() -> subprocess.Popen:
    """A run of half a minute that has begun to answer."""
    options = ("--no_compile", "--ignore_eos", "--max_new_tokens", 48)
    process = start("generate.py", "--speculator", SPECULATOR, *ids(*PROMPTS * 40), *options)
    assert process.stdout.read(40)
    return process


def test_process_reads_stdin_and_writes_what_the_terminal_can_show(results):
    options = ("--ignore_eos", "--max_new_tokens", 24)
    (result,) = results("--prompt", "Hello world", *options)
    argv = ("generate.py", "--speculator", SPECULATOR, "--no_compile", *options)
    process = start(*argv, stdin=subprocess.PIPE, PYTHONIOENCODING="ascii")
    out, err = process.communicate(b"Hello world", timeout=60)
    assert process.returncode == 0, err.decode()
    assert out == (result["text"] + "\n").encode("ascii", "replace")
    assert f"[length] {result['prompt_tokens']} prompt tokens; 24 tokens" in err.decode()


def test_interrupt_prints_the_statistics_so_far():
    process = start_long_run()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"\ninterrupted; so far \d+ tokens, .*acceptance length \d\.\d\d", err.decode())
    assert b"Traceback" not in err


def test_reader_that_leaves_is_no_error():
    process = start_long_run()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not re.search(rb"Traceback|Exception|BrokenPipe|error", err)


def test_process_exits_with_2_at_a_door():
    process = start("generate.py", "--speculator", SPECULATOR, "--device", "tpu", "--prompt", "hi")
    out, err = process.communicate(timeout=60)
    assert "--device" in error_line(Run(process.returncode, out.decode(), err.decode()))


def test_a_python_without_the_packages_is_told_what_to_do():
    """-S: no site-packages, as outside .venv."""
    run = subprocess.run(
        [sys.executable, "-S", "generate.py", "--help"], cwd=FIXTURES.parents[1], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r"error: python: \w+ is not installed; run make demo, .*\n", run.stderr)
