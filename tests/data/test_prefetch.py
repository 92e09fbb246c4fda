"""Batches made ahead: the same ones in the same order, mistakes where they belong, and a thread that ends."""

import threading
from itertools import count, islice

import pytest
import torch

from gdn2.data.batch import Batch
from gdn2.data.loader import Windows
from gdn2.data.prefetch import Prefetch
from tests.data.cases import Counting


class Watched:
    """Rows that are their numbers; says what was asked for, and fails or waits at one of them."""

    vocab_size, length = 1000, 1

    def __init__(self, *, fails_at: int | None = None, waits_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.go_on = threading.Event()
        self._fails_at, self._waits_at = fails_at, waits_at

    def batch(self, first: int, rows: int) -> Batch:
        self.asked.append(first)
        if first == self._fails_at:
            raise ValueError(f"row {first} is damaged")
        if first == self._waits_at:
            assert self.go_on.wait(timeout=60)
        ids = torch.arange(first, first + rows)[:, None]
        return Batch(ids, ids)


def threads() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_the_batches_are_those_of_the_source() -> None:
    source = Windows(Counting(1000), 12, seed=0)
    with Prefetch(source, count(10, 3), 3) as batches:
        for first, batch in zip(range(10, 100, 3), batches, strict=False):
            expected = source.batch(first, 3)
            assert batch.ids.tolist() == expected.ids.tolist()
            assert batch.targets.tolist() == expected.targets.tolist()
            assert batch.cu_seqlens is None


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_made_than_asked_for(ahead: int) -> None:
    source = Watched()
    with Prefetch(source, count(), 1, ahead=ahead) as batches:
        for _ in range(5):
            next(batches)
    assert source.asked == list(range(len(source.asked)))
    assert 5 <= len(source.asked) <= 5 + ahead


def test_the_next_batches_are_made_before_they_are_asked_for() -> None:
    source = Watched(waits_at=3)
    with Prefetch(source, count(), 1, ahead=2) as batches:
        assert [int(batch.ids) for batch in islice(batches, 3)] == [0, 1, 2]
        source.go_on.set()
        assert int(next(batches).ids) == 3


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_mistake_is_raised_with_its_batch(ahead: int) -> None:
    with Prefetch(Watched(fails_at=2), count(), 1, ahead=ahead) as batches:
        assert [int(next(batches).ids) for _ in range(2)] == [0, 1]
        with pytest.raises(ValueError, match="row 2 is damaged"):
            next(batches)
        assert int(next(batches).ids) == 3
    assert threads() == 0


def test_batches_may_come_to_an_end() -> None:
    with Prefetch(Watched(), [4, 2], 2) as batches:
        assert [batch.ids.flatten().tolist() for batch in batches] == [[4, 5], [2, 3]]


def test_closing_ends_the_thread_and_may_be_repeated() -> None:
    batches = Prefetch(Watched(), count(), 1)
    next(batches)
    assert threads() == 1
    batches.close()
    batches.close()
    assert threads() == 0
    assert list(batches) == []


def test_closing_while_a_batch_is_made() -> None:
    """The one in work is finished, those behind it are dropped."""
    source = Watched(waits_at=0)
    batches = Prefetch(source, count(), 1)
    threading.Timer(0.1, source.go_on.set).start()
    batches.close()
    assert source.asked == [0]
    assert threads() == 0


def test_an_exception_in_the_loop_closes_too() -> None:
    with pytest.raises(KeyboardInterrupt), Prefetch(Watched(), count(), 1):
        raise KeyboardInterrupt
    assert threads() == 0


def test_nothing_ahead() -> None:
    with pytest.raises(ValueError, match="ahead: got 0, expected an integer of at least 1"):
        Prefetch(Watched(), count(), 1, ahead=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned_for_a_gpu() -> None:
    source = Windows(Counting(1000, starts=(0, 5)), 12, seed=0, documents="apart")
    with Prefetch(source, count(), 3, pin=True) as batches:
        batch = next(batches)
    assert all(x is not None and x.is_pinned() for x in batch)
    assert batch.ids.tolist() == source.batch(0, 3).ids.tolist()
