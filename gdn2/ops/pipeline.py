"""Forward and backward of the whole operator, composed of the stages.

The chunks are walked in segments: a few steps of the scan at a time, all sequences together. A segment's factors stay
in the cache and are dropped with it, so memory beyond operands, results and the states at chunk starts does not grow
with the length.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops import chunkwise
from gdn2.ops.chunks import ChunkTable, chunk_table
from gdn2.ops.chunkwise import Operands, fold, sum_to_width, unfold


class Saved(NamedTuple):
    """What the backward keeps of the forward; rows follow the chunk table, unused ones are undefined."""

    starts: Tensor  # [M, H, d_k, d_v] state at each chunk's start
    A_qk: Tensor  # [M, H, C, C], or empty to recompute
    A: Tensor  # [M, H, C, C], or empty to recompute or where nothing is erased


class Gradients(NamedTuple):
    """Gradients of the operands (empty where the operand is absent) and of the initial state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor
    w: Tensor
    state: Tensor


# Elements of one operand tile in a segment on a CPU: 8 chunks of 64 tokens, 4 heads, width 64. See docs/performance.md.
SEGMENT_ELEMENTS = 8 * 64 * 4 * 64


def segments(chunks: ChunkTable, row_elements: int, device: torch.device) -> list[tuple[int, int]]:
    """Cut the steps of the scan into runs that fit the cache; anything but a CPU takes all at once."""
    steps = len(chunks.active)
    if device.type != "cpu" or steps == 0:
        return [(0, steps)]
    length = max(1, SEGMENT_ELEMENTS // max(1, row_elements * max(chunks.active)))
    return [(i, min(i + length, steps)) for i in range(0, steps, length)]


def forward(
    x: Operands, lengths: list[int], size: int, state: Tensor, saved: Saved | None
) -> tuple[Tensor, Tensor]:
    """Output [L, H_v, d_v] and final state [N, H_v, d_k, d_v]; fills `saved` if given."""
    table = chunk_table(lengths, size, x.k.device)
    o = torch.empty_like(x.v)
    S = fold(state.index_select(0, table.order), x.heads)
    row = 0
    for i, j in segments(table, x.heads * size * x.k.shape[-1], x.k.device):
        chunks = table.segment(i, j)
        f = chunkwise.intra(x, chunks, state.dtype)
        O, _, starts = chunkwise.scan(f, chunks, S)
        chunks.store(o, unfold(O, x.v.shape[1]))
        if saved is not None:
            rows = slice(row, row + starts.shape[0])
            saved.starts[rows] = starts
            if saved.A_qk.numel():
                saved.A_qk[rows] = f.A_qk
            if saved.A.numel() and f.A is not None:
                saved.A[rows] = f.A
            row = rows.stop
    return o, restore(unfold(S, x.v.shape[1]), table.order)


def backward(
    x: Operands, lengths: list[int], size: int, saved: Saved, do: Tensor, d_final: Tensor
) -> Gradients:
    """Gradients of all operands, from the gradients of output and final state."""
    table = chunk_table(lengths, size, x.k.device)
    operands = (x.q, x.k, x.v, x.g, x.b, x.w)
    empty = [x.q.new_empty(0) if t is None else torch.empty_like(t) for t in operands]
    grads = Gradients(*[*empty, torch.empty_like(d_final)])
    dS = fold(d_final.index_select(0, table.order), x.heads)
    for i, j in reversed(segments(table, x.heads * size * x.k.shape[-1], x.k.device)):
        chunks = table.segment(i, j)
        rows = slice(table.offsets[i], table.offsets[j])
        kept = (saved.A_qk[rows], saved.A[rows]) if saved.A_qk.numel() else None
        f = chunkwise.intra(x, chunks, d_final.dtype, kept)
        S = saved.starts[rows]
        R = f.U if f.Y is None else f.U - f.Y @ S
        dO = fold(chunks.load(do, d_final.dtype), x.heads)
        dR, ends = chunkwise.scan_reverse(f, chunks, dO, dS)
        dX, dK, dZ, dg = chunkwise.gradient(f, S, R, dO, dR, ends)
        store_gradients(grads, x, chunks, f.K, (dX, dK, dZ, dg))
    grads.state.copy_(restore(unfold(dS, x.v.shape[1]), table.order))
    return grads


def store_gradients(
    grads: Gradients,
    x: Operands,
    chunks: ChunkTable,
    K: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Undo the gates (Eqs. 73–75) and sum each gradient over what its operand was broadcast over."""
    dX, dK, dZ, dg = tiles

    def store(target: Tensor, tile: Tensor) -> None:
        heads = target.shape[1]
        if tile.shape[1] > heads:
            tile = tile.unflatten(1, (heads, -1)).sum(2)
        chunks.store(target, sum_to_width(tile, target))

    if x.b is not None:
        dE = dX[..., 1, :]
        B = chunks.load(x.b, K.dtype)
        dK.addcmul_(dE, B.repeat_interleave(x.heads // B.shape[1], 1))
        store(grads.b, dE * K)
    dV = unfold(dZ, x.v.shape[1])
    if x.w is not None:
        store(grads.w, dV * chunks.load(x.v, K.dtype))
        dV = dV * chunks.load(x.w, K.dtype)
    store(grads.q, dX[..., 0, :] * x.scale)
    store(grads.k, dK)
    store(grads.v, dV)
    store(grads.g, dg)


def restore(state: Tensor, order: Tensor) -> Tensor:
    """Put states back into the order of the sequences."""
    return torch.empty_like(state).index_copy_(0, order, state)
