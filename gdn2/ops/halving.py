"""Recursive halving: every decay inside a chunk without an exponent that could overflow.

The paper's factor γ⁻¹ (Eq. 19) overflows fp32 within a chunk once the decay is strong. Here a product of row r and
column s < r is split at a point *between* them instead. At level h a chunk is cut into blocks of 2h tokens; the rows of
each block's second half meet the columns of its first half, and both decays are measured from the seam:

    since[r] = exp(g_{seam+1} + … + g_r)   for rows,        after[s] = exp(g_{s+1} + … + g_seam)   for columns.

Both are at most one, so they can only underflow, which is then the right answer. The levels h = 1, 2, …, C/2 meet every
pair r > s exactly once. Going from h to 2h multiplies one half of each factor by the decay of a whole neighbouring
block, whose logarithm is summed before it is exponentiated: no cancellation, and one rounding per level.

The smallest levels cost the most for what they do. In blocks of `BASE` tokens all pairs are met at once where that is
exact: rows and columns are both measured from the block's start, so a column's factor is 1 / since ≥ 1. A row that has
decayed below `DEEPEST` in some channel takes the small levels instead. That choice looks at tokens up to the row only,
so nothing in the future moves a bit of the past.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BASE = 16
DEEPEST = 1e-18  # ordinary decay over 16 tokens stays above; 1 / since times a key stays far from overflow


def halves(size: int) -> Iterator[int]:
    """Yield 1, 2, 4, …, size / 2."""
    h = 1
    while h < size:
        yield h
        h *= 2


def first(x: Tensor, h: int, axis: int = -2) -> Tensor:
    """View the first half of each block of 2h tokens: […, C, …] → […, C/2h, h, …]."""
    return torch.unflatten(x, axis, (-1, 2, h)).select(axis - 1, 0)


def second(x: Tensor, h: int, axis: int = -2) -> Tensor:
    """View the second half of each block of 2h tokens: […, C, …] → […, C/2h, h, …]."""
    return torch.unflatten(x, axis, (-1, 2, h)).select(axis - 1, 1)


def quarter(X: Tensor, h: int) -> Tensor:
    """View where second halves meet first halves: […, C, n, C] → […, C/2h, h, n, h]."""
    met = first(second(X, h, -3), h, -1)  # […, C/2h, h, n, C/2h, h]
    return met.diagonal(dim1=-5, dim2=-2).movedim(-1, -4)


def diagonal_blocks(X: Tensor, size: int) -> Tensor:
    """View the blocks on the diagonal: […, C, n, C] → […, C/size, size, n, size]."""
    blocks = torch.unflatten(torch.unflatten(X, -3, (-1, size)), -1, (-1, size))
    return blocks.diagonal(dim1=-5, dim2=-2).movedim(-1, -4)


def exp_decay(log_decay: Tensor) -> Tensor:
    """Exp of a log-decay, zero instead of subnormal: those cost 35 times as much on a CPU."""
    return torch.threshold(log_decay, math.log(torch.finfo(log_decay.dtype).tiny), -math.inf).exp_()


def flush(*factors: Tensor) -> None:
    """Make zero of what is subnormal, in place."""
    for x in factors:
        torch.threshold_(x, torch.finfo(x.dtype).tiny, 0)


class Base(NamedTuple):
    """Decays inside blocks of `BASE` tokens, both measured from the block's start."""

    since: Tensor  # […, C, d] of rows
    inverse: Tensor  # […, C, d] of columns: 1 / since, bounded where no row needs it
    shallow: Tensor | None  # […, C, 1] rows that may use them; None if all may


class DecayTree:
    """The decays inside each chunk, each at most one, grown level by level from the log-decays g […, C, d].

    Once all levels have passed, `since` is the decay since the chunk's start, the token's own included (γ of Eq. 18),
    `after` the decay from the token to the chunk's end, and `block` the decay of the whole chunk (γ_C).
    """

    def __init__(self, g: Tensor) -> None:
        self.g = g
        self.base: Base
        self.plant()

    def plant(self) -> None:
        """Begin with blocks of one token."""
        self.log_block, self.block = self.g, exp_decay(self.g)  # of each block of h tokens
        self.since, self.after = self.block.clone(), torch.ones_like(self.block)

    def levels(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield h and the decays of rows since the seam and of columns until it, valid until the next level.

        Levels below `BASE` are left out where no row needs them.
        """
        small = [*halves(BASE)]
        for h in small:
            self.grow(h)
        # with room to spare: near the bound a sum of logarithms and a product of decays may disagree; NaN is deep
        shallow = not self.g.numel() or bool(self.log_block.min() >= math.log(DEEPEST) + 0.01)
        deep = not shallow
        if deep:
            self.plant()
            for h in small:
                yield h, second(self.since, h), first(self.after, h)
                self.grow(h)
            flush(self.since, self.after)
        self.base = self.measure_base(deep)
        for h in [*halves(self.since.shape[-2])][len(small) :]:
            yield h, second(self.since, h), first(self.after, h)
            self.grow(h)

    def grow(self, h: int) -> None:
        """Double the blocks of h tokens."""
        rows, columns = second(self.since, h), first(self.after, h)
        before, behind = torch.unflatten(self.block, -2, (-1, 2)).unbind(-2)
        rows.mul_(before.unsqueeze(-2))
        columns.mul_(behind.unsqueeze(-2))
        if h >= BASE:  # many tokens' decay may be subnormal
            flush(rows, columns)
        first_half, second_half = torch.unflatten(self.log_block, -2, (-1, 2)).unbind(-2)
        self.log_block = first_half + second_half
        self.block = exp_decay(self.log_block)

    def measure_base(self, deep: bool) -> Base:
        """Both decays of the blocks of `BASE` tokens, at the moment when `since` is theirs."""
        since = self.since.clone()
        if not deep:
            return Base(since, since.reciprocal(), None)
        # `since` falls along the rows only up to rounding, so columns get some room below the rows' bound
        inverse = since.clamp(min=DEEPEST / 2).reciprocal_()
        return Base(since, inverse, since.amin(-1, keepdim=True) >= DEEPEST)


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
    A = T.new_ones(T.shape[:-1].numel(), 1, 1)  # of all blocks of h rows
    for h in halves(T.shape[-1]):
        pairs = len(A) // 2
        corner = quarter(T.unsqueeze(-2), h).reshape(pairs, h, h)
        A1, A2 = A.view(pairs, 2, h, h).unbind(1)
        A = A.new_zeros(pairs, 2 * h, 2 * h)
        A[:, :h, :h] = A1
        A[:, h:, h:] = A2
        A[:, h:, :h] = torch.bmm(torch.bmm(A2, corner), A1).neg_()
    return A.view(T.shape)
