"""RMS normalisation, with or without a gate, as kernels, and their launches (`gdn2.ops.norm`).

A program holds whole rows: a few of them where rows are heads, one where they are as wide as a model.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over, overlapping, wait_for_the_last

# Elements of a tile, those of the backward, and the most rows.
TILE = 4096
BACKWARD_TILE = 2048
MOST_ROWS = 64
# Programs of the backward, each with a partial sum of the weight's gradient, where a tile is one row, as of a model,
# and where it has several, as of heads; more tiles than that are looped over, so many of them on the way at once where
# no more bytes wait than all GPUs have room for. On an H200 the gradient of 16384 rows of 2304 with what is passed on
# takes 76 µs by 264 programs of 4 warps; of 8 warps 78, by 528 programs 80 to 91, by 1024 of 8 warps 82; two rows at
# once 91 and more. That of 262144 gated rows of 128 takes 75 µs by 1056 programs; by 528 78, tiles of 4096 77 to 83.
PROGRAMS = 264
MORE_PROGRAMS = 1056
STAGES = 3
ROOM = 64 << 10

# Elements in all up to which rows are spread over as many programs as there are rows.
SMALL = 1 << 16


def warps(how: dict[str, Any]) -> int:
    """A warp for each 512 elements of a tile that is one row, else four; more where a row alone has too many."""
    if how["ROWS"] == 1:
        return min(16, max(1, how["COLS"] // 512))
    return 4


def backward_warps(how: dict[str, Any]) -> int:
    """Four are enough for what the forward gives eight."""
    return warps(how) if how["COLS"] > TILE else min(4, warps(how))


def stages(how: dict[str, Any], *operands: Tensor | None) -> int:
    """Of the backward's loop."""
    waiting = how["ROWS"] * how["COLS"] * sum(x.element_size() for x in operands if x is not None)
    return STAGES if waiting * (STAGES - 1) <= ROOM else 1


@triton.jit
def activate(gate, SILU: tl.constexpr):
    """Gain of a gate, and its derivative: s + z s (1 − s) for SiLU, s (1 − s) for the sigmoid."""
    s = tl.sigmoid(gate)
    slope = s * (1 - s)
    if SILU:
        return gate * s, s + gate * slope
    return s, slope


@triton.jit
def load_tile(ptr, rows, cols, inside, stride, ACC: tl.constexpr):
    """Rows of a matrix, zero outside."""
    place = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(place, mask=inside, other=0.0).to(ACC)


@triton.jit
def store_tile(ptr, X, rows, cols, inside, WIDTH: tl.constexpr):
    """Rows of a contiguous matrix."""
    place = ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(place, X.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def rms_norm_kernel(
    x_ptr, delta_ptr, gate_ptr, weight_ptr, total_ptr, y_ptr, rstd_ptr,
    count, x_stride, delta_stride, gate_stride, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs of ROWS rows, or of their sums with as many others, and the reciprocals of their roots."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = (rows < count)[:, None] & (cols < WIDTH)[None, :]
    wait_for_the_last(PDL)
    x = load_tile(x_ptr, rows, cols, inside, x_stride, ACC)
    if delta_ptr is not None:
        x += load_tile(delta_ptr, rows, cols, inside, delta_stride, ACC)
        x = x.to(total_ptr.dtype.element_ty).to(ACC)
        store_tile(total_ptr, x, rows, cols, inside, WIDTH)
    if gate_ptr is not None:
        gate = load_tile(gate_ptr, rows, cols, inside, gate_stride, ACC)
        gain, _ = activate(gate, SILU)
        if GATE_FIRST:
            x *= gain
    rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)[None, :]
    if gate_ptr is not None and not GATE_FIRST:
        y *= gain
    store_tile(y_ptr, y, rows, cols, inside, WIDTH)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=rows < count)


