"""The target: a llama-shaped decoder over static KV caches, which also hands out the hidden states that drafts read.

Llama 2 to 3.3, Mistral, Qwen2/2.5 and dense Qwen3 differ only in what DecoderConfig says. Knows nothing of checkpoints,
sampling or speculation. Maths: Vaswani et al. 2017 (arXiv:1706.03762), RoFormer (arXiv:2104.09864), Llama
(arXiv:2302.13971), YaRN (arXiv:2309.00071).

Shapes: B batch, T rows of this call, D hidden, H query heads, Hkv key/value heads, Hd head size, S cache slots,
V vocabulary. Every row has a position of its own: it writes key and value into the slot of that number and sees the
slots up to it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculators_config import DecoderConfig, Rope


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Angles per position (Hd/2,) in fp32, and the factor on cos and sin (YaRN's attention temperature, else 1)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":  # long waves are slowed down, short ones kept, those between blended
        waves = rope.original_context * plain / (2 * math.pi)  # turns within the original context
        blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return plain * (blend + (1 - blend) / rope.factor), 1.0
    assert rope.kind == "yarn", f"rope kind {rope.kind} was let through by speculators_config"

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    attention_factor = rope.attention_factor or 0.1 * math.log(rope.factor) + 1
    return plain * (1 - ramp + ramp / rope.factor), attention_factor


def rope_table(rope: Rope, head_dim: int, slots: int) -> Tensor:
    """cos and sin of every position, (2, S, Hd/2) in fp32: sized by the run, whatever context the config names."""
    frequencies, factor = rope_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(slots, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin())) * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves (x1, x2) of each head, in fp32. x (B, T, H, Hd), cos and sin (B, T, 1, Hd/2)."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def causal_bias(positions: Tensor, slots: int, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
    """What to add to the scores so that a row sees the slots up to its own position, at most `window` of them.

    positions (B, T) -> (B, 1, groups * T, S): rows repeat once per query head of a group, as `attend` folds them."""
    keys = torch.arange(slots, device=positions.device)
    rows = positions[:, None, :, None]
    seen = keys <= rows
    if window is not None:
        seen = seen & (keys > rows - window)
    bias = torch.zeros((), dtype=dtype, device=positions.device).where(seen, float("-inf"))  # (B, 1, T, S)
    return bias.repeat(1, 1, groups, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of q (B, T, H, Hd) over k, v (B, Hkv, S, Hd) -> (B, T, H * Hd).

    The query heads that share a key head become rows of one matrix: on the CPU this is several times faster than
    repeating the keys, and it is exact."""
    B, T, H, Hd = q.shape
    Hkv = k.size(1)
    q = q.view(B, T, Hkv, H // Hkv, Hd).permute(0, 2, 3, 1, 4).reshape(B, Hkv, -1, Hd)  # (B, Hkv, groups * T, Hd)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return y.view(B, Hkv, H // Hkv, T, Hd).permute(0, 3, 1, 2, 4).reshape(B, T, H * Hd)


def embedding(rows: int, size: int) -> nn.Embedding:
    """Not initialised, as weights follow: on the meta device that would import sympy, which is 75 MB."""
    return nn.Embedding.from_pretrained(torch.empty(rows, size))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Self-attention with its own key/value cache. in_features is D, or 2D in the first layer of an EAGLE-3 draft."""

    def __init__(self, config: DecoderConfig, window: int | None, in_features: int):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.window = window
        heads = config.n_head + 2 * config.n_kv_head
        self.qkv = nn.Linear(in_features, heads * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.n_head * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def allocate_cache(self, batch: int, slots: int, like: Tensor) -> None:
        """(B, Hkv, S, Hd) each for keys and values; zeros, because a masked slot is still multiplied."""
        for name in ("k_cache", "v_cache"):
            cache = like.new_zeros(batch, self.n_kv_head, slots, self.head_dim)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, bias: Tensor) -> Tensor:
        """x (B, T, in_features), positions (B, T), cos_sin (2, B, T, 1, Hd/2), bias as causal_bias -> (B, T, D)."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.head_dim).split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        rows = torch.arange(B, device=x.device)[:, None]
        self.k_cache[rows, :, positions] = k
        self.v_cache[rows, :, positions] = v
        return self.out(attend(q, self.k_cache, self.v_cache, bias))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and MLP on the residual stream: what every kind of layer has, whatever it feeds its attention with."""

    def __init__(self, config: DecoderConfig, window: int | None, in_features: int):
        super().__init__()
        self.attention = Attention(config, window, in_features)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, normed: Tensor, *where: Tensor) -> Tensor:
        """x (B, T, D) the residual stream, normed (B, T, in_features) what attention reads -> (B, T, D)."""
        x = x + self.attention(normed, *where)
        return x + self.mlp(self.mlp_norm(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, window: int | None):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.block = Block(config, window, config.hidden_size)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        return self.block(x, self.norm(x), *where)


class Stack(nn.ModuleList):
    """Layers one behind the other, and the states between them that drafts read."""

    def forward(self, x: Tensor, where: list[tuple], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """x (B, T, D), where: what Positions says to each layer -> x behind the last one, and, in the order of the
        layers, as it enters those named in `taps` (n_layer: as it leaves the last one), (B, T, n * D)."""
        aux = []
        for i, (layer, place) in enumerate(zip(self, where, strict=True)):
            if i in taps:
                aux.append(x)
            x = layer(x, *place)
        if len(self) in taps:
            aux.append(x)
        return x, torch.cat(aux, dim=-1) if aux else None


class Positions(nn.Module):
    """What a model's layers need to know of rows' positions: its own rotary table and one bias per kind of window."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config

    def allocate(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        table = rope_table(self.config.rope, self.config.head_dim, slots).to(device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """positions (B, T) -> per layer: positions, cos and sin (2, B, T, 1, Hd/2), bias (B, 1, groups * T, S)."""
        cos_sin = self.table[:, positions].unsqueeze(-2)
        groups = self.config.n_head // self.config.n_kv_head
        bias = {w: causal_bias(positions, self.slots, w, groups, dtype) for w in set(self.config.windows)}
        return [(positions, cos_sin, bias[window]) for window in self.config.windows]


class Transformer(nn.Module):
    """The target. aux_layer_ids name the states it hands out: i = entering layer i, n_layer = leaving the last one."""

    def __init__(self, config: DecoderConfig, aux_layer_ids: tuple[int, ...] = (), tied: bool = False):
        super().__init__()
        self.config, self.aux_layer_ids = config, aux_layer_ids
        self.embed = embedding(config.vocab_size, config.hidden_size)
        self.layers = Stack(DecoderLayer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.positions = Positions(config)

    def allocate(self, batch: int, slots: int) -> None:
        """Makes caches and rotary table for `slots` positions; called once, after loading and before compiling."""
        allocate_caches(self, batch, slots, self.norm.weight)
        self.positions.allocate(slots, self.norm.weight.device)

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """tokens, positions (B, T) -> the last layer's output, un-normed (B, T, D), and aux states (B, T, n * D)."""
        x = self.embed(tokens)
        return self.layers(x, self.positions(positions, x.dtype), self.aux_layer_ids)

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) as `forward` returns it -> (..., V), in fp32."""
        return self.head(self.norm(x)).float()


def allocate_caches(model: nn.Module, batch: int, slots: int, like: Tensor) -> None:
    """Gives every attention inside `model` a cache of `slots` positions, of the dtype and on the device of `like`."""
    for module in model.modules():
        if hasattr(module, "allocate_cache"):
            module.allocate_cache(batch, slots, like)
