"""Small tasks made from a seed, to see what a mixer can learn: to look up, to find, to select, to keep track.

Each config is a task: it says how large its vocabulary is, how short a row may be, how accurate guessing is, and draws
a row. Targets are the answers, each at the token after which it is due; all others are ignored.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, permutations
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from gdn2.data.batch import IGNORED, Batch, check_rows
from gdn2.data.checks import require, require_integer
from gdn2.data.corpus import Split

Row = NDArray[np.int64]
MOST_POWER = 16  # with which the weights of all slots stay finite, however long the row


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """Multi-query associative recall, as in Zoology: keys with their values first, then each key again, once.

        k1 v1 k2 v2 k3 v3  0  0 k2  0 k1  0  0  0  0  0 k3  0
                                 └ v2  └ v1              └ v3

    The gaps before the questions follow a power law: slot i of the rest is asked in with weight i^(power − 1).
    """

    type: Literal["mqar"] = "mqar"
    pairs: int = 8
    # 0 is blank, the others of the first half are keys, the second half values.
    vocab_size: int = 256
    power: float = 0.01

    def __post_init__(self) -> None:
        require_integer("pairs", self.pairs, 1)
        least = 2 * self.pairs + 2
        require_integer("vocab_size", self.vocab_size, least)
        fits = 0 < self.power <= MOST_POWER
        require(fits, "power", self.power, f"a finite number above 0, at most {MOST_POWER}")

    @property
    def shortest(self) -> int:
        return 4 * self.pairs

    @property
    def chance(self) -> float:
        """The accuracy of taking any of the row's values."""
        return 1 / self.pairs

    def draw(self, length: int, rand: Generator) -> tuple[Row, Row]:
        half = self.vocab_size // 2
        keys = 1 + rand.choice(half - 1, self.pairs, replace=False)
        values = half + rand.choice(self.vocab_size - half, self.pairs, replace=False)
        slots = (length - 2 * self.pairs) // 2
        weights = np.arange(1, slots + 1, dtype=np.float64) ** (self.power - 1)
        chosen = rand.choice(slots, self.pairs, replace=False, p=weights / weights.sum())
        # The slots drawn first tend to lie first; that must not tell which pair is asked for in them.
        asked = 2 * (self.pairs + rand.permutation(chosen))
        ids, targets = np.zeros(length, np.int64), _unanswered(length)
        ids[: 2 * self.pairs : 2], ids[1 : 2 * self.pairs : 2] = keys, values
        ids[asked], targets[asked] = keys, values
        return ids, targets


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Needles in a haystack: keys with their values among other tokens, and at the end a question about one key.

        f7 f2 f9  0 k4 v1 f3 f3 f8  0 k2 v6 f1 f5 f9  0 k4
                                                        └ v1

    The token 0 stands before each needle and before the question.
    """

    type: Literal["needle"] = "needle"
    needles: int = 1
    keys: int = 16
    values: int = 16
    fillers: int = 31

    def __post_init__(self) -> None:
        require_integer("needles", self.needles, 1)
        require_integer("keys", self.keys, self.needles)
        require_integer("values", self.values, 1)
        require_integer("fillers", self.fillers, 1)

    @property
    def vocab_size(self) -> int:
        return 1 + self.keys + self.values + self.fillers

    @property
    def shortest(self) -> int:
        return 3 * self.needles + 2

    @property
    def chance(self) -> float:
        """The accuracy of guessing without having found the needle."""
        return 1 / self.values

    def draw(self, length: int, rand: Generator) -> tuple[Row, Row]:
        first_value = 1 + self.keys
        keys = 1 + rand.choice(self.keys, self.needles, replace=False)
        values = first_value + rand.integers(self.values, size=self.needles)
        ids = first_value + self.values + rand.integers(self.fillers, size=length)
        # A needle takes the place of one token of a haystack that is shorter by the two others of each needle.
        free = length - 2 - 2 * self.needles
        places = np.sort(rand.choice(free, self.needles, replace=False))
        places += 2 * np.arange(self.needles)
        ids[places], ids[places + 1], ids[places + 2] = 0, keys, values
        asked, targets = rand.integers(self.needles), _unanswered(length)
        ids[-2:], targets[-1] = [0, keys[asked]], values[asked]
        return ids, targets


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """Selective copying: symbols among blanks, to be repeated in order once 1 asks for them.

    0 s4 0 0 s2 0 s4 0 0  1  1  1
                          └s4└s2└s4
    """

    type: Literal["copying"] = "copying"
    items: int = 8
    symbols: int = 14

    def __post_init__(self) -> None:
        require_integer("items", self.items, 1)
        require_integer("symbols", self.symbols, 1)

    @property
    def vocab_size(self) -> int:
        return 2 + self.symbols

    @property
    def shortest(self) -> int:
        return 2 * self.items

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def draw(self, length: int, rand: Generator) -> tuple[Row, Row]:
        items = 2 + rand.integers(self.symbols, size=self.items)
        places = np.sort(rand.choice(length - self.items, self.items, replace=False))
        ids, targets = np.zeros(length, np.int64), _unanswered(length)
        ids[places], ids[-self.items :], targets[-self.items :] = items, 1, items
        return ids, targets


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Whether the ones so far are odd in number, at every token."""

    type: Literal["parity"] = "parity"
    vocab_size = 2
    shortest = 1
    chance = 1 / 2

    def draw(self, length: int, rand: Generator) -> tuple[Row, Row]:
        bits = rand.integers(2, size=length)
        return bits, np.bitwise_xor.accumulate(bits)


@dataclass(frozen=True, kw_only=True)
class PermutationConfig:
    """The product p_t ∘ … ∘ p_1 of the permutations of five things so far, at every token, in lexicographic order."""

    type: Literal["s5"] = "s5"
    vocab_size = 120
    shortest = 1
    chance = 1 / 120

    def draw(self, length: int, rand: Generator) -> tuple[Row, Row]:
        steps, after = rand.integers(self.vocab_size, size=length), _products()
        return steps, np.array([*accumulate(steps.tolist(), lambda so_far, p: after[p][so_far])])


TaskConfig = RecallConfig | NeedleConfig | CopyConfig | ParityConfig | PermutationConfig


class Task:
    """The rows of a task: each is drawn from random numbers of its own, so rows of the two splits are independent."""

    def __init__(self, config: TaskConfig, length: int, seed: int, split: Split) -> None:
        shortest = config.shortest
        require(length >= shortest, "length", length, f"at least {shortest} for {config.type}")
        self._config, self._seed, self._is_validation = config, seed, split == "validation"
        self.length, self.vocab_size = length, config.vocab_size

    def batch(self, first: int, rows: int) -> Batch:
        check_rows(first, rows)
        drawn = [self._config.draw(self.length, self._rand(first + i)) for i in range(rows)]
        ids, targets = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
        return Batch(ids, targets)

    def _rand(self, row: int) -> Generator:
        """Philox counts upward from the row in its highest word, so no two rows share a number."""
        key = np.array([self._seed, self._is_validation], np.uint64)
        return Generator(Philox(key=key, counter=np.array([0, 0, 0, row], np.uint64)))


def _unanswered(length: int) -> Row:
    return np.full(length, IGNORED, np.int64)


@cache
def _products() -> list[list[int]]:
    """The number of p ∘ q for the numbers of permutations p and q."""
    every = list(permutations(range(5)))
    number = {p: i for i, p in enumerate(every)}
    return [[number[tuple(p[x] for x in q)] for q in every] for p in every]
