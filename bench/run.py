"""The benchmark: plain and speculative decoding side by side, and how near each comes to what memory allows.

    python -m bench.run --speculator PATH_OR_REPO [generate.py's options] [--K 1,2,3] [--repeats N] [--plot FILE.png]

All arms share one loaded pair and answer in turns, question by question; compiling, prefill and one question to warm up
are outside the clock. Prints two tables and, as the last line, one JSON object. A *pass* reads the target once: a plain
step (K = 0) or a round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import generate
import options
from metrics import Answer, describe, ratio, totals
from prompts import QUESTIONS
from speculators_config import MAX_SPECULATIVE_TOKENS, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFILLS = 5
PART_CALLS = 30  # a pass's parts are timed so often, apart from the rest
# A table's columns: heading, and how it shows an arm's record.
LIMITS = (
    "arm {arm} | target layers {megabytes[target_layers]:.1f} | target head {megabytes[target_head]:.1f} | "
    "draft {megabytes[draft]:.1f} | draft head {megabytes[draft_head]:.1f} | cache {megabytes[cache]:.1f} | "
    "sum {megabytes[sum]:.1f} | tokens a pass {tokens_per_pass:.3f} | ceiling, tok/s {ceiling_tokens_per_second:.1f}"
)
MEASURED = (
    "arm {arm} | tok/s {tokens_per_second:.1f} | speed-up {speedup:.2f} | "
    "prefill, tok/s {prefill_tokens_per_second:.0f} | first token, ms {milliseconds[first_token]:.0f} | "
    "draft, ms {milliseconds[draft]:.2f} | verify {milliseconds[verify]:.2f} | rest {milliseconds[rest]:.2f} | "
    "host {milliseconds[host]:.2f} | pass {milliseconds[pass]:.2f} | plain steps {plain_steps_per_pass:.2f} | "
    "share of ceiling {share_of_ceiling:.0%}"
)


# ---- the door --------------------------------------------------------------------------------------------------------


def k_list(text: str) -> tuple[int, ...]:
    """An argparse type: "1,2,3", put in order."""
    return tuple(sorted(set(map(options.number(int, 1, MAX_SPECULATIVE_TOKENS), text.split(",")))))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """generate.py's options and the benchmark's own. Raises ConfigError."""
    parser = options.Parser(prog="python -m bench.run", allow_abbrev=False, description="Measures a speculator.")
    for kind in ("model", "prompt", "sampling", "run"):
        getattr(options, f"add_{kind}_options")(parser)
    add = parser.add_argument_group("the benchmark", "no prompts: six of its own; first turns only").add_argument
    add("--K", type=k_list, metavar="LIST", help="values of K to compare, 1,2,3 (default: the config's)")
    add("--repeats", type=options.number(int, 1), default=3, metavar="N", help="medians over N (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE.png", help="acceptance per position and speed over K; needs matplotlib")
    args = parser.parse_args([options.underscored(arg) for arg in argv])
    options.check_combinations(args)
    alien = [f"--{name}" for name in ("interactive", "baseline", "json", "trace") if getattr(args, name)]
    plot, plain = args.plot, args.speculator is None
    for applies, message in (
        (alien, f"{', '.join(alien)}: not here, where the output is always the same; drop it"),
        (plain and args.K, "--K: needs a draft; give --speculator"),
        (plain and plot, "--plot: needs a draft; give --speculator"),
        (args.K and args.num_speculative_tokens is not None, "--K: excludes --num_speculative_tokens; drop one"),
        (plot and plot.suffix != ".png", f"--plot: {plot}: is no .png file; give FILE.png"),
        (plot and not plot.parent.is_dir(), f"--plot: {plot}: its folder does not exist; make it first"),
        (plot and not importlib.util.find_spec("matplotlib"), "--plot: needs matplotlib; pip install matplotlib"),
    ):
        if applies:
            raise ConfigError(message)
    if not (args.prompt or args.prompts or args.prompt_ids):
        args.prompt = list(QUESTIONS)
    args.first_turns = args.prompts is not None
    return args


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way of decoding: K = 0 is plain."""

    K: int
    session: generate.Session
    repeats: list[list[Answer]] = field(default_factory=list)  # each: one answer per question
    rates: list[float] = field(default_factory=list)  # what the memory gave meanwhile, bytes per second: each answer's

    @property
    def name(self) -> str:
        return f"K = {self.K}" if self.K else "plain"

    def answer(self, prompt: list[int]) -> Answer:
        import torch

        answer = Answer(len(prompt))
        torch.get_device_module(self.session.decoder.state.tokens.device).synchronize()  # of a round left behind
        self.session.decode(prompt, answer, lambda text: None, plain=self.K == 0)
        return answer

    def passes(self, answer: Answer) -> int:
        return len(answer.rounds) if self.K else len(answer.token_ids) - 1

    def share_of_ceiling(self, pass_bytes: float) -> float:
        """The median over all answers of the bytes that they read a second to those that the memory gave meanwhile."""
        answers = [answer for repeat in self.repeats for answer in repeat]
        read = [pass_bytes * ratio(self.passes(answer), answer.decode_seconds) for answer in answers]
        return median(ours / gave for ours, gave in zip(read, self.rates, strict=True))

    def numbers(self) -> dict:
        """Acceptance, and medians over the repeats."""
        speeds, passes, prefills, first = [], [], [], []
        for answers in self.repeats:
            speeds.append(totals(answers, self.K)["tokens_per_second"])
            done = sum(map(self.passes, answers))
            passes.append(1e3 * ratio(sum(answer.decode_seconds for answer in answers), done))
            seconds = [answer.prefill_seconds for answer in answers]
            prefills.append(sum(answer.prompt_tokens for answer in answers) / sum(seconds))
            first += [1e3 * taken for taken in seconds]
        return totals(self.repeats[0], self.K) | {
            "arm": self.name,
            "K": self.K,
            "tokens_per_second": median(speeds),
            "prefill_tokens_per_second": median(prefills),
            "milliseconds": {"first_token": median(first), "pass": median(passes)},
        }


