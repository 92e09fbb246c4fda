"""Tokens are drawn from the distribution that the filters leave, by each row's own numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.models.sampling import GREEDY, STEP, Draws, Sampling, choose, filtered, sample, uniform
from tests.closeness import assert_close

CPU = torch.device("cpu")
MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """The published generator, in Python's integers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def literal_uniform(seed: int, drawn: int) -> float:
    golden = 0x9E3779B97F4A7C15
    return (splitmix(splitmix(seed + golden) + (drawn + 1) * golden) >> 11) / 2**53


def literal_probabilities(
    logits: list[float], present: set[int], sampling: Sampling
) -> dict[int, float]:
    """The tokens that may be chosen, one filter after the other in plain Python."""
    penalty = sampling.repetition_penalty
    scores = {
        i: (x / penalty if x > 0 else x * penalty) if i in present else x
        for i, x in enumerate(logits)
    }
    weights = {i: math.exp(x / sampling.temperature) for i, x in scores.items()}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if sampling.top_k is not None:
        ranked = ranked[: sampling.top_k]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if mass >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[ranked[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def literal_sample(p: dict[int, float], u: float) -> int:
    reached = 0.0
    for token, share in p.items():
        reached += share
        if u < reached:
            return token
    return token


def draws(rows: int, sampling: Sampling, vocabulary: int, *history: list[int]) -> Draws:
    seen = [torch.tensor(row, dtype=torch.int64) for row in history or [[]] * rows]
    return Draws.start(range(rows), sampling, vocabulary, seen, CPU)


def logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    rand = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, vocabulary, generator=rand, dtype=torch.float64)


def test_the_generator_is_splitmix64() -> None:
    # Its published first output of seed 0.
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert STEP & MASK == 0x9E3779B97F4A7C15
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    for drawn in (0, 1, 1000, 2**40):
        found = uniform(torch.tensor(seeds), torch.full((6,), drawn))
        assert found.tolist() == [literal_uniform(seed, drawn) for seed in seeds]


def test_draws_are_uniform_and_seeds_are_unrelated() -> None:
    """Means, second moments and correlations of 200 × 500 numbers, within five standard errors."""
    seeds = torch.arange(200)[:, None].expand(200, 500)
    u = uniform(seeds, torch.arange(500).expand(200, 500))
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / 100000**0.5
    assert abs(float(u.square().mean()) - 1 / 3) < 5 * (4 / 45) ** 0.5 / 100000**0.5
    centred = u - 0.5
    neighbours = [(centred[1:] * centred[:-1]).mean(), (centred[:, 1:] * centred[:, :-1]).mean()]
    assert all(abs(float(c)) < 5 / 12 / 99000**0.5 for c in neighbours)


FILTERS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=2.5, top_k=4),
    Sampling(top_k=1),
    Sampling(top_k=1000),
    Sampling(top_p=0.7),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.2),
    Sampling(min_p=1.0),
    Sampling(temperature=1.7, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.4),
    Sampling(repetition_penalty=0.5),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_tokens_are_those_of_the_literal_sampler(sampling: Sampling) -> None:
    history = [[3, 5], [0, 1, 2, 3], [7]]
    own = draws(3, sampling, 11, *history)
    present = [set(row) for row in history]
    for step in range(40):
        x = logits(3, 11, seed=step)
        found = sample(x, sampling, own).tolist()
        for row, token in enumerate(found):
            p = literal_probabilities(x[row].tolist(), present[row], sampling)
            assert token == literal_sample(p, literal_uniform(row, step))
            present[row].add(token)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_leave_the_literal_distribution(sampling: Sampling) -> None:
    x = logits(1, 11)
    left = filtered(x / sampling.temperature, sampling).softmax(-1)[0]
    plain = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    expected = literal_probabilities(x[0].tolist(), set(), plain)
    dense = torch.tensor([expected.get(i, 0.0) for i in range(11)], dtype=torch.float64)
    assert_close("probabilities", left, dense, 1e-12)


def test_frequencies_are_the_probabilities() -> None:
    """Twenty thousand rows of the same logits, by the chi-square of six tokens."""
    x, rows = logits(1, 6), 20000
    found = sample(x.expand(rows, 6), Sampling(), draws(rows, Sampling(), 6))
    counts = torch.bincount(found, minlength=6).double()
    expected = rows * x.softmax(-1)[0]
    assert float(((counts - expected) ** 2 / expected).sum()) < 25.7  # 1e-4 of the time


@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_greedy_takes_the_likeliest(penalty: float) -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
    x = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0]])
    found = sample(x, sampling, draws(2, sampling, 3, [1], [0]))
    assert found.tolist() == ([1, 0] if penalty == 1 else [2, 2])
    assert sample(x.bfloat16(), GREEDY, draws(2, GREEDY, 3)).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-40, 1e-60, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_tiny_temperature_takes_the_likeliest(
    temperature: float, dtype: torch.dtype, filters: dict[str, Any]
) -> None:
    sampling = Sampling(temperature=temperature, **filters)
    rows = [[90.0, 70.0, 100.0, 80.0], [-3.0, -1.0, -2.0, -4.0], [0.0, -1.0, -math.inf, -2.0]]
    x = torch.tensor(rows, dtype=dtype)
    assert sample(x, sampling, draws(3, sampling, 4)).tolist() == [2, 1, 0]


def test_impossible_tokens_are_never_chosen() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3), (1.0, 3)):
        assert choose(p, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


loose: Any = Sampling  # takes what types forbid


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=-0.1), r"^temperature: got -0\.1, expected at least 0$"),
        (lambda: Sampling(temperature=math.nan), r"^temperature: got nan, expected at least 0$"),
        (lambda: loose(temperature="a"), r"^temperature: got 'a', expected a number$"),
        (lambda: loose(top_k=2.5), r"^top_k: got 2\.5, expected an integer$"),
        (lambda: Sampling(top_k=0), r"^top_k: got 0, expected None or at least 1$"),
        (lambda: Sampling(top_p=0.0), r"^top_p: got 0\.0, expected more than 0 and at most 1$"),
        (lambda: Sampling(top_p=1.1), r"^top_p: got 1\.1, expected more than 0 and at most 1$"),
        (lambda: Sampling(min_p=-1.0), r"^min_p: got -1\.0, expected 0 to 1$"),
        (
            lambda: Sampling(repetition_penalty=0.0),
            r"^repetition_penalty: got 0\.0, expected 1e-06 to 1e\+06$",
        ),
    ],
)
def test_mistakes_are_named(make: Callable[[], Sampling], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
