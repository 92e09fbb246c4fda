"""What a task asks of a model, and what it makes of the answers; no model, and when scoring no data, are needed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from gdn2.data.tokenizers import Tokenizer

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
Scores: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Request:
    """One thing to generate or to score; `metadata` has all that scoring an answer needs."""

    task: str
    number: int  # within the task
    kind: Literal["generate", "loglikelihood", "rolling"]
    context: str
    continuation: str = ""
    until: tuple[str, ...] = ()  # generation ends before any of these
    max_tokens: int = 0
    metadata: dict[str, JSON] = field(default_factory=dict)


Scored: TypeAlias = tuple[Request, Scores]


class Task(Protocol):
    """A source of requests that knows what a right answer is."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def protocol(self) -> str:
        """How prompts are made and scored, and in what that differs from the original, in a sentence or two."""
        ...

    def requests(self, tokenizer: Tokenizer, limit: int | None = None) -> Iterator[Request]:
        """All requests in a fixed order, or those of the first `limit` samples."""
        ...

    def score(self, request: Request, answer: str) -> Scores: ...

    def summarise(self, scored: Iterable[Scored]) -> dict[str, JSON]: ...


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit: got {limit}, expected a positive number or none")


def percent(scores: Iterable[float]) -> float:
    """The mean of scores from 0 to 1, times 100."""
    values = list(scores)
    if not values:
        raise ValueError("scores: got none, expected at least one")
    return 100 * sum(values) / len(values)


def number_of(request: Request, name: str) -> float:
    """A number of the request's metadata."""
    value = request.metadata.get(name)
    if not isinstance(value, int | float):
        raise ValueError(
            f"{request.task} {request.number}: got {name} {value!r}, expected a number"
        )
    return value
