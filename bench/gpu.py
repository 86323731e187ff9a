"""What needs a GPU, in one go: is a round one graph that nothing disturbs, and how near does it come to the memory?

    python -m bench.gpu [--device cpu --tiny]      (bench/gpu.sh sets it up)

First checks, on the demo pair; then its speeds (bench.run); last a *synthetic* pair: Llama-3.1-8B's shapes, random
weights, and drafted tokens that are accepted by a fixed pattern. It reads what a real pair reads; its text is noise.
Exit codes: 0 all checks passed, 1 one failed, 2 something the user can fix. The last line is one JSON object.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn

import generate
import options
import speculate
from bench import bandwidth, run
from eagle3 import Eagle3
from eight_bit import EightBitLinear, quantised
from model import Transformer
from prompts import QUESTIONS
from speculate import Decoder, Round, State
from speculators_config import ConfigError, DecoderConfig, Rope, SpeculatorConfig

DEMO = "demo/SmolLM2-135M-Instruct"
CHECKED_KS = (1, 2, 3, 4, 5)
CHECKED_ROUNDS = 20  # of each answer
# How many drafted tokens each round accepts, again and again. The acceptance lengths, one more than the means, are
# published ones of Llama-3.1-8B on MT-Bench: 2.60 at K = 3 and 3.32 at K = 5.
FORCED = {0: (0,), 3: (3, 0, 2, 1, 2), 5: (5, 0, 3, 1, 2) * 2 + (5, 0, 3, 1, 3) * 3}
GOALS = 0.85, 0.75  # plain and speculative, shares of the copy bandwidth
CONTEXT = 1024  # tokens, at the end of an answer
TIMED_ROUNDS = 25  # of each answer: whole repetitions of every pattern
REPEATS = 5
LINEAR_ROWS = (1, 4, 8)
LINE = (
    "synthetic, K = {K}: {milliseconds_per_round:.2f} ms a round, {gigabytes_per_round:.2f} GB at "
    "{gigabytes_per_second:.0f} GB/s = {share_of_bandwidth:.0%} of the copy bandwidth (goal: {goal:.0%}); "
    "{tokens_per_second:.0f} tok/s at a forced acceptance length of {forced_acceptance_length:.2f}"
)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(outcomes: dict[str, str], name: str, test: Callable[[], str | None]) -> None:
    """Runs one check and prints its line. test returns what is wrong, or None; what torch raises is wrong as well."""
    try:
        wrong = test()
    except Exception as error:
        traceback.print_exc()
        wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    outcomes[name] = f"FAILED: {wrong}" if wrong else "ok"
    print(f"{name}: {outcomes[name]}", flush=True)


def answer(decoder: Decoder, prompt: list[int]) -> list[int | Round]:
    """The first token, and what the rounds after it proposed, accepted and emitted."""
    return [decoder.start(prompt)[0], *(decoder.round() for _ in range(CHECKED_ROUNDS))]


def difference(decoder: Decoder, eager: Decoder, prompts: list[list[int]]) -> str | None:
    """Proposals are compared as well: a target hides what is wrong with its draft."""
    decoder.warm_up(plain_too=False)
    for i, prompt in enumerate(prompts, 1):
        for done, wanted in zip(answer(decoder, prompt), answer(eager, prompt), strict=True):
            if done != wanted:
                return f"prompt {i}: {done}, eagerly {wanted}"
    return None


def memory_growth(decoder: Decoder, prompts: list[list[int]]) -> str | None:
    """After the second prompt there is nothing left to allocate."""
    held = []
    for prompt in prompts:
        answer(decoder, prompt)
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    return None if held[-1] == held[-2] else f"bytes allocated and reserved after each prompt: {held}"


def launches(decoder: Decoder, prompts: list[list[int]]) -> str | None:
    """A round is one replay and one wait, for its result, and nothing is launched beside the graph."""
    decoder.start(prompts[0])
    decoder.round()  # queues two, as the decoder runs ahead; from here on it is one for one
    with torch.profiler.profile() as profiler:
        for _ in range(CHECKED_ROUNDS):
            decoder.round()
    calls = Counter({event.key: event.count for event in profiler.key_averages()})
    kernels = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    waiting = calls["cudaStreamSynchronize"] + calls["cudaEventSynchronize"]
    found = f"{calls['cudaGraphLaunch']} graphs, {kernels} kernels beside them and {waiting} waits"
    return None if found == f"{CHECKED_ROUNDS} graphs, 0 kernels beside them and {CHECKED_ROUNDS} waits" else found


def waits(decoder: Decoder, prompts: list[list[int]]) -> str | None:
    """torch raises, in this mode, where the host waits for the device."""
    decoder.start(prompts[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            for _ in range(CHECKED_ROUNDS):
                decoder.steps.round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def check_round(outcomes: dict[str, str], plan: generate.Plan) -> None:
    """Fills outcomes. Only the last K's prefill is compiled as well: the round is what K changes."""
    target, draft = generate.load_models(plan)
    prompts = [question.prompts(plan.dialogue())[0] for question in plan.questions]
    for K in CHECKED_KS:
        decoder = generate.make_decoder(run.with_K(plan, K), target, draft)
        eager = Decoder(speculate.build_steps(target, draft, decoder.state, compiled=False), decoder.state)
        if max(CHECKED_KS) > K:
            decoder.steps = replace(decoder.steps, prefill=eager.steps.prefill)
        name = f"{'compiled' if plan.args.compile else 'eager'} = eager, K = {K}"
        check(outcomes, name, partial(difference, decoder, eager, prompts))
    for name, test, tested in (
        ("memory is flat after two prompts", memory_growth, decoder),
        ("one graph launch and one wait a round", launches, decoder),
        ("no wait inside a round", waits, decoder),
        ("no wait inside an eager round", waits, eager),
    ):
        if decoder.state.tokens.is_cuda:
            check(outcomes, name, partial(test, tested, prompts))
        else:
            outcomes[name] = "skipped: no CUDA"
            print(f"{name}: {outcomes[name]}")


