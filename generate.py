"""The command: runs a speculator and its target on prompts, streams the text and prints the numbers.

    python generate.py --speculator PATH_OR_REPO [options]

What a user can get wrong is checked before torch is imported (that takes seconds); then models are loaded, compiled and
asked. Exit codes: 0 done, 2 something the user can fix (one `error:` line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import safetensors  # noqa: F401
    import tokenizers  # noqa: F401
except ModuleNotFoundError as error:  # the first thing that a newcomer meets outside .venv
    print(f"error: python: {error.name} is not installed; run make demo, then: . .venv/bin/activate", file=sys.stderr)
    sys.exit(2)

from checkpoint import TOLERATED, fetch_weights, load_weights, open_checkpoint, stored_tensors
from convert_hf_checkpoint import (
    draft_tensors,
    eagle3_names,
    eight_bit_tensors,
    say_ignored,
    target_names,
    with_eight_bit_linears,
)
from metrics import Answer, describe, describe_baseline, doubt, ratio, result, totals
from options import parse_args, say
from prompts import Dialogue, Question, read_prompt_file
from speculators_config import (
    ConfigError,
    DecoderConfig,
    Quantisation,
    SpeculatorConfig,
    find_target,
    fit_to_target,
    read_speculator,
    read_target,
)
from tokenizer import TextStream, Tokenizer, load_tokenizer, stop_token_ids

if TYPE_CHECKING:
    import torch
    from torch import nn

    from eight_bit import EightBitLinear
    from model import Transformer
    from speculate import Decoder

INTERACTIVE_CONTEXT = 4096  # tokens, where the target allows as many


# ---- the door: everything that is known before torch is there --------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What was asked for, read and checked."""

    args: argparse.Namespace
    speculator: SpeculatorConfig | None
    target_name: str
    target_folder: Path
    target: DecoderConfig
    tokenizer: Tokenizer | None
    raw: bool
    stop_ids: frozenset[int]
    dtype: str  # as torch names it; of target and draft
    questions: tuple[Question, ...]  # none: interactive
    max_seq_len: int = 0

    @property
    def K(self) -> int:
        return self.speculator.speculative_tokens if self.speculator else 0

    def dialogue(self) -> Dialogue:
        return Dialogue(self.tokenizer, self.raw, self.args.system)


def make_plan(args: argparse.Namespace) -> Plan:
    """Reads configs, tokenizer and prompts. Raises ConfigError; says what was chosen and assumed."""
    speculator, target_name, notices = None, args.target, ()
    if args.speculator:
        speculator = open_speculator(args)
        target_name, notices = find_target(speculator, args.target), speculator.notices
    folder = open_checkpoint(target_name, "target")
    target, target_notices = read_target(folder)
    if speculator:
        speculator = fit_to_target(speculator, target)
        say(f"speculator {args.speculator}: {speculator.algorithm}, {', '.join(speculator.chosen)}")
    if args.dtype == "auto" and target.dtype is None:
        target_notices = (*target_notices, f"{folder / 'config.json'}: dtype: absent, bfloat16 assumed")
    for notice in (*notices, *target_notices):
        say(f"notice: {notice}")
    tokenizer = load_tokenizer(folder)
    raw = args.raw or tokenizer is None or not tokenizer.has_chat_template
    if raw and not args.raw and tokenizer is not None:
        say(f"notice: {target_name} has no chat template, so prompts go in as they are")
    questions = read_questions(args)
    if tokenizer is None and (args.stop or any(question.turns for question in questions) or not questions):
        raise ConfigError(f"{folder}: tokenizer.json: missing, and texts need it; add it, or give only --prompt_ids")
    if args.system is not None and questions and not any(question.turns for question in questions):
        raise ConfigError("--system: --prompt_ids are taken as they are; drop it")
    if args.system is not None and raw:
        raise ConfigError(f"--system: {target_name} has no chat template to put it in; drop it")
    stop_ids = stop_token_ids(folder, tokenizer)
    dtype = choose_dtype(args.dtype, target)
    plan = Plan(args, speculator, target_name, folder, target, tokenizer, raw, stop_ids, dtype, questions)
    plan = replace(plan, max_seq_len=plan_length(plan))
    if plan.K > 0 and speculator.layer.context < plan.max_seq_len:
        say(f"notice: the draft's context is {speculator.layer.context} tokens; past it acceptance may fall")
    return plan


