"""The product of a matrix and one row as a kernel, for decoding (`gdn2.ops.linear`).

Its time is that of reading the weights once. A program reads whole rows of them, all loads on their way before it
waits for x.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over, overlapping, wait_for_the_last


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS numbers of weight · x, with their bias."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    known, inside = rows < OUT, cols < IN
    place = weight_ptr + rows.to(tl.int64)[:, None] * IN + cols[None, :]
    weight = tl.load(
        place, mask=known[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
    )
    wait_for_the_last(PDL)  # the weights are on their way
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=known)


class Tile(NamedTuple):
    """Rows of the weights that a program reads, and its warps."""

    rows: int
    num_warps: int


def choose_tile(outputs: int, inputs: int) -> Tile:
    """About sixty elements a thread, and more programs than a GPU has cores."""
    if inputs > 4096:
        return Tile(1, 4)
    return (
        Tile(4, 4)
        if inputs > 512 and outputs >= 8192
        else Tile(2, 2)
        if inputs > 512
        else Tile(8, 1)
    )


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """One row [..., outputs]: weight [outputs, inputs] · x, with the bias added before it is rounded."""
    outputs, inputs = weight.shape
    rows, num_warps = tile or choose_tile(outputs, inputs)
    y = x.new_empty(*x.shape[:-1], outputs)
    with torch.cuda.device_of(x):
        over(matvec_kernel, triton.cdiv(outputs, rows))(
            x, weight, bias, y, OUT=outputs, IN=inputs, ROWS=rows,
            COLS=triton.next_power_of_2(inputs), num_warps=num_warps, **overlapping(x.device),
        )  # fmt: skip
    return y
