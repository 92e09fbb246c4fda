"""Blocks of 32 rows inside a chunk: views, and the triangle of scores inside a block."""

import torch
from torch import Tensor

from gdn2.ops.halving import diagonal_blocks

BLOCK = 32


def length(tokens: int) -> int:
    """Rows of a block in chunks of so many tokens."""
    return min(BLOCK, tokens)


def blocks(x: Tensor) -> Tensor:
    """View chunks [N, C, d] as their blocks [N·J, 32, d]."""
    return x.view(-1, length(x.shape[1]), x.shape[2])


def per_chunk(x: Tensor) -> Tensor:
    """View chunks [N, C, d] as [N, J, 32, d]."""
    return x.unflatten(1, (-1, length(x.shape[1])))


def on_diagonal(P: Tensor) -> Tensor:
    """View the blocks on the diagonal of matrices [N, C, C] as [N, J, 32, 32]."""
    return diagonal_blocks(P, length(P.shape[1]))


def earlier(P: Tensor, own: bool, out: Tensor) -> Tensor:
    """Keep the scores of blocks […, 32, 32] with earlier keys, and perhaps with the row's own; the others become zero.

    Whatever a later key gives is dropped, and not multiplied by zero: it may be infinite where its reciprocal is large.
    """
    return torch.tril(P, 0 if own else -1, out=out)
