"""Streams and folders of known tokens."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gdn2.data.shard_writer import ShardWriter, write_json
from gdn2.data.shards import FORMAT, INDEX


def seconds(call: Callable[[], object]) -> float:
    """The best of three times, so that a machine that is busy for a moment does not count."""

    def once() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return min(once() for _ in range(3))


class Counting:
    """Token i of the stream is i, so that a row shows where it was cut."""

    def __init__(self, tokens: int, starts: tuple[int, ...] = (0,)) -> None:
        self.tokens = self.vocab_size = tokens
        self._starts = np.array(starts)

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        assert 0 <= start <= start + count <= self.tokens
        return np.arange(start, start + count)

    def starts(self, start: int, count: int) -> NDArray[np.int64]:
        inside = (self._starts >= start) & (self._starts < start + count)
        return self._starts[inside] - start


def write_folder(folder: Path, lengths: list[int], shard_tokens: int = 100) -> Path:
    """Token shards of documents of these lengths; token i of the stream is i."""
    folder.mkdir()
    writer = ShardWriter(folder, "uint16", shard_tokens)
    tokens = np.arange(sum(lengths))
    shards = [writer.add(document) for document in np.split(tokens, np.cumsum(lengths)[:-1])]
    shards.append(writer.finish())
    writer.close()
    index = {
        "format": FORMAT,
        "dtype": "uint16",
        "vocab_size": len(tokens),
        "bos_id": None,
        "eos_id": None,
        "skipped": 0,
        "shards": [asdict(shard) for shard in shards if shard is not None],
        "tokens": len(tokens),
        "documents": len(lengths),
    }
    write_json(folder / INDEX, index)
    return folder
