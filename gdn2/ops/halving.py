"""Recursive halving: every decay inside a block without an exponent that could overflow, and the triangular inverse.

A product of row r and column s < r is split at a point *between* them. At level h a block is cut into parts of 2h
tokens; the rows of each part's second half meet the columns of its first half, both measured from the seam:

    since[r] = exp(g_{seam+1} + … + g_r)   for rows,        after[s] = exp(g_{s+1} + … + g_seam)   for columns.

Both are at most one, so they can only underflow, which is then the right answer. The levels h = 1, 2, … meet every pair
r > s exactly once. Going from h to 2h multiplies one half of each factor by the decay of the whole neighbouring half,
whose logarithm is summed before it is exponentiated: no cancellation, and one rounding per level.
"""

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SMALL = 16  # rows up to which the inverse merges blocks by masks


def halves(size: int) -> Iterator[int]:
    """Yield 1, 2, 4, …, size / 2."""
    h = 1
    while h < size:
        yield h
        h *= 2


def first(x: Tensor, h: int, axis: int = -2) -> Tensor:
    """View the first half of each part of 2h tokens: […, C, …] → […, C/2h, h, …]."""
    return torch.unflatten(x, axis, (-1, 2, h)).select(axis - 1, 0)


def second(x: Tensor, h: int, axis: int = -2) -> Tensor:
    """View the second half of each part of 2h tokens: […, C, …] → […, C/2h, h, …]."""
    return torch.unflatten(x, axis, (-1, 2, h)).select(axis - 1, 1)


def quarter(X: Tensor, h: int) -> Tensor:
    """View where second halves meet first halves: […, C, C] → […, C/2h, h, h]."""
    met = first(second(X, h), h, -1)  # […, C/2h, h, C/2h, h]
    return met.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def diagonal_blocks(X: Tensor, size: int) -> Tensor:
    """View the blocks on the diagonal: […, C, C] → […, C/size, size, size]."""
    square = torch.unflatten(torch.unflatten(X, -2, (-1, size)), -1, (-1, size))
    return square.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def exp_decay(log_decay: Tensor) -> Tensor:
    """Exp of a log-decay, zero instead of subnormal: those cost 35 times as much on a CPU."""
    return torch.threshold(log_decay, math.log(torch.finfo(log_decay.dtype).tiny), -math.inf).exp_()


def flush(*factors: Tensor) -> None:
    """Make zero of what is subnormal, in place."""
    for x in factors:
        torch.threshold_(x, torch.finfo(x.dtype).tiny, 0)


class DecayTree:
    """The decays inside blocks, each at most one, grown level by level from the log-decays g […, C, d].

    Once all levels have passed, `since` is the decay since the block's start, the token's own included, and `after` the
    decay from the token to the block's end.
    """

    def __init__(self, g: Tensor) -> None:
        self.log_part, self.part = g, exp_decay(g)  # of each part of h tokens
        self.since, self.after = self.part.clone(), torch.ones_like(self.part)

    def levels(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield h and the decays of rows since the seam and of columns until it, valid until the next level."""
        for h in halves(self.since.shape[-2]):
            yield h, second(self.since, h), first(self.after, h)
            self.grow(h)

    def grow(self, h: int) -> None:
        """Double the parts of h tokens."""
        rows, columns = second(self.since, h), first(self.after, h)
        before, behind = torch.unflatten(self.part, -2, (-1, 2)).unbind(-2)
        rows.mul_(before.unsqueeze(-2))
        columns.mul_(behind.unsqueeze(-2))
        flush(rows, columns)
        first_half, second_half = torch.unflatten(self.log_part, -2, (-1, 2)).unbind(-2)
        self.log_part = first_half + second_half
        self.part = exp_decay(self.log_part)


def shrink_gradient(d_since: Tensor, d_after: Tensor, h: int) -> None:
    """Adjoint of growing from h to 2h in the log domain, in place.

    What reached a second half through its neighbour flows to the last token of that neighbour, and likewise for first
    halves. Only sums are formed, so the gradient of g never cancels.
    """
    through_first, through_second = second(d_since, h).sum(-2), first(d_after, h).sum(-2)
    first(d_since, h)[..., -1, :] += through_first
    second(d_since, h)[..., -1, :] += through_second


def unit_lower_inverse(T: Tensor) -> Tensor:
    """(I + T)⁻¹ of a strictly lower triangular T […, C, C] (Eq. 21): in blocks of `SMALL` rows, then by merging blocks.

    The inverse of two blocks and what lies between is [[A₁, 0], [−A₂ T₂₁ A₁, A₂]]; for small blocks it is cheaper with
    all of them in one masked product. Neumann doubling is cheaper still and diverges for correlated keys.
    """
    small = diagonal_blocks(T, SMALL).reshape(-1, SMALL, SMALL)
    met = seams(SMALL, T.dtype, T.device)
    A_small = torch.eye(SMALL, dtype=T.dtype, device=T.device) - small * met[0]
    for seam in met[1:]:
        A_small = torch.baddbmm(A_small, torch.bmm(A_small, small * seam), A_small, alpha=-1)
    A = torch.zeros_like(T)
    diagonal = diagonal_blocks(A, SMALL)
    diagonal.copy_(A_small.view(diagonal.shape))
    for h in [*halves(T.shape[-1])][len(met) :]:
        A_1, A_2 = diagonal_blocks(A, h).reshape(-1, 2, h, h).unbind(1)
        T_21, A_21 = quarter(T, h).reshape(-1, h, h), quarter(A, h)
        torch.neg(torch.bmm(torch.bmm(A_2, T_21), A_1).view(A_21.shape), out=A_21)
    return A


@cache
def seams(size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """For each level a mask [C, C]: one where second halves meet first halves."""
    masks = [torch.zeros(size, size, dtype=dtype, device=device) for _ in halves(size)]
    for h, mask in zip(halves(size), masks, strict=True):
        quarter(mask, h).fill_(1)
    return masks
