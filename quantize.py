"""Writes a checkpoint with weights in eight bits, as compressed-tensors lays them out; and compares two checkpoints.

    python quantize.py --checkpoint PATH_OR_REPO --mode fp8|int8 --out DIR [--also_heads] [--also_draft SPECULATOR]
    python quantize.py --compare A B [--prompts FILE]

Layers' linears become codes (eight_bit.py), everything else keeps its bits. The result is a folder that generate.py,
vLLM and transformers open; a draft's lies in DIR/speculator.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import generate
from checkpoint import (
    INDEX,
    SMALL_FILES,
    WEIGHTS,
    Stored,
    check_out,
    fetch_weights,
    new_folder,
    open_checkpoint,
    save_tensors,
    stored_tensors,
)
from metrics import Answer
from options import Parser, exit_code, number, say, show_progress, underscored
from prompts import QUESTIONS
from speculators_config import ConfigError, read_json, read_speculator, read_target

if TYPE_CHECKING:
    import torch

SHARD = 4 << 30  # bytes of a file, at most, unless one tensor is larger
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OF_LAYERS = re.compile(
    r"(midlayer|.*layers\.\d+)\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight|(.*\.)?fc\.weight"
)
MADE_BY = "eagle-fast quantize.py"
SCHEMES = {  # as compressed-tensors spells them
    "fp8": ("float", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
    "int8": ("int", "int-quantized", None),  # only the weights
}


# ---- writing ---------------------------------------------------------------------------------------------------------


def quantization_config(mode: str, heads: bool) -> dict:
    """What config.json says of our codes (the layout of RedHatAI's FP8-dynamic checkpoints)."""
    kind, form, activations = SCHEMES[mode]
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = activations and activations | {"symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": [] if heads else ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"format": form}},
    }  # fmt: skip


def quantise(folder: Path, out: Path, mode: str, heads: bool, changes: dict) -> tuple[int, int]:
    """Writes the checkpoint in `folder` into the existing folder `out`. heads: the head as well, where it is tied as a
    copy of its own. changes: to config.json. Returns bytes of weights before and after."""
    stored = stored_tensors(folder)
    raw = read_json(folder / "config.json") | changes
    tied = heads and HEAD not in stored and raw.get("tie_word_embeddings", False)
    if tied:  # the embedding itself stays what it is
        stored[HEAD] = stored[EMBEDDING]
        raw["tie_word_embeddings"] = False
    if heads and HEAD not in stored:
        raise ConfigError(f"{folder}: {HEAD}: not in the weights, so it is the target's; leave --also_heads out")
    raw |= {"quantization_config": quantization_config(mode, heads), "quantized_by": MADE_BY}
    codes = {name for name in stored if OF_LAYERS.fullmatch(name) or (heads and name == HEAD)}
    if not codes:
        raise ConfigError(f"{folder}: *_proj.weight: no linears of a decoder in it; give a target, or a draft")
    before = sum(size_of(stored[name], False) for name in stored if not (tied and name == HEAD))
    after = write_shards(out, stored, lambda name: name in codes, mode)
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for pattern in SMALL_FILES:
        for path in folder.glob(pattern):
            if path.name not in ("config.json", INDEX):
                shutil.copyfile(path, out / path.name)
    return before, after


def size_of(tensor: Stored, codes: bool) -> int:
    """Bytes, as codes with a scale an output or as it is stored."""
    import math

    bits = int(re.search(r"\d+", tensor.dtype)[0]) if tensor.dtype != "BOOL" else 8
    rows = tensor.shape[0] if tensor.shape else 1
    return math.prod(tensor.shape) + rows * bits // 8 if codes else math.prod(tensor.shape) * bits // 8