def with_K(plan: generate.Plan, K: int) -> generate.Plan:
    """0 leaves it as it is: there is no draft, or none is wanted."""
    return replace(plan, speculator=replace(plan.speculator, speculative_tokens=K)) if K else plan


def make_arms(plan: generate.Plan, models: list[nn.Module], Ks: tuple[int, ...]) -> tuple[list[Arm], float]:
    """The plain arm and one for each K, warmed up; and the seconds that this, or compiling, took. One pair of models
    and caches serves all; the plain arm runs on the first K's decoder."""
    arms, compiling = [], 0.0
    for K in Ks:
        asked = with_K(plan, K)
        decoder = generate.make_decoder(asked, *models)
        compiling += generate.compile_steps(decoder, plain_too=not arms)
        if not arms:
            arms.append(Arm(0, generate.Session(asked, decoder, [])))
        if K > 0:
            arms.append(Arm(K, generate.Session(asked, decoder, [])))
    return arms, compiling


def ask(arms: list[Arm], prompts: list[list[int]], repeats: int, probe: Callable[[], dict]) -> list[dict[str, float]]:
    """Fills the arms' repeats and rates; each question is put to all arms before the next. Returns what `probe` gave
    between the answers: what the memory gives changes within seconds, with what else the machine does."""
    for arm in arms:
        arm.answer(prompts[0])  # unmeasured: what is slow only the first time
    done, total = 0, repeats * len(prompts) * len(arms)
    gave = [probe()]
    for _ in range(repeats):
        for arm in arms:
            arm.repeats.append([])
        for prompt in prompts:
            for arm in arms:
                options.show_progress(done, total, arm.name)
                arm.repeats[-1].append(arm.answer(prompt))
                gave.append(probe())
                arm.rates.append((max(gave[-2].values()) + max(gave[-1].values())) / 2)
                done += 1
    options.show_progress(done, total, "")
    return gave


def time_parts(arm: Arm, models: list[nn.Module], prompt: list[int]) -> dict[str, float]:
    """Median milliseconds behind `prompt` of a pass's drafting and of its verification, each a call of its own, and of
    what else the whole call takes.

    They take turns, as in a round: called alone, a small draft would stay in the processor's cache."""
    import torch

    from speculate import compile_call

    K, decoder, state, target, draft = arm.K, arm.session.decoder, arm.session.decoder.state, models[0], models[-1]

    def positions(first: Tensor) -> Tensor:
        return first[:, None] + torch.arange(K + 1, device=first.device)

    def propose() -> Tensor:
        where = positions(state.length - state.count)
        return draft.propose(state.tokens, state.aux, where, state.count - 1, K, state.pick)[0]

    def verify() -> Tensor:
        return target.logits(target(state.tokens[:, : K + 1], positions(state.length))[0]).argmax(-1)

    calls = {"draft": propose, "verify": verify} if K else {"verify": verify}
    if arm.session.plan.args.compile:
        calls = {part: compile_call(call, state.tokens.is_cuda) for part, call in calls.items()}
    calls["whole"] = decoder.steps.round if K else decoder.steps.plain
    taken = {part: [] for part in calls}
    decoder.start(prompt)
    with torch.inference_mode():
        length, count = state.length.clone(), state.count.clone()
        for _ in range(3 + PART_CALLS):  # three as in Decoder.warm_up
            state.length.copy_(length)
            state.count.copy_(count)
            for part, call in calls.items():
                began = time.perf_counter()
                call().tolist()
                taken[part].append(1e3 * (time.perf_counter() - began))
    parts = {"draft": 0.0} | {part: median(values[3:]) for part, values in taken.items()}
    return parts | {"rest": parts["whole"] - parts["draft"] - parts["verify"]}


