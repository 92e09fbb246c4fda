"""Keys of needles: every pair of an adjective and a noun, in alphabetical order."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import overload

from gdn2.data.extras import need


class Keys(Sequence[str]):
    """All distinct "adjective-noun", sorted by code point, in half a megabyte where a list takes half a gigabyte.

    Keys with the same adjective stand together, in the order of the nouns, unless one "adjective-" begins another
    ("old-" and "old-fashioned-"): only such families are spelled out.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        nouns = sorted(set(nouns))
        families: list[list[str]] = []
        for start in sorted({f"{adjective}-" for adjective in adjectives}):
            if families and start.startswith(families[-1][0]):
                families[-1].append(start)
            else:
                families.append([start])
        self._runs = [  # keys that begin alike, and their endings
            (family[0], nouns)
            if len(family) == 1
            else ("", sorted({start + noun for start in family for noun in nouns}))
            for family in families
        ]
        self._starts = [0, *accumulate(len(endings) for _, endings in self._runs)]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        run = bisect_right(self._starts, place) - 1
        beginning, endings = self._runs[run]
        return beginning + endings[place - self._starts[run]]


@cache
def ruler_keys() -> Keys:
    """RULER's keys: all pairs of two lists of wonderwords."""
    lists = files(need("wonderwords", "eval", "needles")) / "assets"
    adjectives, nouns = (
        # Some words occur a second time with a space behind them.
        {line.rstrip() for line in (lists / name).read_text(encoding="utf-8").splitlines()}
        for name in ("adjectivelist.txt", "nounlist.txt")
    )
    return Keys(adjectives, nouns)
