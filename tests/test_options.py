"""The command line: every option of the contract with its default, ranges and combinations, and what is said."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from options import parse_args, show_progress
from speculators_config import ConfigError

ROOT = Path(__file__).parent.parent
DRAFT, TARGET = ["--speculator", "draft"], ["--target", "target"]
DEFAULTS = {
    "speculator": "draft",
    "target": None,
    "num_speculative_tokens": None,
    "aux_layer_ids": None,
    "draft_rope_theta": None,
    "norm_before_residual": None,
    "prompt": [],
    "prompts": None,
    "prompt_ids": [],
    "limit": None,
    "first_turns": False,
    "interactive": False,
    "system": None,
    "raw": False,
    "max_new_tokens": 256,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "seed": 0,
    "stop": [],
    "ignore_eos": False,
    "max_seq_len": None,
    "dtype": "auto",
    "device": "auto",
    "compile": True,
    "baseline": False,
    "json": False,
    "trace": False,
}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def refused(argv: list[str]) -> str:
    """What is said, on one line: `<option>: <what is wrong>; <what to do>`."""
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    message = str(caught.value)
    assert re.fullmatch(r"(--[a-z_]+(, --[a-z_]+)*|options|WORLD_SIZE): [^;]+; [^;\n]+", message), message
    return message


def test_every_option_has_its_default():
    assert vars(parse_args(DRAFT)) == DEFAULTS


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--target org/model", "target", "org/model"),
        ("--num_speculative_tokens 5", "num_speculative_tokens", 5),
        ("--num_speculative_tokens 0", "num_speculative_tokens", 0),
        ("--aux_layer_ids 2,15,27", "aux_layer_ids", (2, 15, 27)),
        ("--draft_rope_theta 1e6", "draft_rope_theta", 1e6),
        ("--norm_before_residual false", "norm_before_residual", "false"),
        ("--prompt a --prompt b", "prompt", ["a", "b"]),
        ("--prompts file.txt", "prompts", Path("file.txt")),
        ("--prompt_ids 1,2,3 --prompt_ids 7", "prompt_ids", [(1, 2, 3), (7,)]),
        ("--prompts f.txt --limit 3", "limit", 3),
        ("--prompts f.jsonl --first_turns", "first_turns", True),
        ("--interactive", "interactive", True),
        ("--system terse", "system", "terse"),
        ("--raw", "raw", True),
        ("--max_new_tokens 1", "max_new_tokens", 1),
        ("--temperature 0.7", "temperature", 0.7),
        ("--top_k 1", "top_k", 1),
        ("--top_p 1", "top_p", 1.0),
        ("--seed 9223372036854775807", "seed", 2**63 - 1),
        ("--stop END --stop Q:", "stop", ["END", "Q:"]),
        ("--ignore_eos", "ignore_eos", True),
        ("--max_seq_len 512", "max_seq_len", 512),
        ("--dtype fp16", "dtype", "fp16"),
        ("--device mps", "device", "mps"),
        ("--no_compile --compile", "compile", True),
        ("--no_compile", "compile", False),
        ("--baseline", "baseline", True),
        ("--json", "json", True),
        ("--json --trace", "trace", True),
    ],
)
def test_every_option_is_taken_with_underscores_and_with_dashes(argv, name, value):
    words = argv.split()
    dashed = ["--" + word[2:].replace("_", "-") if word.startswith("--") else word for word in words]
    assert getattr(parse_args(DRAFT + words), name) == value
    assert parse_args(DRAFT + dashed) == parse_args(DRAFT + words)


@pytest.mark.parametrize("text", ["a-b_c", "--well-known words", "- a list", "-1", "a=b-c", ""])
def test_values_with_dashes_are_left_alone(text):
    assert parse_args([*DRAFT, "--prompt", text]).prompt == [text]
    assert parse_args([*DRAFT, f"--prompt={text}"]).prompt == [text]
    assert parse_args([*DRAFT, "--prompt=--no-compile"]).prompt == ["--no-compile"]
    assert parse_args([*DRAFT, "--max-new-tokens=5"]).max_new_tokens == 5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num_speculative_tokens -1", "--num_speculative_tokens: -1 is not at least 0 and at most 64; see --help"),
        ("--num_speculative_tokens 65", "--num_speculative_tokens: 65 is not at least 0 and at most 64"),
        ("--num-speculative-tokens 1.5", "--num_speculative_tokens: '1.5' is not an integer"),
        ("--max_new_tokens 0", "--max_new_tokens: 0 is not at least 1"),
        ("--max_seq_len 0", "--max_seq_len: 0 is not at least 1"),
        ("--limit 0", "--limit: 0 is not at least 1"),
        ("--temperature -0.5", "--temperature: -0.5 is not at least 0"),
        ("--temperature nan", "--temperature: nan is not at least 0"),
        ("--temperature inf", "--temperature: inf is not at least 0"),
        ("--temperature hot", "--temperature: 'hot' is not a number"),
        ("--top_k 0", "--top_k: 0 is not at least 1"),
        ("--top_p 0", "--top_p: 0 is not above 0 and at most 1"),
        ("--top_p 1.5", "--top_p: 1.5 is not above 0 and at most 1"),
        ("--seed -1", "--seed: -1 is not at least 0"),
        ("--draft_rope_theta 0", "--draft_rope_theta: 0 is not above 1"),
        ("--aux_layer_ids 2-15", "--aux_layer_ids: '2-15' is not a list of ids like 1,2,3"),
        ("--prompt_ids 1,,2", "--prompt_ids: '1,,2' is not a list of ids like 1,2,3"),
        (f"--prompt_ids {'1x' * 900}", f"--prompt_ids: '{'1x' * 20}...' is not a list of ids like 1,2,3"),
        ("--norm_before_residual yes", "--norm_before_residual: invalid choice: 'yes'"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--prompt", "--prompt: expected one argument"),
        ("--max_new 5", "options: unrecognized arguments: --max_new 5"),  # no abbreviations
        ("--chat", "options: unrecognized arguments: --chat"),
        ("stray", "options: unrecognized arguments: stray"),
    ],
)
def test_values_out_of_range_are_refused(argv, message):
    said = refused(DRAFT + argv.split())
    assert said.startswith(message)
    assert said.endswith("; see --help")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--speculator: missing; give one, or --target alone to decode plainly"),
        (["--prompt", "Hi"], "--speculator: missing; "),
        ([*TARGET, "--num_speculative_tokens", "3"], "--num_speculative_tokens: needs a draft; give --speculator"),
        ([*TARGET, "--aux_layer_ids", "1,2"], "--aux_layer_ids: needs a draft"),
        ([*TARGET, "--draft_rope_theta", "1e4"], "--draft_rope_theta: needs a draft"),
        ([*TARGET, "--norm_before_residual", "true"], "--norm_before_residual: needs a draft"),
        ([*DRAFT, "--interactive", "--prompt", "Hi"], "--interactive: takes its prompts from the terminal; drop the"),
        ([*DRAFT, "--interactive", "--prompts", "f.txt"], "--interactive: takes its prompts from the terminal; "),
        ([*DRAFT, "--interactive", "--prompt_ids", "1"], "--interactive: takes its prompts from the terminal; "),
        ([*DRAFT, "--interactive", "--json"], "--interactive: does not go with --json; drop one of them"),
        ([*DRAFT, "--trace"], "--trace: is part of the JSON; add --json"),
        ([*DRAFT, "--system", "", "--raw"], "--system: needs the chat template; drop --raw"),
        ([*DRAFT, "--stop", ""], "--stop: is empty; give a text"),
        ([*DRAFT, "--limit", "1"], "--limit, --first_turns: choose from a file; give --prompts"),
        ([*DRAFT, "--first_turns", "--prompt", "Hi"], "--limit, --first_turns: choose from a file; give --prompts"),
    ],
)
def test_options_that_do_not_go_together_are_refused(argv, message):
    assert refused(argv).startswith(message)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(DRAFT) == "WORLD_SIZE: several processes are not implemented; run one"
    monkeypatch.setenv("WORLD_SIZE", "1")
    parse_args(DRAFT)


@pytest.mark.parametrize("argv", [TARGET, [*TARGET, "--num_speculative_tokens", "0"], [*DRAFT, *TARGET]])
def test_plain_decoding_needs_no_speculator(argv):
    assert parse_args(argv).target == "target"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    told = set(re.findall(r"--([a-z_]+)", capsys.readouterr().out))
    assert told == {*DEFAULTS, "no_compile", "help"}


def test_messages_name_no_option_or_file_that_does_not_exist():
    """Advice that cannot be followed is worse than none; nor may a message send people to a file that is not there."""
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    options = {*DEFAULTS, "no_compile", "help", *re.findall(r'add\(\s*"--(\w+)"', sources)}
    files = {path.name for path in ROOT.glob("*.py")}
    for path in ROOT.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert {name.replace("-", "_") for name in re.findall(r"--([a-z][\w-]+)", source)} <= options, path.name
        assert set(re.findall(r"\w+\.py\b", source)) <= files, path.name


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--temperature", "hot"], "error: --temperature: 'hot' is not a number; see --help"),
        (["--speculator", "x", "--trace"], "error: --trace: is part of the JSON; add --json"),
    ],
)
def test_the_command_says_one_line_and_exits_with_2(argv, line):
    run = subprocess.run([sys.executable, ROOT / "generate.py", *argv], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", line + "\n")


def test_help_of_the_command():
    run = subprocess.run([sys.executable, ROOT / "generate.py", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: generate.py ")


def test_the_progress_bar_is_for_terminals(monkeypatch, capsys):
    show_progress(1, 4, "plain")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show_progress(1, 3, "plain")
    assert capsys.readouterr().err.endswith("[##########....................] 1/3 plain")