def time_prefill(arm: Arm, models: list[nn.Module]) -> dict:
    """The longest prompt that the caches hold, at most 1000 tokens, against what matrix products reach here."""
    from bench.bandwidth import matrix_rate, prefill_flops

    plan, decoder, weight = arm.session.plan, arm.session.decoder, models[0].norm.weight
    tokens = min(1000, plan.max_seq_len)
    taken, rates = [], []
    for _ in range(PREFILLS):  # in turns: the machine's speed changes
        began = time.perf_counter()
        decoder.start([17 * i % plan.target.vocab_size for i in range(tokens)])
        taken.append(time.perf_counter() - began)
        rates.append(matrix_rate(weight.device, weight.dtype))
    reached = prefill_flops(models[0], models[1] if len(models) > 1 else None, tokens) / median(taken)
    return {
        "tokens": tokens, "tokens_per_second": tokens / median(taken), "flops_per_second": reached,
        "matrix_rate": median(rates), "share_of_matrix_rate": reached / median(rates),
    }  # fmt: skip


def peak_memory(device: str) -> int:
    """Bytes in use at most so far: the GPU's, else this process's; 0 where the system has no /proc."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0


def measure(plan: generate.Plan) -> dict:
    """Everything: the JSON object."""
    import torch

    from bench.bandwidth import bandwidth_meter, held_bytes, pass_bytes

    args, Ks = plan.args, plan.args.K or (plan.K,)
    plan, device = with_K(plan, Ks[0]), generate.choose_device(args.device)
    base = peak_memory(device.type)  # what `import torch` takes is not the run's
    began = time.perf_counter()
    models = generate.load_models(plan)
    load_seconds, memory = time.perf_counter() - began, {"loaded": peak_memory(device.type) - base}
    generate.say("loaded; compiling ..." if args.compile else "loaded")
    arms, compile_seconds = make_arms(plan, models, Ks)
    memory["compiled"] = peak_memory(device.type) - base
    prompts = [question.prompts(plan.dialogue())[0] for question in plan.questions]
    with bandwidth_meter(device) as probe:
        gave = ask(arms, prompts, args.repeats, probe)
    rates = {kind: median(rate[kind] for rate in gave) for kind in gave[0]}
    memory |= {"peak": peak_memory(device.type) - base, "weights": held_bytes(*models)}
    memory |= {"caches": held_bytes(*models, caches=True)}
    plain = arms[0].repeats[0]
    steps = [(len(answer.token_ids) - 1, answer.prompt_tokens) for answer in plain]
    context = ratio(sum(n * (prompt + n / 2) for n, prompt in steps), sum(n for n, _ in steps))
    behind = (prompts[0] * plan.max_seq_len)[: max(1, int(context))]
    records = [arm.numbers() for arm in arms]
    for arm, record in zip(arms, records, strict=True):
        record["milliseconds"] |= time_parts(arm, models, behind)
        parts = pass_bytes(models[0], models[-1], arm.K, context)
        record["megabytes"] = {part: size / 1e6 for part, size in parts.items()}
        record["share_of_ceiling"] = arm.share_of_ceiling(sum(parts.values()))
        pairs = zip(arm.repeats[0], plain, strict=True)
        record["differing_answers"] = sum(ours.token_ids != theirs.token_ids for ours, theirs in pairs)
    prefill = time_prefill(arms[0], models)
    for record in records:
        compare(record, records[0], max(rates.values()))
    return {
        "target": plan.target_name, "speculator": args.speculator, "device": device.type, "dtype": plan.dtype,
        "torch": torch.__version__, "threads": torch.get_num_threads(), "compiled": args.compile,
        "temperature": args.temperature, "questions": len(prompts), "repeats": args.repeats,
        "max_new_tokens": args.max_new_tokens, "max_seq_len": plan.max_seq_len, "context": context,
        "load_seconds": load_seconds, "compile_seconds": compile_seconds, "bandwidth": rates, "memory": memory,
        "prefill": prefill,
        "arms": records,
    }  # fmt: skip


def compare(record: dict, plain: dict, bandwidth: float) -> None:
    """Adds an arm's ceiling, at `bandwidth` bytes per second, and its ratios to that and to the plain arm."""
    record["megabytes"]["sum"] = read = sum(record["megabytes"].values())
    record["tokens_per_pass"] = record["acceptance_length"] or 1.0
    record["ceiling_tokens_per_second"] = record["tokens_per_pass"] * bandwidth / (1e6 * read)
    record["speedup"] = ratio(record["tokens_per_second"], plain["tokens_per_second"])
    times = record["milliseconds"]
    times["host"] = times["pass"] - times.pop("whole")
    record["plain_steps_per_pass"] = ratio(times["pass"], plain["milliseconds"]["pass"])


