"""Shuffling without a list: any place of a random order, computed by itself."""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # with 6, pairs of places are unevenly likely where there are few

Words = NDArray[np.uint64]


def permute(index: NDArray[np.int64], size: int, *key: int) -> NDArray[np.int64]:
    """Where a permutation of 0 … size − 1, chosen by the key, sends each index.

    A Feistel network permutes the numbers of an even count of bits. Some of these are `size` or more; following the
    permutation from there on until it comes back below `size` permutes the rest ("cycle walking"). There are at most
    four times as many numbers as wanted, so that takes a few rounds.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _random_words(ROUNDS, key)
    image = _feistel(index.astype(np.uint64), half, keys)
    while (outside := image >= size).any():
        image[outside] = _feistel(image[outside], half, keys)
    return image.astype(np.int64)


def draw(size: int, *key: int) -> int:
    """A number from 0 … size − 1, chosen by the key."""
    return int(_random_words(1, key)[0]) % size


def _random_words(count: int, key: tuple[int, ...]) -> Words:
    return np.random.SeedSequence(key).generate_state(count, np.uint64).astype(np.uint64)


def _feistel(x: Words, half: int, keys: Words) -> Words:
    """Permute numbers of 2 · half bits: each round can be undone, whatever is mixed into the left half."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: Words) -> Words:
    """Splitmix64's finaliser: every bit of x moves about half of all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
