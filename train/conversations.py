"""Stage 1: conversations that the target writes itself, questions included: what it says is what its draft must guess.

All rows of a batch are written side by side, each at a position of its own; a full row goes to the shard and starts
anew. There is no prefill: a template's tokens are fed one at a time, as if the target had written them.
"""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from model import Transformer
from options import say, show_progress
from speculators_config import ConfigError
from tokenizer import Tokenizer
from train.shards import ANSWER, GREEDY, QUESTION, TEMPLATE, count, shard, write

QUESTION_TEMPERATURE = 0.9
ANSWER_TEMPERATURES = (0.0, 0.0, 0.5, 0.8)  # one of them for each conversation; 0 is greedy
CANDIDATES = 64  # tokens are drawn among the likeliest: the tail of a small model is noise
REPEATED = 24  # tokens that come again in the same turn: a loop
LOOKED_FOR_EVERY = 8  # tokens
Question = tuple[list[int], bool]  # its ids; is it unfinished?
MARKS = "\ue000\ue001\ue002"  # private characters, which no template holds


@dataclass(frozen=True)
class Headers:
    """What the chat template puts around texts, as ids: before the first question, between a question and its answer,
    and behind an answer. The last two begin with the token that ends a turn, which the target writes itself."""

    opening: list[int]
    to_answer: list[int]
    to_question: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Headers":
        """Raises ConfigError where the template does not keep texts in order, each once."""
        roles = zip(("user", "assistant", "user"), MARKS, strict=True)
        messages = [{"role": role, "content": mark} for role, mark in roles]
        text = tokenizer.render_chat(messages, add_generation_prompt=False)
        if re.findall(f"[{MARKS}]", text) != list(MARKS):
            raise ConfigError("--target: its chat template does not show a text once; use another target")
        return cls(*map(tokenizer.codec.encode_marked, re.split(f"[{MARKS}]", text)[:3]))


@dataclass
class Row:
    """One conversation in the making."""

    headers: Headers
    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # template and real questions: what comes next, whatever is drawn
    asking: bool = True  # the turn that is being written, or given, is a question
    begin: int = 0  # where it begins
    answer_temperature: float = 0.0

    def restart(self, draw: random.Random, question: list[int], unfinished: bool) -> None:
        """A new conversation, which begins with `question`; where that is unfinished or empty, the target goes on."""
        opening = self.headers.opening
        self.ids, self.kinds = list(opening), [TEMPLATE] * len(opening)
        self.begin, self.answer_temperature = len(opening), draw.choice(ANSWER_TEMPERATURES)
        self.asking = unfinished or not question
        self.given = question + ([] if self.asking else self.headers.to_answer)

    @property
    def temperature(self) -> float:
        return QUESTION_TEMPERATURE if self.asking else self.answer_temperature

    def take(self, drawn: int) -> None:
        """One more token: what is given, else what was drawn; a turn that ends or loops is followed by the next."""
        if self.given:
            self.ids.append(self.given.pop(0))
            self.kinds.append(TEMPLATE)
            self.begin = len(self.ids)
            return
        self.ids.append(drawn)
        self.kinds.append(QUESTION if self.asking else GREEDY if self.answer_temperature == 0 else ANSWER)
        ending = self.headers.to_answer if self.asking else self.headers.to_question
        if drawn == ending[0]:
            self.given = ending[1:]
            self.asking = not self.asking
        elif len(self.ids) % LOOKED_FOR_EVERY == 0 and (cut := loop_start(self.ids, self.begin)) is not None:
            del self.ids[cut:], self.kinds[cut:]  # the caches' rows are overwritten
            self.given = list(ending)
            self.asking = not self.asking


def loop_start(ids: list[int], begin: int) -> int | None:
    """Where the tokens from `begin` on start to say again what they end with; None where they don't."""
    tail = ids[-REPEATED:]
    for at in range(begin, len(ids) - REPEATED):
        if ids[at] == tail[0] and ids[at : at + REPEATED] == tail:
            return at + REPEATED
    return None


def step(target: Transformer, tokens: Tensor, positions: Tensor, temperatures: Tensor, gumbel: Tensor) -> Tensor:
    """Draws each row's next token: tokens, positions (B, 1), temperatures (B,), gumbel (B, CANDIDATES) -> (B,).

    The largest of logits + T * Gumbel noise follows the softmax of logits / T, and with T = 0 is the best."""
    x, _ = target(tokens, positions)
    values, ids = target.logits(x[:, 0]).topk(CANDIDATES)
    chosen = (values + temperatures[:, None] * gumbel).argmax(-1, keepdim=True)
    return ids.gather(1, chosen)[:, 0]


@torch.inference_mode()
def rows_of(
    target: Transformer, headers: Headers, batch: int, length: int, questions: list[Question], seed: int
) -> Iterator[Row]:
    """Finished rows of `length` tokens, without end. The target's caches hold `batch` rows of at least that.

    questions: real ones, which every second conversation begins with."""
    draw, device = random.Random(seed), target.norm.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    rows = [Row(headers) for _ in range(batch)]

    def restart(row: Row) -> None:
        question, unfinished = draw.choice(questions) if questions and draw.random() < 0.5 else ([], False)
        row.restart(draw, question[: length // 2], unfinished)

    for row in rows:
        restart(row)
    at = [0] * batch  # the position of the token that is fed next: behind it the caches hold the row
    while True:
        tokens = torch.tensor([row.ids[i] for row, i in zip(rows, at, strict=True)], device=device)
        temperatures = torch.tensor([row.temperature for row in rows], device=device)
        noise = torch.empty(batch, CANDIDATES, device=device).exponential_(generator=generator).log_().neg_()
        positions = torch.tensor(at, device=device)
        drawn = step(target, tokens[:, None], positions[:, None], temperatures, noise).tolist()
        for i, row in enumerate(rows):
            at[i] += 1
            if at[i] == len(row.ids):
                row.take(drawn[i])
                at[i] = min(at[i], len(row.ids) - 1)  # a loop was cut
                if len(row.ids) > length:
                    yield Row(headers, row.ids[:length], row.kinds[:length])
                    restart(row)
                    at[i] = len(headers.opening) - 1  # the opening is in the caches


def generate(folder: Path, shards: int, rows: int, written: Iterator[Row]) -> None:
    """Writes the text shards that `folder` still lacks, of `rows` conversations each."""
    for i in range(count(folder, "text"), shards):
        made, began = [], time.perf_counter()
        while len(made) < rows:
            made.append(next(written))
            show_progress(i * rows + len(made), shards * rows, "conversations written")
        ids, kinds = torch.tensor([row.ids for row in made]), torch.tensor([row.kinds for row in made])
        tensors = {"ids": ids.int(), "kinds": kinds.to(torch.uint8)}
        write(shard(folder, "text", i), tensors)
        say(f"text {i + 1} of {shards}: {tensors['ids'].numel() / (time.perf_counter() - began):.0f} tok/s")
