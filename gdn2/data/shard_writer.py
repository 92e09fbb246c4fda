"""The write side of token shards: a shard exists whole under its name, or not at all."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from gdn2.data.shards import DTYPES, START, STARTS, TOKENS, Shard

PARTIAL = ".partial"


class ShardWriter:
    """Documents in, numbered shards out."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, first: int = 0) -> None:
        """Write to a folder; a shard is closed by the document that brings it to `shard_tokens`."""
        self._folder, self._dtype = folder, DTYPES[dtype]
        self._shard_tokens, self._number = shard_tokens, first
        self._open()

    def add(self, document: np.ndarray) -> Shard | None:
        """Append the tokens of a document; the shard, if it is full now and whole on disk."""
        data = document.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._starts.append(self._tokens)
        self._tokens += len(document)
        return self.finish() if self._tokens >= self._shard_tokens else None

    def finish(self) -> Shard | None:
        """Close the shard that is being written, if it holds anything."""
        if not self._starts:
            return None
        _synchronise(self._file)
        starts = np.array(self._starts, START).tobytes()
        self._file.close()
        self._partial.rename(self._name(TOKENS))
        write_whole(self._name(STARTS), starts)  # and with it, the folder's new names
        shard = Shard(
            self._name("").name,
            self._tokens,
            len(self._starts),
            self._hash.hexdigest(),
            hashlib.sha256(starts).hexdigest(),
        )
        self._number += 1
        self._open()
        return shard

    def close(self) -> None:
        """Forget what is not finished."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _open(self) -> None:
        self._starts: list[int] = []
        self._tokens, self._hash = 0, hashlib.sha256()
        self._partial = self._name(TOKENS + PARTIAL)
        self._file = self._partial.open("wb")

    def _name(self, suffix: str) -> Path:
        return self._folder / f"{self._number:05d}{suffix}"


def write_whole(file: Path, data: bytes) -> None:
    """Write a file so that it has either its old content or all of the new, whatever happens."""
    partial = file.with_name(file.name + PARTIAL)
    with partial.open("wb") as opened:
        opened.write(data)
        _synchronise(opened)
    partial.rename(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(file: Path, record: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(record, indent=1) + "\n").encode())


def _synchronise(opened: Any) -> None:
    opened.flush()
    os.fsync(opened.fileno())
