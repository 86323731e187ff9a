"""Trains an EAGLE-3 draft for a target, from nothing but the target: four stages, each resumable and usable alone.

    python -m train.eagle3 --target PATH_OR_REPO --out DIR [options]

generate (train/conversations.py) -> extract (states.py) -> train (unroll.py) -> export (export.py). DIR becomes a
speculators folder; what the stages leave for each other lies in DIR.data, and a run that was broken off goes on there.
"""

import argparse
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import generate as command
import speculators_config as configs
from checkpoint import check_out, fetch_weights, open_checkpoint
from cpu_kernels import freed_memory_given_back
from eagle3 import Eagle3
from metrics import Answer, totals
from model import Transformer
from options import Parser, directory, exit_code, id_list, number, show_progress, underscored
from options import parse_args as command_args
from prompts import read_prompt_file
from speculators_config import ConfigError, SpeculatorConfig
from tokenizer import load_tokenizer
from train import conversations, states
from train.export import config_json, export
from train.shards import GREEDY, count, fingerprint, settle_manifest, shard, whole, write_json
from train.unroll import Teacher, Unrolled, loss_of, rounds

STAGES = ("generate", "extract", "train", "export")
SHARD_ROWS = 128
EXTRACT_BATCH = 2  # conversations: more rows than the processor's cache holds are slower
VALIDATION_ROWS = 64  # of the first shard, which is never trained on
CHECKED = 16  # held-out conversations that the exported draft decodes
OF_ITS_VOCABULARY = ("embed.weight", "head.weight", "d2t", "t2d")
FREE = ("context", "dtype", "model_type", "quantisation", "tied")  # what another draft's layer may have otherwise
WARM_UP = 0.03  # of the steps


# ---- the door --------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises ConfigError."""
    parser = Parser(prog="python -m train.eagle3", allow_abbrev=False, description="Trains an EAGLE-3 draft.")
    add, whole, share = parser.add_argument, number(int, 1), number(float, 0, 1, above=True)
    add("--target", required=True, metavar="PATH_OR_REPO", help="the model to draft for")
    add("--target_name", metavar="NAME", help="what the draft's config.json calls the target (default: as --target)")
    add("--out", required=True, type=directory, metavar="DIR", help="the speculators folder to write")
    add("--data", type=directory, metavar="DIR", help="shards and checkpoints (default: OUT.data)")
    add("--stage", choices=STAGES, help="only this one (default: all that is missing)")
    add("--tokens", type=whole, default=2_000_000, metavar="N", help="to generate (default: %(default)s)")
    add("--length", type=number(int, 32), default=512, metavar="N", help="tokens of a conversation (%(default)s)")
    add("--batch", type=whole, default=SHARD_ROWS, metavar="N", help="conversations written at a time (%(default)s)")
    add("--prompts", type=Path, metavar="FILE", help="questions for half of them; it goes on where one ends in ...")
    add("--draft_vocab", type=whole, default=8192, metavar="N", help="the commonest tokens (%(default)s)")
    add("--layers", type=whole, default=1, metavar="N", help="of the draft (%(default)s)")
    add("--aux_layer_ids", type=id_list, metavar="IDS", help="layers whose input feeds the draft (2, half, last but 3)")
    for flag in configs.FLAGS:
        default = str(flag == "norm_before_residual").lower()
        add(f"--{flag}", choices=("true", "false"), default=default, help="(default: %(default)s)")
    add("--epochs", type=id_list, default=(1, 1, 2, 3), metavar="LIST", help="steps unrolled in each epoch (1,1,2,3)")
    add("--decay", type=share, default=0.8, metavar="F", help="weight of each further step (%(default)s)")
    add("--rows", type=whole, default=2, metavar="N", help="conversations an optimizer step (%(default)s)")
    add("--loss_share", type=share, default=0.5, metavar="F", help="of rows that the loss is taken at (%(default)s)")
    add("--lr", type=number(float, 0, above=True), default=1e-3, metavar="F", help="its largest value (%(default)s)")
    add("--init", metavar="DIR", help="begin with this draft's weights")
    add("--num_speculative_tokens", type=number(int, 1, 8), default=3, metavar="K", help="(default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--no_compile", dest="compile", action="store_false", help="run everything as plain PyTorch, more slowly")
    add("--seed", type=number(int, 0, 2**31), default=0, metavar="N")
    args = parser.parse_args([underscored(arg) for arg in argv])
    check_out(args.out, "train.eagle3", args.target, *([args.init] if args.init else []))
    args.data = args.data or args.out.with_name(args.out.name + ".data")
    if args.data.resolve().is_relative_to(args.out.resolve()):
        raise ConfigError(f"--data: {args.data}: lies in --out, which is replaced at the end; give another")
    local = os.path.expanduser(args.target)  # to be found from anywhere
    args.target_name = args.target_name or (os.path.realpath(local) if os.path.isdir(local) else args.target)
    if min(args.epochs) < 1 or max(args.epochs) > 8:
        given = ",".join(map(str, args.epochs))
        raise ConfigError(f"--epochs: {given}: a step count is below 1 or above 8; give each between 1 and 8")
    return args


