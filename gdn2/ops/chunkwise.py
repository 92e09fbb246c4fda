"""The rule chunk by chunk, in plain torch: three stages and their hand-written backward (Eqs. 18–28, 49–82).

A chunk meets the rest of its sequence only through the state at its start and the gradient of the state at its end:

    intra         decays, scores and triangular inverse of each chunk       parallel over chunks
    scan          states and outputs, forward through the chunks            sequential
    scan_reverse  gradients of values and states, backward through them     sequential
    gradient      gradients of readers, keys and decays of each chunk       parallel over chunks

Every token has up to two *readers* of the state: its query, whose read is the output, and its erase row b ⊙ k, whose
read is subtracted from the value to be written. They are stacked, so one product serves both, and a rule that erases
nothing has one reader and no triangular system. Value heads that share keys lie side by side as columns of one wider
value, since nothing in a chunk mixes value channels.

Shapes: M chunks, H key-side heads, C tokens, n readers; d_v counts the columns of all value heads of a key head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.chunks import ChunkTable
from gdn2.ops.halving import (
    BASE,
    Base,
    DecayTree,
    diagonal_blocks,
    first,
    halves,
    quarter,
    second,
    shrink_gradient,
    unit_lower_inverse,
)
from gdn2.ops.operands import Operands, Tiles, load_tiles


class Factors(NamedTuple):
    """Elementwise results of each chunk: cheap, so the backward computes them again."""

    tiles: Tiles
    gamma: Tensor  # [M, H, C, d_k or 1] decay since the chunk's start (Eq. 18)
    tail: Tensor  # [M, H, C, d_k or 1] decay until the chunk's end
    gamma_C: Tensor  # [M, H, d_k or 1, 1] decay of the whole chunk
    X_gamma: Tensor  # [M, H, C, n, d_k] readers at the chunk's start: Q_γ and Ē
    K_tail: Tensor  # [M, H, C, d_k] keys at the chunk's end (Eq. 41)
    levels: list[tuple[int, Tensor, Tensor]]  # h, row and column decays; for the backward only
    base: Base  # decays of the smallest blocks


class Matrices(NamedTuple):
    """Scores of each chunk, and the inverse where something is erased."""

    A_qk: Tensor  # [M, H, C, C] (Eq. 25)
    A: Tensor | None  # [M, H, C, C] (I + T)⁻¹ (Eq. 21)


def intra(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> tuple[Factors, Matrices]:
    """Everything a chunk can compute on its own (Eqs. 18–21, 25)."""
    t = load_tiles(x, chunks, dtype)
    tree = DecayTree(t.g)
    A_qk, T = scores(t.X, t.K, tree)
    return decayed(t, tree, []), Matrices(A_qk, None if T is None else unit_lower_inverse(T))


def intra_again(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> Factors:
    """The factors once more for the backward, which keeps the matrices and needs the decays of each level."""
    t = load_tiles(x, chunks, dtype)
    tree = DecayTree(t.g)
    return decayed(
        t, tree, [(h, rows.clone(), columns.clone()) for h, rows, columns in tree.levels()]
    )


def decayed(t: Tiles, tree: DecayTree, levels: list[tuple[int, Tensor, Tensor]]) -> Factors:
    """Readers at the chunk's start and keys at its end, from a fully grown tree."""
    X_gamma, K_tail = t.X * tree.since.unsqueeze(-2), t.K * tree.after
    return Factors(t, tree.since, tree.after, tree.block.mT, X_gamma, K_tail, levels, tree.base)


