"""Prompts from options, files and stdin, and conversations as token ids, with real chat templates."""

import io
import json
import re
import sys

import pytest
from conftest import FIXTURES

from generate import read_questions
from options import parse_args
from prompts import Dialogue, Question, read_prompt_file
from speculators_config import ConfigError
from tokenizer import load_tokenizer

SMILE = "\N{SLIGHTLY SMILING FACE}"


def turns(questions) -> list[tuple[str, ...]]:
    assert not any(question.ids for question in questions)
    return [question.turns for question in questions]


def refused(read, *args) -> str:
    """What is said, on one line: `<file or option>: <field>: <what is wrong>; <what to do>`."""
    with pytest.raises(ConfigError) as caught:
        read(*args)
    assert re.fullmatch(r"[^:]+: ([^:]+: )?[^;]+; [^;\n]+", message := str(caught.value)), message
    return message


# Files


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\n\r\ntwo\r\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\n \t\n\n  two  \n", ["one", "  two  "]),  # a byte-order mark; empty lines left out
        (f"caf\xe9 {SMILE}\n".encode(), [f"caf\xe9 {SMILE}"]),
        ("a\u2028b\x0cc\x85d\n".encode(), ["a\u2028b\x0cc\x85d"]),  # only line feeds end a line
        (b'{"prompt": "x"}\n', ['{"prompt": "x"}']),
    ],
)
def test_a_text_file_is_a_prompt_a_line(content, prompts, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(content)
    assert turns(read_prompt_file(tmp_path / "prompts.txt")) == [(prompt,) for prompt in prompts]


def test_a_jsonl_file_holds_prompts_and_turns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one", "category": "writing"},
        {"question_id": 81, "turns": ["two", "three\nlines"]},
        {"turns": ["four"], "prompt": "of both, turns count"},
    ]
    text = "\r\n\r\n".join(json.dumps(line) for line in lines)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert turns(read_prompt_file(path)) == [("one",), ("two", "three\nlines"), ("four",)]


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        '{"prompt": "cut',
        '"a prompt"',
        '["a prompt"]',
        '"turns"',
        "3",
        "null",
        '{"text": "a prompt"}',
        '{"prompt": 3}',
        '{"prompt": null}',
        '{"prompt": " "}',
        '{"prompt": ["a prompt"]}',
        '{"turns": []}',
        '{"turns": "a prompt"}',
        '{"turns": {"a": "prompt"}}',
        '{"turns": ["a prompt", ""]}',
        '{"turns": ["a prompt", 3]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(line, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + '\n{"prompt": "good"}\n')
    wrong = "no JSON object with `prompt` (a text) or `turns` (a list of texts)"
    assert refused(read_prompt_file, path) == f"{path}: line 3: {wrong}; correct the line"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("prompts.csv", b"one", "'.csv' is no kind of prompt file; give .txt or .jsonl"),
        ("prompts", b"one", "'' is no kind of prompt file; "),
        ("prompts.txt", b" \n\r\n", "holds no prompts; give a file with at least one"),
        ("prompts.jsonl", b"", "holds no prompts; "),
        ("prompts.txt", b"caf\xe9", "not readable ('utf-8' codec can't decode byte 0xe9"),
        ("prompts.jsonl", None, "there is no such file; check the path"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert refused(read_prompt_file, tmp_path / name).startswith(f"--prompts: {tmp_path / name}: {words}")


# Options and stdin


def questions(*argv: str) -> tuple[Question, ...]:
    return read_questions(parse_args(["--target", "target", *argv]))


@pytest.fixture
def mt_bench(tmp_path):
    """Three conversations, in FastChat's format."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"{i} first", f"{i} second"]}) + "\n" for i in (1, 2, 3)))
    return str(path)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], [("1 first", "1 second"), ("2 first", "2 second"), ("3 first", "3 second")]),
        (["--limit", "2"], [("1 first", "1 second"), ("2 first", "2 second")]),
        (["--limit", "9", "--first_turns"], [("1 first",), ("2 first",), ("3 first",)]),
        (["--limit", "1", "--first_turns"], [("1 first",)]),
    ],
)
def test_limit_and_first_turns_choose_from_the_file(options, wanted, mt_bench):
    assert turns(questions("--prompts", mt_bench, *options)) == wanted


def test_prompts_come_in_the_order_texts_file_ids(mt_bench):
    """--limit is the file's alone."""
    asked = questions("--prompt_ids", "1,2", "--prompts", mt_bench, "--limit", "1", "--prompt", "a", "--prompt", "b")
    assert asked[:3] == (Question(turns=("a",)), Question(turns=("b",)), Question(turns=("1 first", "1 second")))
    assert asked[3:] == (Question(ids=(1, 2)),)


def test_without_a_prompt_all_of_stdin_is_one(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert questions() == (Question(turns=("two\nlines\n",)),)
    assert questions("--prompt", "Hi") == (Question(turns=("Hi",)),)
    assert questions("--interactive") == ()


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt_is_refused(text, monkeypatch):
    assert refused(questions, "--prompt", text) == "--prompt: is empty; give a text"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert refused(questions) == "stdin: holds no prompt; give one there or with --prompt"


# Conversations


@pytest.fixture(scope="module", params=["bpe_llama3", "bpe_qwen"])
def tokenizer(request):
    return load_tokenizer(FIXTURES / "tokenizers" / request.param)


def test_chat_renders_all_that_was_said(tokenizer):
    dialogue = Dialogue(tokenizer, raw=False, system="You are terse.")
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "First"}]
    assert dialogue.ask("First") == tokenizer.encode_chat(messages)
    dialogue.hear("Answer one.", [1, 2, 3])
    messages += [{"role": "assistant", "content": "Answer one."}, {"role": "user", "content": "Second"}]
    assert dialogue.ask("Second") == tokenizer.encode_chat(messages)