def open_speculator(args: argparse.Namespace) -> SpeculatorConfig:
    """The speculator's config, with the user's options over it."""
    norm_before_residual = {None: None, "true": True, "false": False}[args.norm_before_residual]
    return read_speculator(
        open_checkpoint(args.speculator, "speculator"),
        speculative_tokens=args.num_speculative_tokens,
        aux_layer_ids=args.aux_layer_ids,
        rope_theta=args.draft_rope_theta,
        norm_before_residual=norm_before_residual,
    )


def choose_dtype(name: str, target: DecoderConfig) -> str:
    """auto: what the target's config names, else bfloat16."""
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": target.dtype or "bfloat16"}
    if dtypes[name] not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"--dtype: the target's {dtypes[name]} is not implemented; give bf16, fp16 or fp32")
    return dtypes[name]


def read_questions(args: argparse.Namespace) -> tuple[Question, ...]:
    """The prompts of --prompt, --prompts and --prompt_ids, in this order; else all of stdin. Interactive: none."""
    questions = [Question(turns=(text,)) for text in args.prompt]
    if args.prompts:
        chosen = read_prompt_file(args.prompts)[: args.limit]
        questions += [Question(turns=question.turns[:1]) for question in chosen] if args.first_turns else chosen
    questions += [Question(ids=prompt) for prompt in args.prompt_ids]
    if any(not turn.strip() for question in questions for turn in question.turns):
        raise ConfigError("--prompt: is empty; give a text")
    if questions:
        return tuple(questions)
    if sys.stdin is None:
        raise ConfigError("stdin: is closed; give a prompt with --prompt")
    if args.interactive or sys.stdin.isatty():
        if args.json:
            raise ConfigError("--json: does not go with a chat in the terminal; give --prompt or --prompts")
        return ()
    text = read_stdin(sys.stdin.read)
    if not text.strip():
        raise ConfigError("stdin: holds no prompt; give one there or with --prompt")
    return (Question(turns=(text,)),)


def read_stdin(read: Callable[[], str]) -> str:
    """What sys.stdin.read or .readline returns; ConfigError for bytes that are no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin: is not {error.encoding} text ({error.reason}); convert it") from None


def plan_length(plan: Plan) -> int:
    """The tokens that the longest conversation may need. ConfigError where a prompt cannot fit or has unknown ids."""
    args, context = plan.args, plan.target.context
    if (args.max_seq_len or 0) > context:
        raise ConfigError(f"--max_seq_len: {args.max_seq_len} is more than the target's context of {context}; lower it")
    if not plan.questions:
        return args.max_seq_len or min(context, INTERACTIVE_CONTEXT)
    limit, longest = args.max_seq_len or context, 0
    for i, question in enumerate(plan.questions, 1):
        prompts = question.prompts(plan.dialogue())
        if not prompts[0]:
            raise ConfigError(f"--prompt: prompt {i} has no tokens; give a text")
        if not 0 <= min(prompts[-1]) <= max(prompts[-1]) < plan.target.vocab_size:
            option = "--prompt_ids" if question.ids else f"{plan.target_name}: tokenizer"
            fix = "correct them" if question.ids else "do these files belong to this target?"
            vocabulary = f"0..{plan.target.vocab_size - 1}, the target's vocabulary"
            raise ConfigError(f"{option}: prompt {i} has ids outside {vocabulary}; {fix}")
        if len(prompts[0]) + args.max_new_tokens > limit:
            need = f"prompt {i} has {len(prompts[0])} tokens, with {args.max_new_tokens} new ones more than {limit}"
            option, fix = ("--max_seq_len", "raise it") if limit < context else ("--max_new_tokens", "lower it")
            raise ConfigError(f"{option}: {need}; {fix} or shorten the prompt")
        # An answer comes back as text in the next turn's prompt, where it may take more tokens than it was made of.
        longest = max(longest, len(prompts[-1]) + (2 * len(prompts) - 1) * args.max_new_tokens)
    return args.max_seq_len or min(longest, context)


# ---- loading: from here on torch is there ----------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """auto: cuda where there is one, else the CPU (mps on request). Touches no CUDA where the CPU is asked for."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise ConfigError(f"--device: {why}; use --device cpu, or install a CUDA build of torch")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device: there is no MPS device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def load_target(
    folder: Path, config: DecoderConfig, aux_layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Transformer:
    """The target with its weights, handing out the states at aux_layer_ids."""
    import torch

    from model import Transformer

    stored = eight_bit_tensors(stored_tensors(folder), config.quantisation)
    names = target_names(config, stored)
    with torch.device("meta"):
        target = Transformer(config, aux_layer_ids, tied="head.weight" not in names)
    if device.type != "mps":  # which has no float8: there weights are made while they are read
        names = with_eight_bit_linears(target, names, stored)
    say_ignored(load_weights(target, names, stored, tolerated=TOLERATED, device=device, dtype=dtype))
    return target.eval()


