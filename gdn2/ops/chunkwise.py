"""The rule chunk by chunk, in plain torch: three stages and their hand-written backward (Eqs. 18–28, 49–82).

A chunk meets the rest of its sequence only through the state at its start and the gradient of the state at its end:

    intra         decays, scores and triangular inverse of each chunk       parallel over chunks
    scan          states and outputs, forward through the chunks            sequential
    scan_reverse  gradients of values and states, backward through them     sequential
    gradient      gradients of readers, keys and decays of each chunk       parallel over chunks

Every token has up to two *readers* of the state: its query, whose read is the output, and its erase row b ⊙ k, whose
read is subtracted from the value to be written. A rule that erases nothing has one reader and no triangular system.
Value heads that share keys lie side by side as columns of one wider value, since nothing mixes value channels.

The paper's γ⁻¹ (Eq. 19) overflows within a chunk once the decay is strong. Here the readers of a block of 32 rows are
measured from the block's start. Keys before the block meet them there with exponents at most zero, always safe; keys
inside it have positive ones, exact as long as they are finite. A row that has decayed below `DEEPEST` since the block's
start in some channel meets the keys inside by recursive halving instead (`gdn2.ops.deep`). That choice looks at tokens
up to the row only, so nothing in the future moves a bit of the past.

Shapes: N chunks of single key-side heads, n readers, C tokens in J blocks; d_v counts the columns of all value heads of
a key head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.blocks import blocks, earlier, on_diagonal, per_chunk
from gdn2.ops.chunks import ChunkTable
from gdn2.ops.deep import DeepRows, deep_gradient, deep_rows, deep_scores
from gdn2.ops.halving import flush, unit_lower_inverse
from gdn2.ops.operands import Operands, load_tiles

DEEPEST = 1e-32  # the paper's initial decays stay above over 32 tokens; 1 / since times a key stays finite
LIFT = 2.0**64  # keeps dK̄, products of a small gradient and a small reader, from underflow


class Factors(NamedTuple):
    """Elementwise results of each chunk: cheap, so the backward computes them again."""

    X: Tensor  # [n, N, C, d_k] readers measured from their block's start
    X_gamma: Tensor  # [n, N, C, d_k] readers at the chunk's start: Q_γ and Ē (Eq. 20)
    K: Tensor  # [N, C, d_k]
    K_bar: Tensor  # [N, C, d_k] keys measured from their block's start (Eq. 19)
    K_end: Tensor  # [N, C, d_k] keys measured at their block's end
    # [N, 32 j, d_k] keys before block j, measured at its start; the last one is K_tail (Eq. 41)
    past: list[Tensor]
    since: Tensor  # [N, C, d_k or 1] decay since the block's start
    inverse: Tensor  # [N, C, d_k or 1] 1 / since, bounded where no row needs it
    after: Tensor  # [N, C, d_k or 1] decay until the block's end
    whole: Tensor  # [N, J, 1, d_k or 1] decay of each block
    before: Tensor  # [N, J, 1, d_k or 1] decay from the chunk's start to the block's
    gamma_C: Tensor  # [N, d_k or 1, 1] decay of the chunk
    deep: DeepRows | None  # None where no row is


class Matrices(NamedTuple):
    """Scores of each chunk, and the inverse where something is erased."""

    A_qk: Tensor  # [N, C, C] (Eq. 25)
    A: Tensor | None  # [N, C, C] (I + T)⁻¹ (Eq. 21)


def intra(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> tuple[Factors, Matrices]:
    """Everything a chunk can compute on its own (Eqs. 18–21, 25)."""
    f = factors(x, chunks, dtype)
    A_qk, *T = (scores(f, reader) for reader in range(len(f.X)))
    return f, Matrices(A_qk, unit_lower_inverse(T[0]) if T else None)


def factors(x: Operands, chunks: ChunkTable, dtype: torch.dtype) -> Factors:
    """Readers and keys measured from starts of blocks and from both ends of the chunk."""
    X, K, g = load_tiles(x, chunks, dtype)
    since = g.exp()
    per_chunk(since).cumprod_(-2)
    whole = per_chunk(since)[:, :, -1:]
    # equal roundings of a slow decay would add up in the product, and those of a strong one in the sum
    whole = torch.where(whole > 0.5, per_chunk(g).sum(2, keepdim=True).exp_(), whole)
    deep = None  # `since` falls from row to row, so the last one tells; NaN is deep
    if not bool((per_chunk(since)[:, :, -1] >= DEEPEST).all()):
        flush(since)
        deep = deep_rows(X, K, g, since.amin(-1, keepdim=True) >= DEEPEST)
    inverse = (since if deep is None else since.clamp(min=DEEPEST)).reciprocal()
    after = (per_chunk(inverse) * whole).view_as(since)
    if deep is not None:
        blocks(after)[deep.which] = deep.after
    X.mul_(since)
    before = torch.ones_like(whole)
    before[:, 1:] = whole[:, :-1].cumprod(1)
    X_gamma = (X.unflatten(2, (whole.shape[1], -1)) * before).view_as(X)
    K_bar, K_end = K * inverse, K * after
    past = keys_before(K_end, whole)
    gamma_C = (before[:, -1] * whole[:, -1]).mT
    return Factors(
        X, X_gamma, K, K_bar, K_end, past, since, inverse, after, whole, before, gamma_C, deep
    )


def keys_before(K_end: Tensor, whole: Tensor) -> list[Tensor]:
    """The keys before each block and before the chunk's end, measured there; `K_end` has them at their block's end."""
    size = K_end.shape[1] // whole.shape[1]
    past = [K_end[:, :0], K_end[:, :size]]
    for j in range(1, whole.shape[1]):
        longer = torch.empty_like(K_end[:, : (j + 1) * size])
        torch.mul(past[-1], whole[:, j], out=longer[:, : j * size])
        longer[:, j * size :] = K_end[:, j * size : (j + 1) * size]
        past.append(longer)
    return past


def scores(f: Factors, reader: int) -> Tensor:
    """Products of one kind of reader with earlier keys [N, C, C], and of queries with their own: A_qk or T."""
    X, own = f.X[reader], reader == 0
    P = X.new_zeros(*X.shape[:2], X.shape[1])
    for rows, past in zip(per_chunk(X).unbind(1), f.past, strict=False):
        j = past.shape[1]
        torch.bmm(rows, past.mT, out=P[:, j : j + rows.shape[1], :j])
    met = torch.bmm(blocks(X), blocks(f.K_bar).mT)
    earlier(met, own, out=met)
    if f.deep is not None:
        rows = torch.where(f.deep.shallow, met[f.deep.which], deep_scores(f.deep, reader))
        met[f.deep.which] = rows
    on_diagonal(P).copy_(met.view_as(on_diagonal(P)))
    return P


def scan(
    f: Factors, m: Matrices, Z: Tensor, chunks: ChunkTable, state: Tensor, starts: Tensor, R: Tensor
) -> Tensor:
    """Outputs; fills in residuals and the state at each chunk's start, and moves `state` to the end (Eqs. 23, 24).

    R = A (Z − Ē S) is the paper's U − Y S (Eqs. 22, 38) without Y and U, which only many steps at once would need.
    O = Q_γ S + A_qk R needs no order, so only R and S are computed step by step.
    """
    if m.A is None:
        R.copy_(Z)
    A, E_bar = m.A_qk if m.A is None else m.A, f.X_gamma[-1]
    for S, S_n, R_n, Z_n, A_n, E_n, K_n, gamma_n in steps(
        chunks, state, starts, R, Z, A, E_bar, f.past[-1], f.gamma_C
    ):
        S_n.copy_(S)
        if m.A is not None:
            torch.bmm(A_n, torch.baddbmm(Z_n, E_n, S, alpha=-1), out=R_n)
        S.mul_(gamma_n).baddbmm_(K_n.mT, R_n)
    return torch.bmm(f.X_gamma[0], starts).baddbmm_(m.A_qk, R)


def scan_reverse(
    f: Factors, A_qk: Tensor, A: Tensor | None, chunks: ChunkTable, dO: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of gated values and of the state at each chunk's end; `d_state` moves to the start.

    dR = A_qkᵀ dO + K_tail dS_C, dZ = Aᵀ dR, dS₀ = γ_C ⊙ dS_C + Q_γᵀ dO − Ēᵀ dZ (Eqs. 54, 56–59, 63, 64).
    """
    dR = torch.bmm(A_qk.mT, dO)
    dZ = dR if A is None else torch.empty_like(dR)
    A = A_qk if A is None else A
    d_read = torch.bmm(f.X_gamma[0].mT, dO)
    ends = torch.empty_like(d_read)
    tensors = (ends, dR, dZ, A, d_read, f.past[-1], f.X_gamma[-1], f.gamma_C)
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
    counts = [active * state.shape[1] for active in chunks.active]
    return zip(states, *(x.split(counts) for x in tensors), strict=True)


