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

PIECES = 8
LEAST = 16  # chunks of a piece: less would be over before the next has begun


def takes(x: Operands, table: Table) -> bool:
    """Whether there is one dense sequence, long enough, and scanned by few programs."""
    chunks = table.start.numel()
    if table.first.numel() != 2 or chunks < PIECES * LEAST or not in_blocks(x, table.size):
        return False
    programs = x.heads * scan.parts(x, scan.VALUES)
    is_dense = (chunks - 1) * table.size < x.k.shape[0] <= chunks * table.size
    return is_dense and 2 * programs <= multiprocessors(x.k.device)


def forward(x: Operands, table: Table, state: Tensor) -> tuple[Tensor, Tensor, Factors]:
    """Output, final state and the factors."""
    chunks, device = table.start.numel(), x.k.device
    f = stages.new_factors(x, chunks, table.size)._replace(blocks=True)
    o, states = torch.empty_like(x.v), [state, *(torch.empty_like(state) for _ in range(PIECES))]
    edges = piece_edges(chunks)
    places = edges_on(chunks, device)
    main, side = torch.cuda.current_stream(device), side_stream(device)
    for i, (first, last) in enumerate(edges):
        piece = [t[first:last] for t in (table.start, table.length, *f.tensors())]
        intra.compute(x, piece[0], piece[1], piece[2:], blocks=True, run=True)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            given = [*scans.scanned(f), states[i], o, states[i + 1], table.start, table.length]
            scan.forward(x, state.shape[0] * state.shape[1], [*given, places[i]], run=True)
    main.wait_stream(side)
    return o, states[-1], f


def piece_edges(chunks: int) -> list[tuple[int, int]]:
    """First chunk of each piece, and of the next."""
    at = [i * chunks // PIECES for i in range(PIECES + 1)]
    return [*pairwise(at)]


def edges_on(chunks: int, device: torch.device) -> Tensor:
    """Those of all pieces [PIECES, 2] on a device."""
    # one first made while a graph is captured would be filled only when the graph runs
    make = _edges_on.__wrapped__ if torch.cuda.is_current_stream_capturing() else _edges_on
    return make(chunks, device)


@cache
def _edges_on(chunks: int, device: torch.device) -> Tensor:
    at = torch.arange(PIECES + 1, device=device) * chunks // PIECES
    return torch.stack([at[:-1], at[1:]], 1)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Its programs come first: a scan that waits for room would be waited for by all after it."""
    return torch.cuda.Stream(device, priority=-1)
