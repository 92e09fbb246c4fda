"""The forward of one long sequence: its scan goes on while later chunks are still computing.

A scan meets the chunks of a sequence one after the other, by a program for each head and some value channels: few
heads leave most of a GPU idle. So the chunks are cut into pieces. While a second stream scans one, in as many programs
as there are, the first computes what the chunks of the next need. The kernels are those of `stages` and `scans` and
each number is computed as there, so results are the same bits.
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from gdn2.ops.cuda import intra, scan
from gdn2.ops.cuda.launch import in_blocks, multiprocessors
from gdn2.ops.operands import Operands
from gdn2.ops.triton import scans, stages
from gdn2.ops.triton.stages import Factors
from gdn2.ops.triton.table import Table

# On an H200, ms at 1 x 65536 with 4 heads, 1 x 32768 with 8 and 1 x 16384 with 16: at once 1.244, 0.788 and 0.562; in 2
# pieces 1.124, 0.672, 0.507; 4 pieces 1.066, 0.632, 0.520; 8 pieces 1.024, 0.637, 0.570.
PIECES = 4
LEAST = 256  # chunks; less would be over before the host has started all pieces


def takes(x: Operands, table: Table) -> bool:
    """Whether there is one dense sequence, long enough, and scanned by few programs."""
    chunks = table.start.numel()
    if table.first.numel() != 2 or chunks < LEAST or not in_blocks(x, table.size):
        return False
    programs = x.v.shape[1] * scan.parts(x, scan.VALUES)
    is_dense = (chunks - 1) * table.size < x.k.shape[0] <= chunks * table.size
    return is_dense and 2 * programs <= multiprocessors(x.k.device)


def forward(x: Operands, table: Table, state: Tensor) -> tuple[Tensor, Tensor, Factors]:
    """Output, final state and the factors."""
    chunks, device = table.start.numel(), x.k.device
    f = stages.new_factors(x, chunks, table.size)._replace(blocks=True)
    o, states = torch.empty_like(x.v), [state, *(torch.empty_like(state) for _ in range(PIECES))]
    scanned, places = scans.scanned(f), [table.start, table.length]
    main, side, done = torch.cuda.current_stream(device), side_stream(device), torch.cuda.Event()
    try:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            bounds = bounds_on(chunks, device)
        for i, (first, last) in enumerate(pieces(chunks)):
            start, length, *factors = (t[first:last] for t in (*places, *f.tensors()))
            intra.compute(x, start, length, factors, blocks=True, run=True)
            done.record(main)
            side.wait_event(done)
            with torch.cuda.stream(side):
                given = [*scanned, states[i], o, states[i + 1], *places, bounds[i]]
                scan.forward(x, state.shape[0] * state.shape[1], given, run=True)
    finally:  # nothing is given back while the second stream may use it
        main.wait_stream(side)
    return o, states[-1], f


def pieces(chunks: int) -> list[tuple[int, int]]:
    """First chunk of each piece, and of the next."""
    return [*pairwise(i * chunks // PIECES for i in range(PIECES + 1))]


def bounds_on(chunks: int, device: torch.device) -> Tensor:
    """Those of all pieces [pieces, 2] on a device; computed there, since a graph would copy from what is gone."""
    edges = torch.arange(PIECES + 1, device=device) * chunks // PIECES
    return edges.unfold(0, 2, 1).contiguous()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Its programs come first: a scan that waits for room would be waited for by all after it."""
    return torch.cuda.Stream(device, priority=-1)
