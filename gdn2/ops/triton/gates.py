"""Erase and write gates from their logits as one kernel, and the gradients of these as another (`gdn2.ops.entry`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

BLOCK = 2048  # of half precision 16 bytes twice for each thread of four warps
WARPS = 4


@triton.jit
def gates_kernel(
    erase_ptr, write_ptr, b_ptr, w_ptr, erase_range, erase_count, write_count,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A stretch of one of the gates: b = range σ(erase) or w = σ(write)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        x = tl.load(erase_ptr + place, mask=place < erase_count, other=0.0).to(ACC)
        b = erase_range * tl.sigmoid(x)
        tl.store(b_ptr + place, b.to(b_ptr.dtype.element_ty), mask=place < erase_count)
    else:
        x = tl.load(write_ptr + place, mask=place < write_count, other=0.0).to(ACC)
        w = tl.sigmoid(x)
        tl.store(w_ptr + place, w.to(w_ptr.dtype.element_ty), mask=place < write_count)


@triton.jit
def gates_gradient_kernel(
    db_ptr, b_ptr, dw_ptr, w_ptr, to_ptr, erase_range, stride,
    ERASE: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A stretch of one row: gradients of the logits, those of both gates side by side in rows of another tensor.

    A gate y = range σ has the slope y (1 − y / range).
    """
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks: tl.constexpr = (ERASE + BLOCK - 1) // BLOCK
    to_ptr += row * stride
    if tl.program_id(1) < blocks:
        inside = cols < ERASE
        y = tl.load(b_ptr + row * ERASE + cols, mask=inside, other=0.0).to(ACC)
        dy = tl.load(db_ptr + row * ERASE + cols, mask=inside, other=0.0).to(ACC)
        dx = dy * y * (1 - y / erase_range)
        tl.store(to_ptr + cols, dx.to(to_ptr.dtype.element_ty), mask=inside)
    else:
        cols -= blocks * BLOCK
        inside = cols < WRITE
        y = tl.load(w_ptr + row * WRITE + cols, mask=inside, other=0.0).to(ACC)
        dy = tl.load(dw_ptr + row * WRITE + cols, mask=inside, other=0.0).to(ACC)
        dx = dy * y * (1 - y)
        tl.store(to_ptr + ERASE + cols, dx.to(to_ptr.dtype.element_ty), mask=inside)


def forward(erase: Tensor, write: Tensor, erase_range: float) -> tuple[Tensor, Tensor]:
    """Both gates."""
    erase, write = erase.contiguous(), write.contiguous()
    b, w = torch.empty_like(erase), torch.empty_like(write)
    over(gates_kernel, triton.cdiv(max(b.numel(), w.numel()), BLOCK), 2)(
        erase, write, b, w, erase_range, b.numel(), w.numel(), BLOCK=BLOCK, ACC=_sums(b),
        num_warps=WARPS,
    )  # fmt: skip
    return b, w


def backward(db: Tensor, b: Tensor, dw: Tensor, w: Tensor, erase_range: float, to: Tensor) -> None:
    """Store the gradients of both logits side by side in `to` [rows, channels of both], whose rows may lie apart."""
    db, b, dw, w = (x.contiguous() for x in (db, b, dw, w))
    erase, write = b.shape[-1], w.shape[-1]
    blocks = triton.cdiv(erase, BLOCK) + triton.cdiv(write, BLOCK)
    over(gates_gradient_kernel, to.shape[0], blocks)(
        db, b, dw, w, to, erase_range, to.stride(0),
        ERASE=erase, WRITE=write, BLOCK=BLOCK, ACC=_sums(b), num_warps=WARPS,
    )  # fmt: skip


def _sums(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
