"""SiLU(gate) ⊙ up as a kernel, for inference (`gdn2.ops.swiglu`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over, overlapping, wait_for_the_last

BLOCK = 1024


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
            num_warps=4,
            **overlapping(gate.device),
        )
    return y