# ---- the synthetic pair ----------------------------------------------------------------------------------------------


def synthetic_configs(tiny: bool) -> tuple[DecoderConfig, SpeculatorConfig]:
    """Llama-3.1-8B and a one-layer EAGLE-3 draft with 32000 tokens; or the same, far smaller."""
    V, Vd, D, F, layers, H, Hkv, Hd = 128256, 32000, 4096, 14336, 32, 32, 8, 128
    if tiny:
        V, Vd, D, F, layers, H, Hkv, Hd = 256, 64, 64, 96, 8, 4, 2, 16
    target = DecoderConfig(
        model_type="llama", vocab_size=V, hidden_size=D, intermediate_size=F, n_layer=layers, n_head=H, n_kv_head=Hkv,
        head_dim=Hd, norm_eps=1e-5, rope=Rope(500000.0, kind="llama3", factor=8.0, original_context=8192),
        context=131072, windows=(None,) * layers, qkv_bias=False, o_bias=False, qk_norm=False, tied=False,
        dtype="bfloat16",
    )  # fmt: skip
    return target, SpeculatorConfig(
        folder=Path("synthetic"), algorithm="eagle3", target=None, speculative_tokens=max(FORCED), draft_vocab_size=Vd,
        target_hidden_size=D, target_vocab_size=V, aux_layer_ids=(2, layers // 2, layers - 3), aux_source="default",
        norm_before_residual=True, norm_before_fc=False, fc_norm=False, norm_output=False,
        layer=replace(target, n_layer=1, windows=(None,)), chosen=(), notices=(),
    )  # fmt: skip


def synthetic_pair(target_config: DecoderConfig, config: SpeculatorConfig, device: torch.device) -> list[nn.Module]:
    """Target and draft in bf16 with random weights, made on the device; the draft has the target's embedding."""
    with torch.device("meta"):
        models = [Transformer(target_config, config.aux_layer_ids), Eagle3(config, own={"head.weight", "d2t"})]
    target, draft = models = [model.to(torch.bfloat16).to_empty(device=device).eval() for model in models]
    for parameter in (*target.parameters(), *draft.parameters()):
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
    ids = torch.arange(config.draft_vocab_size, device=device)
    draft.d2t.copy_(ids * (config.target_vocab_size // config.draft_vocab_size - 1))  # ids spread over the target's
    draft.embed = target.embed
    return models


class Forced(nn.Module):
    """Stands for sampling.verify_greedy: how many tokens are accepted is read from a pattern, on the device."""

    def __init__(self, pattern: tuple[int, ...], device: torch.device):
        super().__init__()
        self.register_buffer("pattern", torch.tensor(pattern, device=device))
        self.register_buffer("turn", torch.zeros(1, dtype=torch.int64, device=device))

    def forward(self, draft_tokens: Tensor, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
        num_accepted = self.pattern[self.turn]
        self.turn.copy_((self.turn + 1) % len(self.pattern))
        return num_accepted, target_tokens.gather(-1, num_accepted.unsqueeze(-1))


@contextmanager
def forced_acceptance(pattern: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """Rounds that run, or are compiled, in here accept by the pattern."""
    real, speculate.verify_greedy = speculate.verify_greedy, Forced(pattern, device)
    try:
        yield
    finally:
        speculate.verify_greedy = real


def measure_arm(target: Transformer, draft: Eagle3, K: int, compiled: bool, rate: float) -> dict:
    """One K against `rate`, in bytes per second. The prefill stays eager: it is not timed, and compiling takes time."""
    weight, width = target.norm.weight, len(target.aux_layer_ids) * target.config.hidden_size
    state = State(1, K, width, target.positions.slots, weight.dtype, weight.device)
    eager = speculate.build_steps(target, draft if K else None, state, compiled=False)
    steps = replace(speculate.build_steps(target, draft, state, compiled), prefill=eager.prefill)
    decoder, length, taken = Decoder(steps, state), 1 + mean(FORCED[K]), []
    emitted = round(TIMED_ROUNDS * length)
    prompt = [17 * i % target.config.vocab_size for i in range(CONTEXT - emitted)]
    with forced_acceptance(FORCED[K], weight.device):
        decoder.warm_up(plain_too=False)
        for _ in range(REPEATS):
            decoder.start(prompt)
            began = time.perf_counter()
            rounds = [decoder.round() for _ in range(TIMED_ROUNDS)]  # each read once the next is queued, as for a user
            taken.append((time.perf_counter() - began) / TIMED_ROUNDS)
    assert len(decoder.ids) == CONTEXT + 1, f"K = {K}: not {emitted} tokens from {rounds}"
    seconds, read = median(taken), sum(bandwidth.pass_bytes(target, draft, K, CONTEXT - emitted / 2).values())
    return {
        "K": K, "milliseconds_per_round": 1e3 * seconds, "gigabytes_per_round": read / 1e9,
        "gigabytes_per_second": read / seconds / 1e9, "share_of_bandwidth": read / seconds / rate, "goal": GOALS[K > 0],
        "forced_acceptance_length": length, "tokens_per_second": length / seconds,
    }  # fmt: skip


def measure_synthetic(device: torch.device, tiny: bool, compiled: bool) -> dict:
    rate = max(bandwidth.read_bandwidth(device, *((1 << 20, 1) if tiny else ())).values())
    target, draft = synthetic_pair(*synthetic_configs(tiny), device)
    for model in (target, draft):
        model.allocate(1, speculate.cache_slots(CONTEXT))
    shape = "far smaller than Llama-3.1-8B" if tiny else "Llama-3.1-8B"
    print(f"synthetic: random weights, forced acceptance; {shape}, bf16; {rate / 1e9:.0f} GB/s in a copy", flush=True)
    arms = []
    for K in FORCED:
        arms.append(measure_arm(target, draft, K, compiled, rate))
        print(LINE.format_map(arms[-1]), flush=True)
    return {"shape": shape, "dtype": "bfloat16", "context": CONTEXT, "copy_bandwidth": rate, "arms": arms}


# ---- linears in eight bits -------------------------------------------------------------------------------------------


def linear_calls(size: int, out: int, device: torch.device) -> dict[str, tuple[int, Callable[[Tensor], Tensor]]]:
    """The same linear in bf16, in both kinds of codes, and as torch's product of float8s, which needs the activations
    quantised too: the bytes of its weights, and the call."""
    plain = nn.Linear(size, out, bias=False, device=device, dtype=torch.bfloat16)
    calls: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {"bf16": (plain.weight.nbytes, plain)}
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        linear = EightBitLinear(size, out, False, dtype, size).to(device)
        linear.weight, scale = quantised(plain.weight.detach(), dtype)
        linear.scale = scale.float()
        calls[name] = (linear.weight.nbytes, linear)
    codes, by = linear.weight.t(), linear.scale.t()

    def scaled_mm(x: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        return torch._scaled_mm((x / scale).to(codes.dtype), codes, scale, by, out_dtype=x.dtype)

    return calls | {"_scaled_mm": (codes.nbytes, scaled_mm)}


def seconds_of(linears: list[Callable[[Tensor], Tensor]], x: Tensor, compiled: bool) -> float:
    """One of them, when all take turns: together they are more than a cache holds."""

    def all_of_them() -> list[Tensor]:
        return [linear(x) for linear in linears]

    call = speculate.compile_call(all_of_them, x.is_cuda) if compiled else all_of_them
    with torch.inference_mode():
        return bandwidth.best_seconds(call, x.device, 20) / len(linears)


def measure_linears(device: torch.device, tiny: bool, compiled: bool) -> list[dict]:
    """The mlp's first linear of Llama-3.1-8B: microseconds and, of the weights, bytes per second."""
    if device.type == "cuda":
        import gpu_kernels  # noqa: F401 (registers EightBitLinear's operator)
    size, out, copies, records = (64, 96, 1, []) if tiny else (4096, 28672, 8, [])
    made = [linear_calls(size, out, device) for _ in range(copies)]
    for rows in LINEAR_ROWS:
        x, record = torch.randn(rows, size, device=device, dtype=torch.bfloat16), {"rows": rows}
        for name, (read, _) in made[0].items():
            seconds = seconds_of([calls[name][1] for calls in made], x, compiled)
            record[name] = {"microseconds": 1e6 * seconds, "gigabytes_per_second": read / seconds / 1e9}
        taken = (f"{name} {record[name]['microseconds']:.0f} us" for name in made[0])
        print(f"linear {size} -> {out}, {rows} rows: {', '.join(taken)}", flush=True)
        records.append(record)
    return records


# ---- the whole -------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises ConfigError."""
    parser = options.Parser(prog="python -m bench.gpu", allow_abbrev=False, description="Checks and measures a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few tokens: to try the script itself")
    parser.add_argument("--no_compile", action="store_true", help="run eagerly: to try the script itself")
    parser.add_argument("--speculator", default=f"{DEMO}-speculator.eagle3", help="default: %(default)s")
    parser.add_argument("--target", default=DEMO, help="default: %(default)s")
    return parser.parse_args([options.underscored(arg) for arg in argv])


def measure(args: argparse.Namespace) -> dict:
    """Everything: the JSON object. What fails is a failed check, and the rest still runs."""
    device = generate.choose_device(args.device)
    pair = ["--speculator", args.speculator, "--target", args.target, "--device", args.device]
    pair += ["--no_compile"] if args.no_compile else []
    asked = [option for text in QUESTIONS[:3] for option in ("--prompt", text)]
    exact = ["--dtype", "fp32", "--max_new_tokens", str(CHECKED_ROUNDS * (1 + max(CHECKED_KS)))]
    short = ["--max_new_tokens", "4", "--repeats", "1"] if args.tiny else []
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    record = {"device": name, "torch": torch.__version__, "checks": (outcomes := {})}

    def measure_demo() -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        record["demo"] = run.measure(generate.make_plan(run.parse_args([*pair, "--dtype", "bf16", *short])))
        print(run.report(record["demo"]), flush=True)

    def measure_shapes() -> None:
        record["synthetic"] = measure_synthetic(device, args.tiny, not args.no_compile)

    def measure_eight_bits() -> None:
        record["linears"] = measure_linears(device, args.tiny, not args.no_compile)

    check_round(outcomes, generate.make_plan(options.parse_args(pair + asked + exact)))
    check(outcomes, "the demo pair is measured", measure_demo)
    check(outcomes, "linears in eight bits are measured", measure_eight_bits)
    check(outcomes, "the synthetic pair is measured", measure_shapes)
    return record


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        record = measure(parse_args(argv))
    except ConfigError as error:
        generate.say("error: " + " ".join(str(error).split()))
        return 2
    print(json.dumps(record), flush=True)
    return int(any(outcome.startswith("FAILED") for outcome in record["checks"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