def gradient(
    f: Factors, S: Tensor, R: Tensor, d_reads: list[Tensor], dS_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a chunk's readers [n, N, C, d_k], keys and log-decays, by the short backward from those of reads.

    With dZ = Aᵀ dR the paper's dA products (Eqs. 64–66) collapse to dT = −tril(dZ Rᵀ, −1): the erase row behaves like a
    query whose output gradient is −dZ. So all readers take one path: dX_γ = d_read Sᵀ and dP = tril(d_read Rᵀ).
    """
    dX = torch.empty_like(f.X)
    for dX_i, d_read in zip(dX, d_reads, strict=True):
        torch.bmm(d_read, S.mT, out=dX_i)
    dX.view(len(dX), *per_chunk(f.K).shape).mul_(f.before)
    d_end = torch.bmm(R, dS_C.mT)
    d_chunk = (dS_C * S).sum(-1).unsqueeze(1) * f.gamma_C.mT
    d_whole = sum_to_width(d_chunk, f.whole).unsqueeze(1).repeat(1, f.whole.shape[1], 1, 1)
    gradient_between(f, R, d_reads, dX, d_end, d_whole)
    dK_bar, dP, d_own = gradient_inside(f, R, d_reads, dX)
    dg = log_decay_gradient(f, dX, dK_bar, d_end, d_whole)

    d_met = d_own if f.deep is None else f.deep.others(blocks(d_own)).view_as(d_own)
    dX[0].addcmul_(d_met, f.K_bar)
    dK_bar.addcmul_(d_met, f.X[0], value=LIFT)
    dX.mul_(f.since)
    dK = d_end.mul_(f.after).addcmul_(f.inverse, dK_bar, value=1 / LIFT)
    if f.deep is not None:
        deep_gradient(f.deep, dP, d_own, dX, dK, dg)
    return dX, dK, dg


def log_decay_gradient(
    f: Factors, dX: Tensor, dK_bar: Tensor, d_end: Tensor, d_whole: Tensor
) -> Tensor:
    """Gradient of g (Eqs. 76–82): each decay is an exponential of a sum, so what flows to it flows to every g it spans.

    Decays since a block's start span the tokens up to the row's, those until its end the tokens after the key's, those
    of a whole block all of them.
    """
    d_since = f.X[0] * dX[0]
    for X_i, dX_i in zip(f.X[1:], dX[1:], strict=True):
        d_since.addcmul_(X_i, dX_i)
    d_since = per_chunk(sum_to_width(d_since.addcmul_(f.K_bar, dK_bar, value=-1 / LIFT), f.since))
    d_since[:, :, -1:] += d_whole
    d_after = per_chunk(sum_to_width(f.K_end * d_end, f.since))
    dg = d_since.flip(2).cumsum_(2).flip(2)
    dg[:, :, 1:] += d_after.cumsum_(2)[:, :, :-1]
    return dg.view_as(f.since)


def gradient_between(
    f: Factors, R: Tensor, d_reads: list[Tensor], dX: Tensor, d_end: Tensor, d_whole: Tensor
) -> None:
    """Add what flows between blocks, the last one first; `d_end` moves from the chunk's end to those of the blocks."""
    size = f.K.shape[1] // f.whole.shape[1]
    for j in reversed(range(1, f.whole.shape[1])):
        seam, rows = j * size, slice(j * size, (j + 1) * size)
        through = sum_to_width((f.X[:, :, rows] * dX[:, :, rows]).sum((0, 2)), f.whole)
        # readers at the chunk's start have passed all blocks before
        d_whole[:, :j] += through[:, None, None]
        past, d_past = f.past[j + 1][:, :seam], d_end[:, :seam]
        d_whole[:, j] += sum_to_width((past * d_past).sum(1, keepdim=True), f.whole)
        d_past.mul_(f.whole[:, j])
        for X_i, dX_i, d_read in zip(f.X, dX, d_reads, strict=True):
            dP = torch.bmm(d_read[:, rows], R[:, :seam].mT)
            dX_i[:, rows].baddbmm_(dP, f.past[j])
            d_past.baddbmm_(dP.mT, X_i[:, rows])


def gradient_inside(
    f: Factors, R: Tensor, d_reads: list[Tensor], dX: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Add to dX what flows inside blocks.

    Returns dK̄ times `LIFT`, each reader's dP [N·J, 32, 32] and that of q · k [N, C, 1], which does not decay.
    """
    dP = [torch.bmm(blocks(d_read), blocks(R).mT) for d_read in d_reads]
    d_own = dP[0].diagonal(dim1=1, dim2=2).clone().view(*f.K.shape[:2], 1)
    dK_bar = torch.zeros_like(f.K)
    for X_i, dX_i, dP_i in zip(f.X, dX, dP, strict=True):
        earlier(dP_i, own=False, out=dP_i)
        met = dP_i if f.deep is None else f.deep.others(dP_i)
        blocks(dX_i).baddbmm_(met, blocks(f.K_bar))
        blocks(dK_bar).baddbmm_((met * LIFT).mT, blocks(X_i))
    return dK_bar, dP, d_own


def sum_to_width(x: Tensor, like: Tensor) -> Tensor:
    """Sum the last axis if `like` has width one there."""
    return x.sum(-1, keepdim=True) if like.shape[-1] < x.shape[-1] else x