def write_shards(out: Path, stored: dict[str, Stored], coded: Callable[[str], bool], mode: str) -> int:
    """model.safetensors, or several and their index; one shard is in memory at a time. Returns their bytes."""
    import torch

    from eight_bit import quantised

    shards, size = [[]], 0
    for name, tensor in stored.items():
        bytes_ = size_of(tensor, coded(name))
        if shards[-1] and size + bytes_ > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    total, weight_map, done = 0, {}, 0
    for i, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        made: dict[str, torch.Tensor] = {}
        for name in names:
            made[name] = stored[name].read()
            if coded(name):
                made[name], made[f"{name}_scale"] = quantised(
                    made[name], {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[mode]
                )
            done += 1
            show_progress(done, len(stored), name)
        total += sum(tensor.nbytes for tensor in made.values())
        weight_map |= dict.fromkeys(made, file)
        save_tensors(out / file, made)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def write(args: argparse.Namespace) -> None:
    """The target, and the draft inside its folder; both are there when all is done, or neither."""
    check_out(args.out, "quantized_by")
    folder = open_checkpoint(args.checkpoint, "checkpoint")
    if read_target(folder)[0].quantisation is not None:
        raise ConfigError(f"{folder / 'config.json'}: quantization_config: is quantised already; give the 16-bit one")
    sources = [("", fetch_weights(folder, args.checkpoint, "checkpoint"), {})]
    if args.also_draft:
        draft = open_checkpoint(args.also_draft, "also_draft")
        config = read_speculator(draft)
        if config.quantisation is not None:
            raise ConfigError(
                f"{draft / 'config.json'}: quantization_config: is quantised already; give the 16-bit one"
            )
        sources.append(("speculator", fetch_weights(draft, args.also_draft, "also_draft"), {}))
    lines = []
    with new_folder(args.out) as scratch:
        for name, source, changes in sources:
            (scratch / name).mkdir(exist_ok=True)
            before, after = quantise(source, scratch / name, args.mode, args.also_heads, changes)
            lines.append(f"{args.out / name}: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB")
    for line in lines:
        say(line)


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    """Prints what B's distribution of the next token differs from A's, behind every token of A's greedy answers."""
    plans = [plan_for(name, args) for name in args.compare]
    if plans[0].target.vocab_size != plans[1].target.vocab_size:
        sizes = " and ".join(str(plan.target.vocab_size) for plan in plans)
        raise ConfigError(f"--compare: vocabularies of {sizes} tokens; give two versions of one model")
    answers = greedy_answers(plans[0])
    kept = [list(logits_behind(plan, answers)) for plan in plans]
    kl, agreed = [], []
    for ours, theirs in zip(*kept, strict=True):
        p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        agreed += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    of = f"{len(kl)} tokens of {len(answers)} answers of {args.compare[0]}, in fp32"
    print(f"{of}: KL to {args.compare[1]} {fmean(kl):.5f} nats a token, at most {max(kl):.3f}; ", end="")
    print(f"the same best token {100 * fmean(agreed):.2f} %")


def plan_for(name: str, args: argparse.Namespace) -> generate.Plan:
    """fp32 and eagerly: what quantising changes is not to drown in rounding."""
    asked = ["--target", name, "--dtype", "fp32", "--no_compile", "--max_new_tokens", str(args.max_new_tokens)]
    if args.prompts:
        asked += ["--prompts", str(args.prompts), "--first_turns", "--limit", str(args.limit)]
    else:
        asked += [part for question in QUESTIONS for part in ("--prompt", question)]
    return generate.make_plan(generate.parse_args(asked))


def greedy_answers(plan: generate.Plan) -> list[tuple[list[int], int]]:
    """Of each prompt: its ids and the answer's behind them, and how many are the prompt's."""
    decoder = generate.make_decoder(plan, *generate.load_models(plan))
    session, made = generate.Session(plan, decoder, []), []
    for i, question in enumerate(plan.questions):
        prompt = list(question.ids) or plan.dialogue().ask(question.turns[0])
        answer = Answer(len(prompt))
        session.decode(prompt, answer, lambda text: None)
        made.append((prompt + answer.token_ids, len(prompt)))
        show_progress(i + 1, len(plan.questions), "answers")
    return made


def logits_behind(plan: generate.Plan, answers: list[tuple[list[int], int]]) -> Iterator[torch.Tensor]:
    """(answer's tokens, V) fp32: for each of them, what stood before it predicts."""
    import torch

    target = generate.load_models(plan)[0]
    with torch.inference_mode():
        for i, (ids, prompt) in enumerate(answers):
            tokens = torch.tensor([ids[:-1]], device=target.norm.weight.device)
            x, _ = target(tokens, torch.arange(tokens.size(1), device=tokens.device)[None])
            yield target.logits(x[0, prompt - 1 :]).cpu()
            show_progress(i + 1, len(answers), plan.target_name)


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises ConfigError."""
    parser = Parser(prog="quantize.py", allow_abbrev=False, description="Weights in eight bits.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH_OR_REPO", help="a target in 16 or 32 bits")
    add("--mode", choices=tuple(SCHEMES), help="fp8: what vLLM serves; int8: for CPUs and older GPUs")
    add("--out", type=Path, metavar="DIR", help="the folder to write")
    add("--also_heads", action="store_true", help="the heads too, of the target and of --also_draft")
    add("--also_draft", metavar="SPECULATOR", help="a draft, into DIR/speculator")
    add("--compare", nargs=2, metavar=("A", "B"), help="instead: how B's next tokens differ from A's")
    add("--prompts", type=Path, metavar="FILE", help="of --compare (default: six questions of our own)")
    add(
        "--limit", type=number(int, 1), default=20, metavar="N", help="of --prompts, first turns (default: %(default)s)"
    )
    add("--max_new_tokens", type=number(int, 1), default=64, metavar="N", help="of an answer (default: %(default)s)")
    args = parser.parse_args([underscored(arg) for arg in argv])
    writing = {"--checkpoint": args.checkpoint, "--mode": args.mode, "--out": args.out}
    for option, value in writing.items():
        if (value is None) != (args.compare is not None):
            fix = "drop it" if args.compare else "give it, or --compare A B"
            raise ConfigError(f"{option}: {'does not go with --compare' if args.compare else 'missing'}; {fix}")
    if args.compare and (args.also_heads or args.also_draft):
        raise ConfigError("--also_heads, --also_draft: do not go with --compare; drop them")
    if args.prompts and not args.compare:
        raise ConfigError("--prompts: goes with --compare; drop it")
    return args


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    compare(args) if args.compare else write(args)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
