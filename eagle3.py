"""EAGLE-3 draft: proposes K tokens from a few of the target's hidden states. Maths: Li et al. 2025 (arXiv:2503.01840).

A row's input is a token and a *feature*: for committed tokens the target's aux states, fused; for drafted ones the
draft's own previous state. Row i pairs token x_{i+1} with the feature of x_i, the state that predicted it, at position
i. The first layer attends over the pair, [token embedding, feature]; later layers are ordinary ones. Knows nothing of
files or sampling parameters; ids leave the draft in the target's vocabulary.

Shapes: B batch, T rows, D the draft's hidden size, Dt the target's, n aux layers, V target and Vd draft vocabulary.
"""

from collections.abc import Callable, Container

import torch
from torch import Tensor, nn

from eight_bit import dequantised
from model import Block, DecoderLayer, Positions, RMSNorm, Stack, allocate_caches, embedding
from speculators_config import ConfigError, DecoderConfig, SpeculatorConfig


class FirstLayer(nn.Module):
    """Attention over [normed embedding, normed feature]; the residual stream is the feature, normed first or not."""

    def __init__(self, config: DecoderConfig, norm_before_residual: bool):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.embed_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feature_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.block = Block(config, config.windows[0], 2 * config.hidden_size)

    def forward(self, embedded: Tensor, feature: Tensor, *where: Tensor) -> Tensor:
        normed = self.feature_norm(feature)
        x = normed if self.norm_before_residual else feature
        return self.block(x, torch.cat((self.embed_norm(embedded), normed), dim=-1), *where)