# ---- what is trained -------------------------------------------------------------------------------------------------


def open_target(args: argparse.Namespace, folder: Path, config: SpeculatorConfig | None, batch: int) -> Transformer:
    """In the checkpoint's dtype; with caches for `batch` conversations and, on a CPU, our operators. 0: for neither."""
    target_config, _ = configs.read_target(folder)
    device = command.choose_device(args.device)
    dtype = getattr(torch, command.choose_dtype("auto", target_config))
    kernels = args.compile and batch > 0 and device.type == "cpu"
    with freed_memory_given_back() if kernels else nullcontext():
        target = command.load_target(folder, target_config, config.aux_layer_ids if config else (), device, dtype)
        if kernels:
            command.use_cpu_kernels([target])
        else:  # without caches its head is read whole; on CUDA rows are many
            command.hold_eight_bits([target], command.never)
    if batch > 0:
        target.allocate(batch, -(-(args.length + 1) // 64) * 64)  # in chunks of 64; the last slot takes padding
    return target


def settle_config(args: argparse.Namespace, folder: Path, run: Path) -> SpeculatorConfig:
    """Writes the draft's config.json into `run` and reads it as generate.py does: what that refuses is not trained."""
    target, _ = configs.read_target(folder)
    aux = args.aux_layer_ids or (2, target.n_layer // 2, target.n_layer - 3)
    flags = {flag: getattr(args, flag) == "true" for flag in configs.FLAGS}
    K, names = args.num_speculative_tokens, {"speculators_config": None}
    raw = config_json(folder, args.target_name, K, args.layers, args.draft_vocab, aux, flags)
    path = run / "config.json"
    if (run / "checkpoint.pt").exists() and configs.read_json(path) | names != json.loads(json.dumps(raw | names)):
        raise ConfigError(f"{path}: another draft is in training here; give its options again, or another --out")
    write_json(path, raw)
    return configs.fit_to_target(configs.read_speculator(run), target)


def commonest(data: Path, size: int) -> Tensor:
    """(Vd,) ids of the `size` tokens that the target wrote most often, ascending."""
    ids = torch.cat([load_file(shard(data, "text", i))["ids"].flatten() for i in range(count(data, "states"))])
    counts = torch.bincount(ids, minlength=size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


@torch.no_grad()
def new_draft(config: SpeculatorConfig, target: Transformer, ids: Tensor) -> Eagle3:
    """A draft for the tokens `ids` (Vd,), on the target's device, in fp32.

    Its head begins as the target's and the last aux state as its feature. Its layer does not: a target's weights may be
    ten times as large as these, and Adam's steps would change them too slowly."""
    reduced = config.draft_vocab_size < config.target_vocab_size
    draft = Eagle3(config, own={"head.weight", "d2t", "t2d"} if reduced else {"head.weight"})
    draft.embed = target.embed
    for name, weight in draft.named_parameters():
        if not name.startswith("embed."):
            weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(std=0.02)
    draft.fc.weight.zero_()
    draft.fc.weight[:, -config.target_hidden_size :].fill_diagonal_(1.0)
    draft.head.weight.copy_(0.2 * target.head.weight[ids])  # moved by Adam as fast as the rest, and not too sure yet
    draft.norm.weight.copy_(target.norm.weight)
    if reduced:
        draft.d2t.copy_(ids - torch.arange(len(ids)))
        draft.t2d.zero_()[ids] = True
    return draft.to(target.norm.weight.device)


def open_draft(args: argparse.Namespace, config: SpeculatorConfig, target: Transformer) -> Eagle3:
    """A new draft, or one with the weights of --init, whose vocabulary may be another."""
    torch.manual_seed(args.seed)
    ids = commonest(args.data, config.draft_vocab_size)
    if not args.init:
        return new_draft(config, target, ids)
    other = command.load_draft(configs.fit_to_target(configs.read_speculator(Path(args.init)), target.config), target)
    command.hold_eight_bits([other], command.never)
    theirs, ours = (vars(kind.layer) | vars(kind) for kind in (other.config, config))
    for name in (*configs.FLAGS, "aux_layer_ids", *vars(config.layer)):
        if theirs[name] != ours[name] and name not in FREE:
            raise ConfigError(f"--init: {args.init}: {name}: is {theirs[name]}, here {ours[name]}; give the same")
    if not torch.equal(other.embed.weight, target.embed.weight):
        raise ConfigError(f"--init: {args.init}: embed_tokens: is not the target's, as it is here; give another draft")
    known = target_ids(other).cpu()
    draft = new_draft(config, target, ids)
    own = {name: tensor for name, tensor in draft.state_dict().items() if name in OF_ITS_VOCABULARY}
    own["head.weight"][torch.isin(ids, known)] = other.head.weight[torch.isin(known, ids)].float()
    draft.load_state_dict(other.state_dict() | own)
    return draft


def target_ids(draft: Eagle3) -> Tensor:
    """(Vd,) ids of its vocabulary."""
    return draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=draft.fc.weight.device))


# ---- training --------------------------------------------------------------------------------------------------------


class Rows:
    """The shards' conversations, from `first` on: text in memory, states mapped."""

    def __init__(self, data: Path, shards: range, device: torch.device):
        text = [load_file(shard(data, "text", i)) for i in shards]
        self.ids, self.kinds = (torch.cat([part[name] for part in text]) for name in ("ids", "kinds"))
        self.files = [safe_open(shard(data, "states", i), "pt") for i in shards]
        self.device = device

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        data = {"ids": self.ids[rows].long(), "kinds": self.kinds[rows]}
        for name in ("aux", "last"):
            places = [divmod(row, SHARD_ROWS) for row in rows.tolist()]
            data[name] = torch.stack([self.files[i].get_slice(name)[j] for i, j in places])
        return {name: tensor.to(self.device) for name, tensor in data.items()}


def validate(draft: Eagle3, rows: Rows, K: int, batch: int) -> dict:
    """Acceptance as metrics.py defines it, of the rounds that inference would run on the held-out greedy answers."""
    done: list[int] = []
    for part in torch.arange(min(VALIDATION_ROWS, len(rows))).split(batch):
        with torch.autocast(rows.device.type, dtype=torch.bfloat16):
            done += rounds(draft, rows.take(part), K, torch.bfloat16)
    per_position = [sum(kept > i for kept in done) / max(1, len(done)) for i in range(K)]
    return {"rounds": len(done), "acceptance_length": 1 + sum(per_position), "per_position": per_position}


def train(args: argparse.Namespace, draft: Eagle3, target: Transformer, run: Path) -> None:
    """Goes on where `run`/checkpoint.pt stopped; leaves what validated best in `run`/best.pt. A step depends on its
    number alone, so that a run that was broken off ends where an unbroken one does."""
    device, K = draft.fc.weight.device, args.num_speculative_tokens
    rows, held_out = Rows(args.data, range(1, count(args.data, "states")), device), Rows(args.data, range(1), device)
    weights = [weight.requires_grad_() for name, weight in draft.named_parameters() if name != "embed.weight"]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    draft.positions = Unrolled(draft.config.layer, args.length - 1, max(*args.epochs, K)).to(device)
    per_epoch, path = len(rows) // args.rows, run / "checkpoint.pt"
    if per_epoch == 0:
        raise ConfigError(
            f"--rows: {args.rows} is more than the {len(rows)} conversations; give less, or more --tokens"
        )
    options = {name: getattr(args, name) for name in ("epochs", "rows", "lr", "decay", "loss_share", "seed")}
    options["steps"] = per_epoch * len(args.epochs)
    state = {"done": 0, "total": options["steps"], "best": 0.0, "seconds": 0.0, "options": options}
    if path.exists():
        kept = torch.load(path, weights_only=True, map_location=device)
        if kept["options"] != options:
            wrong = f"is of a run with {kept['options']}, this one has {options}"
            raise ConfigError(f"{path}: {wrong}; give the same options, delete it or give another --out")
        draft.load_state_dict(kept.pop("draft") | {"embed.weight": draft.embed.weight})
        optimizer.load_state_dict(kept.pop("optimizer"))
        state = kept
    teacher = Teacher(target.norm, target.head.weight[target_ids(draft)], args.compile)
    losses, began = [], time.perf_counter() - state["seconds"]
    while state["done"] < state["total"]:
        epoch, place = divmod(state["done"], per_epoch)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed + epoch))
        data, unrolled = rows.take(order[place * args.rows :][: args.rows]), args.epochs[epoch]
        torch.manual_seed(args.seed + state["done"])
        with torch.autocast(device.type, dtype=torch.bfloat16), command.compiler_needed():
            loss = loss_of(draft, teacher, data, unrolled, args.decay, args.loss_share, torch.bfloat16)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = args.lr * schedule(state["done"] / state["total"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / sum(args.decay**step for step in range(unrolled)))
        state["done"] += 1
        show_progress(state["done"], state["total"], f"steps, loss {fmean(losses[-50:]):.3f}")
        if state["done"] % max(1, state["total"] // 8) == 0 or state["done"] == state["total"]:
            state["seconds"] = time.perf_counter() - began
            numbers = validate(draft, held_out, K, args.rows) | {"loss": fmean(losses), "unrolled": unrolled}
            numbers |= {"tokens": state["done"] * args.rows * args.length, "hours": state["seconds"] / 3600}
            losses.clear()
            own = {name: weight for name, weight in draft.state_dict().items() if name != "embed.weight"}
            if numbers["acceptance_length"] > state["best"]:
                state["best"] = numbers["acceptance_length"]
                whole(run / "best.pt", partial(torch.save, {"draft": own, "numbers": numbers}))
            whole(path, partial(torch.save, state | {"draft": own, "optimizer": optimizer.state_dict()}))
            with (run / "log.jsonl").open("a") as log:
                print(json.dumps({"step": state["done"]} | numbers), file=log)
            command.say(f"step {state['done']}/{state['total']}: loss {numbers['loss']:.3f}, {accepted(numbers)}")


def schedule(share: float) -> float:
    """Of the learning rate, behind a share of all steps: a short warm-up, then half a cosine."""
    return min(1, (share + 1e-6) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))


def accepted(numbers: dict) -> str:
    per_position = " ".join(f"{share:.3f}" for share in numbers["per_position"])
    return f"acceptance length {numbers['acceptance_length']:.3f}, accepted per position {per_position}"


# ---- the result ------------------------------------------------------------------------------------------------------


def card(args: argparse.Namespace, numbers: dict, tokens: int) -> str:
    return f"""# EAGLE-3 draft for {args.target_name}

Trained with `python -m train.eagle3` of eagle-fast on {tokens:,} tokens of conversations that the target wrote itself:
{numbers["tokens"]:,} tokens seen, {numbers["hours"]:.1f} hours. Format: speculators 0.9; the embedding is the target's.

On held-out greedy answers of the same kind, K = {args.num_speculative_tokens}: {accepted(numbers)}.

    python generate.py --speculator THIS_FOLDER --target {args.target_name}
"""


def export_draft(args: argparse.Namespace, draft: Eagle3, config: SpeculatorConfig, run: Path) -> None:
    """Writes --out, opens it through generate.py and lets it decode held-out answers, whose validation is known."""
    if not (run / "best.pt").exists():
        raise ConfigError(f"{run / 'best.pt'}: missing; run the stage train first")
    best = torch.load(run / "best.pt", weights_only=True, map_location=draft.fc.weight.device)
    draft.load_state_dict(best["draft"] | {"embed.weight": draft.embed.weight})
    tokens = count(args.data, "states") * SHARD_ROWS * args.length
    export(draft, config, args.out, draft.embed.weight.dtype, card(args, best["numbers"], tokens))
    path = shard(args.data, "text", 0)
    text = zip(*(load_file(path)[name].tolist() for name in ("ids", "kinds")), strict=True)
    prompts = [ids[: kinds.index(GREEDY)] for ids, kinds in text if GREEDY in kinds[:-1]][:CHECKED]
    if not prompts:
        raise ConfigError(f"{path}: holds no greedy answer to check with; give a larger --length")
    prompts = [option for ids in prompts for option in ("--prompt_ids", ",".join(map(str, ids)))]
    asked = ["--speculator", str(args.out), "--target", args.target, "--max_new_tokens", str(args.length // 2)]
    plan = command.make_plan(command_args([*asked, "--device", args.device, "--no_compile", *prompts]))
    session = command.Session(plan, command.make_decoder(plan, *command.load_models(plan)), [])
    answers = [Answer(len(question.ids)) for question in plan.questions]
    for question, answer in zip(plan.questions, answers, strict=True):
        session.decode(list(question.ids), answer, lambda text: None)
    reached, said = totals(answers, plan.K)["acceptance_length"], best["numbers"]["acceptance_length"]
    command.say(f"{args.out}: acceptance length in generate.py {reached:.3f}, in validation {said:.3f}")


def run_stages(argv: list[str]) -> None:
    """Raises ConfigError."""
    args = parse_args(argv)
    stages = [args.stage] if args.stage else STAGES
    folder = fetch_weights(open_checkpoint(args.target, "target"), args.target, "target")
    run = args.data / args.out.name
    config = settle_config(args, folder, run)
    settle_manifest(
        args.data, target=fingerprint(folder), length=args.length, shard_rows=SHARD_ROWS,
        aux_layer_ids=config.aux_layer_ids, convention="id i: the residual stream entering layer i",
    )  # fmt: skip
    if "generate" in stages:
        write_text(args, folder)
    if "extract" in stages and count(args.data, "states") < count(args.data, "text"):
        states.extract(open_target(args, folder, config, EXTRACT_BATCH), args.data, EXTRACT_BATCH)
    if "train" in stages or "export" in stages:
        if count(args.data, "states") < 2:
            raise ConfigError(f"{shard(args.data, 'states', 1)}: missing; run the stages generate and extract first")
        target = open_target(args, folder, config, batch=0)
        draft = open_draft(args, config, target)
        if "train" in stages:
            train(args, draft, target, run)
        if "export" in stages:
            export_draft(args, draft, config, run)


def main(argv: list[str]) -> int:
    """Returns the exit code, as generate.main does."""
    return exit_code(lambda: run_stages(argv), "interrupted; the same command goes on from here")


def write_text(args: argparse.Namespace, folder: Path) -> None:
    """The stage generate: a shard to validate on and those to train on."""
    shards = 1 + -(-args.tokens // (SHARD_ROWS * args.length))
    if count(args.data, "text") >= shards:
        return
    tokenizer = load_tokenizer(folder)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigError(f"{folder}: tokenizer_config.json: no chat template, which conversations need; add one")
    asked = [prompt.turns[0] for prompt in read_prompt_file(args.prompts)] if args.prompts else []
    questions = [(tokenizer.encode(text.removesuffix("..."), bos=False), text.endswith("...")) for text in asked]
    headers, seed = conversations.Headers.of(tokenizer), args.seed * 1_000_003 + count(args.data, "text")
    target = open_target(args, folder, None, args.batch)
    rows = conversations.rows_of(target, headers, args.batch, args.length, questions, seed)
    conversations.generate(args.data, shards, SHARD_ROWS, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
