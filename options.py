"""The command line: options, their ranges, which of them go together, and how a command ends. Knows no config and no
model."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from speculators_config import MAX_SPECULATIVE_TOKENS, ConfigError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        message = message.removeprefix("argument ") if message.startswith("argument --") else f"options: {message}"
        raise ConfigError(f"{message}; see --help")


def number(kind: type, low: float, high: float = float("inf"), above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number of `kind` in [low, high], or in (low, high] where it must be above."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not {'an integer' if kind is int else 'a number'}") from None
        if not low <= value <= high or value == float("inf") or (above and value == low):
            upper = f" and at most {high}" if high < float("inf") else ""
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if above else 'at least'} {low}{upper}")
        return value

    return parse


def directory(text: str) -> Path:
    """An argparse type. The shell leaves the ~ of --out=~/DIR alone."""
    return Path(os.path.expanduser(text))


def id_list(text: str) -> tuple[int, ...]:
    """An argparse type: "1,2,3"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"'{shown}' is not a list of ids like 1,2,3") from None


def parse_args(
    argv: list[str], prog: str = "generate.py", description: str = "Runs a speculators checkpoint on prompts."
) -> argparse.Namespace:
    """Options are spelled with underscores; dashes are accepted as well. Raises ConfigError."""
    parser = Parser(prog=prog, allow_abbrev=False, description=description)
    for add in (add_model_options, add_prompt_options, add_sampling_options, add_run_options):
        add(parser)
    args = parser.parse_args([underscored(arg) for arg in argv])
    check_combinations(args)
    return args


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to run").add_argument
    add("--speculator", metavar="PATH_OR_REPO", help="a draft in speculators format; none: plain decoding of --target")
    add("--target", metavar="PATH_OR_REPO", help="default: the one that the speculator's config names")
    tokens = number(int, 0, MAX_SPECULATIVE_TOKENS)
    add("--num_speculative_tokens", type=tokens, metavar="K", help="tokens drafted a round (default: the config's)")
    add(
        "--aux_layer_ids",
        type=id_list,
        metavar="IDS",
        help="layers whose input feeds the draft (default: the config's)",
    )
    add("--draft_rope_theta", type=number(float, 1, above=True), metavar="F", help="default: the config's")
    add("--norm_before_residual", choices=("true", "false"), help="default: the config's")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "each is one answer; default: chat, or all of stdin as one prompt")
    add = group.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    add("--prompts", type=Path, metavar="FILE", help=".txt: one a line; .jsonl: objects with `prompt` or `turns`")
    add("--prompt_ids", type=id_list, action="append", default=[], metavar="IDS", help="repeatable; token ids, 1,2,3")
    add("--limit", type=number(int, 1), metavar="N", help="only the first N of --prompts")
    add("--first_turns", action="store_true", help="only the first turn of each conversation in --prompts")
    add("--interactive", action="store_true", help="chat in the terminal")
    add("--system", metavar="TEXT", help="the system message (default: the chat template's own)")
    add("--raw", action="store_true", help="do not apply the target's chat template")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling and stopping").add_argument
    add("--max_new_tokens", type=number(int, 1), default=256, metavar="N", help="of each answer (default: %(default)s)")
    add("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top_k", type=number(int, 1, 2**31 - 1), metavar="K", help="sample among the K most likely tokens")
    share = number(float, 0, 1, above=True)
    add("--top_p", type=share, metavar="P", help="sample among the likeliest tokens that together hold P")
    add(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="restarts with every prompt (default: 0)"
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="repeatable; ends the answer and is not printed")
    add("--ignore_eos", action="store_true", help="go on after an end-of-sequence token")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the run").add_argument
    add("--max_seq_len", type=number(int, 1), metavar="N", help="prompt + new tokens (default: what the run needs)")
    add("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help="auto: the target checkpoint's")
    add("--device", choices=("auto", "cuda", "cpu", "mps"), default="auto", help="auto: cuda if there is one, else cpu")
    add("--compile", action="store_true", default=True, help="the default")
    add("--no_compile", dest="compile", action="store_false", help="run eagerly: starts at once, decodes more slowly")
    add("--baseline", action="store_true", help="decode each prompt plainly as well and compare")
    add("--json", action="store_true", help="stdout holds one JSON object and nothing else")
    add("--trace", action="store_true", help="with --json: what each round proposed and accepted")


def underscored(arg: str) -> str:
    """--max-new-tokens=5 -> --max_new_tokens=5; values stay as they are, also those that look like an option."""
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if re.fullmatch(r"--[\w-]+", name) else arg


def check_combinations(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that contradict each other or would have no effect."""
    plain = args.speculator is None
    asked = args.prompt or args.prompts or args.prompt_ids
    filtered = args.limit or args.first_turns
    for applies, message in (
        (plain and args.target is None, "--speculator: missing; give one, or --target alone to decode plainly"),
        (plain and args.num_speculative_tokens, "--num_speculative_tokens: needs a draft; give --speculator"),
        (plain and args.aux_layer_ids, "--aux_layer_ids: needs a draft; give --speculator"),
        (plain and args.draft_rope_theta, "--draft_rope_theta: needs a draft; give --speculator"),
        (plain and args.norm_before_residual, "--norm_before_residual: needs a draft; give --speculator"),
        (args.interactive and asked, "--interactive: takes its prompts from the terminal; drop the others"),
        (args.interactive and args.json, "--interactive: does not go with --json; drop one of them"),
        (args.trace and not args.json, "--trace: is part of the JSON; add --json"),
        (args.system is not None and args.raw, "--system: needs the chat template; drop --raw"),
        ("" in args.stop, "--stop: is empty; give a text"),
        (filtered and not args.prompts, "--limit, --first_turns: choose from a file; give --prompts"),
        (
            os.environ.get("WORLD_SIZE", "1") not in ("", "1"),
            "WORLD_SIZE: several processes are not implemented; run one",
        ),
    ):
        if applies:
            raise ConfigError(message)


# ---- what a command says and how it ends ----------------------------------------------------------------------------


def say(line: str) -> None:
    """Notices, statistics and errors: stderr."""
    print(line, file=sys.stderr, flush=True)


def show_progress(done: int, total: int, name: str) -> None:
    """One line on stderr, if that is a terminal; gone when all is done."""
    if sys.stderr.isatty():
        bar = f"[{'#' * (30 * done // total):.<30}] {done}/{total} {name}" if done < total else ""
        print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def exit_code(work: Callable[[], None], interrupted: str = "interrupted") -> int:
    """Runs any other command than generate.py; what the user can fix, and Ctrl-C, are one line. Also where it is
    terminated it puts away what is half-written."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        work()
    except ConfigError as error:
        say("error: " + " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        say(f"\n{interrupted}")
        return 130
    return 0
