"""Rows of several sources, mixed by weights.

Rows come in blocks. Each block holds the same number of rows of each source, its quota, in an order of its own: the
proportions are exact in every block, and a source's next row follows from the block's number alone.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gdn2.data.batch import Batch, Source, check_rows, pack
from gdn2.data.checks import require
from gdn2.data.shuffle import permute

BLOCK = 1024  # rows


class Mixture:
    """Each source's own rows in their own order, in the proportion of the weights."""

    def __init__(self, parts: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        for name in ("vocab_size", "length"):
            found = [getattr(part, name) for part in parts]
            require(len(set(found)) == 1, "parts", found, f"the same {name} everywhere")
        self.vocab_size, self.length = parts[0].vocab_size, parts[0].length
        self._quotas = quotas(weights)
        self._parts, self._seed = parts, seed
        # All batches have one form, also those without a row of a part that keeps documents apart.
        self._apart = any(part.batch(0, 1).cu_seqlens is not None for part in parts)

    def batch(self, first: int, rows: int) -> Batch:
        check_rows(first, rows)
        parts, before = self._shares(first, rows)
        ids = torch.empty(rows, self.length, dtype=torch.int64)
        targets = torch.empty_like(ids)
        begins = torch.zeros_like(ids, dtype=torch.bool)
        for number in np.unique(parts).tolist():
            here = torch.from_numpy(parts == number)
            batch = self._parts[number].batch(before[number], int(here.sum()))
            ids[here] = batch.ids.view(-1, self.length)
            targets[here] = batch.targets.view(-1, self.length)
            if batch.cu_seqlens is not None:
                own = torch.zeros(batch.ids.numel(), dtype=torch.bool)
                own[batch.cu_seqlens[:-1]] = True
                begins[here] = own.view(-1, self.length)
        return pack(ids, targets, begins) if self._apart else Batch(ids, targets)

    def _shares(self, first: int, rows: int) -> tuple[NDArray[np.int64], list[int]]:
        """The part of each row, and how many rows of each part come before the first."""
        block, skipped = divmod(first, BLOCK)
        blocks = range(block, (first + rows - 1) // BLOCK + 1)
        parts = np.concatenate([self._block(number) for number in blocks])
        counted = np.bincount(parts[:skipped], minlength=len(self._quotas))
        before = [block * quota + int(n) for quota, n in zip(self._quotas, counted, strict=True)]
        return parts[skipped : skipped + rows], before

    def _block(self, number: int) -> NDArray[np.int64]:
        """The part of each row of a block."""
        order = permute(np.arange(BLOCK), BLOCK, self._seed, number)
        return np.searchsorted(np.cumsum(self._quotas), order, side="right")


def quotas(weights: Sequence[float]) -> list[int]:
    """Rows of a block in proportion to the weights; those left by rounding down go to the largest remainders."""
    whole = math.fsum(weights)
    shares = [weight / whole * BLOCK for weight in weights]
    found = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: found[i] - shares[i])
    for i in by_remainder[: BLOCK - sum(found)]:
        found[i] += 1
    for weight, quota in zip(weights, found, strict=True):
        require(quota > 0, "weights", weight, f"at least one part in {BLOCK} of their sum {whole}")
    return found
