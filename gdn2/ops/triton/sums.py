"""Gradients summed over what their operands were broadcast over."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over
from gdn2.ops.trust import trusted

NAME = "sums"  # which is trusted or not
ELEMENTS = 4096  # of a program's results
WARPS = 4


def sum_to(partial: Tensor, like: Tensor) -> Tensor:
    """Sum [L, heads, width] over heads and channels that an operand was broadcast over."""
    if partial.shape[2] != like.shape[2]:
        partial = partial.sum(2, keepdim=True)
    if partial.shape[1] != like.shape[1]:
        partial = sum_heads(partial, like)
    return partial.to(like.dtype)


def sum_heads(partial: Tensor, like: Tensor) -> Tensor:
    """Sum over heads that share one, bf16 and fp16 in fp32."""
    heads = like.shape[1]
    if partial.device.type == "cuda" and not trusted(NAME, partial.device):
        return partial.unflatten(1, (heads, -1)).sum(2)
    count, width = len(partial) * heads, partial.shape[2]
    to = like.new_empty(len(partial), heads, width)
    columns = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // columns)
    over(sum_heads_kernel, triton.cdiv(count, rows))(
        partial.contiguous(), to, count,
        SHARING=partial.shape[1] // heads, WIDTH=width, ROWS=rows, COLUMNS=columns,
        ACC=tl.float64 if partial.dtype == torch.float64 else tl.float32, num_warps=WARPS,
    )  # fmt: skip
    return to


@triton.jit
def sum_heads_kernel(
    x_ptr, to_ptr, count,
    SHARING: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """[rows, heads that share, width] → [rows, width], one program for so many rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < count) & (columns < WIDTH)
    total = tl.zeros((ROWS, COLUMNS), ACC)
    for n in tl.static_range(SHARING):
        place = (rows * SHARING + n) * WIDTH + columns
        total += tl.load(x_ptr + place, mask=inside, other=0.0).to(ACC)
    tl.store(to_ptr + rows * WIDTH + columns, total.to(to_ptr.dtype.element_ty), mask=inside)
