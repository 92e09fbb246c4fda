"""The rule chunk by chunk, in plain torch: three stages and their hand-written backward (Eqs. 18–28, 49–82).

A chunk meets the rest of its sequence only through the state at its start and the gradient of the state at its end:

    intra       scores, triangular inverse and WY factors of each chunk          parallel over chunks
    scan        states and outputs, forward through the chunks                   sequential
    scan_reverse  gradients of residuals and states, backward through them       sequential
    gradient    gradients of all operands of each chunk                          parallel over chunks

Every token has up to two *readers* of the state: its query, whose read is the output, and its erase row b ⊙ k, whose
read is subtracted from the value to be written. They are stacked, so one product serves both, and a rule that erases
nothing has one reader and no triangular system. Value heads that share keys lie side by side as columns of one wider
value, since nothing in a chunk mixes value channels.

Shapes: M chunks, H key-side heads, C tokens, n readers; d_v counts the columns of all value heads of a key head.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.chunks import ChunkTable
from gdn2.ops.halving import (
    Decays,
    chunk_decays,
    first,
    halves,
    quarter,
    second,
    shrink_gradient,
    unit_lower_inverse,
)


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
    """The operands of each chunk."""

    X: Tensor  # [M, H, C, n, d_k] readers: scale · q, and b ⊙ k
    K: Tensor  # [M, H, C, d_k]
    V: Tensor  # [M, H_v, C, d_v] of one value head
    g: Tensor  # [M, H, C, d_k or 1]
    B: Tensor | None  # [M, H, C, d_k or 1]
    W: Tensor | None  # [M, H_v, C, d_v or 1]


class Factors(NamedTuple):
    """What `scan` and `gradient` need of each chunk."""

    tiles: Tiles
    decay: Decays
    X_gamma: Tensor  # [M, H, C, n, d_k] readers at the chunk's start: Q_γ and Ē
    K_tail: Tensor  # [M, H, C, d_k] keys at the chunk's end (Eq. 41)
    A_qk: Tensor  # [M, H, C, C] scores (Eq. 25)
    A: Tensor | None  # [M, H, C, C] (I + T)⁻¹ (Eq. 21)
    Y: Tensor | None  # [M, H, C, d_k] A Ē (Eq. 22)
    U: Tensor  # [M, H, C, d_v] A Z


def intra(
    x: Operands, chunks: ChunkTable, dtype: torch.dtype, matrices: Sequence[Tensor] = ()
) -> Factors:
    """Everything a chunk can compute on its own (Eqs. 18–22, 25); `matrices` are A_qk and A if known."""
    t = load_tiles(x, chunks, dtype)
    Z = fold(t.V if t.W is None else t.W * t.V, x.heads)
    decay = chunk_decays(t.g)
    X_gamma = t.X * decay.gamma.unsqueeze(-2)
    K_tail = t.K * decay.tail
    if matrices:
        A_qk, A = matrices[0], None if x.b is None else matrices[1]
    else:
        A_qk, T = scores(t.X, t.K, decay)
        A = None if T is None else unit_lower_inverse(T)
    Y, U = (None, Z) if A is None else (A @ X_gamma[..., 1, :], A @ Z)
    return Factors(t, decay, X_gamma, K_tail, A_qk, A, Y, U)


def scores(X: Tensor, K: Tensor, decay: Decays) -> tuple[Tensor, Tensor | None]:
    """A_qk and, with a second reader, T: products of readers and earlier keys, level by level."""
    P = K.new_zeros(*X.shape[:-1], K.shape[-2])  # [M, H, C, n, C]
    P[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((X[..., 0, :] * K).sum(-1))
    for h, (rows, columns) in zip(halves(K.shape[-2]), decay.levels, strict=True):
        met = rows_of(X, rows, h) @ (first(K, h) * columns).mT
        quarter(P, h).copy_(met.unflatten(-2, (h, -1)))
    return P[..., 0, :], P[..., 1, :] if X.shape[-2] > 1 else None


def rows_of(X: Tensor, decay: Tensor, h: int) -> Tensor:
    """Readers of the second halves, decayed since the seam: […, C/2h, h·n, d_k]."""
    return (second(X, h, -3) * decay.unsqueeze(-2)).flatten(-3, -2)


def load_tiles(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> Tiles:
    """Load the operands, the key-side ones all on the key-side heads."""

    def load(t: Tensor) -> Tensor:
        tile = chunks.load(t, dtype)
        return tile.repeat_interleave(x.heads // t.shape[1], 1) if t.shape[1] < x.heads else tile

    K, B = load(x.k), None if x.b is None else load(x.b)
    X = K.new_empty(*K.shape[:-1], 1 if B is None else 2, K.shape[-1])
    torch.mul(load(x.q), x.scale, out=X[..., 0, :])
    if B is not None:
        torch.mul(B, K, out=X[..., 1, :])
    W = None if x.w is None else chunks.load(x.w, dtype)
    return Tiles(X, K, chunks.load(x.v, dtype), load(x.g), B, W)


def fold(V: Tensor, heads: int) -> Tensor:
    """Lay the value heads of each key head side by side: [M, H·G, C, d] → [M, H, C, G·d]."""
    if V.shape[1] == heads:
        return V
    return V.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)


def unfold(V: Tensor, heads: int) -> Tensor:
    """Undo `fold`: [M, H, C, G·d] → [M, H·G, C, d]."""
    if V.shape[1] == heads:
        return V
    return V.unflatten(3, (heads // V.shape[1], -1)).transpose(2, 3).flatten(1, 2)


def scan(f: Factors, chunks: ChunkTable, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, residuals and the state at each chunk's start; `state` moves to the end (Eqs. 23, 24).

    O = Q_γ S + A_qk R needs no order, so only R and S are computed step by step.
    """
    starts = state.new_empty(f.K_tail.shape[0], *state.shape[1:])
    R = f.U if f.Y is None else torch.empty_like(f.U)
    gamma_C = f.decay.gamma_C.mT
    for n, (i, j) in enumerate(steps(chunks)):
        S = state[: chunks.active[n]]
        starts[i:j].copy_(S)
        if f.Y is not None:
            torch.sub(f.U[i:j], f.Y[i:j] @ S, out=R[i:j])
        S.mul_(gamma_C[i:j]).add_(f.K_tail[i:j].mT @ R[i:j])
    O = f.X_gamma[..., 0, :] @ starts
    O += f.A_qk @ R
    return O, R, starts


