"""The numbers of an answer: acceptance as vLLM defines it, speeds, and how they are written for people and for scripts.

A round is one verification by the target; acceptance length = 1 + accepted / rounds, so the target's own token counts.
Tokens that were cut, past a stop or the budget, count nowhere. Over several answers: ratios of sums, never means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculate import Round

MANY_ROUNDS = 20  # before acceptance says something about a draft
NEARLY_ALL = 0.95  # of the drafted tokens; an answer's last round is cut, so that all of them seldom count


@dataclass
class Answer:
    """One answer; grows while it is being made, so that an interrupt finds what there is. Times in seconds."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None  # stop | length
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    baseline: dict | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token comes from the prefill."""
        return ratio(len(self.token_ids[1:]), self.decode_seconds)


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def acceptance(answers: Sequence[Answer], K: int) -> dict:
    """The acceptance numbers over one or more answers. Position i: the share of rounds with more than i accepted."""
    rounds = [done for answer in answers for done in answer.rounds]
    reached = [len(rounds), *(sum(done.accepted > i for done in rounds) for i in range(K))]
    accepted = sum(reached[1:])
    return {
        "rounds": len(rounds),
        "proposed": K * len(rounds),
        "accepted": accepted,
        "emitted": sum(len(answer.token_ids) for answer in answers),
        "acceptance_length": 1 + accepted / len(rounds) if rounds else 0.0,
        "acceptance_rate": ratio(accepted, K * len(rounds)),
        "acceptance_per_position": [ratio(count, len(rounds)) for count in reached[1:]],
        "conditional_acceptance_per_position": [
            after / before if before else None for before, after in pairwise(reached)
        ],
    }


def totals(answers: Sequence[Answer], K: int) -> dict:
    """Everything summed over the answers; `speedup` where there are baselines."""
    numbers = acceptance(answers, K)
    decoded = sum(len(answer.token_ids[1:]) for answer in answers)
    numbers["tokens_per_second"] = speed = ratio(decoded, sum(answer.decode_seconds for answer in answers))
    plain = [answer.baseline for answer in answers if answer.baseline]
    if plain:
        decoded = sum(len(baseline["token_ids"][1:]) for baseline in plain)
        plain_speed = ratio(decoded, sum(baseline["decode_seconds"] for baseline in plain))
        numbers["speedup"] = ratio(speed, plain_speed)
    return numbers


def result(answer: Answer, K: int, trace: bool) -> dict:
    """One entry of the JSON's `results`."""
    entry = {
        "prompt_tokens": answer.prompt_tokens,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prefill_seconds": answer.prefill_seconds,
        "decode_seconds": answer.decode_seconds,
        "tokens_per_second": answer.tokens_per_second,
        **acceptance([answer], K),
    }
    if trace:
        entry["trace"] = [asdict(done) for done in answer.rounds]
    return entry | ({"baseline": answer.baseline} if answer.baseline else {})


def describe(numbers: dict) -> str:
    """One line for people, from `totals`."""
    line = f"{numbers['emitted']} tokens, {numbers['tokens_per_second']:.1f} tok/s"
    if numbers["rounds"]:
        positions = " ".join(f"{share:.2f}" for share in numbers["acceptance_per_position"])
        length = f"acceptance length {numbers['acceptance_length']:.2f}"
        line += f"; {numbers['rounds']} rounds, {length}, accepted per position {positions}"
    return line + (f"; {numbers['speedup']:.2f} x plain decoding" if "speedup" in numbers else "")


def describe_baseline(baseline: dict, sampled: bool = False) -> str:
    """One line for people: is it the same text? Sampled answers have the same law, not the same tokens."""
    parted = baseline["first_divergence"]
    same = "the same tokens"
    if sampled:
        same = "sampled from the same law"
    elif parted is not None:
        margin = f"where the target's two best logits are {parted['margin']:.4f} apart"
        same = f"other tokens from {parted['index']} on, {margin}"
    return f"plain decoding: {baseline['tokens_per_second']:.1f} tok/s, {same}"


def doubt(numbers: dict) -> str | None:
    """Draft defects are silent, the text stays right: both ends of the scale deserve a word."""
    accepted, proposed = numbers["accepted"], numbers["proposed"]
    if numbers["rounds"] < MANY_ROUNDS or 0 < accepted < NEARLY_ALL * proposed:
        return None
    if accepted == 0:
        return f"none of {proposed} drafted tokens was accepted: was this draft trained on this target?"
    return f"{accepted} of {proposed} drafted tokens were accepted, which is rare: does the text repeat itself?"
