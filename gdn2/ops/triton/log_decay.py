"""Log-decays as a kernel, and all their gradients as another (`gdn2.ops.log_decay`).

A program holds a tile [rows, width] of tokens and the channels of one head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over
from gdn2.ops.triton.norm import load_tile, matrix

# Elements of a tile, those of the backward, warps, and programs of the backward for each head, which loop over tiles.
# On an H200, for 16384 tokens and 16 heads of width 128, the backward takes 97 µs by tiles of 1024, of 2048 106 and of
# 4096 129; it took 154 when it summed over the rows of each tile instead of over all at the end, with one exponential
# for value and slope 172 then, with loads ahead 185. The forward takes 68 by tiles of 4096, of 1024 75.
TILE = 4096
BACKWARD_TILE = 1024
WARPS = 4
PROGRAMS = 128


@triton.jit
def softplus(x):
    """log(1 + eˣ). For small e the logarithm of the rounded u = 1 + e is put right: log(1 + e) = log(u) e / (u − 1)."""
    e = tl.exp(-tl.abs(x))
    u = 1 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1, e, tl.log(u) * (e / (u - 1)))


@triton.jit(do_not_specialize=["count"])
def log_decay_kernel(
    x_ptr, bias_ptr, log_rate_ptr, g_ptr, count, x_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """G of ROWS tokens and one head."""
    head, rows, cols = (
        tl.program_id(1),
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.arange(0, COLS),
    )
    known = cols < WIDTH
    inside = (rows < count)[:, None] & known[None, :]
    channels = head * WIDTH + cols
    rate = tl.exp(tl.load(log_rate_ptr + head).to(ACC))
    x = load_tile(x_ptr, rows, channels, inside, x_stride, ACC)
    x += tl.load(bias_ptr + channels, mask=known, other=0.0).to(ACC)[None, :]
    place = g_ptr + rows.to(tl.int64)[:, None] * (HEADS * WIDTH) + channels[None, :]
    tl.store(place, -rate * softplus(x), mask=inside)


@triton.jit(do_not_specialize=["count", "tiles"])
def log_decay_gradient_kernel(
    dg_ptr, x_ptr, bias_ptr, log_rate_ptr, dx_ptr, partial_ptr, count, tiles, x_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of x for `tiles` tiles of tokens, and of bias and log-rate summed over them, for one head.

    Both sums stand in [programs, 2, channels]: that of a log-rate, dg ⊙ g, is still to be summed over the channels.
    """
    head, cols = tl.program_id(1), tl.arange(0, COLS)
    known = cols < WIDTH
    channels = head * WIDTH + cols
    rate = tl.exp(tl.load(log_rate_ptr + head).to(ACC))
    bias = tl.load(bias_ptr + channels, mask=known, other=0.0).to(ACC)[None, :]
    d_bias, d_rate = tl.zeros((ROWS, COLS), ACC), tl.zeros((ROWS, COLS), ACC)
    for i_tile in range(tiles):
        rows = (tl.program_id(0) * tiles + i_tile) * ROWS + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & known[None, :]
        x = load_tile(x_ptr, rows, channels, inside, x_stride, ACC) + bias
        dg = -rate * load_tile(dg_ptr, rows, channels, inside, HEADS * WIDTH, ACC)
        dx = dg * tl.sigmoid(x)
        d_bias += dx
        d_rate += dg * softplus(x)
        place = dx_ptr + rows.to(tl.int64)[:, None] * (HEADS * WIDTH) + channels[None, :]
        tl.store(place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    partial_ptr += tl.program_id(0).to(tl.int64) * (2 * HEADS * WIDTH) + channels
    tl.store(partial_ptr, tl.sum(d_bias, 0), mask=known)
    tl.store(partial_ptr + HEADS * WIDTH, tl.sum(d_rate, 0), mask=known)


def sizes(x: Tensor, heads: int, tile: int) -> dict[str, Any]:
    """What a kernel is compiled for, by tiles of so many elements."""
    width = x.shape[-1] // heads
    cols = triton.next_power_of_2(width)
    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    rows = max(1, tile // cols)
    return {"HEADS": heads, "WIDTH": width, "ROWS": rows, "COLS": cols, "ACC": accumulate}


def forward(x: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    """G [..., heads, width] of x [..., channels]."""
    rows, heads = matrix(x), log_rate.shape[0]
    how = sizes(x, heads, TILE)
    wide = torch.promote_types(x.dtype, torch.float32)
    g = x.new_empty(*x.shape[:-1], heads, how["WIDTH"], dtype=wide)
    over(log_decay_kernel, triton.cdiv(rows.shape[0], how["ROWS"]), heads)(
        rows, bias.contiguous(), log_rate.contiguous(), g, rows.shape[0], rows.stride(0),
        **how, num_warps=WARPS,
    )  # fmt: skip
    return g


def backward(
    dg: Tensor, x: Tensor, bias: Tensor, log_rate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, bias and log-rate."""
    rows, heads = matrix(x), log_rate.shape[0]
    how, dg, dx = sizes(x, heads, BACKWARD_TILE), dg.contiguous(), x.new_empty(x.shape)
    row_tiles = triton.cdiv(rows.shape[0], how["ROWS"])
    tiles = max(1, triton.cdiv(row_tiles, PROGRAMS))
    programs = triton.cdiv(row_tiles, tiles)
    partial = dg.new_empty(programs, 2, x.shape[-1])
    over(log_decay_gradient_kernel, programs, heads)(
        dg, rows, bias.contiguous(), log_rate.contiguous(), dx, partial,
        rows.shape[0], tiles, rows.stride(0), **how, num_warps=WARPS,
    )  # fmt: skip
    d_bias, d_rate = partial.sum(0)
    return dx, d_bias.to(bias.dtype), d_rate.view(heads, -1).sum(1).to(log_rate.dtype)
