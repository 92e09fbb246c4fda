"""Forward and backward of the whole operator, composed of the stages.

The chunks are walked in segments: a few steps of the scan at a time, all sequences together. A segment's factors stay
in the cache and are dropped with it, so memory beyond operands, results and the states at chunk starts does not grow
with the length.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops import chunkwise
from gdn2.ops.arguments import check_decay, state_dtype
from gdn2.ops.chunks import ChunkTable, chunk_table
from gdn2.ops.chunkwise import sum_to_width
from gdn2.ops.operands import Operands, fold, load_values, spread, unfold
from gdn2.ops.packing import sequence_lengths


class Batch(NamedTuple):
    """How the tokens of a call are laid out, and how they are to be cut."""

    rows: int
    length: int
    cu_seqlens: Tensor | None
    chunk_size: int
    solve_precision: str

    @property
    def sequences(self) -> int:
        """Rows of a dense batch, or packed sequences."""
        return self.rows if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def chunks(self) -> int:
        """Bound on the number of chunks that depends on shapes alone: exact for a dense batch."""
        if self.cu_seqlens is None:
            return self.rows * ((self.length + self.chunk_size - 1) // self.chunk_size)
        return self.length // self.chunk_size + self.sequences

    def table(self, device: torch.device) -> ChunkTable:
        """Read the lengths and build the chunk table."""
        if self.cu_seqlens is None:
            return dense_table(self.rows, self.length, self.chunk_size, device)
        lengths = sequence_lengths(self.cu_seqlens, self.rows, self.length)
        return chunk_table(lengths, self.chunk_size, device)


@lru_cache(maxsize=64)
def dense_table(rows: int, length: int, size: int, device: torch.device) -> ChunkTable:
    """The table of equal lengths, made once."""
    return chunk_table([length] * rows, size, device)


class Gradients(NamedTuple):
    """Gradients of the operands (empty where the operand is absent) and of the initial state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor
    w: Tensor
    state: Tensor


# Elements of one operand tile in a segment on a CPU: 16 chunks of 64 tokens, 4 heads, width 64
# (docs/performance-steps.md).
SEGMENT_ELEMENTS = 16 * 64 * 4 * 64


