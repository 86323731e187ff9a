"""On CUDA: a few rows times a weight in eight bits, as one Triton kernel that reads the weight's codes and no more.

Left to Inductor, the weight would be written out in 16 bits and read again: five bytes a weight (one read, two written,
two read), where bf16 reads two and this kernel one. It fuses nothing that has to be computed in fp32 into a product in
16 bits, and on GPUs with few multiprocessors nothing at all (torch 2.13). For many rows, where reading weights is not
what takes the time, that is well enough: see eight_bit.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eight_bit import FEW_ROWS, EightBitLinear

TILE = 16  # rows, and inputs, that a tensor core takes at once


def step(group: int) -> int:
    """How many inputs the kernel takes at once: they share a scale, and are a power of two."""
    return min(group & -group, 256)


@triton.autotune(
    [
        triton.Config({"OUTPUTS": outputs}, num_warps=warps, num_stages=stages)
        for outputs, warps, stages in ((16, 2, 4), (16, 4, 5), (32, 4, 4), (64, 4, 4), (64, 8, 3))
    ],
    key=["n_out", "n_in"],
)
@triton.jit
def multiply(
    x, codes, scale, y, rows, n_out, n_in, group, n_group,
    ROWS: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """y (rows, n_out) = x (rows, n_in) times codes (n_out, n_in) with scale (n_out, n_group), OUTPUTS of it a program.

    The codes become the rows' dtype, which holds all of them exactly; sums are fp32, and scaled there."""
    row, of_step = tl.arange(0, ROWS), tl.arange(0, STEP)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    asked, there = (row < rows)[:, None], (output < n_out)[None, :]
    weights = codes + output.to(tl.int64)[None, :] * n_in
    sums = tl.full((ROWS, OUTPUTS), 0.0, tl.float32)
    for first in range(0, n_in, STEP):
        i = first + of_step
        a = tl.load(x + row[:, None] * n_in + i[None, :], asked & (i < n_in)[None, :], other=0.0)
        w = tl.load(weights + i[:, None], there & (i < n_in)[:, None], other=0.0)
        s = tl.load(scale + output * n_group + first // group, output < n_out, other=0.0)
        sums += tl.dot(a, w.to(a.dtype)) * s[None, :]
    tl.store(y + row[:, None] * n_out + output[None, :], sums.to(y.dtype.element_ty), asked & there)


@triton_op("eagle_fast::few_rows", mutates_args={})
def few_rows(x: Tensor, codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """x (rows, in) in 16 bits, codes (out, in) and scale (out, in / group) as in eight_bit -> (rows, out)."""
    rows, n_in = x.shape
    n_out, y = codes.size(0), x.new_empty(rows, codes.size(0))
    assert rows <= FEW_ROWS, (rows, FEW_ROWS)
    wrap_triton(multiply)[lambda meta: (triton.cdiv(n_out, meta["OUTPUTS"]),)](
        x.contiguous(), codes, scale, y, rows, n_out, n_in, group, scale.size(1), ROWS=TILE, STEP=step(group)
    )
    return y


def reads(linear: EightBitLinear, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """May few_rows serve it in a model of this dtype, on a GPU of this compute capability?"""
    oldest = (8, 0) if linear.weight.dtype == torch.int8 else (8, 9)  # Turing: no bfloat16 in its tensor cores
    return capability >= oldest and dtype.itemsize == 2 and step(linear.group) >= TILE
