"""Mixtures: exact proportions, each part in its own order, and the same rows however they are asked for."""

from collections import Counter

import pytest
import torch

from gdn2.data.batch import IGNORED, Batch, pack
from gdn2.data.mixture import BLOCK, Mixture, quotas

LENGTH = 3


class Numbered:
    """Row n of part p is p, n, n; where documents are kept apart, a sequence begins with its last token in odd rows."""

    vocab_size = 10**6

    def __init__(self, part: int, *, apart: bool = False, length: int = LENGTH) -> None:
        self.length, self._part, self._apart = length, part, apart

    def batch(self, first: int, rows: int) -> Batch:
        number = torch.arange(first, first + rows)
        ids = torch.stack([torch.full((rows,), self._part), number, number], 1)
        targets = ids + 1
        if not self._apart:
            return Batch(ids, targets)
        begins = torch.zeros_like(ids, dtype=torch.bool)
        begins[:, -1] = number % 2 == 1
        targets[:, 1] = torch.where(begins[:, -1], IGNORED, targets[:, 1])
        return pack(ids, targets, begins)


def mixture(*weights: float, seed: int = 0) -> Mixture:
    return Mixture([Numbered(part) for part in range(len(weights))], weights, seed)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1,), [1024]),
        ((1, 1), [512, 512]),
        ((1, 1, 1), [342, 341, 341]),
        ((0.7, 0.2, 0.1), [717, 205, 102]),
        ((5, 0.01), [1022, 2]),
    ],
)
def test_quotas_by_largest_remainder(weights: tuple[float, ...], expected: list[int]) -> None:
    assert quotas(weights) == expected
    assert sum(expected) == BLOCK


def test_every_block_has_the_exact_proportions() -> None:
    source = mixture(0.7, 0.2, 0.1)
    for block in (0, 1, 10**9):
        parts = source.batch(block * BLOCK, BLOCK).ids[:, 0].tolist()
        assert Counter(parts) == {0: 717, 1: 205, 2: 102}


def test_parts_are_well_mixed_and_blocks_differ() -> None:
    """A part of a half is nowhere far from a half, and neighbours are independent."""
    parts = mixture(1, 1).batch(0, 8 * BLOCK).ids[:, 0]
    assert abs(torch.corrcoef(torch.stack([parts[:-1], parts[1:]]).double())[0, 1]) < 0.05
    assert (parts.view(-1, 128).sum(1) - 64).abs().max() < 32
    assert parts[:BLOCK].tolist() != parts[BLOCK : 2 * BLOCK].tolist()


def test_each_part_gives_its_rows_once_and_in_order() -> None:
    rows = mixture(3, 1).batch(0, 2 * BLOCK + 100).ids
    for part in range(2):
        numbers = rows[rows[:, 0] == part, 1]
        assert numbers.tolist() == list(range(len(numbers)))


@pytest.mark.parametrize("first", [0, 1000, 5 * BLOCK - 1])
def test_rows_do_not_depend_on_how_they_are_asked_for(first: int) -> None:
    source = mixture(3, 1, 2)
    whole = source.batch(first, 65)
    single = [source.batch(first + i, 1) for i in range(65)]
    assert whole.ids.tolist() == torch.cat([batch.ids for batch in single]).tolist()
    assert whole.targets.tolist() == torch.cat([batch.targets for batch in single]).tolist()
    assert whole.targets.tolist() == (whole.ids + 1).tolist()


def test_seeds_differ() -> None:
    assert (
        mixture(1, 1, seed=1).batch(0, 64).ids.tolist() != mixture(1, 1).batch(0, 64).ids.tolist()
    )


def test_documents_stay_apart() -> None:
    """One part keeps documents apart, the other has whole rows; the mixture has the sequences of both."""
    source = Mixture([Numbered(0), Numbered(1, apart=True)], (1, 1), 0)
    batch = source.batch(7, 50)
    assert batch.ids.shape == batch.targets.shape == (1, 50 * LENGTH)
    begins = []
    rows = zip(batch.ids.view(-1, LENGTH), batch.targets.view(-1, LENGTH), strict=True)
    for i, (ids, targets) in enumerate(rows):
        part, number, _ = ids.tolist()
        cut = part == 1 and number % 2 == 1
        begins += [i * LENGTH] + [i * LENGTH + 2] * cut
        assert targets.tolist() == [part + 1, IGNORED if cut else number + 1, number + 1]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [*begins, 50 * LENGTH]
    for first in range(20):  # also where all rows are of the other part
        single = source.batch(first, 1)
        assert single.cu_seqlens is not None
        assert single.cu_seqlens.tolist() in ([0, LENGTH], [0, 2, LENGTH])


def test_parts_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"parts: got \[3, 4\], expected the same length"):
        Mixture([Numbered(0), Numbered(1, length=4)], (1, 1), 0)
    other = Numbered(1)
    other.vocab_size = 7
    with pytest.raises(
        ValueError, match=r"parts: got \[1000000, 7\], expected the same vocab_size"
    ):
        Mixture([Numbered(0), other], (1, 1), 0)


def test_a_weight_too_small_for_a_row() -> None:
    with pytest.raises(
        ValueError, match=r"weights: got 0.0001, expected at least one part in 1024"
    ):
        quotas((1, 0.0001))
