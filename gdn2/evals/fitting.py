"""How long a haystack may be for prompts of so many tokens: RULER's way to find out, and lm-eval's.

Every probe is a sample of its own and draws from the same random numbers as the samples after it, so what is asked
depends on the way of fitting and on the tokenizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gdn2.evals.needles import Sample

GENERATED = 128  # tokens kept for the answer
TRIES = 100  # draws at the smallest size before a length is called too short

Make = Callable[[int], Sample]  # one sample with a haystack of that size
Count = Callable[[str], int]  # the tokens of a text, special ones apart


@dataclass(frozen=True)
class Budget:
    """What a prompt may take, and in which steps the haystack's size changes."""

    length: int
    step: int
    least: int  # units that the needles need
    most: int  # units there are
    count: Count


class Fit(Protocol):
    """A way of fitting."""

    default_seed: int

    def shuffle_seed(self, seed: int) -> int:
        """The seed by which the needles of every sample are shuffled, all alike."""
        ...

    def taken(self, sample: Sample, budget: Budget) -> int:
        """The tokens that count for a sample."""
        ...

    def size(self, make: Make, budget: Budget) -> int:
        """The size of the haystack that samples try first."""
        ...

    def sizes(self, size: int, budget: Budget) -> Iterator[int]:
        """Sizes that a sample tries until it fits."""
        ...


class RulerFit:
    """RULER since June 2025: a binary search, one probe a size. What is too long loses a step and is drawn anew."""

    default_seed = 42

    def shuffle_seed(self, seed: int) -> int:
        return seed

    def taken(self, sample: Sample, budget: Budget) -> int:
        """Prompt with the answer's prefix, and room for the answer; no special token."""
        return budget.count(sample.question + sample.prefix) + GENERATED

    def size(self, make: Make, budget: Budget) -> int:
        step = budget.step
        tokens = self.taken(make(step), budget) - GENERATED
        low, high = step, max(int(budget.length / (tokens / step) * 3), 2 * step)
        best = step
        while low <= high:
            middle = (low + high) // 2
            if self.taken(make(middle), budget) <= budget.length:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def sizes(self, size: int, budget: Budget) -> Iterator[int]:
        while size > budget.step:
            yield size
            size -= budget.step
        for _ in range(TRIES):  # RULER itself would try for ever
            yield size


class LmEvalFit:
    """lm-eval 0.4: steps up until a probe is too long, then one back. The answer's prefix is not counted."""

    default_seed = 0

    def shuffle_seed(self, seed: int) -> int:
        return 42

    def taken(self, sample: Sample, budget: Budget) -> int:
        """A token for the beginning of the text, the question, and room for the answer."""
        return 1 + budget.count(sample.question) + GENERATED

    def size(self, make: Make, budget: Budget) -> int:
        size, taken = max(budget.step, budget.least), GENERATED
        while taken < budget.length:
            sample = make(min(size, budget.most))
            taken = 1 + budget.count(sample.question + sample.answer) + GENERATED
            if taken > budget.length:
                size -= budget.step
                break
            if size > budget.most:
                size = budget.most
                break
            size += budget.step
        return max(size, budget.least)

    def sizes(self, size: int, budget: Budget) -> Iterator[int]:
        yield from range(size, 0, -budget.step)


FITS: dict[str, Fit] = {"ruler": RulerFit(), "lm_eval": LmEvalFit()}


def fitted(fit: Fit, make: Make, budget: Budget) -> Iterator[tuple[int, Sample]]:
    """Samples without end that fit the budget, with the size of their haystack."""
    size = fit.size(make, budget)
    while True:
        shortest = None
        for tried in fit.sizes(size, budget):
            sample = make(tried)
            taken = fit.taken(sample, budget)
            if taken <= budget.length:
                yield tried, sample
                break
            shortest = taken if shortest is None else min(shortest, taken)
        else:
            raise ValueError(
                f"length: got {budget.length}, expected at least {shortest}, "
                f"what the shortest prompt and {GENERATED} tokens of an answer take"
            )
