"""Rows that have decayed too far since their block's start: scores and gradients inside the block by recursive halving.

They are rare: a few tokens with very strong decay, or a channel that forgets all within a block. Their readers meet the
earlier keys of the block level by level (`gdn2.ops.halving`), where no exponent is positive. Only blocks that have such
rows are looked at; what they compute for their other rows is not used. The same levels give the decay of their keys
until the block's end, which is too small for a quotient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.blocks import blocks
from gdn2.ops.halving import DecayTree, first, quarter, second, shrink_gradient


class DeepRows(NamedTuple):
    """The D blocks of 32 rows, out of N·J, that have deep rows."""

    which: Tensor  # [D] indices of the blocks
    shallow: Tensor  # [D, 32, 1] their other rows
    X: Tensor  # [n, D, 32, d_k] readers
    K: Tensor  # [D, 32, d_k]
    after: Tensor  # [D, 32, d_k or 1] decay until the block's end
    # h, decays of rows since the seam, and of columns until it
    levels: list[tuple[int, Tensor, Tensor]]

    def others(self, x: Tensor) -> Tensor:
        """A copy of x [N·J, 32, …] with zero in the deep rows."""
        return x.index_put((self.which,), x[self.which].masked_fill(~self.shallow, 0))

    def own(self, x: Tensor) -> Tensor:
        """The blocks of x [N·J, 32, …] that have deep rows, with zero in their others."""
        return x[self.which].masked_fill(self.shallow, 0)


def deep_rows(X: Tensor, K: Tensor, g: Tensor, shallow: Tensor) -> DeepRows:
    """Grow the decays of all levels from the log-decays g [N, C, d_k or 1]; `shallow` [N, C, 1] are the other rows."""
    which = (~blocks(shallow)).flatten(1).any(1).nonzero().flatten()
    tree = DecayTree(blocks(g)[which])
    levels = [(h, rows.clone(), columns.clone()) for h, rows, columns in tree.levels()]
    readers = torch.stack([blocks(X_i)[which] for X_i in X])
    return DeepRows(which, blocks(shallow)[which], readers, blocks(K)[which], tree.after, levels)


def deep_scores(f: DeepRows, reader: int) -> Tensor:
    """Scores of one reader with earlier keys of its block [D, 32, 32], and of the query with its own."""
    X, K = f.X[reader], f.K
    P = K.new_zeros(*K.shape[:2], K.shape[1])
    for h, rows, columns in f.levels:
        quarter(P, h).copy_((second(X, h) * rows) @ (first(K, h) * columns).mT)
    if reader == 0:
        P.diagonal(dim1=1, dim2=2).copy_((X * K).sum(-1))
    return P


def deep_gradient(
    f: DeepRows, dP: list[Tensor], d_own: Tensor, dX: Tensor, dK: Tensor, dg: Tensor
) -> None:
    """Add what flows through the scores of the deep rows to the gradients of readers, keys and log-decays [N, C, …].

    `dP` [N·J, 32, 32] of each reader is that of the scores with earlier keys, `d_own` [N, C, 1] of the query's with its
    own. The gradients of g are those of sums since and until the seams, so they never cancel.
    """
    d_own = f.own(blocks(d_own))
    dX_deep, dK_deep = torch.zeros_like(f.X), d_own * f.X[0]
    dX_deep[0] = d_own * f.K
    d_since = f.K.new_zeros(*f.K.shape[:2], dg.shape[2])
    d_after = torch.zeros_like(d_since)
    for h, rows, columns in reversed(f.levels):
        shrink_gradient(d_since, d_after, h)
        column = first(f.K, h) * columns
        for X_i, dX_i, dP_i in zip(f.X, dX_deep, dP, strict=True):
            dM, row = quarter(f.own(dP_i), h), second(X_i, h) * rows
            d_row, d_column = dM @ column, dM.mT @ row
            second(dX_i, h).addcmul_(d_row, rows)
            first(dK_deep, h).addcmul_(d_column, columns)
            add_to_width(second(d_since, h), d_row * row)
            add_to_width(first(d_after, h), d_column * column)
    for target, x in zip((*dX, dK, dg), (*dX_deep, dK_deep, d_since), strict=True):
        blocks(target)[f.which] += x


def add_to_width(target: Tensor, x: Tensor) -> None:
    """Add x in place, summed over the last axis if the target has width one."""
    target.add_(x.sum(-1, keepdim=True) if target.shape[-1] < x.shape[-1] else x)