def scores(X: Tensor, K: Tensor, tree: DecayTree) -> tuple[Tensor, Tensor | None]:
    """A_qk and, with a second reader, T: products of readers and earlier keys, level by level."""
    P = K.new_zeros(*X.shape[:-1], K.shape[-2])  # [M, H, C, n, C]
    for h, rows, columns in tree.levels():
        met = rows_of(X, rows, h) @ (first(K, h) * columns).mT
        quarter(P, h).copy_(met.unflatten(-2, (h, -1)))
    row, column = base_factors(X, K, tree.base)
    met = (row @ column.mT).unflatten(-2, (BASE, -1))
    blocks = diagonal_blocks(P, BASE)
    blocks.copy_(torch.where(base_mask(tree.base, met), met, blocks))
    P[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((X[..., 0, :] * K).sum(-1))
    return P[..., 0, :], P[..., 1, :] if X.shape[-2] > 1 else None


def base_factors(X: Tensor, K: Tensor, base: Base) -> tuple[Tensor, Tensor]:
    """Rows […, C/16, 16·n, d_k] and columns […, C/16, 16, d_k] of the blocks that are met at once."""
    row = (X * base.since.unsqueeze(-2)).unflatten(-3, (-1, BASE)).flatten(-3, -2)
    return row, (K * base.inverse).unflatten(-2, (-1, BASE))


def base_mask(base: Base, met: Tensor) -> Tensor:
    """Pairs r > s of rows that are not too deep, as […, C/16, 16, 1, 16]."""
    mask = torch.ones(BASE, BASE, dtype=torch.bool, device=met.device).tril(-1).unsqueeze(1)
    if base.shallow is None:
        return mask
    return mask & base.shallow.unflatten(-2, (-1, BASE)).unsqueeze(-1)


def rows_of(X: Tensor, decay: Tensor, h: int) -> Tensor:
    """Readers of the second halves, decayed since the seam: […, C/2h, h·n, d_k]."""
    return (second(X, h, -3) * decay.unsqueeze(-2)).flatten(-3, -2)


def scan(
    f: Factors, m: Matrices, Z: Tensor, chunks: ChunkTable, state: Tensor, starts: Tensor, R: Tensor
) -> Tensor:
    """Outputs; fills in residuals and the state at each chunk's start, and moves `state` to the end (Eqs. 23, 24).

    R = A (Z − Ē S) is the paper's U − Y S (Eqs. 22, 38) without Y and U, which only many steps at once would need.
    O = Q_γ S + A_qk R needs no order, so only R and S are computed step by step.
    """
    if m.A is None:
        R.copy_(Z)
    A, E_bar = m.A_qk if m.A is None else m.A, f.X_gamma[..., -1, :]
    for S, S_n, R_n, Z_n, A_n, E_n, K_n, gamma_n in steps(
        chunks, state, starts, R, Z, A, E_bar, f.K_tail, f.gamma_C
    ):
        S_n.copy_(S)
        if m.A is not None:
            torch.bmm(A_n, torch.baddbmm(Z_n, E_n, S, alpha=-1), out=R_n)
        S.mul_(gamma_n).baddbmm_(K_n.mT, R_n)
    O = f.X_gamma[..., 0, :] @ starts
    O.flatten(0, 1).baddbmm_(m.A_qk.flatten(0, 1), R.flatten(0, 1))
    return O


def scan_reverse(
    f: Factors, A_qk: Tensor, A: Tensor | None, chunks: ChunkTable, dO: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of gated values and of the state at each chunk's end; `d_state` moves to the start.

    dR = A_qkᵀ dO + K_tail dS_C, dZ = Aᵀ dR, dS₀ = γ_C ⊙ dS_C + Q_γᵀ dO − Ēᵀ dZ (Eqs. 54, 56–59, 63, 64).
    """
    dR = A_qk.mT @ dO
    dZ = dR if A is None else torch.empty_like(dR)
    A = A_qk if A is None else A
    d_read, E_bar = f.X_gamma[..., 0, :].mT @ dO, f.X_gamma[..., -1, :]
    ends = torch.empty_like(d_read)
    tensors = (ends, dR, dZ, A, d_read, f.K_tail, E_bar, f.gamma_C)
    for dS, dS_n, dR_n, dZ_n, A_n, d_read_n, K_n, E_n, gamma_n in reversed(
        [*steps(chunks, d_state, *tensors)]
    ):
        dS_n.copy_(dS)
        dR_n.baddbmm_(K_n, dS)
        torch.addcmul(d_read_n, dS, gamma_n, out=dS)
        if dZ is not dR:
            torch.bmm(A_n.mT, dR_n, out=dZ_n)
            dS.baddbmm_(E_n.mT, dZ_n, alpha=-1)
    return dZ, ends


def steps(chunks: ChunkTable, state: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each step of the scan: the states of the sequences that go on, and their chunks of the other tensors."""
    states = (state[:active].flatten(0, 1) for active in chunks.active)
    return zip(
        states,
        *(x.flatten(0, 1).split([a * x.shape[1] for a in chunks.active]) for x in tensors),
        strict=True,
    )


def gradient(
    f: Factors, S: Tensor, R: Tensor, d_reads: Tensor, dZ: Tensor, dS_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a chunk's readers, keys and log-decays, by the short backward; `d_reads` […, n, d_v] begins with dO.

    With dZ = Aᵀ dR the paper's dA products (Eqs. 64–66) collapse to dT = −tril(dZ Rᵀ, −1): the erase row behaves like a
    query whose output gradient is −dZ. One stacked gradient of all reads gives dA_qk and dT, dQ_γ and dĒ.
    """
    X, K = f.tiles.X, f.tiles.K
    if X.shape[-2] > 1:
        torch.neg(dZ, out=d_reads[..., 1, :])
    flat = d_reads.flatten(-3, -2)
    dP = (flat @ R.mT).unflatten(-2, X.shape[-3:-1])  # [M, H, C, n, C]: dA_qk and dT
    dX = (flat @ S.mT).view_as(X).mul_(f.gamma.unsqueeze(-2))
    dK = (R @ dS_C.mT).mul_(f.tail)

    # g through γ, K_tail and γ_C; the levels below add what it does between rows and columns
    d_since = sum_to_width(dX[..., 0, :] * X[..., 0, :], f.gamma)
    add_product(d_since, dX[..., 1:, :], X[..., 1:, :])
    d_after = sum_to_width(dK * K, f.gamma)
    d_chunk = f.gamma_C.squeeze(-1) * sum_to_width((dS_C * S).sum(-1), f.gamma)
    d_since[..., -1, :] += d_chunk

    d_diagonal = dP[..., 0, :].diagonal(dim1=-2, dim2=-1)[..., None]
    dX[..., 0, :].addcmul_(d_diagonal, K)
    dK.addcmul_(d_diagonal, X[..., 0, :])
    levels = {h: (rows, columns) for h, rows, columns in f.levels}
    for h in [K.shape[-2], *reversed([*halves(K.shape[-2])])]:
        if h < K.shape[-2]:
            shrink_gradient(d_since, d_after, h)
        if h in levels:
            level_gradient(h, *levels[h], f.tiles, dP, dX, dK, d_since, d_after)
        if h == BASE:
            base_gradient(f.base, f.tiles, dP, dX, dK, d_since)
            if f.base.shallow is not None:  # the levels below are for the other rows
                dP = dP.masked_fill(f.base.shallow.unsqueeze(-1), 0)
    return dX, dK, d_since


def level_gradient(
    h: int,
    rows: Tensor,
    columns: Tensor,
    t: Tiles,
    dP: Tensor,
    dX: Tensor,
    dK: Tensor,
    d_since: Tensor,
    d_after: Tensor,
) -> None:
    """Add what flows through the scores of one level; the gradients of g are those of sums since and until the seam."""
    dM = quarter(dP, h).flatten(-3, -2)  # […, C/2h, h·n, h]
    row, column = rows_of(t.X, rows, h), first(t.K, h) * columns
    d_row = (dM @ column).unflatten(-2, (h, -1))
    d_column = dM.mT @ row
    second(dX, h, -3).addcmul_(d_row, rows.unsqueeze(-2))
    first(dK, h).addcmul_(d_column, columns)
    add_product(second(d_since, h), d_row, row.view_as(d_row))
    add_product(first(d_after, h), d_column.unsqueeze(-2), column.unsqueeze(-2))


def base_gradient(
    base: Base, t: Tiles, dP: Tensor, dX: Tensor, dK: Tensor, d_since: Tensor
) -> None:
    """Add what flows through the scores of the blocks that are met at once, all measured since the block's start."""
    blocks = diagonal_blocks(dP, BASE)
    dM = torch.where(base_mask(base, blocks), blocks, 0).flatten(-3, -2)  # […, C/16, 16·n, 16]
    row, column = base_factors(t.X, t.K, base)
    d_row, d_column = (dM @ column).view_as(t.X), (dM.mT @ row).view_as(t.K)
    dX.addcmul_(d_row, base.since.unsqueeze(-2))
    dK.addcmul_(d_column, base.inverse)
    add_product(d_since, d_row, row.view_as(t.X))
    add_product(d_since, d_column.unsqueeze(-2), column.view_as(t.K).unsqueeze(-2), sign=-1)


def add_product(target: Tensor, x: Tensor, y: Tensor, sign: int = 1) -> None:
    """Add ±x ⊙ y […, n, d], summed over the readers n, and over d if the target has width one."""
    if target.shape[-1] < x.shape[-1]:
        target.add_((x * y).sum((-2, -1)).unsqueeze(-1), alpha=sign)
        return
    for i in range(x.shape[-2]):
        target.addcmul_(x[..., i, :], y[..., i, :], value=sign)


def sum_to_width(x: Tensor, like: Tensor) -> Tensor:
    """Sum the last axis if `like` has width one there."""
    return x.sum(-1, keepdim=True) if like.shape[-1] < x.shape[-1] else x
