"""Windows of a stream: what is in a row, in which order rows come, and that it takes no time to find them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gdn2.data.batch import IGNORED, Source, micro_batches
from gdn2.data.loader import Documents, Windows
from gdn2.data.shards import TokenFolder
from gdn2.layers.layout import Layout
from tests.data.cases import Counting, seconds, write_folder

TOKENS, LENGTH = 1000, 12  # 76 windows of 13 tokens, and 12 tokens


def epoch(source: Windows, number: int) -> Tensor:
    return source.batch(number * source.count, source.count).ids


@pytest.mark.parametrize("tokens", [13, 14, 25, 26, 38, 39, 40, 1000])
def test_an_epoch_holds_every_window_once(tokens: int) -> None:
    source = Windows(Counting(tokens), LENGTH, seed=7)
    for number in range(3):
        ids = epoch(source, number)
        starts = ids[:, 0].sort().values
        assert (starts.diff() == LENGTH + 1).all()
        assert (ids == ids[:, :1] + torch.arange(LENGTH)).all()
        assert starts[0] >= 0
        assert starts[-1] + LENGTH < tokens
    assert tokens - source.count * (LENGTH + 1) < 2 * (LENGTH + 1)


def test_targets_are_the_next_tokens() -> None:
    batch = Windows(Counting(TOKENS), LENGTH, seed=7).batch(5, 9)
    assert batch.cu_seqlens is None
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    assert batch.targets.tolist() == (batch.ids + 1).tolist()


def test_epochs_differ_in_order_and_in_cuts() -> None:
    source = Windows(Counting(TOKENS), LENGTH, seed=7)
    firsts = [epoch(source, number)[:, 0] for number in range(60)]
    orders = {tuple((first - first.min()).tolist()) for first in firsts}
    assert len(orders) == 60
    assert len({int(first.min()) % (LENGTH + 1) for first in firsts}) == LENGTH + 1


def test_seeds_differ_and_repeat() -> None:
    one, two, again = (Windows(Counting(TOKENS), LENGTH, seed=seed) for seed in (1, 2, 1))
    assert epoch(one, 0).tolist() == epoch(again, 0).tolist()
    assert epoch(one, 0).tolist() != epoch(two, 0).tolist()


def test_a_batch_may_span_epochs() -> None:
    source = Windows(Counting(40), LENGTH, seed=7)
    together = source.batch(1, 20).ids
    assert together.tolist() == torch.cat([source.batch(1 + i, 1).ids for i in range(20)]).tolist()


def test_without_shuffling_the_stream_comes_in_order() -> None:
    source = Windows(Counting(TOKENS), LENGTH, seed=7, shuffle=False)
    for number in range(2):
        assert epoch(source, number)[:, 0].tolist() == [13 * i for i in range(76)]


def test_a_part_of_the_stream() -> None:
    source = Windows(Counting(TOKENS), LENGTH, seed=7, begin=300, end=400)
    seen = torch.cat([epoch(source, number) for number in range(30)])
    assert (int(seen.min()), int(seen.max())) == (300, 398)  # 399 is the target of 398


def documents_of(tokens: Tensor, lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(lengths))[tokens]


@pytest.mark.parametrize("shuffle", [True, False])
def test_documents_kept_apart(tmp_path: Path, shuffle: bool) -> None:
    """Sequences and targets, against the document that each token belongs to."""
    lengths = [1, 1, 30, 2, 11, 13, 12, 26, 1, 5, 60, 3, 1, 1, 1, 9]
    folder = TokenFolder(write_folder(tmp_path / "tokens", lengths, shard_tokens=50))
    source = Windows(folder, LENGTH, seed=3, documents="apart", shuffle=shuffle)
    rows = 3 * source.count
    batch = source.batch(1, rows)
    assert batch.ids.shape == batch.targets.shape == (1, rows * LENGTH)
    ids, targets = batch.ids[0], batch.targets[0]
    document, next_document = documents_of(ids, lengths), documents_of(ids + 1, lengths)
    expected = torch.where(document == next_document, ids + 1, IGNORED)
    assert targets.tolist() == expected.tolist()
    row = torch.arange(len(ids)) // LENGTH
    begins = [
        i
        for i in range(len(ids))
        if i == 0 or row[i] != row[i - 1] or document[i] != document[i - 1]
    ]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [*begins, len(ids)]
    assert Layout.packed(batch.cu_seqlens, len(ids)).rows == len(begins)
    for i in range(rows):  # alone as among others
        alone, place = source.batch(1 + i, 1), slice(i * LENGTH, (i + 1) * LENGTH)
        assert torch.equal(alone.ids[0], ids[place])
        assert torch.equal(alone.targets[0], targets[place])
    run_on = Windows(folder, LENGTH, seed=3, shuffle=shuffle).batch(1, rows)
    assert run_on.ids.flatten().tolist() == ids.tolist()
    assert run_on.targets.flatten().tolist() == (ids + 1).tolist()


def steps(source: Source, first: int, last: int, *, ranks: int, micro: int) -> list[list[int]]:
    """Sorted first tokens of the rows that all ranks together read in each step of 8 rows."""
    seen: list[list[int]] = [[] for _ in range(first, last)]
    for rank in range(ranks):
        firsts = micro_batches(first, rows=8, micro=micro, rank=rank, ranks=ranks)
        for rows in seen:
            for _ in range(8 // (micro * ranks)):
                rows.extend(source.batch(next(firsts), micro).ids[:, 0].tolist())
    return [sorted(rows) for rows in seen]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 1), (2, 2), (4, 2), (8, 1)])
def test_every_number_of_ranks_reads_the_same_steps(ranks: int, micro: int) -> None:
    """Also when a run is resumed, twice, with other numbers."""
    source = Windows(Counting(TOKENS), LENGTH, seed=7)
    expected = [sorted(source.batch(8 * step, 8).ids[:, 0].tolist()) for step in range(15)]
    assert steps(source, 0, 15, ranks=ranks, micro=micro) == expected
    resumed = steps(source, 0, 4, ranks=2, micro=4)
    resumed += steps(source, 4, 9, ranks=ranks, micro=micro)
    resumed += steps(source, 9, 15, ranks=1, micro=2)
    assert resumed == expected


@pytest.mark.parametrize("documents", ["run_on", "apart"])
def test_step_one_million_comes_at_once(tmp_path: Path, documents: Documents) -> None:
    """Half a million tokens within a second, five times what a fast GPU takes."""
    folder = TokenFolder(write_folder(tmp_path / "tokens", [60_000], shard_tokens=10**6))
    source = Windows(folder, 4096, seed=3, documents=documents)
    assert seconds(lambda: source.batch(10**6 * 128, 128)) < 1


def test_too_few_tokens() -> None:
    with pytest.raises(ValueError, match=r"length: got 12, expected at most 11: there are 12"):
        Windows(Counting(12), LENGTH, seed=0)


@pytest.mark.parametrize(
    ("first", "rows", "name"), [(-1, 2, "first: got -1"), (0, 0, "rows: got 0")]
)
def test_rows_that_are_none(first: int, rows: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Windows(Counting(TOKENS), LENGTH, seed=0).batch(first, rows)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 6}, "rows: got 6, expected a multiple of 2 rows on each of 2 ranks"),
        ({"rows": 0}, "rows: got 0"),
        ({"micro": 0}, "micro: got 0"),
        ({"rank": 2}, "rank: got 2, expected 0 to 1"),
        ({"step": -1}, "step: got -1"),
    ],
)
def test_micro_batches_that_do_not_fit(wrong: dict[str, int], said: str) -> None:
    right = {"step": 0, "rows": 8, "micro": 2, "rank": 0, "ranks": 2}
    with pytest.raises(ValueError, match=said):
        micro_batches(**(right | wrong))
