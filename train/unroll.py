"""EAGLE-3's training-time test: the draft's own class, unrolled over its own states (Li et al. 2025, arXiv:2503.01840).

All rows of a conversation are drafted from at once. Step 0 reads true features; step s > 0 reads what step s - 1 left
in the same row, beside the token that really came s later. Row i of step s stands at position i + s and sees the true
rows up to i and, of the steps after them, its own: what a chain that starts behind row i sees when it is drafted.

Shapes: B conversations, L tokens of each, T = L - 1 rows, R of them the roots of chains, Vd draft vocabulary.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3 import Eagle3
from model import Attention, rope_table
from speculators_config import DecoderConfig
from train.shards import GREEDY, TEMPLATE


class Unrolled(nn.Module):
    """Takes the place of a draft's `positions`. Slots 0 .. T - 1 hold the true rows; each further step adds a slot for
    each of `roots`, the rows that chains start from."""

    def __init__(self, config: DecoderConfig, rows: int, steps: int):
        super().__init__()
        self.config, self.step = config, 0
        self.register_buffer("true", torch.arange(rows), persistent=False)
        self.register_buffer("roots", torch.arange(rows), persistent=False)
        self.register_buffer("table", rope_table(config.rope, config.head_dim, rows + steps), persistent=False)

    @property
    def rows(self) -> Tensor:
        """Of the current step."""
        return self.roots if self.step else self.true

    def forward(self, slots: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """slots (1, T or R) of this step -> per layer what model.Positions says. A window counts from the root."""
        root = self.rows[None, :, None]
        cos_sin = self.table[:, root[..., 0] + self.step].unsqueeze(-2)
        key = torch.cat((self.true, self.roots.repeat(self.step)))  # each slot's root
        true = torch.arange(len(key), device=key.device) < len(self.true)
        groups, where = self.config.n_head // self.config.n_kv_head, []
        for window in self.config.windows:
            seen = (key == root) | (true & (key <= root) & (key > root - (window or len(self.true))))
            bias = torch.zeros((), dtype=dtype, device=slots.device).where(seen, float("-inf"))
            where.append((slots, cos_sin, bias[:, None].repeat(1, 1, groups, 1)))
        return where


def widen_caches(draft: Eagle3, batch: int, rows: int, dtype: torch.dtype, anew: bool) -> None:
    """Room for `rows` more slots, in new tensors: what a step wrote must outlive it, for its gradient."""
    for module in draft.modules():
        if isinstance(module, Attention):
            for name in ("k_cache", "v_cache"):
                sizes = (batch, module.n_kv_head, rows, module.head_dim)
                room = torch.zeros(sizes, dtype=dtype, device=draft.fc.weight.device)
                cache = room if anew else torch.cat((getattr(module, name), room), dim=2)
                module.register_buffer(name, cache, persistent=False)


def unroll(
    draft: Eagle3, tokens: Tensor, aux: Tensor, steps: int, dtype: torch.dtype, roots: Tensor | None = None
) -> Iterator[Tensor]:
    """tokens (B, T): x_1, x_2, ...; aux (B, T, n * Dt): states behind x_0, x_1, ... -> per step (B, R, D), un-normed,
    of the chains from the rows `roots` (R,), ascending; None: from all. dtype: of keys and values.

    draft.positions is an `Unrolled`. Nothing sees a chain but itself: those that are left out cost nothing."""
    place = draft.positions
    place.roots = place.true if roots is None else roots
    feature, tokens, slots = draft.fuse(aux), F.pad(tokens, (0, steps)), place.true[None]
    for place.step in range(steps):
        widen_caches(draft, len(tokens), slots.size(1), dtype, anew=place.step == 0)
        x = draft(tokens[:, place.rows + place.step], feature, slots)
        x = x if place.step else x[:, place.roots]
        yield x
        feature, slots = draft.feedback(x), slots[:, -1:] + 1 + torch.arange(len(place.roots), device=x.device)


def cross_entropy(guess: Tensor, truth: Tensor) -> Tensor:
    """Of two laws, given as logits (N, Vd), the sum over all rows."""
    return -(truth.softmax(-1) * guess.log_softmax(-1)).sum()


class Teacher(nn.Module):
    """The target's law over the draft's vocabulary, from the states that it left on disk."""

    def __init__(self, norm: nn.Module, head: Tensor, compiled: bool = False):
        super().__init__()
        self.norm, self.head = norm, head  # (Vd, D): the rows of the draft's vocabulary
        self.entropy = torch.compile(cross_entropy, dynamic=True) if compiled else cross_entropy  # one pass, not six

    def loss(self, guess: Tensor, last: Tensor) -> Tensor:
        """Mean cross entropy. guess (N, Vd): logits; last (N, D), un-normed; N may be 0."""
        return self.entropy(guess, F.linear(self.norm(last), self.head).float()) / max(1, len(guess))


def loss_of(
    draft: Eagle3, teacher: Teacher, data: dict[str, Tensor], steps: int, decay: float, share: float, dtype: torch.dtype
) -> Tensor:
    """Cross entropy against the target's law, step s weighted by decay^s, of the chains from a random `share` of the
    rows, as the head is half of the work. data: ids, kinds (B, L), aux (B, L, n * Dt), last (B, L, D)."""
    ids, kinds, last = data["ids"], data["kinds"], data["last"]
    T, total = ids.size(1) - 1, 0.0
    roots = torch.randperm(T, device=ids.device)[: math.ceil(T * share)].sort().values
    for step, x in enumerate(unroll(draft, ids[:, 1:], data["aux"][:, :-1], steps, dtype, roots)):
        # Row i guesses token i + 2 + step, whose law stands behind token i + 1 + step.
        known = roots[roots < T - 1 - step] + 1 + step
        wanted = kinds[:, known + 1] != TEMPLATE
        guess = draft.logits(x[:, : len(known)][wanted])
        total = total + decay**step * teacher.loss(guess, last[:, known][wanted])
    return total


@torch.no_grad()
def rounds(draft: Eagle3, data: dict[str, Tensor], K: int, dtype: torch.dtype) -> list[int]:
    """How many drafted tokens each round accepts over the greedy answers of `data`, as inference would have it: there
    the token that came is the target's best, so that a chain which is right so far has read what it drafted."""
    ids, kinds, hits = data["ids"], data["kinds"], []
    for step, x in enumerate(unroll(draft, ids[:, 1:], data["aux"][:, :-1], K, dtype)):
        best = F.pad(draft.target_ids(draft.logits(x[:, : -1 - step]).argmax(-1)), (0, 1 + step), value=-1)
        came = F.pad(ids[:, 2 + step :], (0, 1 + step), value=-2)
        hits.append((best == came) & (F.pad(kinds[:, 2 + step :], (0, 1 + step)) == GREEDY))
    accepted = torch.stack(hits).int().cumprod(0).sum(0).tolist()  # behind each row
    done = []
    for row, kind in zip(accepted, (kinds == GREEDY).tolist(), strict=True):
        i = 0
        while i + 2 < len(kind):
            starts = kind[i + 1] and kind[i + 2]  # token i + 1 is pending, of the answer, and there is one to guess
            if starts:
                done.append(row[i])
            i += 1 + (row[i] if starts else 0)
    return done