class Eagle3(nn.Module):
    """own: which of embed.weight, head.weight, d2t and t2d the checkpoint holds; `settle` sees to the rest."""

    def __init__(self, config: SpeculatorConfig, own: Container[str]):
        super().__init__()
        layer, n = config.layer, len(config.aux_layer_ids)
        D, Dt, eps = layer.hidden_size, config.target_hidden_size, layer.norm_eps
        self.config = config
        self.input_norm = RMSNorm(n * Dt, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(Dt, eps) for _ in range(n)) if config.fc_norm else None
        self.fc = nn.Linear(n * Dt, D, bias=False)
        self.embed = embedding(layer.vocab_size, D) if "embed.weight" in own else None
        self.first = FirstLayer(layer, config.norm_before_residual)
        self.layers = Stack(DecoderLayer(layer, window) for window in layer.windows[1:])
        self.norm = RMSNorm(D, eps)
        self.head = nn.Linear(D, config.draft_vocab_size, bias=False) if "head.weight" in own else None
        # Offsets: target id = draft id + d2t[draft id]. t2d marks the same target ids, and only serves to check them.
        self.register_buffer("d2t", torch.empty(config.draft_vocab_size, dtype=torch.int64) if "d2t" in own else None)
        self.register_buffer("t2d", torch.empty(layer.vocab_size, dtype=torch.bool) if "t2d" in own else None)
        self.positions = Positions(layer)

    def settle(self, embed: nn.Embedding, head: nn.Linear) -> None:
        """Called after loading: checks the vocabulary map; takes the target's embedding and head where it has none.

        Raises ConfigError for a map that leaves the target's vocabulary, names an id twice or contradicts t2d."""
        self.embed = embed if self.embed is None else self.embed
        self.head = head if self.head is None else self.head
        if self.d2t is not None:
            ids = self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.d2t.device))
            low, high = ids.min().item(), ids.max().item()
            known = min(self.config.target_vocab_size, self.config.layer.vocab_size)
            sound = low >= 0 and high < known and ids.unique().numel() == ids.numel()
            if not sound or (self.t2d is not None and not (self.t2d[ids].all() and self.t2d.sum() == ids.numel())):
                wrong = f"its offsets lead to ids {low}..{high}, against t2d, the target's vocabulary or each other"
                raise ConfigError(f"{self.config.folder}: d2t: {wrong}; the file may hold absolute ids")
            if not self.d2t.any():
                self.d2t = None  # the identity
        self.t2d = None

    def looks_untrained(self) -> bool:
        """Does its first layer look as if nobody had trained it? Converters have saved such layers, and then hardly a
        token is accepted, which nothing else would show."""
        block = self.first.block
        if not all(
            (norm.weight == 1).all() for norm in (self.first.embed_norm, self.first.feature_norm, block.mlp_norm)
        ):
            return False
        qkv = block.attention.qkv
        weight = qkv.weight.float() if isinstance(qkv, nn.Linear) else dequantised(qkv.weight, qkv.scale, qkv.group)
        return abs(weight.std().item() - 0.02) < 0.002

    def allocate(self, batch: int, slots: int) -> None:
        """Makes caches and the draft's own rotary table, sized by the run; called once, before compiling."""
        allocate_caches(self, batch, slots, self.norm.weight)
        self.positions.allocate(slots, self.norm.weight.device)

    def fuse(self, aux: Tensor) -> Tensor:
        """The feature of rows whose target states are known: (B, T, n * Dt) -> (B, T, D); never of own states."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor) -> Tensor:
        """tokens (B, T) in target ids, feature (B, T, D), positions (B, T) -> the last layer's output, un-normed."""
        where = self.positions(positions, feature.dtype)
        # Padded vocabularies: a target id past the draft's own embedding reads its last row, not foreign memory.
        embedded = self.embed(tokens.clamp(max=self.embed.num_embeddings - 1))
        return self.layers(self.first(embedded, feature, *where[0]), where[1:])[0]

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) as `forward` returns it -> (..., Vd), in fp32."""
        return self.head(self.norm(x)).float()

    def feedback(self, x: Tensor) -> Tensor:
        """The feature of the next drafted row: the state itself, or normed (EAGLE 3.1's norm_output)."""
        return self.norm(x) if self.config.norm_output else x

    def prefill(self, tokens: Tensor, aux: Tensor, positions: Tensor) -> None:
        """Writes cache rows for a piece of prompt: tokens (B, T) the *following* ones, aux (B, T, n * Dt)."""
        self.forward(tokens, self.fuse(aux), positions)

    def propose(
        self, tokens: Tensor, aux: Tensor, positions: Tensor, last: Tensor, K: int, pick: Callable
    ) -> tuple[Tensor, Tensor | None]:
        """Drafts K tokens after the newest committed ones.

        tokens (B, T), aux (B, T, n * Dt) and positions (B, T) are rows of *true* features, the first ones up to row
        `last` (B,) real and the rest padding: they overwrite what the previous round's drafting left in the cache.
        pick(logits (B, Vd), step) -> ids (B,) in draft numbering and probs (B, Vd), or None when greedy.
        Returns draft_tokens (B, K) in target ids and draft_probs (B, K, V) or None."""
        rows = torch.arange(tokens.size(0), device=tokens.device)
        x = self.forward(tokens, self.fuse(aux), positions)[rows, last].unsqueeze(1)  # (B, 1, D)
        position = positions.gather(1, last.unsqueeze(1))
        drafted, probs = [], []
        for step in range(K):
            if step > 0:
                x = self.forward(drafted[-1], self.feedback(x), position + step)
            ids, law = pick(self.logits(x.squeeze(1)), step)
            drafted.append(self.target_ids(ids).unsqueeze(1))
            probs.append(law)
        stacked = None if probs[0] is None else self.spread(torch.stack(probs, dim=1))
        return torch.cat(drafted, dim=1), stacked

    def target_ids(self, ids: Tensor) -> Tensor:
        """Draft ids -> target ids, any shape."""
        return ids if self.d2t is None else ids + self.d2t[ids]

    def spread(self, probs: Tensor) -> Tensor:
        """Probabilities over the draft's vocabulary (..., Vd) -> over the target's (..., V), 0 outside."""
        if self.d2t is None and probs.size(-1) == self.config.target_vocab_size:
            return probs
        ids = self.target_ids(torch.arange(self.config.draft_vocab_size, device=probs.device))
        full = probs.new_zeros(*probs.shape[:-1], self.config.target_vocab_size)
        return full.index_copy(-1, ids, probs)
