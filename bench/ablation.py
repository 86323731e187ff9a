"""What each part of the CPU path buys: the same pair again and again, each time without one of them.

    python -m bench.ablation --speculator PATH_OR_REPO [generate.py's options]

All variants are loaded and compiled first, then take turns behind the first prompt; medians. Nothing here is an option
of generate.py: nobody needs the slower ways, so they are put in from outside.
"""

import mmap
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from unittest.mock import patch

from torch import nn

import cpu_kernels
import generate
import options
from bench.run import table
from model import Block, Stack
from prompts import QUESTIONS
from speculate import Decoder
from speculators_config import ConfigError

TURNS, STEPS = 7, 20
COLUMNS = (
    "left out {name} | plain step, ms {plain:.2f} | times {plain_ratio:.2f} | round, ms {round:.2f} | "
    "times {round_ratio:.2f}"
)


def keeping(kinds: tuple[type[nn.Module], ...]) -> Callable:
    """In place of cpu_kernels.replacement: modules of these kinds stay torch's."""
    replace = cpu_kernels.replacement
    return lambda module, *packing: module if isinstance(module, kinds) else replace(module, *packing)


NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", 0)
LEFT_OUT: dict[str, Callable[[], AbstractContextManager]] = {
    "nothing": nullcontext,
    "huge pages": lambda: patch.object(mmap, "MADV_HUGEPAGE", NO_HUGE_PAGES, create=True),
    "one operator for all layers": lambda: patch.object(cpu_kernels, "replacement", keeping((Stack,))),
    "layers as operators": lambda: patch.object(cpu_kernels, "replacement", keeping((Stack, Block))),
    "our operators": lambda: patch.object(cpu_kernels, "install", lambda *models: None),
}


def make(plan: generate.Plan, left_out: str) -> Decoder:
    """A decoder without `left_out`, compiled."""
    generate.say(f"without {left_out} ...")
    with LEFT_OUT[left_out]():
        decoder = generate.make_decoder(plan, *generate.load_models(plan))
        generate.compile_steps(decoder, plain_too=True)
    return decoder


def milliseconds(decoder: Decoder, prompt: list[int], plain: bool) -> float:
    """The median of STEPS calls behind `prompt`."""
    decoder.start(prompt)
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        decoder.round(plain)
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken)


def measure(plan: generate.Plan) -> list[dict]:
    """One record a variant, the first with everything in."""
    prompt = plan.questions[0].prompts(plan.dialogue())[0]
    made = {name: make(plan, name) for name in LEFT_OUT}
    taken = {name: {"plain": [], "round": []} for name in made}
    for _ in range(TURNS):
        for name, decoder in made.items():
            for kind, values in taken[name].items():
                values.append(milliseconds(decoder, prompt, plain=kind == "plain"))
    records = []
    for name, times in taken.items():
        record = {kind: median(values) for kind, values in times.items()}
        first = records[0] if records else record
        ratios = {f"{kind}_ratio": record[kind] / first[kind] for kind in ("plain", "round")}
        records.append(record | ratios | {"name": name})
    return records


def run(argv: list[str]) -> None:
    """Raises ConfigError."""
    args = options.parse_args(argv, "python -m bench.ablation", "Measures what each part of the CPU path buys.")
    alien = [f"--{name}" for name in ("interactive", "baseline", "json", "trace") if getattr(args, name)]
    if alien:
        raise ConfigError(f"{', '.join(alien)}: not here, where the output is always the same; drop it")
    if not args.compile:
        raise ConfigError("--no_compile: what is left out here is of compiled runs; drop it")
    if args.speculator is None or args.num_speculative_tokens == 0:
        raise ConfigError("--speculator: missing, and rounds are measured; give one, and K of at least 1")
    if generate.choose_device(args.device).type != "cpu":
        raise ConfigError("--device: what is left out here is of runs on the CPU; give cpu")
    if not (args.prompt or args.prompts or args.prompt_ids):
        args.prompt = list(QUESTIONS[:1])
    plan = generate.make_plan(args)
    if (tokens := STEPS * (plan.K + 1)) > args.max_new_tokens:
        raise ConfigError(f"--max_new_tokens: {args.max_new_tokens}: the {STEPS} timed rounds need {tokens}; raise it")
    print(table(COLUMNS, measure(plan)))


def main(argv: list[str]) -> int:
    """Returns the exit code, as generate.main does."""
    return options.exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