def load_draft(config: SpeculatorConfig, target: Transformer) -> nn.Module:
    """The draft with its weights, in the target's dtype and on its device; what it does not hold it shares."""
    import torch

    import eagle3

    drafts = {"eagle3": (eagle3.Eagle3, eagle3_names)}  # algorithm -> its module, and the names of its tensors
    build, name_tensors = drafts[config.algorithm]
    stored = eight_bit_tensors(draft_tensors(stored_tensors(config.folder)), config.quantisation)
    config, names = name_tensors(config, stored)
    with torch.device("meta"):
        draft = build(config, own=names)
    weight = target.norm.weight
    if weight.device.type != "mps":
        names = with_eight_bit_linears(draft, names, stored)
    say_ignored(load_weights(draft, names, stored, tolerated=TOLERATED, device=weight.device, dtype=weight.dtype))
    draft.settle(target.embed, target.head)
    if draft.looks_untrained():
        say(f"notice: {config.folder}: the first layer looks untrained; was it lost in a conversion?")
    owner = {True: "the draft's own", False: "the target's"}
    owned = f"embedding {owner['embed.weight' in names]}, head {owner['head.weight' in names]}"
    say(f"draft: {owned}{of_codes(config.quantisation)}")
    return draft.eval()


def of_codes(quantisation: Quantisation | None) -> str:
    return f", weights in {quantisation.codes}" if quantisation else ""


def load_models(plan: Plan) -> list[nn.Module]:
    """The target, and the draft where tokens are drafted: weights and caches, on the device."""
    import torch

    import cpu_kernels
    import speculate

    args, K = plan.args, plan.K
    device, dtype = choose_device(args.device), getattr(torch, plan.dtype)
    folder = fetch_weights(plan.target_folder, plan.target_name, "target")
    if K > 0:
        fetch_weights(plan.speculator.folder, args.speculator, "speculator")
    kernels = args.compile and device.type == "cpu"
    with cpu_kernels.freed_memory_given_back() if kernels else nullcontext():
        target = load_target(folder, plan.target, plan.speculator.aux_layer_ids if K > 0 else (), device, dtype)
        models = [target, load_draft(plan.speculator, target)] if K > 0 else [target]
        if kernels:
            use_cpu_kernels(models)
        else:
            hold_eight_bits(models, fast_on(device) if args.compile else never)
    for model in models:
        model.allocate(1, speculate.cache_slots(plan.max_seq_len))
    return models


def make_decoder(plan: Plan, target: Transformer, draft: nn.Module | None = None) -> Decoder:
    """State for plan.K tokens a round, and the calls over it and the models, not yet compiled."""
    import speculate

    args, weight, slots = plan.args, target.norm.weight, speculate.cache_slots(plan.max_seq_len)
    width = len(target.aux_layer_ids) * plan.target.hidden_size
    sampling = args.temperature, args.top_k, args.top_p
    state = speculate.State(1, plan.K, width, slots, weight.dtype, weight.device, *sampling)
    return speculate.Decoder(speculate.build_steps(target, draft, state, args.compile), state, args.seed)


def use_cpu_kernels(models: list[nn.Module]) -> None:
    """Puts our operators in; where the compiler does not take them, torch's own do the same, more slowly."""
    import cpu_kernels

    try:
        cpu_kernels.load_library()
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"notice: decoding is slower without our CPU operators: {cpu_kernels.reason(error)}")
        return hold_eight_bits(models, never)
    hold_eight_bits(models, cpu_kernels.reads)
    cpu_kernels.install(*models)


def fast_on(device: torch.device) -> Callable[[EightBitLinear, torch.dtype], bool]:
    """Which linears stay in eight bits where our CPU operators do not run: on CUDA those that our kernel reads."""

    def reads(linear: EightBitLinear, dtype: torch.dtype) -> bool:
        import torch

        import gpu_kernels

        return gpu_kernels.reads(linear, dtype, torch.cuda.get_device_capability(device))

    return reads if device.type == "cuda" else never