@cache
def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MB for the next call instead of returning them to the system.

    It does so once a block of that size has been freed; this one is never touched. Without it the same memory is mapped
    and zeroed again in every segment: 33 instead of 29 ms for forward and backward of 2048 tokens, 4 heads, width 64.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def segments(chunks: ChunkTable, row_elements: int, device: torch.device) -> list[tuple[int, int]]:
    """Cut the steps of the scan into runs that fit the cache; anything but a CPU takes all at once."""
    steps = len(chunks.active)
    if device.type != "cpu" or steps == 0:
        return [(0, steps)]
    length = max(1, SEGMENT_ELEMENTS // max(1, row_elements * max(chunks.active)))
    return [(i, min(i + length, steps)) for i in range(0, steps, length)]


def kept(x: Operands, batch: Batch, keep: str) -> list[Tensor]:
    """Nothing; or states at chunk starts [M, H, d_k, d_v], residuals R [M, H, C, d_v], A_qk and A [M, H, C, C].

    The rest is elementwise and costs less to compute again than to keep.
    """
    if keep == "nothing":
        return []
    size, width = batch.chunk_size, x.v.shape[1] * x.v.shape[2] // x.heads
    shapes = [(x.k.shape[2], width), (size, width), (size, size), (size, size)]
    dtype = state_dtype(x.q)
    count = 3 if x.b is None else 4
    return [x.k.new_empty(batch.chunks, x.heads, *shape, dtype=dtype) for shape in shapes[:count]]


def forward(
    x: Operands, batch: Batch, state: Tensor, keep: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output [L, H_v, d_v], final state [N, H_v, d_k, d_v], and what the backward keeps."""
    check_decay(x.g)
    if x.k.device.type == "cpu":
        keep_freed_memory()
    table = batch.table(x.k.device)
    saved = kept(x, batch, keep)
    o = x.v.new_empty(x.v.shape)  # without gaps, as compilers are told; so are all results
    S = folded_state(state, table, x.heads)
    for i, j in segments(table, x.heads * table.size * x.k.shape[2], x.k.device):
        chunks, rows = table.segment(i, j), slice(table.offsets[i], table.offsets[j])
        f, m = chunkwise.intra(x, chunks, state.dtype)
        Z = load_values(x, chunks, state.dtype)
        starts, R, *matrices = [t[rows].flatten(0, 1) for t in saved] or [
            Z.new_empty(len(Z), *S.shape[2:]),
            torch.empty_like(Z),
        ]
        O = chunkwise.scan(f, m, Z, chunks, S, starts, R)
        chunks.store(o, unfold(O, x.heads, x.v.shape[1]))
        for target, value in zip(matrices, (m.A_qk, m.A), strict=False):
            target.copy_(value)  # type: ignore[arg-type]
    return o, restored_state(S, table, x.v.shape[1]), saved


def backward(
    x: Operands, batch: Batch, state: Tensor, saved: list[Tensor], do: Tensor, d_final: Tensor
) -> Gradients:
    """Gradients of all operands and of the initial state, from those of output and final state."""
    table = batch.table(x.k.device)
    operands = (x.q, x.k, x.v, x.g, x.b, x.w)
    empty = [x.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in operands]
    dS = folded_state(d_final, table, x.heads)
    grads = Gradients(*[*empty, state.new_empty(state.shape)])
    for i, j in reversed(segments(table, x.heads * table.size * x.k.shape[2], x.k.device)):
        chunks, rows = table.segment(i, j), slice(table.offsets[i], table.offsets[j])
        S, R, A_qk, *A = (t[rows].flatten(0, 1) for t in saved)
        f = chunkwise.factors(x, chunks, state.dtype)
        dO = fold(chunks.load(do, state.dtype), x.heads)
        dZ, ends = chunkwise.scan_reverse(f, A_qk, A[0] if A else None, chunks, dO, dS)
        d_reads = [dO] if x.b is None else [dO, -dZ]
        dX, dK, dg = chunkwise.gradient(f, S, R, d_reads, ends)
        store_gradients(grads, x, chunks, f.K, (dX, dK, dZ, dg))
    grads.state.copy_(restored_state(dS, table, x.v.shape[1]))
    return grads


def store_gradients(
    grads: Gradients,
    x: Operands,
    chunks: ChunkTable,
    K: Tensor,
    d_tiles: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Undo the gates (Eqs. 73–75) and sum each gradient over what its operand was broadcast over."""
    dX, dK, dZ, dg = d_tiles
    K, dK, dg = (t.unflatten(0, (-1, x.heads)) for t in (K, dK, dg))
    dQ, *dE = dX.unflatten(1, (-1, x.heads))

    def store(target: Tensor, tile: Tensor, factor: Tensor | float) -> None:
        if target.shape[1:] == (tile.shape[1], tile.shape[3]):
            chunks.store_product(target, tile, factor)
            return
        product = torch.empty_like(tile)
        torch.mul(chunks.shaped(tile), factor, out=chunks.shaped(product))
        if tile.shape[1] > target.shape[1]:
            product = product.unflatten(1, (target.shape[1], -1)).sum(2)
        chunks.store(target, sum_to_width(product, target))

    if x.b is not None:
        B = spread(chunks.peek(x.b), x.heads, -3).to(K.dtype)
        chunks.shaped(dK).addcmul_(chunks.shaped(dE[0]), B)
        store(grads.b, dE[0], chunks.shaped(K))
    dV = unfold(dZ, x.heads, x.v.shape[1])
    if x.w is not None:
        store(grads.w, dV, chunks.peek(x.v))
    store(grads.v, dV, 1.0 if x.w is None else chunks.peek(x.w))
    store(grads.q, dQ, x.scale)
    store(grads.k, dK, 1.0)
    store(grads.g, dg, 1.0)


def folded_state(state: Tensor, table: ChunkTable, heads: int) -> Tensor:
    """States [N, H_v, d_k, d_v], longest sequence first, as [N, H, d_k, all columns of a key head]."""
    return fold(state.index_select(0, table.order), heads).unflatten(0, (-1, heads))


def restored_state(S: Tensor, table: ChunkTable, value_heads: int) -> Tensor:
    """Undo `folded_state`."""
    state = unfold(S.flatten(0, 1), S.shape[1], value_heads)
    return state.new_empty(state.shape).index_copy_(0, table.order, state)
