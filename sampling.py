"""The decisions: which token is drawn, which drafted tokens are kept. Tensors in, tensors out; uniforms are given.

Knows no model and no cache. Maths: speculative sampling, Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023
(arXiv:2302.01318). Shapes: B batch, K drafted tokens, V target vocabulary; `...` any leading dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def law(logits: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None) -> Tensor:
    """The law that tokens are drawn from: logits (..., V) -> probabilities (..., V) in fp32.

    temperature (> 0), top_k (>= 1) and top_p (in (0, 1]) are scalar tensors, so that another value compiles nothing.
    The filters apply in this order: the k largest are kept (ties by lower id), then the smallest set of them that
    holds top_p of what is left. The largest logit is always kept, so that not everything can be masked."""
    logits = logits.float()
    # Shifted first: the largest becomes 0 and nothing overflows, however small the temperature.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k is None and top_p is None:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked = ranked * (torch.arange(ranked.size(-1), device=ranked.device) < top_k)
    if top_p is not None:
        before = ranked.cumsum(-1) - ranked
        keep = before < top_p * ranked.sum(-1, keepdim=True)
        # top_p below the rounding of the sum keeps the best token all the same. Not keep[..., 0] = True, which makes a
        # tensor on the host, in the middle of a round.
        keep[..., :1].fill_(True)
        ranked = ranked * keep
    kept = torch.zeros_like(probs).scatter(-1, order, ranked)
    return kept / kept.sum(-1, keepdim=True)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse transform: probs (..., V), not necessarily of sum 1, and u (...) in [0, 1) -> token ids (...).

    Sums run in u's precision: with fp64 also the rarest of 128k tokens keep their share. A token of probability 0 is
    never drawn, whatever the rounding."""
    sums = probs.to(u.dtype).cumsum(-1)
    below = 1 - 4 * torch.finfo(u.dtype).eps  # keeps `reach` under the last sum also after rounding
    reach = u.unsqueeze(-1) * (sums[..., -1:] * below)
    return ((sums > reach) & (probs > 0)).int().argmax(-1)  # the first of them


def verify_greedy(draft_tokens: Tensor, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """verify_chain for one-hot laws. draft_tokens (B, K), target_tokens (B, K+1): the target's best after each row.

    Returns num_accepted (B,) in 0..K, the length of the agreeing prefix, and next_token (B, 1)."""
    num_accepted = (draft_tokens == target_tokens[:, :-1]).int().cumprod(-1).sum(-1)
    return num_accepted, target_tokens.gather(-1, num_accepted.unsqueeze(-1))


def verify_chain(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps a prefix of the drafted tokens so that what is emitted follows the target's law exactly.

    draft_tokens (B, K), drawn from draft_probs (B, K, V); target_probs (B, K+1, V); u (B, K) in [0, 1).
    Returns num_accepted (B,) in 0..K and next_probs (B, V), the law of the token after the kept ones: the residual
    max(target - draft, 0) after a rejection, the target's own after K acceptances."""
    at = draft_tokens.unsqueeze(-1)  # (B, K, 1)
    p_draft = draft_probs.gather(-1, at).squeeze(-1)
    p_target = target_probs[:, :-1].gather(-1, at).squeeze(-1)
    num_accepted = (u * p_draft < p_target).int().cumprod(-1).sum(-1)  # each with probability min(1, target / draft)
    row = num_accepted[:, None, None].expand(-1, 1, target_probs.size(-1))
    target_row = target_probs.gather(1, row).squeeze(1)
    draft_row = F.pad(draft_probs, (0, 0, 0, 1)).gather(1, row).squeeze(1)  # in row K there is nothing to subtract
    residual = (target_row - draft_row).clamp(min=0)
    total = residual.sum(-1, keepdim=True)
    # A rejection implies a residual; rounding may still leave none where the two laws are equal.
    return num_accepted, torch.where(total > 0, residual / total.clamp(min=1e-38), target_row)