def never(linear: EightBitLinear, dtype: torch.dtype) -> bool:
    return False


def hold_eight_bits(models: list[nn.Module], fast: Callable[[EightBitLinear, torch.dtype], bool]) -> None:
    """In the model's dtype, where nothing here reads them faster in eight."""
    import eight_bit

    if held := eight_bit.hold(models, fast):
        dtype = str(models[0].norm.weight.dtype).removeprefix("torch.")
        say(f"notice: {held} linears with weights in eight bits are held as {dtype}: nothing reads them as they are")


@contextmanager
def compiler_needed() -> Iterator[None]:
    """ConfigError where the machine has no C or C++ compiler: torch.compile needs one."""
    try:
        yield
    except RuntimeError as error:  # the base of what Inductor and Triton raise
        if re.search(r"C(\+\+)? compiler", str(error)) is None:
            raise
        raise ConfigError("torch.compile: finds no C++ compiler; install g++, or give --no_compile") from None


def compile_steps(decoder: Decoder, plain_too: bool) -> float:
    """Seconds spent."""
    with compiler_needed():
        return decoder.warm_up(plain_too)


def graphs_active(device: str) -> str:
    """On CUDA: are the compiled calls replayed as graphs? Inductor skips what it cannot record, without a word."""
    if device != "cuda":
        return ""
    from torch._dynamo.utils import counters

    return f", CUDA graphs {'only in part' if counters['inductor']['cudagraph_skips'] else 'active'}"


# ---- answering -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """A loaded plan, and the answers so far."""

    plan: Plan
    decoder: Decoder
    answers: list[Answer]

    def reply(self, prompt: list[int], keep: bool = False) -> Answer:
        """Answers one prompt, streaming, and reports. keep: the prompt continues the previous sequence."""
        args = self.plan.args
        self.answers.append(answer := Answer(len(prompt)))
        self.decode(prompt, answer, (lambda text: None) if args.json else write, keep=keep)
        if not args.json:
            write("\n")
        if args.baseline:
            self.compare_with_plain(prompt, answer)
        say(f"[{answer.finish_reason}] {answer.prompt_tokens} prompt tokens; {describe(totals([answer], self.plan.K))}")
        if answer.baseline:
            say(describe_baseline(answer.baseline, sampled=args.temperature > 0))
        return answer

    def decode(
        self, prompt: list[int], answer: Answer, emit: Callable[[str], None], *, keep: bool = False, plain: bool = False
    ) -> None:
        """Fills `answer` token by token; the earliest event in token order ends it."""
        plan, stream = self.plan, TextStream(self.plan.tokenizer, self.plan.args.stop)
        budget = min(plan.args.max_new_tokens, plan.max_seq_len - len(prompt))

        def take(token: int) -> None:
            answer.token_ids.append(token)
            if token in plan.stop_ids:  # never part of the text
                text, stopped = "", not plan.args.ignore_eos
            else:
                text, stopped = stream.push(token)
            if stopped:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) == budget:
                answer.finish_reason = "length"
            answer.text += text + stream.finish() if answer.finish_reason else text

        began = time.perf_counter()
        take(self.decoder.start(prompt, keep)[0])
        answer.prefill_seconds = time.perf_counter() - began
        emit(answer.text)
        while answer.finish_reason is None:
            began = time.perf_counter()
            done = self.decoder.round(plain)
            before, shown = len(answer.token_ids), len(answer.text)
            for token in done.emitted:
                if answer.finish_reason is None:
                    take(token)
            kept = len(answer.token_ids) - before
            if done.proposed:  # tokens that were cut did not reach the output: they are not accepted either
                answer.rounds.append(replace(done, accepted=min(done.accepted, kept), emitted=done.emitted[:kept]))
            answer.decode_seconds += time.perf_counter() - began
            emit(answer.text[shown:])  # outside the clock: a slow terminal is not a slow model

    def compare_with_plain(self, prompt: list[int], answer: Answer) -> None:
        """Decodes the prompt plainly, in the same process with the same code, into answer.baseline."""
        plain = Answer(len(prompt))
        self.decode(prompt, plain, lambda text: None, plain=True)
        answer.baseline = {
            "token_ids": plain.token_ids,
            "decode_seconds": plain.decode_seconds,
            "tokens_per_second": plain.tokens_per_second,
            "speedup": ratio(answer.tokens_per_second, plain.tokens_per_second),
            "first_divergence": self.first_divergence(prompt, answer.token_ids, plain.token_ids),
        }

    def first_divergence(self, prompt: list[int], ours: list[int], plain: list[int]) -> dict | None:
        """Where two answers part, and the gap of the target's two best logits there: rounding or a bug?"""
        if ours == plain:
            return None
        pairs = zip(ours, plain, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(plain)))
        _, logits = self.decoder.start(prompt + ours[:index])
        best, second = logits.topk(2).values.tolist()
        return {"index": index, "margin": best - second}

    def converse(self, question: Question) -> None:
        """Answers the turns of one question, each with the answers before it in view."""
        if question.ids:
            self.reply(list(question.ids))
            return
        dialogue = self.plan.dialogue()
        for turn, text in enumerate(question.turns):
            prompt = dialogue.ask(text)
            if len(prompt) >= self.plan.max_seq_len:
                say(f"notice: all {self.plan.max_seq_len} tokens are used; left out: turn {turn + 1} and what follows")
                return
            answer = self.reply(prompt, keep=turn > 0)
            dialogue.hear(answer.text, answer.token_ids)

    def chat(self) -> None:
        """Questions from the terminal until its end; the caches are kept between turns."""
        say("chat: one question a line; Ctrl-D ends, and so does Ctrl-C in the middle of an answer")
        dialogue = self.plan.dialogue()
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            line = read_stdin(sys.stdin.readline)
            if not line:
                say("")
                return
            if not line.strip():
                continue
            prompt = dialogue.ask(line.rstrip("\n"))
            if len(prompt) >= self.plan.max_seq_len:
                say(f"notice: all {self.plan.max_seq_len} tokens are used; start again, or with a larger --max_seq_len")
                return
            answer = self.reply(prompt, keep=True)
            dialogue.hear(answer.text, answer.token_ids)


