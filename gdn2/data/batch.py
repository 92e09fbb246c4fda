"""What training sees of data: batches, and the endless numbered rows that they are cut from.

A source is a pure function of row numbers, so the whole state of data loading is one integer, and every number of
processes sees the same rows in the same step.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gdn2.data.checks import require, require_integer

IGNORED = -100  # a target that does not count


class Batch(NamedTuple):
    """Rows on the CPU; where documents are kept apart, packed into one row of sequences."""

    ids: Tensor  # [rows, length], or [1, rows · length] with cu_seqlens
    targets: Tensor  # the token after each, or IGNORED
    cu_seqlens: Tensor | None = None  # [sequences + 1]


class Source(Protocol):
    """An endless sequence of rows."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int: ...

    def batch(self, first: int, rows: int) -> Batch:
        """Rows first … first + rows − 1, as quickly wherever they are."""
        ...


def pack(ids: Tensor, targets: Tensor, begins: Tensor) -> Batch:
    """A batch of rows [rows, length] whose sequences begin with each row and where `begins` says so."""
    begins = begins.clone()
    begins[:, 0] = True
    ends = torch.tensor([ids.numel()])
    cu_seqlens = torch.cat([begins.flatten().nonzero()[:, 0], ends])
    return Batch(ids.reshape(1, -1), targets.reshape(1, -1), cu_seqlens)


def check_rows(first: int, rows: int) -> None:
    """Raise ValueError unless these are rows of a source."""
    require_integer("first", first, 0)
    require_integer("rows", rows, 1)


def micro_batches(step: int, *, rows: int, micro: int, rank: int, ranks: int) -> Iterator[int]:
    """First rows of one rank's micro-batches of `micro` rows each, from a step of `rows` rows on, without end.

    All ranks together read rows step · rows … (step + 1) · rows − 1 in a step, however many they are.
    """
    for name, value, least in (("step", step, 0), ("micro", micro, 1), ("ranks", ranks, 1)):
        require_integer(name, value, least)
    require(0 <= rank < ranks, "rank", rank, f"0 to {ranks - 1}")
    whole = rows > 0 and rows % (micro * ranks) == 0
    require(whole, "rows", rows, f"a multiple of {micro} rows on each of {ranks} ranks")
    return count(step * rows + rank * micro, micro * ranks)
