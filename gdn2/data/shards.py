"""A folder of token shards: one stream of token ids in numbered files, with the places where documents start.

`index.json` says what the folder holds. `00000.tokens` are raw little-endian ids, documents one after the other;
`00000.starts` is the start of each document in its shard, as int64. No document spans two shards.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

INDEX, TOKENS, STARTS = "index.json", ".tokens", ".starts"
FORMAT = 1
START = np.dtype("<i8")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_for(vocab_size: int) -> str:
    """The smallest type of ids that holds a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class Shard:
    """One shard, as the index lists it; `file` is the name of both its files without the suffix."""

    file: str
    tokens: int
    documents: int
    tokens_sha256: str
    starts_sha256: str


class TokenFolder:
    """The read side: shards are mapped into memory when they are first touched."""

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        """Open a folder and check its files' sizes; with `verify` their checksums too."""
        self.path = Path(folder)
        index = read_index(self.path)
        try:
            self.tokens: int = index["tokens"]
            self.documents: int = index["documents"]
            self.vocab_size: int = index["vocab_size"]
            self.bos_id: int | None = index["bos_id"]
            self.eos_id: int | None = index["eos_id"]
            self.skipped: int = index["skipped"]
            self._dtype = DTYPES[index["dtype"]]
            self._shards = [Shard(**shard) for shard in index["shards"]]
        except (KeyError, TypeError) as reason:
            raise ValueError(f"{self.path / INDEX}: got a wrong entry ({reason})") from None
        self._ends = np.cumsum([shard.tokens for shard in self._shards])
        if not self._shards or self._ends[-1] != self.tokens:
            raise ValueError(f"{self.path / INDEX}: got {self.tokens} tokens, expected their sum")
        for shard in self._shards:
            self._check(shard, verify)
        self._tokens_of, self._starts_of = cache(self._map_tokens), cache(self._map_starts)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start … start + count − 1 of the whole stream."""
        parts = [self._tokens_of(i)[first:last] for i, first, last, _ in self._pieces(start, count)]
        found = np.concatenate([np.empty(0, self._dtype), *parts])
        if count and (largest := int(found.max())) >= self.vocab_size:
            where = f"{self.path}: tokens {start} … {start + count - 1}"
            raise ValueError(f"{where}: got id {largest}, expected at most {self.vocab_size - 1}")
        return found

    def starts(self, start: int, count: int) -> np.ndarray:
        """Where documents begin among those tokens, counted from `start`; int64, ascending."""
        found = [np.empty(0, START)]
        for i, first, last, before in self._pieces(start, count):
            starts = self._starts_of(i)
            low, high = np.searchsorted(starts, (first, last))
            found.append(starts[low:high] + (before - start))
        return np.concatenate(found)

    def _pieces(self, start: int, count: int) -> list[tuple[int, int, int, int]]:
        """Shards that hold a range: number, first and last place in it, and the tokens before the shard."""
        if start < 0 or count < 0 or start + count > self.tokens:
            asked = f"tokens {start} … {start + count}"
            raise ValueError(f"{self.path}: got {asked}, expected at most 0 … {self.tokens}")
        pieces, end = [], start + count
        i = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            before = int(self._ends[i]) - self._shards[i].tokens
            last = min(end - before, self._shards[i].tokens)
            pieces.append((i, start - before, last, before))
            start, i = before + last, i + 1
        return pieces

    def _map_tokens(self, i: int) -> np.ndarray:
        return np.memmap(self.path / (self._shards[i].file + TOKENS), self._dtype, mode="r")

    def _map_starts(self, i: int) -> np.ndarray:
        file = self.path / (self._shards[i].file + STARTS)
        starts = np.memmap(file, START, mode="r")
        if starts[0] != 0 or starts[-1] >= self._shards[i].tokens or (np.diff(starts) <= 0).any():
            raise ValueError(f"{file}: damaged, expected starts that ascend from 0")
        return starts

    def _check(self, shard: Shard, verify: bool) -> None:
        expected = {
            TOKENS: (shard.tokens * self._dtype.itemsize, shard.tokens_sha256),
            STARTS: (shard.documents * START.itemsize, shard.starts_sha256),
        }
        for suffix, (size, sha256) in expected.items():
            file = self.path / (shard.file + suffix)
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                said = "no file" if found is None else f"{found} bytes"
                raise ValueError(f"{file}: got {said}, expected {size} bytes")
            if verify and _sha256(file) != sha256:
                raise ValueError(f"{file}: damaged, its checksum is not that of {INDEX}")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_index(folder: Path) -> dict[str, Any]:
    """What a folder holds, as its index says."""
    file = folder / INDEX
    try:
        index = json.loads(file.read_bytes())
    except OSError as reason:
        said = reason.strerror
        raise ValueError(f"{file}: {said}, expected a folder made by gdn2 prepare") from None
    except ValueError:
        raise ValueError(f"{file}: damaged, expected JSON") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{file}: got another format, expected version {FORMAT}")
    return index
