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


@triton.jit(do_not_specialize=["sequences", "chunks"])
def table_kernel(
    cu_seqlens_ptr, start_ptr, length_ptr, first_ptr, sequences, chunks,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The chunks of one sequence, behind those of all before it, which it counts; the last program those left over."""
    sequence, places = tl.program_id(0), tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int64)
    for i in range(0, sequence, BLOCK):
        known = i + places < sequence
        begins = tl.load(cu_seqlens_ptr + i + places, mask=known, other=0).to(tl.int64)
        ends = tl.load(cu_seqlens_ptr + i + 1 + places, mask=known, other=0).to(tl.int64)
        counts += tl.cdiv(ends - begins, SIZE)
    first = tl.sum(counts, 0)
    tl.store(first_ptr + sequence, first)
    known = sequence < sequences
    begin = tl.load(cu_seqlens_ptr + sequence, mask=known, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=known, other=0).to(tl.int64)
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
    cu_seqlens = cu_seqlens.contiguous()
    start, length = (cu_seqlens.new_empty(chunks, dtype=torch.int64) for _ in range(2))
    first = cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int64)
    with torch.cuda.device_of(cu_seqlens):
        over(table_kernel, len(cu_seqlens))(
            cu_seqlens, start, length, first, len(cu_seqlens) - 1, chunks,
            SIZE=size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return Table(size, start, length, first)