@triton.jit(do_not_specialize=["count", "tiles"])
def rms_norm_gradient_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, passed_ptr, dx_ptr, d_gate_ptr, partial_ptr,
    count, tiles, dy_stride, x_stride, gate_stride, passed_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of x and gate for `tiles` tiles of rows, and of the weight summed over them.

    With n = h / root for the normalised h, which is x or x ⊙ gain, dh = (dn − n mean(dn ⊙ n)) / root. What x gets where
    it is passed on beside its norm is added to its gradient.
    """
    cols = tl.arange(0, COLS)
    known = cols < WIDTH
    sums = tl.zeros((ROWS, COLS), ACC)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=known, other=0.0).to(ACC)[None, :]
    for i_tile in tl.range(tiles, num_stages=STAGES):
        rows = (tl.program_id(0) * tiles + i_tile) * ROWS + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & known[None, :]
        rstd = tl.load(rstd_ptr + rows, mask=rows < count, other=0.0)[:, None]
        x = load_tile(x_ptr, rows, cols, inside, x_stride, ACC)
        dn = load_tile(dy_ptr, rows, cols, inside, dy_stride, ACC)
        if passed_ptr is not None:
            passed = load_tile(passed_ptr, rows, cols, inside, passed_stride, ACC)
        n = x * rstd
        if gate_ptr is not None:
            gate = load_tile(gate_ptr, rows, cols, inside, gate_stride, ACC)
            gain, slope = activate(gate, SILU)
            if GATE_FIRST:
                n *= gain
            else:
                d_gain = dn * n
                dn *= gain
        if weight_ptr is not None:
            sums += dn * n
            dn *= weight
        dx = rstd * (dn - n * (tl.sum(dn * n, 1) / WIDTH)[:, None])
        if gate_ptr is not None:
            if GATE_FIRST:
                d_gain = dx * x
                dx *= gain
            elif weight_ptr is not None:
                d_gain *= weight
            store_tile(d_gate_ptr, d_gain * slope, rows, cols, inside, WIDTH)
        if passed_ptr is not None:
            dx += passed
        store_tile(dx_ptr, dx, rows, cols, inside, WIDTH)
    if weight_ptr is not None:
        tl.store(
            partial_ptr + tl.program_id(0).to(tl.int64) * WIDTH + cols, tl.sum(sums, 0), mask=known
        )


def matrix(x: Tensor) -> Tensor:
    """All rows [rows, width], copied only if they are not evenly spaced or not contiguous themselves."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def tile(x: Tensor, small: bool = False, elements: int | None = None) -> dict[str, Any]:
    """What both kernels are compiled for: tiles of so many elements, of a small input of one row."""
    cols = triton.next_power_of_2(x.shape[-1])
    rows = 1 if small else min(MOST_ROWS, max(1, (elements or TILE) // cols))
    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    return {"WIDTH": x.shape[-1], "ROWS": rows, "COLS": cols, "ACC": accumulate}


def forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, silu: bool, gate_first: bool
) -> tuple[Tensor, Tensor]:
    """Output, shaped as x, and the reciprocal of each row's root [rows]."""
    how = tile(x, small=x.numel() <= SMALL)
    rows, gates = matrix(x), None if gate is None else matrix(gate)
    y = x.new_empty(x.shape)
    rstd = x.new_empty(rows.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    over(rms_norm_kernel, triton.cdiv(rows.shape[0], how["ROWS"]))(
        rows, None, gates, None if weight is None else weight.contiguous(), None, y, rstd,
        rows.shape[0], rows.stride(0), 0, 0 if gates is None else gates.stride(0), eps,
        **how, SILU=silu, GATE_FIRST=gate_first, num_warps=warps(how),
        **overlapping(x.device),
    )  # fmt: skip
    return y, rstd


def add(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum x + delta, its norm, and the reciprocal of each row's root."""
    how = tile(x, small=x.numel() <= SMALL)
    rows, deltas = matrix(x), matrix(delta)
    total, y = x.new_empty(x.shape), x.new_empty(x.shape)
    rstd = x.new_empty(rows.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    over(rms_norm_kernel, triton.cdiv(rows.shape[0], how["ROWS"]))(
        rows, deltas, None, weight.contiguous(), total, y, rstd,
        rows.shape[0], rows.stride(0), deltas.stride(0), 0, eps,
        **how, SILU=False, GATE_FIRST=False, num_warps=warps(how),
        **overlapping(x.device),
    )  # fmt: skip
    return total, y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    silu: bool,
    gate_first: bool,
    passed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gate and weight; `passed` is what x gets from elsewhere, which its own includes then."""
    how = tile(x, elements=BACKWARD_TILE)
    dys, rows = matrix(dy), matrix(x)
    gates, others = (None if t is None else matrix(t) for t in (gate, passed))
    dx = x.new_empty(x.shape)
    d_gate = None if gate is None else gate.new_empty(gate.shape)
    row_tiles = triton.cdiv(rows.shape[0], how["ROWS"])
    tiles = max(1, triton.cdiv(row_tiles, MORE_PROGRAMS if how["ROWS"] > 1 else PROGRAMS))
    programs = triton.cdiv(row_tiles, tiles)
    partial = None if weight is None else rstd.new_empty(programs, x.shape[-1])
    over(rms_norm_gradient_kernel, programs)(
        dys, rows, gates, None if weight is None else weight.contiguous(), rstd, others, dx,
        d_gate, partial, rows.shape[0], tiles, dys.stride(0), rows.stride(0),
        *(0 if t is None else t.stride(0) for t in (gates, others)),
        **how, SILU=silu, GATE_FIRST=gate_first, num_warps=backward_warps(how),
        STAGES=stages(how, dys, rows, gates, others),
    )  # fmt: skip
    return dx, d_gate, None if partial is None else partial.sum(0).to(weight.dtype)
