"""Where the chunks of sequences lie, as one kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

NAME = "table"
BLOCK = 512  # sequences counted at once, and chunks written


class Table(NamedTuple):
    """Chunks in sequence-major order; its sizes depend on shapes alone, unused chunks have length 0."""

    size: int
    start: Tensor  # [M] first token of each chunk
    length: Tensor  # [M] its tokens
    first: Tensor  # [N + 1] first chunk of each sequence


@triton.jit(do_not_specialize=["sequences", "chunks", "each"])
def table_kernel(
    cu_seqlens_ptr, start_ptr, length_ptr, first_ptr, sequences, chunks, each,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The chunks of one sequence, behind those of all before it; the last program those left over.

    Sequences have `each` tokens; where that is negative, those between their places in cu_seqlens, and the chunks
    before this one are counted.
    """
    sequence, places = tl.program_id(0), tl.arange(0, BLOCK)
    known = sequence < sequences
    if each >= 0:
        first = sequence.to(tl.int64) * tl.cdiv(each, SIZE)
        begin = sequence.to(tl.int64) * each
        end = begin + each
    else:
        counts = tl.zeros((BLOCK,), tl.int64)
        for i in range(0, sequence, BLOCK):
            before = i + places < sequence
            begins = tl.load(cu_seqlens_ptr + i + places, mask=before, other=0).to(tl.int64)
            ends = tl.load(cu_seqlens_ptr + i + 1 + places, mask=before, other=0).to(tl.int64)
            counts += tl.cdiv(ends - begins, SIZE)
        first = tl.sum(counts, 0)
        begin = tl.load(cu_seqlens_ptr + sequence, mask=known, other=0).to(tl.int64)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=known, other=0).to(tl.int64)
    tl.store(first_ptr + sequence, first)
    last = tl.where(known, first + tl.cdiv(end - begin, SIZE), chunks)
    last = tl.minimum(last, chunks)  # sequences that overlap would need more
    for chunk in range(first, last, BLOCK):
        inside = chunk + places < last
        start = begin + (chunk - first + places) * SIZE
        tl.store(start_ptr + chunk + places, tl.where(known, start, 0), mask=inside)
        length = tl.minimum(end - start, SIZE)
        tl.store(length_ptr + chunk + places, tl.where(known, length, 0), mask=inside)


def chunk_table(cu_seqlens: Tensor, chunks: int, size: int) -> Table:
    """Build the table on the device, reading nothing back; `chunks` may be more than there are."""
    return _build(cu_seqlens.contiguous(), len(cu_seqlens) - 1, chunks, -1, size, cu_seqlens.device)


def dense_table(rows: int, length: int, size: int, device: torch.device) -> Table:
    """Equal lengths are packing too.

    Not kept from call to call: another stream may read it before it is filled, and a kernel that is only captured or
    only compiled fills nothing.
    """
    return _build(None, rows, rows * ((length + size - 1) // size), length, size, device)


def _build(
    cu_seqlens: Tensor | None,
    sequences: int,
    chunks: int,
    each: int,
    size: int,
    device: torch.device,
) -> Table:
    sizes = (chunks, chunks, sequences + 1)
    start, length, first = (torch.empty(n, dtype=torch.int64, device=device) for n in sizes)
    places = first if cu_seqlens is None else cu_seqlens  # a pointer of the same kind, never read
    with torch.cuda.device_of(first):
        over(table_kernel, sequences + 1)(
            places, start, length, first, sequences, chunks, each,
            SIZE=size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return Table(size, start, length, first)
