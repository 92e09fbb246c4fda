"""Chunk table: which tokens make up each chunk, and in which order the scan meets the chunks.

Sequences are cut into chunks of C tokens; the last one of a sequence is filled up with padding slots. Chunks lie in
time-major order, longest sequence first: all first chunks, then all second chunks, and so on. The chunks that the scan
handles together are then neighbours, and so are the sequences that still go on. A dense batch is packing with equal
lengths, so nothing downstream knows the difference.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkTable:
    """Rows of `size` slots; `token[i]` is the token in slot i (0 in a padding slot)."""

    size: int
    token: Tensor  # [M * C] index into the packed tokens
    filled: Tensor | None  # [M * C] False in padding slots; None when there are none
    active: tuple[int, ...]  # sequences that go on at each step of the scan
    order: Tensor  # [N] sequences, longest first
    regular: bool  # equal lengths without padding: chunks are a strided view of the tokens
    step: int = 0  # of the scan where this (part of a) table begins

    @property
    def offsets(self) -> list[int]:
        """First chunk of each step, and the number of chunks."""
        return [0, *accumulate(self.active)]

    def segment(self, first: int, last: int) -> "ChunkTable":
        """Return the steps first … last − 1 as a table of their own."""
        rows = self.offsets
        slots = slice(rows[first] * self.size, rows[last] * self.size)
        filled = None if self.filled is None else self.filled[slots]
        return replace(
            self, token=self.token[slots], filled=filled, active=self.active[first:last], step=first
        )

    def peek(self, x: Tensor) -> Tensor:
        """Packed tokens [L, H, d] as chunks, in the shape of `shaped`: a view where the table is regular, else a copy.

        Padding slots are zero.
        """
        if self.regular:
            steps = x.unflatten(0, (len(self.order), -1, self.size)).permute(1, 0, 3, 2, 4)
            return steps[self.step : self.step + len(self.active)]
        tile = x.index_select(0, self.token)
        if self.filled is not None:
            tile.masked_fill_(~self.filled[:, None, None], 0)
        return tile.unflatten(0, (-1, self.size)).transpose(1, 2)

    def shaped(self, tile: Tensor) -> Tensor:
        """View chunks [M, H, C, d] as [steps, N, H, C, d] where the table is regular."""
        return tile.unflatten(0, (len(self.active), -1)) if self.regular else tile

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy packed tokens [L, H, d] into chunks [M, H, C, d]."""
        chunks = len(self.token) // self.size
        tile = torch.empty(chunks, x.shape[1], self.size, x.shape[2], dtype=dtype, device=x.device)
        self.shaped(tile).copy_(self.peek(x))
        return tile

    def store(self, target: Tensor, tile: Tensor) -> None:
        """Copy chunks [M, H, C, d] into packed tokens [L, H, d]; padding slots are dropped."""
        if self.regular:
            self.peek(target).copy_(self.shaped(tile))
            return
        token, rows = self.token, tile.transpose(1, 2).flatten(0, 1).to(target.dtype)
        if self.filled is not None:
            token, rows = token[self.filled], rows[self.filled]
        target.index_copy_(0, token, rows)

    def store_product(self, target: Tensor, tile: Tensor, factor: Tensor | float) -> None:
        """Store chunks [M, H, C, d] times a factor in the shape of `shaped`, at once where the table is regular."""
        if self.regular and target.dtype == tile.dtype:
            torch.mul(self.shaped(tile), factor, out=self.peek(target))
        else:
            product = torch.empty_like(tile)
            torch.mul(self.shaped(tile), factor, out=self.shaped(product))
            self.store(target, product)


def chunk_table(lengths: list[int], size: int, device: torch.device) -> ChunkTable:
    """Build the table of sequences packed one after the other."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = torch.tensor([0, *accumulate(lengths)])[:-1][order]
    length = torch.tensor(lengths, dtype=torch.long)[order]
    count = (length + size - 1) // size
    steps = int(count.max()) if lengths else 0
    # [step, sequence] → the chunks that exist, in time-major order
    step, sequence = (torch.arange(steps)[:, None] < count).nonzero(as_tuple=True)
    position = step[:, None] * size + torch.arange(size)
    filled = position < length[sequence][:, None]
    token = torch.where(filled, start[sequence][:, None] + position, 0)
    return ChunkTable(
        size=size,
        token=token.flatten().to(device),
        filled=None if bool(filled.all()) else filled.flatten().to(device),
        active=tuple(torch.bincount(step, minlength=steps).tolist()),
        order=torch.tensor(order, dtype=torch.long, device=device),
        regular=steps > 0 and len(set(lengths)) == 1 and lengths[0] % size == 0,
    )
