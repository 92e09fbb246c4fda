"""The operator's operands: packed tokens, and the tiles that chunks make of them.

Shapes: M chunks, H key-side heads, N = M · H, n readers, C tokens; d_v counts the columns of all value heads of a key
head.
"""

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.chunks import ChunkTable


class Operands(NamedTuple):
    """Packed tokens [L, heads, d]; gates may have width one, and b or w may be absent."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor | None
    w: Tensor | None
    scale: float

    @property
    def heads(self) -> int:
        """Key-side heads; all value heads of one share its scores."""
        return key_side_heads(self.k.shape, self.g.shape, None if self.b is None else self.b.shape)


def key_side_heads(k: Sequence[int], g: Sequence[int], b: Sequence[int] | None) -> int:
    """The fewest heads that keys, decay and erase gate can all be repeated to, from their shapes."""
    return lcm(k[-2], g[-2], 1 if b is None else b[-2])


class Tiles(NamedTuple):
    """The key-side operands of each chunk, erase gate applied."""

    X: Tensor  # [n, N, C, d_k] readers: scale · q, and b ⊙ k
    K: Tensor  # [N, C, d_k]
    g: Tensor  # [N, C, d_k or 1]


def load_tiles(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> Tiles:
    """Load the key-side operands onto the key-side heads and apply the erase gate."""

    def load(t: Tensor) -> Tensor:
        return spread(chunks.load(t, dtype), x.heads, 1)

    K = load(x.k)
    X = K.new_empty(1 if x.b is None else 2, *K.shape)
    torch.mul(spread(chunks.peek(x.q), x.heads, -3).to(dtype), x.scale, out=chunks.shaped(X[0]))
    if x.b is not None:
        B = spread(chunks.peek(x.b), x.heads, -3).to(dtype)
        torch.mul(B, chunks.shaped(K), out=chunks.shaped(X[1]))
    return Tiles(X.flatten(1, 2), K.flatten(0, 1), load(x.g).flatten(0, 1))


def load_values(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> Tensor:
    """Z = w ⊙ v [N, C, d_v] (Eq. 20)."""
    if x.w is None:
        return fold(chunks.load(x.v, dtype), x.heads)
    V = chunks.peek(x.v).to(dtype)
    Z = V.new_empty(len(chunks.token) // chunks.size, *V.shape[-3:])
    torch.mul(V, chunks.peek(x.w).to(dtype), out=chunks.shaped(Z))
    return fold(Z, x.heads)


def spread(tile: Tensor, heads: int, axis: int) -> Tensor:
    """Repeat the heads of an operand that has fewer."""
    count = tile.shape[axis]
    return tile if count == heads else tile.repeat_interleave(heads // count, axis)


def fold(V: Tensor, heads: int) -> Tensor:
    """Lay the value heads of each key head side by side: [M, H·G, C, d] → [M·H, C, G·d]."""
    if V.shape[1] == heads:
        return V.flatten(0, 1)
    return V.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3).flatten(0, 1).contiguous()


def unfold(V: Tensor, heads: int, value_heads: int) -> Tensor:
    """Undo `fold`: [M·H, C, G·d] → [M, H·G, C, d]."""
    V = V.unflatten(0, (-1, heads))
    if heads == value_heads:
        return V
    return V.unflatten(3, (value_heads // heads, -1)).transpose(2, 3).flatten(1, 2)
