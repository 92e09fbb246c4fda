"""The order of rows: a permutation that can be asked for one place at a time."""

import numpy as np
import pytest

from gdn2.data.shuffle import draw, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 130, 1000, 4097])
def test_every_number_comes_once(size: int) -> None:
    for key in ((0, 0), (0, 1), (3407, 12)):
        assert sorted(permute(np.arange(size), size, *key).tolist()) == list(range(size))


def test_a_place_does_not_depend_on_what_else_is_asked() -> None:
    whole = permute(np.arange(1000), 1000, 5, 6)
    for i in (0, 1, 499, 999):
        assert permute(np.array([i]), 1000, 5, 6).tolist() == [whole[i]]
    assert permute(np.arange(900, 1000), 1000, 5, 6).tolist() == whole[900:].tolist()


def test_the_order_is_that_of_earlier_versions() -> None:
    """A run must find its place again after an upgrade."""
    assert permute(np.arange(10), 10, 3407, 0).tolist() == [9, 3, 1, 2, 0, 8, 5, 6, 4, 7]
    assert draw(4097, 3407, 0) == 1600


def test_keys_give_orders_that_have_nothing_in_common() -> None:
    """Two random orders agree in one place on average, whatever the size."""
    orders = [permute(np.arange(1000), 1000, 1, epoch) for epoch in range(40)]
    common = [(a == b).sum() for i, a in enumerate(orders) for b in orders[:i]]
    assert 0.8 < np.mean(common) < 1.2


@pytest.mark.parametrize("size", [5, 7])
def test_every_place_and_every_pair_is_equally_likely(size: int) -> None:
    """Chi-square over many keys: six standard deviations above its mean is too much."""
    keys = 100 * size * (size - 1)
    images = np.stack([permute(np.arange(2), size, 11, key) for key in range(keys)])
    for counts in (
        np.bincount(images[:, 0], minlength=size),
        np.unique(images[:, 0] * size + images[:, 1], return_counts=True)[1],
    ):
        expected = keys / len(counts)
        freedom = len(counts) - 1
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < freedom + 6 * np.sqrt(2 * freedom)
    assert len(counts) == size * (size - 1)


def test_neighbours_are_torn_apart() -> None:
    order = permute(np.arange(10**5), 10**5, 2)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02


def test_sizes_beyond_any_list() -> None:
    size = 10**15 + 1
    index = np.array([0, 1, 2, size // 2, size - 1])
    image = permute(index, size, 0)
    assert len(set(image.tolist())) == 5
    assert ((image >= 0) & (image < size)).all()


def test_draws_are_even() -> None:
    counts = np.bincount([draw(5, 3, key) for key in range(5000)], minlength=5)
    assert ((counts > 900) & (counts < 1100)).all()
