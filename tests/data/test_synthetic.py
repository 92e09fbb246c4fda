"""The answers of every task, found again from the ids alone by other means."""

import math
from collections import Counter
from itertools import permutations

import pytest
import torch

from gdn2.data.batch import IGNORED
from gdn2.data.synthetic import (
    MOST_POWER,
    CopyConfig,
    NeedleConfig,
    ParityConfig,
    PermutationConfig,
    RecallConfig,
    Task,
    TaskConfig,
)
from tests.data.cases import seconds

TASKS: list[TaskConfig] = [
    RecallConfig(),
    RecallConfig(pairs=1, vocab_size=4),
    RecallConfig(pairs=5, vocab_size=13),
    NeedleConfig(),
    NeedleConfig(needles=4, keys=4, values=3, fillers=1),
    CopyConfig(),
    CopyConfig(items=1, symbols=1),
    ParityConfig(),
    PermutationConfig(),
]


def by_dictionary(config: RecallConfig, ids: list[int]) -> dict[int, int]:
    """Answers by position: what stands after a key in the first part, at its second appearance."""
    told = 2 * config.pairs
    values = dict(zip(ids[0:told:2], ids[1:told:2], strict=True))
    assert len(values) == len(set(values.values())) == config.pairs
    assert all(0 < key < config.vocab_size // 2 <= values[key] for key in values)
    return {i: values[token] for i, token in enumerate(ids) if i >= told and token != 0}


def by_search(config: NeedleConfig, ids: list[int]) -> dict[int, int]:
    """The value that stands behind the marker and the key asked for last."""
    marks = [i for i, token in enumerate(ids) if token == 0]
    assert len(marks) == config.needles + 1
    assert marks[-1] == len(ids) - 2
    fillers = range(config.vocab_size - config.fillers, config.vocab_size)
    in_needles = {i + j for i in marks for j in range(3)}
    assert all((i in in_needles) != (token in fillers) for i, token in enumerate(ids))
    (found,) = (ids[i + 2] for i in marks[:-1] if ids[i + 1] == ids[-1])
    return {len(ids) - 1: found}


def by_reading(config: CopyConfig, ids: list[int]) -> dict[int, int]:
    """The symbols in their order, one for each time they are asked for."""
    asked = [i for i, token in enumerate(ids) if token == 1]
    assert asked == list(range(len(ids) - config.items, len(ids)))
    return dict(zip(asked, [token for token in ids if token > 1], strict=True))


def by_counting(config: ParityConfig, ids: list[int]) -> dict[int, int]:
    return {i: ids[: i + 1].count(1) % 2 for i in range(len(ids))}


def by_moving_things(config: PermutationConfig, ids: list[int]) -> dict[int, int]:
    """Five things are moved about; the permutation so far says where each began and is now."""
    numbered = list(permutations(range(5)))
    answers, place = {}, list(range(5))
    for i, token in enumerate(ids):
        place = [numbered[token][p] for p in place]
        answers[i] = numbered.index(tuple(place))
    return answers


SOLVERS = {
    RecallConfig: by_dictionary,
    NeedleConfig: by_search,
    CopyConfig: by_reading,
    ParityConfig: by_counting,
    PermutationConfig: by_moving_things,
}


@pytest.mark.parametrize("config", TASKS, ids=str)
@pytest.mark.parametrize("extra", [0, 1, 31])
def test_the_answers_are_right(config: TaskConfig, extra: int) -> None:
    length = config.shortest + extra
    batch = Task(config, length, 5, "train").batch(3, 40)
    assert batch.ids.shape == batch.targets.shape == (40, length)
    assert batch.cu_seqlens is None
    assert set(batch.ids.flatten().tolist()) <= set(range(config.vocab_size))
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        answers = SOLVERS[type(config)](config, ids)  # type: ignore[operator]
        assert targets == [answers.get(i, IGNORED) for i in range(length)]


@pytest.mark.parametrize("config", TASKS, ids=str)
def test_rows_are_functions_of_seed_split_and_number(config: TaskConfig) -> None:
    length = config.shortest + 40
    task = Task(config, length, 5, "train")
    whole = task.batch(10**12, 9)
    single = [task.batch(10**12 + i, 1) for i in range(9)]
    assert whole.ids.tolist() == torch.cat([batch.ids for batch in single]).tolist()
    assert whole.targets.tolist() == torch.cat([batch.targets for batch in single]).tolist()
    others = [
        Task(config, length, 6, "train").batch(10**12, 9),
        Task(config, length, 5, "validation").batch(10**12, 9),
        task.batch(10**12 + 9, 9),
    ]
    for other in others:
        assert other.ids.tolist() != whole.ids.tolist()


@pytest.mark.parametrize(
    ("config", "chance"),
    [
        (RecallConfig(pairs=5, vocab_size=64), 1 / 5),
        (NeedleConfig(values=4), 1 / 4),
        (CopyConfig(symbols=3), 1 / 3),
        (ParityConfig(), 1 / 2),
        (PermutationConfig(), 1 / 120),
    ],
    ids=str,
)
def test_guessing_is_as_good_as_stated(config: TaskConfig, chance: float) -> None:
    """The best constant guess among what an answer may be: for recall among the row's own values, in their order."""
    task = Task(config, config.shortest + 20, 0, "validation")
    assert config.chance == pytest.approx(chance)
    batch = task.batch(0, 4000)
    if isinstance(config, RecallConfig):
        values = batch.ids[:, 1 : 2 * config.pairs : 2]
        answers = torch.stack([t[t != IGNORED] for t in batch.targets])
        right = (answers[:, :1] == values).double().mean(0)
        assert (right - chance).abs().max() < 0.03
        return
    counts = Counter(batch.targets[batch.targets != IGNORED].tolist())
    assert len(counts) == round(1 / chance)
    assert max(counts.values()) / counts.total() == pytest.approx(chance, rel=0.2)


@pytest.mark.parametrize("config", TASKS, ids=str)
def test_rows_are_made_as_fast_as_they_are_used(config: TaskConfig) -> None:
    """At 100k tokens a second, wherever they are."""
    task = Task(config, 256, 0, "train")
    assert seconds(lambda: task.batch(10**9, 50)) < 50 * 256 / 100_000


def test_questions_follow_a_power_law() -> None:
    """With one pair the slots' frequencies are their weights; most questions come soon."""
    config = RecallConfig(pairs=1, vocab_size=8, power=0.01)
    targets = Task(config, 2 + 2 * 8, 0, "train").batch(0, 4000).targets
    counts = (targets != IGNORED).sum(0)[2::2].double()
    weights = torch.arange(1, 9).double() ** (0.01 - 1)
    expected = 4000 * weights / weights.sum()
    assert ((counts - expected).abs() < 4 * expected.sqrt()).all()


def test_the_steepest_law_has_finite_weights() -> None:
    """Nearly all questions come last, in rows much longer than anyone trains on."""
    config = RecallConfig(pairs=2, vocab_size=8, power=MOST_POWER)
    targets = Task(config, 2**21, 0, "train").batch(0, 1).targets[0]
    assert (targets != IGNORED).nonzero().flatten().min() > 2**20


def test_needles_lie_at_every_depth() -> None:
    ids = Task(NeedleConfig(needles=2), 20, 0, "train").batch(0, 2000).ids[:, :-2]
    counts = (ids == 0).sum(0)
    assert (counts[-2:] == 0).all()
    assert (counts[:-2] > 100).all()


@pytest.mark.parametrize("config", TASKS, ids=str)
def test_a_row_too_short(config: TaskConfig) -> None:
    length = config.shortest - 1
    said = f"length: got {length}, expected at least {config.shortest} for {config.type}"
    with pytest.raises(ValueError, match=said):
        Task(config, length, 0, "train")


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        (RecallConfig, {"pairs": 0}, "pairs: got 0, expected an integer of at least 1"),
        (RecallConfig, {"pairs": 8, "vocab_size": 17}, "vocab_size: got 17, .* at least 18"),
        (RecallConfig, {"power": 0.0}, "power: got 0.0, expected a finite number above 0"),
        (RecallConfig, {"power": math.inf}, "power: got inf, expected a finite number"),
        (RecallConfig, {"power": math.nan}, "power: got nan, expected a finite number"),
        (RecallConfig, {"power": 1e3}, "power: got 1000.0, expected a finite number .* at most 16"),
        (NeedleConfig, {"needles": 0}, "needles: got 0"),
        (NeedleConfig, {"needles": 9, "keys": 8}, "keys: got 8, .* at least 9"),
        (NeedleConfig, {"fillers": 0}, "fillers: got 0"),
        (CopyConfig, {"items": 1.5}, "items: got 1.5, expected an integer"),
        (CopyConfig, {"symbols": 0}, "symbols: got 0"),
    ],
)
def test_sizes_that_make_no_task(
    kind: type[TaskConfig], wrong: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**wrong)  # type: ignore[arg-type]