# ---- main ------------------------------------------------------------------------------------------------------------


def write(text: str) -> None:
    """Streams to stdout; what its encoding lacks is replaced rather than fatal."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def run(plan: Plan, answers: list[Answer]) -> None:
    """Loads, compiles, answers. `answers` is the caller's, so that it can report after an interrupt."""
    args = plan.args
    began = time.perf_counter()
    decoder = make_decoder(plan, *load_models(plan))
    load_seconds, compile_seconds = time.perf_counter() - began, 0.0
    device = decoder.state.tokens.device.type
    kind = f"{plan.target.model_type}, {plan.dtype} on {device}{of_codes(plan.target.quantisation)}"
    say(f"target {plan.target_name}: {kind}, loaded in {load_seconds:.1f} s")
    if args.compile:
        say("compiling: up to a minute or so the first time, seconds when torch's cache has it ...")
        compile_seconds = compile_steps(decoder, plain_too=args.baseline and plan.K > 0)
        say(f"compiled in {compile_seconds:.1f} s{graphs_active(device)}")
    session = Session(plan, decoder, answers)
    for question in plan.questions:
        session.converse(question)
    if not plan.questions:
        session.chat()
    numbers = totals(answers, plan.K)
    if len(answers) > 1:
        say(f"all {len(answers)} answers: {describe(numbers)}")
    if (suspicion := doubt(numbers)) is not None:
        say(f"notice: {suspicion}")
    if args.json:
        record = {
            "target": plan.target_name,
            "speculator": args.speculator,
            "algorithm": plan.speculator.algorithm if plan.speculator else None,
            "num_speculative_tokens": plan.K,
            "device": device,
            "dtype": plan.dtype,
            "compiled": args.compile,
            "max_seq_len": plan.max_seq_len,
            "load_seconds": load_seconds,
            "compile_seconds": compile_seconds,
            "results": [result(answer, plan.K, args.trace) for answer in answers],
            "totals": numbers,
        }
        print(json.dumps(record), flush=True)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    answers: list[Answer] = []
    K = 0
    try:
        plan = make_plan(parse_args(argv))
        K = plan.K
        run(plan, answers)
    except ConfigError as error:
        say("error: " + " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        say("\ninterrupted" + (f"; so far {describe(totals(answers, K))}" if answers else ""))
        return 130
    except BrokenPipeError:  # the reader of stdout has gone: there is nothing left to do, and nothing went wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
