"""Losses of logits and their gradients as one kernel, and the rounding of such gradients (`gdn2.ops.loss`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

BLOCK = 4096
SCALED_BLOCK = 8192
LEAST = tl.constexpr(-3e38)  # finite, so that the difference of two such is a number


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, d_logits_ptr, ignore_index, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: its logits are read twice, the second time from a cache."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    logits_ptr += row * vocabulary
    target = tl.load(targets_ptr + row)
    most = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        x = tl.load(logits_ptr + first + cols, mask=first + cols < vocabulary, other=-float("inf"))
        more = tl.maximum(most, x)
        total = total * tl.exp(most - more) + tl.exp(x - more)
        most = more
    largest = tl.max(most, 0)
    log = largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))
    counts = target != ignore_index
    score = tl.load(logits_ptr + target, mask=counts, other=0.0)
    tl.store(losses_ptr + row, tl.where(counts, log - score, 0.0))
    d_logits_ptr += row * vocabulary
    dtype: tl.constexpr = d_logits_ptr.dtype.element_ty
    for first in range(0, vocabulary, BLOCK):
        inside = first + cols < vocabulary
        x = tl.load(logits_ptr + first + cols, mask=inside, other=-float("inf"))
        d = tl.exp(x - log) - tl.where(first + cols == target, 1.0, 0.0)
        d = tl.where(counts, d, 0.0)
        tl.store(d_logits_ptr + first + cols, d.to(dtype), mask=inside)


@triton.jit
def scaled_kernel(x_ptr, by_ptr, y_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(x_ptr + place, mask=inside, other=0.0) * tl.load(by_ptr)
    tl.store(y_ptr + place, x.to(y_ptr.dtype.element_ty), mask=inside)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Losses of the rows of logits [tokens, vocabulary], and their gradients in a dtype; nothing where ignored."""
    logits, targets = logits.contiguous(), targets.contiguous()
    losses = logits.new_empty(len(logits))
    d_logits = logits.new_empty(logits.shape, dtype=dtype)
    with torch.cuda.device_of(logits):
        over(cross_entropy_kernel, len(logits))(
            logits,
            targets,
            losses,
            d_logits,
            ignore_index,
            logits.shape[1],
            BLOCK=BLOCK,
            num_warps=8,
        )
    return losses, d_logits


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, fp32 and contiguous, times a number on its device, in another dtype."""
    y = x.new_empty(x.shape, dtype=dtype)
    with torch.cuda.device_of(x):
        over(scaled_kernel, triton.cdiv(x.numel(), SCALED_BLOCK))(
            x, by, y, x.numel(), BLOCK=SCALED_BLOCK, num_warps=8
        )
    return y