def scan_reverse(
    f: Factors, chunks: ChunkTable, dO: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the residuals and of the state at each chunk's end; `d_state` moves to the start.

    dR = A_qkᵀ dO + K_tail dS_C and dS₀ = γ_C ⊙ dS_C + Q_γᵀ dO − Yᵀ dR (Eqs. 54, 56, 57, 59, 63).
    """
    dR = f.A_qk.mT @ dO
    d_read = f.X_gamma[..., 0, :].mT @ dO
    ends = torch.empty_like(d_read)
    gamma_C = f.decay.gamma_C.mT
    for n, (i, j) in reversed(list(enumerate(steps(chunks)))):
        dS = d_state[: chunks.active[n]]
        ends[i:j].copy_(dS)
        dR[i:j] += f.K_tail[i:j] @ dS
        torch.addcmul(d_read[i:j], dS, gamma_C[i:j], out=dS)
        if f.Y is not None:
            dS.sub_(f.Y[i:j].mT @ dR[i:j])
    return dR, ends


def steps(chunks: ChunkTable) -> list[tuple[int, int]]:
    """Range of chunks of each step of the scan."""
    return list(pairwise(chunks.offsets))


def gradient(
    f: Factors, S: Tensor, R: Tensor, dO: Tensor, dR: Tensor, dS_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a chunk's readers, keys, gated values and log-decays, by the short backward.

    With dZ = Aᵀ dR the paper's dA products (Eqs. 64–66) collapse to dT = −tril(dZ Rᵀ, −1): the erase row behaves like a
    query whose output gradient is −dZ. One stacked gradient of all reads gives dA_qk and dT, dQ_γ and dĒ.
    """
    X, K, decay = f.tiles.X, f.tiles.K, f.decay
    dZ = dR if f.A is None else f.A.mT @ dR
    d_reads = dO.unsqueeze(-2) if f.A is None else torch.stack([dO, -dZ], -2)  # [M, H, C, n, d_v]
    flat = d_reads.flatten(-3, -2)
    dP = (flat @ R.mT).unflatten(-2, X.shape[-3:-1])  # [M, H, C, n, C]: dA_qk and dT
    dX = (flat @ S.mT).view_as(X).mul_(decay.gamma.unsqueeze(-2))
    dK = (R @ dS_C.mT).mul_(decay.tail)

    # g through γ, K_tail and γ_C; the levels below add what it does between rows and columns
    d_since, d_after = torch.zeros_like(f.tiles.g), torch.zeros_like(f.tiles.g)
    add_product(d_since, dX, X)
    add_product(d_after, dK.unsqueeze(-2), K.unsqueeze(-2))
    d_chunk = decay.gamma_C.squeeze(-2) * sum_to_width((dS_C * S).sum(-1), decay.gamma_C)
    d_since[..., -1, :] += d_chunk

    d_diagonal = dP[..., 0, :].diagonal(dim1=-2, dim2=-1)[..., None]
    dX[..., 0, :].addcmul_(d_diagonal, K)
    dK.addcmul_(d_diagonal, X[..., 0, :])
    for h, (rows, columns) in reversed([*zip(halves(K.shape[-2]), decay.levels, strict=True)]):
        shrink_gradient(d_since, d_after, h)
        dM = quarter(dP, h).flatten(-3, -2)  # […, C/2h, h·n, h]
        row, column = rows_of(X, rows, h), first(K, h) * columns
        d_row = (dM @ column).unflatten(-2, (h, -1))
        d_column = dM.mT @ row
        second(dX, h, -3).addcmul_(d_row, rows.unsqueeze(-2))
        first(dK, h).addcmul_(d_column, columns)
        add_product(second(d_since, h), d_row, row.view_as(d_row))
        add_product(first(d_after, h), d_column.unsqueeze(-2), column.unsqueeze(-2))
    return dX, dK, dZ, d_since


def add_product(target: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x ⊙ y […, n, d], summed over the readers n, and over d if the target has width one."""
    if target.shape[-1] < x.shape[-1]:
        target += (x * y).sum((-2, -1)).unsqueeze(-1)
        return
    for i in range(x.shape[-2]):
        target.addcmul_(x[..., i, :], y[..., i, :])


def sum_to_width(x: Tensor, like: Tensor) -> Tensor:
    """Sum the last axis if `like` has width one there."""
    return x.sum(-1, keepdim=True) if like.shape[-1] < x.shape[-1] else x
