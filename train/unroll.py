"""EAGLE-3's training-time test: the draft's own class, unrolled over its own states (Li et al. 2025, arXiv:2503.01840).

All rows of a conversation are drafted from at once. Step 0 reads true features; step s > 0 reads what step s - 1 left
in the same row, beside the token that really came s later. Row i of step s stands at position i + s and sees the true
rows up to i and, of the steps after them, its own: what a chain that starts behind row i sees when it is drafted.

Shapes: B conversations, L tokens of each, T = L - 1 rows, Vd draft vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3 import Eagle3
from model import Attention, rope_table
from speculators_config import DecoderConfig
from train.shards import GREEDY, TEMPLATE


class Unrolled(nn.Module):
    """Takes the place of a draft's `positions`: row i of step s has slot s * T + i of caches that grow by T a step."""

    def __init__(self, config: DecoderConfig, rows: int, steps: int):
        super().__init__()
        self.config, self.rows, self.step = config, rows, 0
        self.register_buffer("table", rope_table(config.rope, config.head_dim, rows + steps), persistent=False)

    def forward(self, slots: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """slots (1, T) -> per layer what model.Positions says. A window counts from the row a chain starts at."""
        step, root = slots // self.rows, slots % self.rows
        cos_sin = self.table[:, root + step].unsqueeze(-2)
        keys, root = torch.arange((self.step + 1) * self.rows, device=slots.device), root.unsqueeze(-1)
        own = (keys % self.rows == root) & (keys // self.rows <= step.unsqueeze(-1))
        groups, where = self.config.n_head // self.config.n_kv_head, []
        for window in self.config.windows:
            true = (keys < self.rows) & (keys <= root) & (keys > root - (window or self.rows))
            bias = torch.zeros((), dtype=dtype, device=slots.device).where(true | own, float("-inf"))
            where.append((slots, cos_sin, bias[:, None].repeat(1, 1, groups, 1)))
        return where


def widen_caches(draft: Eagle3, batch: int, rows: int, dtype: torch.dtype, anew: bool) -> None:
    """Room for `rows` more slots, in new tensors: what a step wrote must outlive it, for its gradient."""
    for module in draft.modules():
        if isinstance(module, Attention):
            for name in ("k_cache", "v_cache"):
                room = torch.zeros(
                    batch, module.n_kv_head, rows, module.head_dim, dtype=dtype, device=draft.fc.weight.device
                )
                cache = room if anew else torch.cat((getattr(module, name), room), dim=2)
                module.register_buffer(name, cache, persistent=False)


def unroll(draft: Eagle3, tokens: Tensor, aux: Tensor, steps: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """tokens (B, T): x_1, x_2, ...; aux (B, T, n * Dt): the states behind x_0, x_1, ... -> per step (B, T, D),
    un-normed. draft.positions is an `Unrolled`; dtype: of keys and values."""
    feature, rows = draft.fuse(aux), torch.arange(tokens.size(1), device=tokens.device)[None]
    for step in range(steps):
        widen_caches(draft, *tokens.shape, dtype, anew=step == 0)
        draft.positions.step = step
        x = draft(tokens, feature, step * tokens.size(1) + rows)
        yield x
        feature, tokens = draft.feedback(x), F.pad(tokens[:, 1:], (0, 1))


class Teacher(nn.Module):
    """The target's law over the draft's vocabulary, from the states that it left on disk."""

    def __init__(self, norm: nn.Module, head: Tensor):
        super().__init__()
        self.norm, self.head = norm, head  # (Vd, D): the rows of the draft's vocabulary

    def logits(self, last: Tensor) -> Tensor:
        """(..., D), un-normed -> (..., Vd) in fp32."""
        return F.linear(self.norm(last), self.head).float()


def loss_of(
    draft: Eagle3, teacher: Teacher, data: dict[str, Tensor], steps: int, decay: float, share: float, dtype: torch.dtype
) -> Tensor:
    """Cross entropy against the target's law, step s weighted by decay^s, at a random `share` of the rows, as the head
    is half of the work. data: ids, kinds (B, L), aux (B, L, n * Dt), last (B, L, D)."""
    ids, kinds, last = data["ids"], data["kinds"], data["last"]
    total = 0.0
    for step, x in enumerate(unroll(draft, ids[:, 1:], data["aux"][:, :-1], steps, dtype)):
        # Row i guesses token i + 2 + step, whose law stands behind token i + 1 + step.
        wanted = kinds[:, 2 + step :] != TEMPLATE
        wanted &= torch.rand(wanted.shape, device=wanted.device) < share
        guess = draft.logits(x[:, : wanted.size(1)][wanted]).log_softmax(-1)
        law = teacher.logits(last[:, 1 + step : -1][wanted]).softmax(-1)
        total = total - decay**step * (law * guess).sum(-1).mean()
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