# ---- reporting -------------------------------------------------------------------------------------------------------


def table(columns: str, records: list[dict]) -> str:
    """Aligned, in Markdown."""
    cells = [column.partition("{") for column in columns.split(" | ")]
    rows = [[heading.strip() for heading, _, _ in cells]]
    rows += [[(brace + form).format_map(record) for _, brace, form in cells] for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def report(run: dict) -> str:
    """For people, from `measure`: what limits the run, what it did, the share of the limit that it reached."""
    arms, greedy = run["arms"], run["temperature"] == 0
    memory = {key: size / 1e6 for key, size in run["memory"].items()}
    share = (memory["peak"] - memory["caches"]) / memory["weights"]
    rates = ", ".join(f"{kind} {rate / 1e9:.1f}" for kind, rate in run["bandwidth"].items())
    why = "a bug, unless an exact tie" if run["dtype"] == "float32" else "near-ties fall otherwise in 16 bits"
    differing = [
        f"{arm['arm']}: {arm['differing_answers']} of {run['questions']} answers differ from plain decoding's ({why})"
        for arm in arms
        if greedy and arm["differing_answers"]
    ]
    return "\n".join((
        f"{run['target']}, {run['dtype']} on {run['device']}, {'compiled' if run['compiled'] else 'eager'}, "
        f"torch {run['torch']}, {run['threads']} threads; {run['questions']} questions x {run['repeats']}, "
        f"{run['max_new_tokens']} new tokens, {'greedy' if greedy else 'sampled'}",
        f"\nbetween the answers the memory gave, GB/s: {rates}\n"
        f"MB read in a pass, at {run['context']:.0f} tokens of context (the mean):",
        table(LIMITS, arms),
        "",
        *(f"{arm['arm']}: {describe(arm)}" for arm in arms),
        *(differing or ["every answer is plain decoding's, token for token"] * (greedy and len(arms) > 1)),
        "memory besides import torch: peak {peak:.0f} MB (loading {loaded:.0f}, compiling {compiled:.0f}); weights "
        "{weights:.0f}, caches {caches:.0f}; peak = {share:.2f} x weights + caches".format(share=share, **memory),
        "a prompt of {tokens} tokens: {tokens_per_second:.0f} tok/s, {share_of_matrix_rate:.0%} of the rate of torch's "
        "matrix products".format_map(run["prefill"]),
        f"loaded in {run['load_seconds']:.1f} s, compiled in {run['compile_seconds']:.1f} s",
        f"\nMedians of {run['repeats']}. A pass: draft and verify called apart, the rest of the call, the host's part; "
        "share of ceiling: by what the memory gave before and after each answer",
        table(MEASURED, arms),
    ))  # fmt: skip


def plot(arms: list[dict], path: Path) -> None:
    """Acceptance per position, and tokens per second over K."""
    from matplotlib.figure import Figure

    values, figure = [arm["K"] for arm in arms], Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm in arms[1:]:
        left.plot(range(1, arm["K"] + 1), arm["acceptance_per_position"], "o-", label=arm["arm"])
    left.set(xlabel="drafted token", ylabel="accepted, share of rounds", ylim=(0, 1), xticks=range(1, values[-1] + 1))
    for label, key in (("measured", "tokens_per_second"), ("ceiling", "ceiling_tokens_per_second")):
        right.plot(values, [arm[key] for arm in arms], "o-", label=label)
    right.set(xlabel="K (0: plain decoding)", ylabel="tokens per second", ylim=(0, None), xticks=values)
    for axes in (left, right):
        axes.legend()
    figure.savefig(path)


def run_all(argv: list[str]) -> None:
    """Raises ConfigError."""
    args = parse_args(argv)
    run = measure(generate.make_plan(args))
    print(report(run), json.dumps(run), sep="\n\n", flush=True)
    if args.plot:
        plot(run["arms"], args.plot)


def main(argv: list[str]) -> int:
    """Returns the exit code, as generate.main does."""
    return options.exit_code(lambda: run_all(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
