"""RULER's needles in a haystack: S-NIAH-1, -2, -3 and MK-NIAH-1, one sample at a time."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from gdn2.evals.haystacks import Haystack
from gdn2.layers.plain import nearest

Unit: TypeAlias = Literal["number", "uuid"]

NEEDLE = "One of the special magic {unit}s for {key} is: {value}."
QUESTION = (
    "A special magic {unit} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {unit} afterwards.\n{context}\n"
    "What is the special magic {unit} for {key} mentioned in the provided text?"
)
PREFIX = " The special magic {unit} for {key} mentioned in the provided text is"


@dataclass(frozen=True)
class Kind:
    """What is hidden, how often, and in what."""

    title: str  # in the paper
    essays: bool
    unit: Unit
    needles: int


KINDS = {
    "niah_single_1": Kind("S-NIAH-1", essays=False, unit="number", needles=1),
    "niah_single_2": Kind("S-NIAH-2", essays=True, unit="number", needles=1),
    "niah_single_3": Kind("S-NIAH-3", essays=True, unit="uuid", needles=1),
    "niah_multikey_1": Kind("MK-NIAH-1", essays=True, unit="number", needles=4),
}


def kind_of(name: str) -> Kind:
    """The kind of needles that RULER gives this name."""
    if name not in KINDS:
        raise ValueError(f"task: got {name!r}, expected {nearest(name, KINDS)}")
    return KINDS[name]


class Sample(NamedTuple):
    """A prompt in two parts, its answer, and where that is."""

    question: str
    prefix: str  # of the answer, given to the model
    key: str
    answer: str
    depth: float  # percent


@dataclass(frozen=True)
class Drawer:
    """Draws samples one after the other, each with a haystack of the size asked for."""

    kind: Kind
    haystack: Haystack
    keys: Sequence[str]
    random: Random
    shuffle_seed: int

    def __call__(self, size: int) -> Sample:
        """Draw, in RULER's order, key and value of each needle, the places, and which key is asked for."""
        unit, number, random = self.kind.unit, self.kind.needles, self.random
        pairs = [(random.choice(self.keys), _value(unit, random)) for _ in range(number)]
        order = list(range(number))
        Random(self.shuffle_seed).shuffle(order)
        needles = [NEEDLE.format(unit=unit, key=pairs[i][0], value=pairs[i][1]) for i in order]
        text, depths = self.haystack.hide(needles, size, random)
        # Moves the random numbers on also where there is one needle.
        (asked,) = random.sample(range(number), 1)
        key, value = pairs[asked]
        return Sample(
            question=QUESTION.format(unit=unit, key=key, context=text),
            prefix=PREFIX.format(unit=unit, key=key),
            key=key,
            answer=value,
            depth=depths[order.index(asked)],
        )


def _value(unit: Unit, random: Random) -> str:
    if unit == "uuid":
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    return str(random.randint(1_000_000, 9_999_999))
