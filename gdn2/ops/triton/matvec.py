"""The product of a matrix and one row as a kernel, for decoding (`gdn2.ops.linear`).

Its time is that of reading the weights once. A program reads whole rows of them, all loads on their way before the
first sum is needed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over


class Tile(NamedTuple):
    """Weights' rows of a program, columns of a load, and warps."""

    rows: int
    cols: int
    num_warps: int


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS numbers of weight · x, with what is to be added to them."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    known = rows < OUT
    weight_ptr += rows.to(tl.int64)[:, None] * IN + cols[None, :]
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.static_range(0, IN, COLS):
        inside = cols < IN - start
        weight = tl.load(
            weight_ptr + start,
            mask=known[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=known, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=known)


# On an H200 in bf16, µs, in brackets cuBLAS and what reading at 4.24 TB/s takes: 10496 × 2304 13.6 (14.4, 11.4),
# 13568 × 2304 16.8 (18.2, 14.7), 32000 × 2304 36.0 (37.8, 34.8), 2048 × 128 1.6 (2.5, 0.1) by one warp; 2304 × 2048
# 4.4 (6.2, 2.2), 2304 × 6784 10.2 (13.2, 7.4) by a row to a program, 4.8 and 12.3 by 4 rows.
MANY, FEW = Tile(4, 128, 1), Tile(1, 2048, 4)


def choose_tile(outputs: int, inputs: int) -> Tile:
    """Few rows need more programs than there are rows for."""
    return MANY if outputs >= 8192 or inputs <= 256 else FEW


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """One row [..., outputs]: weight [outputs, inputs] · x, with bias and residual added before it is rounded."""
    outputs, inputs = weight.shape
    rows, cols, num_warps = tile or choose_tile(outputs, inputs)
    y = x.new_empty(*x.shape[:-1], outputs)
    with torch.cuda.device_of(x):
        over(matvec_kernel, triton.cdiv(outputs, rows))(
            x,
            weight,
            bias,
            residual,
            y,
            OUT=outputs,
            IN=inputs,
            ROWS=rows,
            COLS=cols,
            num_warps=num_warps,
        )
    return y
