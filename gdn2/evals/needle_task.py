"""The needle tasks as requests and scores, by length and by depth."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean

from gdn2.data.tokenizers import Tokenizer
from gdn2.evals.fitting import FITS, GENERATED, Budget, Count, fitted
from gdn2.evals.haystacks import Essays, Haystack, Noise, read_essays, sentence_splitter
from gdn2.evals.keys import ruler_keys
from gdn2.evals.needles import Drawer, Sample, kind_of
from gdn2.evals.request import JSON, Request, Scored, Scores, check_limit, number_of, percent
from gdn2.layers.plain import nearest

SAMPLES = 500
BIN = 10  # percent of depth that count together


def needle_task(
    name: str,
    lengths: Sequence[int],
    *,
    essays: Path | None = None,
    nltk_data: Path | None = None,
    fit: str = "ruler",
    seed: int | None = None,
) -> "NeedleTask":
    """A task with RULER's keys and haystack; the essays come from a file, for they are not ours to ship."""
    haystack: Haystack = Noise()
    if kind_of(name).essays:
        if essays is None:
            raise ValueError(f"essays: got no file, expected one for {name}")
        haystack = Essays(read_essays(essays), sentence_splitter(nltk_data))
    return NeedleTask(name, lengths, haystack, ruler_keys(), fit=fit, seed=seed)


class NeedleTask:
    """One kind of needles at some lengths, each with random numbers of its own from the same seed."""

    version = "1"

    def __init__(
        self,
        name: str,
        lengths: Sequence[int],
        haystack: Haystack,
        keys: Sequence[str],
        *,
        fit: str = "ruler",
        seed: int | None = None,
    ) -> None:
        if fit not in FITS:
            raise ValueError(f"fit: got {fit!r}, expected {nearest(fit, FITS)}")
        if not lengths:
            raise ValueError("lengths: got none, expected at least one")
        for length in lengths:
            if length <= GENERATED:
                raise ValueError(
                    f"length: got {length}, expected more than the {GENERATED} tokens of an answer"
                )
        self.name, self.lengths, self._kind = name, tuple(lengths), kind_of(name)
        self._haystack, self._keys = haystack, keys
        self._fit_name, self._fit = fit, FITS[fit]
        self._seed = self._fit.default_seed if seed is None else seed

    @property
    def protocol(self) -> str:
        return (
            f"{self._kind.title}: RULER's {self.name}, base template, length fitted as by "
            f"{self._fit_name}, seed {self._seed} for each length; greedy, {GENERATED} new tokens, "
            "right if the value occurs in them, whatever the case of its letters"
        )

    def requests(self, tokenizer: Tokenizer, limit: int | None = None) -> Iterator[Request]:
        """The first samples of each length, 500 unless limited."""
        check_limit(limit)

        def count(text: str) -> int:
            return len(tokenizer.encode_texts([text])[0])

        samples = (
            (length, size, sample)
            for length in self.lengths
            for size, sample in islice(self._fitted(length, count), limit or SAMPLES)
        )
        for number, (length, size, sample) in enumerate(samples):
            prompt = sample.question + sample.prefix
            metadata: dict[str, JSON] = {
                "length": length,
                "tokens": count(prompt),
                "haystack": size,
                "depth": sample.depth,
                "key": sample.key,
                "answer": sample.answer,
            }
            yield Request(
                self.name, number, "generate", prompt, max_tokens=GENERATED, metadata=metadata
            )

    def score(self, request: Request, answer: str) -> Scores:
        return {"accuracy": float(str(request.metadata["answer"]).lower() in answer.lower())}

    def summarise(self, scored: Iterable[Scored]) -> dict[str, JSON]:
        """Accuracy in percent: of all, of each length, and there of each tenth of the depth that has samples."""
        scored = list(scored)
        by_length: dict[str, JSON] = {}
        for length, here in _groups(scored, lambda request: int(number_of(request, "length"))):
            by_length[str(length)] = {
                "accuracy": _accuracy(here),
                "samples": len(here),
                "prompt_tokens": mean(number_of(request, "tokens") for request, _ in here),
                "by_depth": {str(start): _accuracy(rows) for start, rows in _groups(here, _bin)},
            }
        return {"accuracy": _accuracy(scored), "samples": len(scored), "by_length": by_length}

    def _fitted(self, length: int, count: Count) -> Iterator[tuple[int, Sample]]:
        shuffle_seed = self._fit.shuffle_seed(self._seed)
        draw = Drawer(self._kind, self._haystack, self._keys, Random(self._seed), shuffle_seed)
        budget = Budget(
            length, self._haystack.step(length), self._kind.needles, self._haystack.most, count
        )
        return fitted(self._fit, draw, budget)


def _groups(
    scored: Sequence[Scored], group: Callable[[Request], int]
) -> Iterator[tuple[int, list[Scored]]]:
    for value in sorted({group(request) for request, _ in scored}):
        yield value, [row for row in scored if group(row[0]) == value]


def _bin(request: Request) -> int:
    return min(int(number_of(request, "depth")) // BIN * BIN, 100 - BIN)


def _accuracy(scored: Iterable[Scored]) -> float:
    return percent(scores["accuracy"] for _, scores in scored)
