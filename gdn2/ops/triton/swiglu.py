"""SiLU(gate) ⊙ up as a kernel, for inference, and all its gradients as another, for training (`gdn2.ops.swiglu`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over, overlapping, wait_for_the_last
from gdn2.ops.triton.norm import matrix

BLOCK = 1024  # of half precision 16 bytes for each thread of four warps
WARPS = 4


@triton.jit
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_row,
    up_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    wait_for_the_last(PDL)
    gate = tl.load(gate_ptr + row * gate_row + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + cols, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(
    gate_ptr, up_ptr, dh_ptr, both_ptr, h_ptr, gate_row, up_row, dh_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Both gradients side by side, and the product again where it is asked for, of a stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    gate = tl.load(gate_ptr + row * gate_row + cols, mask=inside, other=0.0).to(ACC)
    up = tl.load(up_ptr + row * up_row + cols, mask=inside, other=0.0).to(ACC)
    dh = tl.load(dh_ptr + row * dh_row + cols, mask=inside, other=0.0).to(ACC)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = dh * up * (sigmoid + silu * (1 - sigmoid))
    place = both_ptr + row * (2 * WIDTH) + cols
    tl.store(place, d_gate.to(both_ptr.dtype.element_ty), mask=inside)
    tl.store(place + WIDTH, (dh * silu).to(both_ptr.dtype.element_ty), mask=inside)
    if h_ptr is not None:
        h_place = h_ptr + row * WIDTH + cols
        tl.store(h_place, (silu * up).to(h_ptr.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Both [..., width], each with rows evenly spaced."""
    width = gate.shape[-1]
    gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
    y = gate.new_empty(gate.shape)
    with torch.cuda.device_of(gate):
        over(swiglu_kernel, len(gates), triton.cdiv(width, BLOCK))(
            gates,
            ups,
            y,
            gates.stride(0),
            ups.stride(0),
            WIDTH=width,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **overlapping(gate.device),
        )
    return y


def swiglu_gradient(gate: Tensor, up: Tensor, dh: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up [..., width] side by side, from that of their product h, and h again or nothing."""
    rows = [matrix(x) for x in (gate, up, dh)]
    *lead, width = gate.shape
    both, h = gate.new_empty(*lead, 2 * width), gate.new_empty(gate.shape if again else 0)
    with torch.cuda.device_of(gate):
        over(swiglu_gradient_kernel, len(rows[0]), triton.cdiv(width, BLOCK))(
            *rows, both, h if again else None, *(x.stride(0) for x in rows),
            WIDTH=width, BLOCK=BLOCK, num_warps=WARPS,
            ACC=tl.float64 if gate.dtype == torch.float64 else tl.float32,
        )  # fmt: skip
    return both, h
