"""Forward and backward of the whole operator, composed of the kernels."""

from collections.abc import Hashable

import torch
from torch import Tensor

from gdn2.ops.arguments import require
from gdn2.ops.cuda.launch import aligned, come_later, in_blocks
from gdn2.ops.operands import Operands
from gdn2.ops.pipeline import Batch, Gradients
from gdn2.ops.triton import ahead, overlap, plain, scans, stages
from gdn2.ops.triton.stages import Factors
from gdn2.ops.triton.sums import sum_to
from gdn2.ops.triton.table import Table, chunk_table, dense_table

SMALLEST_CHUNK = 32  # tensor cores take 16 rows at least, and a chunk is handled as two halves


def forward(
    x: Operands, batch: Batch, state: Tensor, keep: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output [L, H_v, d_v], final state [N, H_v, d_k, d_v], and what the backward keeps."""
    with torch.cuda.device_of(x.k):  # a launch goes to the current device
        table, state = table_of(x, batch), state.contiguous()
        x = contiguous(x)
        if keeps_factors(x, table.size, keep):
            check_loaded(x, table.size)
        x, solve = widened(x, table.size), batch.solve_precision
        ahead.compile_together(
            kind_of(x, table, solve, keep),
            x.k.device,
            lambda: rehearse(x, table, state, solve, keep),
        )
        return run_forward(x, table, state, solve, keep)


def run_forward(
    x: Operands, table: Table, state: Tensor, solve: str, keep: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final state and what is kept."""
    keeps = keeps_factors(x, table.size, keep)
    at_once = None if keeps else scans.plain(x, table, state)
    if at_once is not None:
        return *at_once, []
    if overlap.takes(x, table) and not ahead.compiling():
        o, final, f = overlap.forward(x, table, state)
    else:
        f = stages.intra(x, table, solve)
        o, final = scans.forward(x, f, table, state)
    return o, final, f.tensors() if keeps else []


def backward(
    x: Operands, batch: Batch, state: Tensor, saved: list[Tensor], do: Tensor, d_final: Tensor
) -> Gradients:
    """Gradients of all operands and of the initial state, from those of output and final state."""
    with torch.cuda.device_of(x.k):
        given, table = contiguous(x), table_of(x, batch)
        x, state = widened(given, table.size), state.contiguous()
        d_final, solve = d_final.contiguous(), batch.solve_precision
        found = run_backward(x, table, state, solve, saved, do, d_final)
        return found._replace(g=sum_to(found.g, given.g))


def run_backward(
    x: Operands,
    table: Table,
    state: Tensor,
    solve: str,
    saved: list[Tensor],
    do: Tensor,
    d_final: Tensor,
) -> Gradients:
    """All gradients; nothing is held longer than it is needed."""
    if not saved and plain.takes(x, table.size):
        grads, d_state = plain.backward(x, table, state, do, d_final)
        return Gradients(*[*grads, d_state])
    blocks = in_blocks(x, table.size)
    sums = None if stages.at_once(x, table, blocks) else stages.decays(x, table)
    f = restore(saved, x, blocks) if saved else stages.intra(x, table, solve, sums)
    *between, d_state = scans.backward(x, f, table, state, do, d_final)
    A, deep = f.A, f.deep
    del f
    grads = stages.gradient(x, A, deep, table, sums, do, between, blocks)
    return Gradients(*[*grads, d_state])


def rehearse(x: Operands, table: Table, state: Tensor, solve: str, keep: str) -> None:
    """Start every kernel that this call will, and its backward if there is to be one."""
    o, final, _ = run_forward(x, table, state, solve, keep)
    if keep != "nothing":
        run_backward(x, table, state, solve, [], o, final)


def kind_of(x: Operands, table: Table, solve: str, keep: str) -> Hashable:
    """What the kernels are compiled for, of a call."""
    operands = (x.q, x.k, x.v, x.g, x.b, x.w)
    sizes = tuple(None if t is None else (t.dtype, *t.shape[1:]) for t in operands)
    is_plain = plain.takes(x, table.size)
    states = plain.states_launch(x, table.first.numel() - 1) if is_plain else None
    launches = stages.scan_launch("scan", x, table), states
    return sizes, table.size, launches, solve, keep


def kept(x: Operands, batch: Batch, keep: str) -> list[Tensor]:
    """Nothing, or all factors."""
    batch = enlarged(batch)
    if not keeps_factors(x, batch.chunk_size, keep):
        return []
    return stages.new_factors(x, batch.chunks, batch.chunk_size).tensors()


def keeps_factors(x: Operands, chunk: int, keep: str) -> bool:
    """Whether the backward gets factors: `plain` needs none."""
    return keep == "factors" and not plain.takes(x, chunk)


def restore(saved: list[Tensor], x: Operands, blocks: bool) -> Factors:
    """Put the absent A and Y back in their places."""
    fields = [*saved] if x.b is not None else [*saved[:4], None, None, *saved[4:]]
    return Factors(*fields)._replace(blocks=blocks)


def contiguous(x: Operands) -> Operands:
    """The kernels take no strides, and some only what begins where 16 bytes do.

    So which of them run is never decided by addresses, which may differ from the forward to the backward.
    """
    given = (x.q, x.k, x.v, x.g, x.b, x.w)
    tensors = (None if t is None else aligned(t.contiguous()) for t in given)
    return Operands(*tensors, x.scale)  # type: ignore[call-arg, arg-type]


def check_loaded(x: Operands, chunk: int) -> None:
    """Refuse to keep factors by Triton's kernels that a backward would read as CUDA kernels make them."""
    said = "False in a first call that a CUDA graph captures"
    expected = "a call before, in which the kernels are loaded"
    require(not come_later(wide(x), chunk), "recompute", said, expected)


def widened(x: Operands, chunk: int) -> Operands:
    """Decays of a head for each channel where its erase gates are, if CUDA kernels do it all then; else x as it is."""
    y = wide(x)
    return x if y is x or not in_blocks(y, chunk) else y._replace(g=y.g.contiguous())


def wide(x: Operands) -> Operands:
    """Where erase gates are for each channel, decays seen so too."""
    width = x.k.shape[2]
    if x.b is None or x.g.shape[2] == width or x.b.shape[2] < width:
        return x
    return x._replace(g=x.g.expand(-1, -1, width))


def enlarged(batch: Batch) -> Batch:
    """The batch with chunks no smaller than the kernels can take."""
    return batch._replace(chunk_size=max(batch.chunk_size, SMALLEST_CHUNK))


def table_of(x: Operands, batch: Batch) -> Table:
    """The table of a batch."""
    batch = enlarged(batch)
    if batch.cu_seqlens is None:
        return dense_table(batch.rows, batch.length, batch.chunk_size, x.k.device)
    return chunk_table(batch.cu_seqlens, batch.chunks, batch.chunk_size)
