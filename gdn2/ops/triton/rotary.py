"""Rotary embedding of queries and keys as a kernel, which also turns their gradients back (`gdn2.ops.entry`).

Beside it one that copies rows to where others lie apart, of which torch copies two bytes at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

TILE = 2048  # elements of one half of the channels: of half precision 16 bytes twice for each thread of four warps
WARPS = 4
MOST_COLS = 256  # of rows that are copied


@triton.jit(do_not_specialize=["tokens", "length"])
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, tokens, length, x_stride, y_stride, sign,
    HALF: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: channels (i, i + d/2) turned by the angles of a token's place in its sequence."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols, head = tl.arange(0, COLS), tl.program_id(1) * (2 * HALF)
    inside = (rows < tokens)[:, None] & (cols < HALF)[None, :]
    angle = (rows % length)[:, None] * HALF + cols[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(ACC)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(ACC) * sign
    place = x_ptr + rows.to(tl.int64)[:, None] * x_stride + head + cols[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(ACC)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(ACC)
    place = y_ptr + rows.to(tl.int64)[:, None] * y_stride + head + cols[None, :]
    tl.store(place, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (a * sin + b * cos).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def copy_rows_kernel(
    x_ptr, y_ptr, count, x_stride, y_stride,
    WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some columns of some rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < count)[:, None] & (cols < WIDTH)[None, :]
    places = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + places * x_stride + cols[None, :], mask=inside)
    tl.store(y_ptr + places * y_stride + cols[None, :], x, mask=inside)


def turn(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, back: bool) -> None:
    """Store x [tokens, channels] turned, or turned back, in y, both with channels next to each other.

    cos and sin are [length, d/2], for sequences one after the other, or [tokens, d/2].
    """
    length, half = cos.shape
    cols = triton.next_power_of_2(half)
    rows = max(1, TILE // cols)
    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    over(rotary_kernel, triton.cdiv(x.shape[0], rows), x.shape[1] // (2 * half))(
        x, cos, sin, y, x.shape[0], length, x.stride(0), y.stride(0), -1.0 if back else 1.0,
        HALF=half, COLS=cols, ROWS=rows, ACC=accumulate, num_warps=WARPS,
    )  # fmt: skip


def copy_rows(x: Tensor, y: Tensor) -> None:
    """Store x [rows, width] in y, both with columns next to each other."""
    cols = min(MOST_COLS, triton.next_power_of_2(x.shape[1]))
    rows = max(1, 2 * TILE // cols)
    over(copy_rows_kernel, triton.cdiv(x.shape[0], rows), triton.cdiv(x.shape[1], cols))(
        x, y, x.shape[0], x.stride(0), y.stride(0),
        WIDTH=x.shape[1], COLS=cols, ROWS=rows, num_warps=WARPS,
    )  # fmt: skip
