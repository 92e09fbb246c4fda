"""Text that needles are hidden in: a refrain in lines, or essays in sentences."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from gdn2.data.extras import need
from gdn2.evals.documents import read_text, text_field

REFRAIN = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent


class Hidden(NamedTuple):
    """Text with needles in it, and how deep in it each is, in percent."""

    text: str
    depths: list[float]


class Haystack(Protocol):
    """Hides needles, in their order, in text of any size; the places are drawn."""

    most: int  # units (lines or words) there are

    def step(self, length: int) -> int:
        """By how many units RULER's ways of fitting prompts of so many tokens change the size."""
        ...

    def hide(self, needles: Sequence[str], size: int, random: Random) -> Hidden: ...


class Noise:
    """The same line again and again, and one needle as a line of its own, never the last."""

    most = sys.maxsize

    def step(self, length: int) -> int:
        return 5 if length < 4096 else 25

    def hide(self, needles: Sequence[str], size: int, random: Random) -> Hidden:
        (needle,) = needles
        (place,) = random.sample(range(size), 1)
        lines = [REFRAIN] * size
        lines.insert(place, needle)
        return Hidden("\n".join(lines), [100 * place / size])


class Essays:
    """The first words of one long text, with needles between its sentences."""

    def __init__(self, text: str, split: Callable[[str], list[str]]) -> None:
        self._words = re.sub(r"\s+", " ", text).split(" ")
        self._split = split
        self.most = len(self._words)
        self.sentences = lru_cache(maxsize=16)(self._sentences)  # most samples share a few sizes

    def step(self, length: int) -> int:
        return 500

    def hide(self, needles: Sequence[str], size: int, random: Random) -> Hidden:
        sentences = self.sentences(size)
        depths = sorted(random.sample(DEPTHS, len(needles)))
        places = [int(len(sentences) * (depth / 100)) for depth in depths]
        pieces = []
        for needle, start, end in zip(needles, [0, *places], places, strict=False):
            pieces += [" ".join(sentences[start:end]), needle]
        pieces.append(" ".join(sentences[places[-1] :]))
        return Hidden(" ".join(pieces), [float(depth) for depth in depths])

    def _sentences(self, size: int) -> list[str]:
        """The sentences of the first `size` words; the text begins anew where it ends."""
        repeats = -(-size // self.most)
        return self._split(" ".join((self._words * repeats)[:size]).strip())


def read_essays(path: Path) -> str:
    """The text of RULER's PaulGrahamEssays.json (its field "text"), or of a plain text file."""
    text = read_text(path)
    if ".json" in path.suffixes:
        try:
            data = json.loads(text)
        except ValueError as reason:
            raise ValueError(f"{path}: got {reason}, expected JSON") from None
        text = text_field(data if isinstance(data, dict) else {}, "text", str(path))
    if not text.strip():
        raise ValueError(f"{path}: got an empty text, expected essays")
    return text


def sentence_splitter(nltk_data: Path | None = None) -> Callable[[str], list[str]]:
    """NLTK's English sentence splitter, from its data in a folder or where NLTK looks for them."""
    nltk = need("nltk", "eval", "sentences")
    if nltk_data is not None and str(nltk_data) not in nltk.data.path:
        nltk.data.path.insert(0, str(nltk_data))  # it opens no file elsewhere
    try:
        split: Callable[[str], list[str]] = nltk.tokenize.PunktTokenizer("english").tokenize
    except LookupError:
        raise ValueError(
            f"nltk_data: got {nltk_data or 'none'}, expected a folder with tokenizers/punkt_tab; "
            "python -m nltk.downloader punkt_tab fetches it"
        ) from None
    return split
