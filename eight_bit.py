"""Weights in eight bits: codes and scales, and the linear that multiplies by them. w = code * scale.

A code is an int8 or a float8 (e4m3: a sign, 4 bits of exponent, 3 of mantissa; up to 448); all inputs of an output
share a scale, or each block of `group` inputs has one. Only weights: what a checkpoint says of quantised activations is
left out, which is the more exact way. Knows nothing of files.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 16  # up to here the weight's bytes take the time, not the arithmetic
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # code; an int8 read from a file may also be -128


class EightBitLinear(nn.Module):
    """nn.Linear with codes (out, in) and scales (out, in / group, rounded up), both buffers: nothing turns their dtype
    into the model's.

    On CUDA few rows are multiplied by the codes themselves (by gpu_kernels, which is to be imported); for many the
    weight is made first. On a CPU it would be made anew at every call, so there cpu_kernels or `held_as` takes the
    module's place."""

    def __init__(self, in_features: int, out_features: int, bias: bool, codes: torch.dtype, group: int):
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=codes))
        self.register_buffer("scale", torch.empty(out_features, -(-in_features // group), dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.numel() <= FEW_ROWS * self.in_features:
            rows = x.reshape(-1, self.in_features)
            y = torch.ops.eagle_fast.few_rows(rows, self.weight, self.scale, self.group).view(
                *x.shape[:-1], self.out_features
            )
            return y if self.bias is None else y + self.bias
        return F.linear(x, dequantised(self.weight, self.scale, self.group).to(x.dtype), self.bias)


def dequantised(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """codes (out, in) and scales (out, in / group, rounded up) -> fp32."""
    if scale.size(1) > 1:
        scale = scale.repeat_interleave(group, dim=1)[:, : codes.size(1)]
    return codes.float() * scale


def quantised(weight: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight (out, in) -> codes, and scales (out, 1) in the weight's dtype (float16: fp32); a row of zeros gets its
    epsilon.

    The scale is rounded to that dtype first and what was rounded is divided by: for float8 in the dtype itself, which
    gives the codes of compressed-tensors bit for bit; for int8 in fp32, which comes closer. Clamped before the cast,
    which would make NaN of what lies outside."""
    if weight.dtype == torch.float16:  # in which the scales of small rows would be subnormal
        weight = weight.float()
    largest = LARGEST[codes]
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    scale = torch.where(scale == 0, torch.finfo(weight.dtype).eps, scale)
    if codes.is_floating_point:
        return (weight / scale).clamp(-largest, largest).to(codes), scale
    return (weight.float() / scale.float()).round().clamp(-largest, largest).to(codes), scale


def held_as(linear: EightBitLinear, dtype: torch.dtype) -> nn.Linear:
    """The same with its weight made once, in `dtype`; takes the codes away from `linear`."""
    weight = dequantised(linear.weight, linear.scale, linear.group).to(dtype)
    with torch.device("meta"):
        plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), linear.bias
    linear.weight, linear.scale = linear.weight.new_empty(0), linear.scale.new_empty(0)  # not twice in memory
    return plain


def hold(models: list[nn.Module], fast: Callable[[EightBitLinear, torch.dtype], bool]) -> int:
    """Makes plain linears, in each model's dtype, of the EightBitLinears that are not fast; returns how many.

    Modules that models share stay shared."""
    held: dict[nn.Module, nn.Module] = {}

    def plain(model: nn.Module) -> Callable[[str, EightBitLinear], nn.Module]:
        def of(path: str, linear: EightBitLinear) -> nn.Module:
            if linear not in held and not fast(linear, model.norm.weight.dtype):
                held[linear] = held_as(linear, model.norm.weight.dtype)
            return held.get(linear, linear)

        return of

    for model in models:
        replace_children(model, EightBitLinear, plain(model))
    return len(held)


def replace_children(
    module: nn.Module, what: type[nn.Module], by: Callable[[str, nn.Module], nn.Module], path: str = ""
) -> None:
    """Puts by(name, child) in the place of each child of type `what` inside `module`, at any depth."""
    for name, child in module.named_children():
        if type(child) is what:
            setattr(module, name, by(path + name, child))
        else:
            replace_children(child, what, by, f"{path}{name}.")