def test_chat_without_a_system_message_leaves_it_to_the_template(tokenizer):
    dialogue = Dialogue(tokenizer, raw=False, system=None)
    assert dialogue.ask("Hi") == tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_raw_strings_texts_and_answers_together_after_one_bos(tokenizer):
    """The ids of the answer as they were made, not its text encoded anew."""
    dialogue = Dialogue(tokenizer, raw=True, system=None)
    first, second = (tokenizer.encode(text, bos=False) for text in ("Once upon", " a time"))
    bos = tokenizer.encode("", bos=True)
    assert dialogue.ask("Once upon") == bos + first
    dialogue.hear("ignored", [7, 8])
    assert dialogue.ask(" a time") == bos + first + [7, 8] + second


def test_a_prompt_handed_out_does_not_grow_with_the_conversation(tokenizer):
    dialogue = Dialogue(tokenizer, raw=True, system=None)
    prompt = dialogue.ask("Hi")
    before = list(prompt)
    dialogue.hear("", [7, 8])
    assert prompt == before


def test_a_question_lists_its_turns_with_the_answers_left_empty(tokenizer):
    question = Question(turns=("First", "Second"))
    said = [
        {"role": role, "content": text} for role, text in (("user", "First"), ("assistant", ""), ("user", "Second"))
    ]
    prompts = question.prompts(Dialogue(tokenizer, raw=False, system=None))
    assert prompts == [tokenizer.encode_chat(said[:1]), tokenizer.encode_chat(said)]
    raw = question.prompts(Dialogue(tokenizer, raw=True, system=None))
    assert raw[1] == tokenizer.encode("First") + tokenizer.encode("Second", bos=False)


def test_prompt_ids_are_taken_as_they_are():
    """No template, no BOS, and no tokenizer needed."""
    assert Question(ids=(5, 6)).prompts(Dialogue(None, raw=True, system=None)) == [[5, 6]]
