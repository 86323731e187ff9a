"""Our engine beside those that a user would pick instead: the same prompts, weights, dtype, K and lengths.

    python -m bench.peers --speculator DIR --target DIR [options]

An engine is a command that answers one task (make_task) and ends its stdout with one JSON object that holds, at least,
{"results": [{"token_ids": [int], "decode_seconds": float}], "totals": {"rounds": int, "accepted": int}}. generate.py
--json is one as it is, bench/peer_*.py make the others so. Each runs alone, both arms, in turn, several times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import median

from bench.peer_setup import HOME, OFFLINE, PEERS, ROOT, PeerError, last_words, say, set_up
from checkpoint import fetch_weights
from generate import make_plan
from metrics import ratio
from options import Parser, number, underscored
from options import parse_args as generate_args
from prompts import QUESTIONS
from speculators_config import MAX_SPECULATIVE_TOKENS, ConfigError

CLOCK = "decoding only: from the first token, which the pass over the prompt makes, to the last"
ARMS = ("plain", "speculative")
PROBE_PROMPTS, PROBE_TOKENS = 3, 32  # to choose the number of threads by
CLEARLY = 1.05  # times faster; less is noise, and speculation gains more from a second core than plain decoding does
LIMIT = 3600  # seconds that one run may take
COLUMNS = ("engine", "version", "threads", "plain tok/s", "speculative tok/s", "acceptance length")
COLUMNS += ("peak MB, plain / speculative", "ours / it: plain", "speculative", "best")


def peer_names(text: str) -> tuple[str, ...]:
    """An argparse type: "llama.cpp,vllm"."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(PEERS)}")
    return names


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises ConfigError."""
    parser = Parser(prog="python -m bench.peers", allow_abbrev=False, description="Measures ours beside other engines.")
    add, count = parser.add_argument, number(int, 1)
    add("--speculator", required=True, metavar="PATH_OR_REPO", help="an EAGLE-3 draft in speculators format")
    add("--target", metavar="PATH_OR_REPO", help="default: the one that the speculator's config names")
    add("--prompts", type=Path, metavar="FILE", help=".txt or .jsonl, first turns (default: six questions of our own)")
    add("--limit", type=count, metavar="N", help="only the first N prompts")
    add("--max_new_tokens", type=count, default=128, metavar="N", help="of each answer (default: %(default)s)")
    tokens = number(int, 1, MAX_SPECULATIVE_TOKENS)
    add("--num_speculative_tokens", type=tokens, metavar="K", help="tokens drafted a round (default: the config's)")
    add("--peers", type=peer_names, default=tuple(PEERS), metavar="NAMES", help=f"default: {','.join(PEERS)}")
    add(
        "--rounds", type=count, default=3, metavar="N", help="runs of each engine; medians count (default: %(default)s)"
    )
    add("--json", action="store_true", help="stdout holds one JSON object and nothing else")
    return parser.parse_args([underscored(arg) for arg in argv])


# ---- what is asked, and how ------------------------------------------------------------------------------------------


def question_options(args: argparse.Namespace, limit: int | None) -> list[str]:
    """The first `limit` prompts, for generate.py."""
    if args.prompts is None:
        return [option for text in QUESTIONS[:limit] for option in ("--prompt", text)]
    return ["--prompts", str(args.prompts), "--first_turns", *(("--limit", str(limit)) if limit else ())]


def make_task(args: argparse.Namespace) -> dict:
    """What an engine has to answer, checked and tokenized by generate.py's own functions. Raises ConfigError."""
    options = ["--speculator", args.speculator, "--dtype", "bf16", "--json"]
    for name in ("target", "num_speculative_tokens", "max_new_tokens"):
        if (value := getattr(args, name)) is not None:
            options += [f"--{name}", str(value)]
    plan = make_plan(generate_args([*options, *question_options(args, args.limit)]))
    prompts = [question.prompts(plan.dialogue())[0] for question in plan.questions]
    need = max(map(len, prompts)) + args.max_new_tokens + plan.K + 1
    return {
        "speculator": str(fetch_weights(plan.speculator.folder, args.speculator, "speculator")),
        "target": str(fetch_weights(plan.target_folder, plan.target_name, "target")),
        "prompts": prompts,  # token ids
        "questions": question_options(args, args.limit),  # the same for generate.py
        "stop_ids": sorted(plan.stop_ids),
        "max_new_tokens": args.max_new_tokens,
        "context": min(-need // 512 * -512, plan.target.context),  # tokens; rounded up
        "K": plan.K,  # 0: plain
        "threads": 1,
    }


def our_command(task: dict, file: Path) -> list[str]:
    options = ["--speculator", task["speculator"], "--target", task["target"], "--dtype", "bf16", "--json"]
    options += ["--num_speculative_tokens", str(task["K"]), "--max_new_tokens", str(task["max_new_tokens"])]
    return [sys.executable, "generate.py", *options, *task["questions"]]


def our_version() -> str:
    commit = "unknown"
    if shutil.which("git"):
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or commit
    return f"{commit}, torch {metadata.version('torch')}"


def peer_command(name: str, task: dict) -> Callable[[dict, Path], list[str]]:
    """What makes a peer's command from a task and a file to write it to. Sets it up. Raises PeerError."""
    folder, script = set_up(name), f"bench/peer_{name.replace('.', '_')}.py"
    changes = PEERS[name].prepare(folder, Path(task["speculator"]), Path(task["target"]))
    python = folder / "bin/python"  # where it is no Python package, ours starts it

    def command(task: dict, file: Path) -> list[str]:
        file.write_text(json.dumps(task | changes))
        return [str(python if python.exists() else sys.executable), script, str(file)]

    return command


# ---- running ---------------------------------------------------------------------------------------------------------


def run(name: str, command: Callable[[dict, Path], list[str]], task: dict) -> dict:
    """One run: what the engine printed, its `command`, and its largest process's `peak_mb`. Raises PeerError."""
    log = HOME / f"{name}.run.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as errors:
        argv, out = command(task, Path(folder) / "task.json"), Path(folder) / "stdout"
        options = {"env": os.environ | OFFLINE | {"OMP_NUM_THREADS": str(task["threads"])}, "cwd": ROOT}
        with out.open("w") as stdout:
            options |= {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": errors}
            process = subprocess.Popen(argv, start_new_session=True, **options)
        timer = threading.Timer(LIMIT, end_session, (process.pid,))
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # its usage covers the children that it waited for
        finally:
            timer.cancel()
            end_session(process.pid)  # nobody stays behind to disturb the next one
        process.returncode = os.waitstatus_to_exitcode(status)
        lines = [line for line in out.read_text().splitlines() if line.startswith('{"')]
    if process.returncode != 0 or not lines:
        raise PeerError(f"it ended with exit code {process.returncode} ({last_words(log)})")
    return {"command": shlex.join(argv)} | json.loads(lines[-1]) | {"peak_mb": usage.ru_maxrss / 1024}


def end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextlib.contextmanager
def reason_in(entry: dict) -> Iterator[None]:
    """A peer that fails is no failure of the comparison: it gets a reason."""
    try:
        yield
    except PeerError as error:
        entry["reason"] = str(error)
        say(f"not measured, because {error}")


def best_threads(name: str, command: Callable, probe: dict) -> int:
    """All cores, unless one thread decodes plainly clearly faster. The fastest answer counts: hiccups are common."""
    speeds = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        record = run(name, command, probe | {"threads": threads})
        speeds[threads] = max(speed([result]) for result in record["results"])
        say(f"{name}: {speeds[threads]:.1f} tok/s on {threads} thread{'s' * (threads > 1)}")
    return 1 if speeds[1] > CLEARLY * speeds[max(speeds)] else max(speeds)


def measure(commands: dict[str, Callable], task: dict, probe: dict, rounds: int, rows: dict[str, dict]) -> None:
    """Fills in the rows: `threads`, and for each arm `runs`, or the `reason` why there are none."""
    for name, command in commands.items():
        with reason_in(rows[name]):
            rows[name]["threads"] = best_threads(name, command, probe)
    for i, name, arm in product(range(rounds), commands, ARMS):
        row = rows[name]
        if "reason" in row or "reason" in row[arm]:
            continue
        say(f"run {i + 1} of {rounds}: {name}, {arm}")
        asked = task | {"threads": row["threads"], "K": 0 if arm == "plain" else task["K"]}
        with reason_in(row[arm]):
            row[arm].setdefault("runs", []).append(run(name, commands[name], asked))


# ---- the numbers -----------------------------------------------------------------------------------------------------


def speed(results: list[dict]) -> float:
    """Tokens per second over some answers, without each one's first token and the pass over the prompt."""
    return ratio(sum(len(r["token_ids"]) - 1 for r in results), sum(r["decode_seconds"] for r in results))


def summary(runs: list[dict]) -> dict:
    """One arm of one engine; medians."""
    speeds, totals = [speed(record["results"]) for record in runs], runs[0]["totals"]
    numbers = {"tokens_per_second": median(speeds), "each_run": speeds}
    numbers["tokens"] = sum(len(result["token_ids"]) for result in runs[0]["results"])
    numbers["peak_mb"] = median(record["peak_mb"] for record in runs)
    if totals.get("rounds"):
        numbers["acceptance_length"] = 1 + totals["accepted"] / totals["rounds"]
        numbers |= {name: totals[name] for name in ("rounds", "accepted")}
    return numbers | {"command": runs[0]["command"]}


def summarize(rows: dict[str, dict]) -> None:
    """Puts a summary in the place of each arm's runs, and how ours compares into each row."""
    for row in rows.values():
        for arm in ARMS:
            row[arm] |= summary(runs) if (runs := row[arm].pop("runs", None)) else {}
        speeds = {arm: row[arm]["tokens_per_second"] for arm in ARMS if "tokens_per_second" in row[arm]}
        row["speeds"] = speeds | ({"best": max(speeds.values())} if speeds else {})
    for row in rows.values():
        ours = rows["ours"]["speeds"]
        row["ours_over_it"] = {key: ratio(ours[key], value) for key, value in row["speeds"].items() if key in ours}


def table(rows: dict[str, dict]) -> str:
    """In Markdown, with the commands and what is missing below it."""
    lines, notes = [COLUMNS], []
    for name, row in rows.items():
        arms = [row[arm] for arm in ARMS]
        head = [name, row["version"], str(row.get("threads", "-"))]
        if not row["speeds"]:
            lines.append([*head, f"not measured, because {row.get('reason') or arms[0]['reason']}"])
            continue
        length, memory = shown(arms[1], "acceptance_length", 3), [shown(arm, "peak_mb", 0) for arm in arms]
        ratios = [shown(row["ours_over_it"], key, 2) for key in (*ARMS, "best")]
        lines.append([*head, *(shown(row["speeds"], arm, 1) for arm in ARMS), length, " / ".join(memory), *ratios])
        for arm in ARMS:
            reason = f"not measured, because {row[arm].get('reason')}"
            notes.append(f"{name}, {arm}: {row[arm].get('command', reason)}")
    widths = [max(len(line[i]) for line in lines if len(line) == len(COLUMNS)) for i in range(len(COLUMNS))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines] + ["", *notes])


def shown(numbers: dict, key: str, digits: int) -> str:
    return f"{numbers[key]:.{digits}f}" if key in numbers else "-"


def compare(args: argparse.Namespace) -> dict:
    """The whole comparison, as the record that is printed last. Raises ConfigError."""
    task = make_task(args)
    versions = {"ours": our_version()} | {name: PEERS[name].version for name in args.peers}
    rows = {name: {"version": version} | {arm: {} for arm in ARMS} for name, version in versions.items()}
    commands = {"ours": our_command}
    for name in args.peers:
        if PEERS[name].plain_only:
            rows[name]["speculative"]["reason"] = PEERS[name].plain_only
        with reason_in(rows[name]):
            commands[name] = peer_command(name, task)
    probe = task | {"K": 0, "max_new_tokens": min(PROBE_TOKENS, args.max_new_tokens)}
    probe["prompts"] = task["prompts"][:PROBE_PROMPTS]
    probe["questions"] = question_options(args, len(probe["prompts"]))
    measure(commands, task, probe, args.rounds, rows)
    summarize(rows)
    settings = {name: task[name] for name in ("speculator", "target", "K", "max_new_tokens")}
    settings |= {"prompts": len(task["prompts"]), "rounds": args.rounds, "cores": len(os.sched_getaffinity(0))}
    return settings | {"dtype": "bfloat16", "temperature": 0, "clock": CLOCK, "engines": rows}


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        args = parse_args(argv)
        record = compare(args)
    except ConfigError as error:
        say("error: " + " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        say("\ninterrupted")
        return 130
    settings = f"{record['prompts']} prompts x {record['max_new_tokens']}, K={record['K']}, bf16, greedy"
    settings += " (OpenVINO: fp16 weights); the better of one thread and all"
    print(f"{settings}; clock: {CLOCK}\n\n{table(record['engines'])}", file=sys.stderr if args.json else sys.stdout)
    print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
