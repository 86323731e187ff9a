"""Writes a checkpoint with weights in eight bits, as compressed-tensors lays them out; and compares two checkpoints.

    python quantize.py --checkpoint PATH_OR_REPO --mode fp8|int8 --out DIR [--also_heads] [--also_draft SPECULATOR]
    python quantize.py --compare A B [--prompts FILE]

Layers' linears become codes (eight_bit.py), everything else keeps its bits. A draft is written into DIR/speculator.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import generate
from checkpoint import (
    FLOATS,
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
    write_config,
)
from convert_hf_checkpoint import draft_tensors
from metrics import Answer
from options import Parser, directory, exit_code, number, say, show_progress, underscored
from prompts import QUESTIONS
from speculators_config import ConfigError, fit_to_target, read_json, read_speculator, read_target

if TYPE_CHECKING:
    import torch

    from model import Transformer

SHARD = 4 << 30  # bytes of a file, at most, unless one tensor is larger
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OF_LAYERS = re.compile(
    r"(midlayer|.*layers\.\d+)\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight|(.*\.)?fc\.weight"
)


class Scheme(NamedTuple):
    """As compressed-tensors spells it."""

    codes: str  # torch's dtype
    kind: str
    form: str
    activations: dict | None


SCHEMES = {
    "fp8": Scheme(
        "float8_e4m3fn", "float", "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    ),
    "int8": Scheme("int8", "int", "int-quantized", None),  # only the weights
}  # fmt: skip


# ---- writing ---------------------------------------------------------------------------------------------------------


def quantization_config(mode: str, heads: bool) -> dict:
    """What config.json says of our codes (the layout of RedHatAI's FP8-dynamic checkpoints).

    A head is named beside the class of linears, since vLLM's heads are of another class."""
    _, kind, form, activations = SCHEMES[mode]
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear", "lm_head"] if heads else ["Linear"], "weights": weights}
    group |= {"input_activations": activations, "output_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": [] if heads else ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }  # fmt: skip


class Source(NamedTuple):
    """A checkpoint that was checked: what becomes of it is settled before anything is written."""

    folder: Path
    stored: dict[str, Stored]
    coded: set[str]  # the tensors that become codes
    raw: dict  # the config.json to write
    read: int  # bytes of what is stored


def prepare(folder: Path, stored: dict[str, Stored], raw: dict, mode: str, heads: bool) -> Source:
    """heads: the head as well, where it is tied as a copy of its own. Raises ConfigError."""
    already = [key for key in ("quantization_config", "compression_config") if raw.get(key)]
    already += [name for name, tensor in stored.items() if OF_LAYERS.fullmatch(name) and tensor.dtype not in FLOATS]
    if already:
        raise ConfigError(f"{folder}: {already[0]}: is quantised already; give the 16-bit one")
    read, stored = sum(size_of(tensor, False) for tensor in stored.values()), dict(stored)
    if heads and HEAD not in stored and raw.get("tie_word_embeddings", False):  # the embedding stays what it is
        stored[HEAD] = stored[EMBEDDING]
    if heads and HEAD not in stored:
        raise ConfigError(f"{folder}: {HEAD}: not in the weights, nor tied; fetch them again")
    coded = {name for name in stored if OF_LAYERS.fullmatch(name) or (heads and name == HEAD)}
    if not coded:
        raise ConfigError(f"{folder}: *_proj.weight: no linears of a decoder in it; give another")
    raw = raw | {"quantization_config": quantization_config(mode, heads)}
    return Source(folder, stored, coded, raw | {"tie_word_embeddings": False} if heads else raw, read)


def write_folder(out: Path, source: Source, mode: str) -> int:
    """Fills the existing folder `out`; returns the bytes of its weights."""
    written = write_shards(out, source.stored, source.coded, mode)
    write_config(out, source.raw, "quantize.py")
    for pattern in SMALL_FILES:
        for path in source.folder.glob(pattern):
            if path.name not in ("config.json", INDEX):
                shutil.copyfile(path, out / path.name)
    return written


def size_of(tensor: Stored, codes: bool) -> int:
    """Bytes, as codes with a scale an output or as it is stored."""
    bits = int(re.search(r"\d+", tensor.dtype)[0]) if tensor.dtype != "BOOL" else 8
    rows = tensor.shape[0] if tensor.shape else 1
    return math.prod(tensor.shape) + rows * bits // 8 if codes else math.prod(tensor.shape) * bits // 8


def write_shards(out: Path, stored: dict[str, Stored], coded: set[str], mode: str) -> int:
    """model.safetensors, or several and their index; one shard is in memory at a time. Returns their bytes."""
    import torch

    from eight_bit import quantised

    shards, size = [[]], 0
    for name, tensor in stored.items():
        bytes_ = size_of(tensor, name in coded)
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
            if name in coded:
                if not made[name].isfinite().all():
                    raise ConfigError(f"{stored[name].file}: {name}: holds NaN or infinity; mend the checkpoint")
                made[name], made[f"{name}_scale"] = quantised(made[name], getattr(torch, SCHEMES[mode].codes))
            done += 1
            show_progress(done, len(stored), name)
        total += sum(tensor.nbytes for tensor in made.values())
        weight_map |= dict.fromkeys(made, file)
        save_tensors(out / file, made)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


@contextmanager
def named(**options: str) -> Iterator[None]:
    """What goes wrong in here is told in this command's options, not in generate.py's."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for theirs, ours in options.items():
            text = text.replace(f"--{theirs}", f"--{ours}")
        raise ConfigError(text) from error


def write(args: argparse.Namespace) -> None:
    """The target, and the draft inside its folder; both are there when all is done, or neither."""
    check_out(args.out, "quantize.py", args.checkpoint, *([args.also_draft] if args.also_draft else []))
    folder = open_checkpoint(args.checkpoint, "checkpoint")
    with named(speculator="also_draft"):
        target, _ = read_target(folder)
    stored = stored_tensors(fetch_weights(folder, args.checkpoint, "checkpoint"))
    sources = {"": prepare(folder, stored, read_json(folder / "config.json"), args.mode, args.also_heads)}
    if args.also_draft:
        folder = open_checkpoint(args.also_draft, "also_draft")
        speculator = read_speculator(folder)
        with named(target="checkpoint"):
            fit_to_target(speculator, target)
        raw = read_json(folder / "config.json")
        verifier = raw.setdefault("speculators_config", {}).setdefault("verifier", {})
        verifier["name_or_path"] = ".."  # the target that it now lies in
        stored = draft_tensors(stored_tensors(fetch_weights(folder, args.also_draft, "also_draft")))
        heads = args.also_heads and HEAD in stored  # else it is the target's
        sources["speculator"] = prepare(folder, stored, raw, args.mode, heads)
    instead, said = " (in place of what was there)" if args.out.is_dir() and any(args.out.iterdir()) else "", []
    with new_folder(args.out, "quantize.py") as made:
        for name, source in sources.items():
            (made / name).mkdir(exist_ok=True)
            written = write_folder(made / name, source, args.mode)
            sizes = f"{source.read / 1e6:.1f} MB -> {written / 1e6:.1f} MB"
            share = f"{len(source.coded)} of its {len(source.stored)} tensors in {args.mode}"
            said.append(f"{args.out / name}: {share}, the others as in {source.folder}; {sizes}{instead}")
    say("\n".join(said))


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    """Prints what B's distribution of the next token differs from A's, behind every token of A's greedy answers."""
    with named(target="compare", speculator="speculator of generate.py"):
        plans = [plan_for(name, args) for name in args.compare]
    if plans[0].target.vocab_size != plans[1].target.vocab_size:
        sizes = " and ".join(str(plan.target.vocab_size) for plan in plans)
        raise ConfigError(f"--compare: vocabularies of {sizes} tokens; give two versions of one model")
    ours = generate.load_models(plans[0])[0]
    answers = greedy_answers(plans[0], ours)
    theirs = generate.load_models(plans[1])[0]
    kl, agreed = [], []
    for i, (ids, prompt) in enumerate(answers, 1):
        p, q = (logits_behind(target, ids, prompt).log_softmax(-1) for target in (ours, theirs))
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        agreed += (p.argmax(-1) == q.argmax(-1)).tolist()
        show_progress(i, len(answers), "answers compared")
    of = f"{len(kl)} tokens of {len(answers)} answers of {args.compare[0]}, in fp32"
    print(f"{of}: KL to {args.compare[1]} {fmean(kl):.5f} nats a token, at most {max(kl):.3f}; ", end="")
    print(f"the same best token {100 * fmean(agreed):.2f} %")


def plan_for(name: str, args: argparse.Namespace) -> generate.Plan:
    """fp32 and eagerly: what quantising changes is not to drown in rounding."""
    asked = ["--target", name, "--dtype", "fp32", "--no_compile", "--max_new_tokens", str(args.max_new_tokens or 64)]
    if args.prompts:
        asked += ["--prompts", str(args.prompts), "--first_turns", "--limit", str(args.limit or 20)]
    else:
        asked += [part for question in QUESTIONS for part in ("--prompt", question)]
    return generate.make_plan(generate.parse_args(asked))


def greedy_answers(plan: generate.Plan, target: Transformer) -> list[tuple[list[int], int]]:
    """Of each prompt: its ids and the answer's behind them, and how many are the prompt's."""
    session, made = generate.Session(plan, generate.make_decoder(plan, target), []), []
    for i, question in enumerate(plan.questions, 1):
        prompt = list(question.ids) or plan.dialogue().ask(question.turns[0])
        answer = Answer(len(prompt))
        session.decode(prompt, answer, lambda text: None)
        made.append((prompt + answer.token_ids, len(prompt)))
        show_progress(i, len(plan.questions), "answers written")
    return made


def logits_behind(target: Transformer, ids: list[int], prompt: int) -> torch.Tensor:
    """(answer's tokens, V) fp32: for each of them, what stood before it predicts."""
    import torch

    tokens = torch.tensor([ids[:-1]], device=target.norm.weight.device)
    with torch.inference_mode():
        x, _ = target(tokens, torch.arange(tokens.size(1), device=tokens.device)[None])
        return target.logits(x[0, prompt - 1 :])


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises ConfigError."""
    parser = Parser(prog="quantize.py", allow_abbrev=False, description="Weights in eight bits.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH_OR_REPO", help="a target in 16 or 32 bits")
    add("--mode", choices=tuple(SCHEMES), help="fp8: the FP8-dynamic layout; int8: closer to 16 bits")
    add("--out", type=directory, metavar="DIR", help="the folder to write")
    add("--also_heads", action="store_true", help="the heads too, of the target and of --also_draft")
    add("--also_draft", metavar="SPECULATOR", help="a draft, into DIR/speculator")
    add("--compare", nargs=2, metavar=("A", "B"), help="instead: how B's next tokens differ from A's")
    add("--prompts", type=Path, metavar="FILE", help="of --compare (default: six questions of our own)")
    add("--limit", type=number(int, 1), metavar="N", help="of --prompts, first turns (default: 20)")
    add("--max_new_tokens", type=number(int, 1), metavar="N", help="of an answer (default: 64)")
    args = parser.parse_args([underscored(arg) for arg in argv])
    writing = {"--checkpoint": args.checkpoint, "--mode": args.mode, "--out": args.out}
    for option, value in writing.items():
        if (value is None) != (args.compare is not None):
            fix = "drop it" if args.compare else "give it, or --compare A B"
            raise ConfigError(f"{option}: {'does not go with --compare' if args.compare else 'missing'}; {fix}")
    if args.compare and (args.also_heads or args.also_draft):
        raise ConfigError("--also_heads, --also_draft: do not go with --compare; drop them")
    for option, given, needs in (
        ("--prompts", args.prompts, args.compare), ("--limit", args.limit, args.prompts),
        ("--max_new_tokens", args.max_new_tokens, args.compare),
    ):  # fmt: skip
        if given and not needs:
            raise ConfigError(f"{option}: goes with {'--prompts' if option == '--limit' else '--compare'}; drop it")
    return args


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    compare(args) if args.compare else write(args)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
