"""Documents one after the other, as one long line of tokens."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Stream(Protocol):
    """What windows are cut from; a folder of token shards is one."""

    @property
    def tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens start … start + count − 1."""
        ...

    def starts(self, start: int, count: int) -> NDArray[Any]:
        """Places among these tokens, counted from `start`, at which documents begin."""
        ...


class ByteStream:
    """Texts in memory; their bytes are the tokens."""

    vocab_size = 256

    def __init__(self, texts: Iterable[str]) -> None:
        documents = [text.encode() for text in texts]
        lengths = [len(document) for document in documents]
        self._starts = np.cumsum([0, *lengths[:-1]])
        self._bytes = np.frombuffer(b"".join(documents), np.uint8)

    @property
    def tokens(self) -> int:
        return len(self._bytes)

    def read(self, start: int, count: int) -> NDArray[np.uint8]:
        return self._bytes[start : start + count]

    def starts(self, start: int, count: int) -> NDArray[np.int64]:
        first, last = np.searchsorted(self._starts, [start, start + count])
        return self._starts[first:last] - start
