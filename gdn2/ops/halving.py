"""Recursive halving: every decay inside a chunk without an exponent that could overflow.

The paper's factor γ⁻¹ (Eq. 19) overflows fp32 within a chunk once the decay is strong. Here a product of row r and
column s < r is split at a point *between* them instead. At level h a chunk is cut into blocks of 2h tokens; the rows of
each block's second half meet the columns of its first half, and both decays are measured from the seam:

    since[r] = exp(g_{seam+1} + … + g_r)   for rows,        after[s] = exp(g_{s+1} + … + g_seam)   for columns.

Both are at most one, so they can only underflow, which is then the right answer. The levels h = 1, 2, …, C/2 meet every
pair r > s exactly once. Going from h to 2h multiplies one half of each factor by the decay of a whole neighbouring
block, whose logarithm is summed before it is exponentiated: no cancellation, and one rounding per level.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


def halves(size: int) -> Iterator[int]:
    """Yield 1, 2, 4, …, size / 2."""
    h = 1
    while h < size:
        yield h
        h *= 2


def first(x: Tensor, h: int, axis: int = -2) -> Tensor:
    """View the first half of each block of 2h tokens: […, C, …] → […, C/2h, h, …]."""
    return x.unflatten(axis, (-1, 2, h)).select(axis - 1, 0)


def second(x: Tensor, h: int, axis: int = -2) -> Tensor:
    """View the second half of each block of 2h tokens: […, C, …] → […, C/2h, h, …]."""
    return x.unflatten(axis, (-1, 2, h)).select(axis - 1, 1)


def quarter(X: Tensor, h: int) -> Tensor:
    """View where second halves meet first halves: […, C, n, C] → […, C/2h, h, n, h]."""
    met = first(second(X, h, -3), h, -1)  # […, C/2h, h, n, C/2h, h]
    return met.diagonal(dim1=-5, dim2=-2).movedim(-1, -4)


def exp_decay(log_decay: Tensor) -> Tensor:
    """Exp of a log-decay, zero instead of subnormal: those cost 35 times as much on a CPU."""
    return torch.threshold(log_decay, math.log(torch.finfo(log_decay.dtype).tiny), -math.inf).exp_()


class Decays(NamedTuple):
    """All decays inside a chunk, each at most one; `levels[i]` belongs to h = 2^i."""

    levels: list[tuple[Tensor, Tensor]]  # since the seam for second halves, until it for first ones
    gamma: Tensor  # […, C, d] since the chunk's start, the token's own decay included (Eq. 18)
    tail: Tensor  # […, C, d] after the token, until the chunk's end
    gamma_C: Tensor  # […, 1, d] of the whole chunk


def chunk_decays(g: Tensor) -> Decays:
    """Grow the decay factors level by level from the log-decays g […, C, d]."""
    log_block, block = g, exp_decay(g)  # of each block of h tokens
    since, after = block.clone(), torch.ones_like(block)
    levels = []
    for h in halves(g.shape[-2]):
        rows, columns = second(since, h), first(after, h)
        levels.append((rows.clone(), columns.clone()))
        before, behind = block.unflatten(-2, (-1, 2)).unbind(-2)
        rows.mul_(before.unsqueeze(-2))
        columns.mul_(behind.unsqueeze(-2))
        log_block = log_block.unflatten(-2, (-1, 2)).sum(-2)
        block = exp_decay(log_block)
    return Decays(levels, since, after, block)


def shrink_gradient(d_since: Tensor, d_after: Tensor, h: int) -> None:
    """Adjoint of growing from h to 2h in the log domain, in place.

    What reached a second half through its neighbour's block flows to the last token of that neighbour, and likewise
    for first halves. Only sums are formed, so the gradient of g never cancels.
    """
    through_first, through_second = second(d_since, h).sum(-2), first(d_after, h).sum(-2)
    first(d_since, h)[..., -1, :] += through_first
    second(d_since, h)[..., -1, :] += through_second


def unit_lower_inverse(T: Tensor) -> Tensor:
    """(I + T)⁻¹ of a strictly lower triangular T […, C, C], by block merge (Eq. 21).

    A block's inverse is [[A₁, 0], [−A₂ T₂₁ A₁, A₂]]. Neumann doubling is cheaper and diverges for correlated keys.
    """
    size = T.shape[-1]
    A = torch.ones_like(T).diagonal(dim1=-2, dim2=-1)[..., None, None]  # […, C, 1, 1]
    for h in halves(size):
        corner = quarter(T.unsqueeze(-2), h).squeeze(-2)
        A1, A2 = A.unflatten(-3, (-1, 2)).unbind(-3)
        merged = A.new_zeros(*A1.shape[:-2], 2 * h, 2 * h)
        merged[..., :h, :h] = A1
        merged[..., h:, h:] = A2
        merged[..., h:, :h] = (A2 @ corner @ A1).neg_()
        A = merged
    return A.squeeze(-3)
