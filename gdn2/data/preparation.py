"""What a preparation has finished, on disk, so that the next call goes on from there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gdn2.data.byte_tokenizer import JSON
from gdn2.data.locking import locked
from gdn2.data.shard_writer import PARTIAL, write_json
from gdn2.data.shards import INDEX, Shard, read_index
from gdn2.data.sources import Place
from gdn2.data.tokenizer_config import CONFIG
from gdn2.data.tokenizers import SENTENCEPIECE

START = Place(0, 0)
PROGRESS = "progress.json"


@dataclass
class Record:
    """Finished shards, the place after them, and the items skipped before it."""

    folder: Path
    settings: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)
    place: Place = START
    skipped: int = 0

    @classmethod
    def resume(cls, folder: Path, settings: dict[str, Any]) -> "Record":
        """The record of a folder; a new one where no shard is finished, a ValueError where one of other settings is."""
        file = folder / PROGRESS
        if not file.exists():
            return cls._begin(folder, settings)
        try:
            data = json.loads(file.read_bytes())
            shards = [Shard(**shard) for shard in data["shards"]]
            record = cls(folder, settings, shards, Place(*data["place"]), data["skipped"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}: damaged, expected the record of a preparation") from None
        if not shards:  # most likely the settings were wrong, and these correct them
            return cls._begin(folder, settings)
        _check_same(folder, data, settings)
        return record

    @classmethod
    def _begin(cls, folder: Path, settings: dict[str, Any]) -> "Record":
        """A new record; a tokenizer that an earlier attempt has left would be read in place of the right one."""
        for name in (JSON, SENTENCEPIECE, CONFIG):
            (folder / name).unlink(missing_ok=True)
        record = cls(folder, settings)
        record.save()
        return record

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def add(self, shard: Shard | None, place: Place, skipped: int) -> None:
        """Note that everything before a place is in shards, this one the last if there is one."""
        self.shards += [] if shard is None else [shard]
        self.place, self.skipped = place, skipped
        self.save()

    def save(self) -> None:
        shards = [asdict(shard) for shard in self.shards]
        progress = {"place": self.place, "skipped": self.skipped, "shards": shards}
        write_json(self.folder / PROGRESS, {**self.settings, **progress})

    def finish(self, dtype: str, vocab_size: int) -> None:
        """Write the index, with which the folder is whole."""
        if not self.shards:
            raise ValueError("inputs: got no text at all, expected at least one document")
        index = {
            **self.settings,
            "dtype": dtype,
            "vocab_size": vocab_size,
            "tokens": self.tokens,
            "documents": self.documents,
            "skipped": self.skipped,
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_json(self.folder / INDEX, index)
        (self.folder / PROGRESS).unlink()


def is_finished(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a folder is whole; a ValueError if it was prepared with other settings."""
    if not (folder / INDEX).exists():
        return False
    _check_same(folder, read_index(folder), settings)
    (folder / PROGRESS).unlink(missing_ok=True)
    return True


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Make a folder, or take over a preparation's, and keep others from preparing into it meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise ValueError(f"out: got {reason}, expected a folder to write to") from None
    names = {file.name for file in folder.iterdir()} - {PROGRESS + PARTIAL}
    if names and not names & {INDEX, PROGRESS}:
        held = f"{folder} with {min(names)} in it"
        raise ValueError(f"out: got {held}, expected a new folder, or a preparation's")
    with locked(folder, "out"):
        for partial in folder.glob(f"*{PARTIAL}"):
            partial.unlink()
        yield


def _check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        was, now = old.get(name), value
        if name == "inputs":
            was, now = _first_difference(was, now)
        if was != now:
            said = f"{folder} was prepared with {name} {was}, got {now}"
            raise ValueError(f"out: {said}; expected the same, or another folder")


def _first_difference(was: Any, now: list[Any]) -> tuple[Any, Any]:
    """The first inputs that differ."""
    pairs = zip_longest(was if isinstance(was, list) else [], now, fillvalue="no more")
    return next((pair for pair in pairs if not _is_same_input(*pair)), (None, None))


def _is_same_input(was: Any, now: Any) -> bool:
    """Whether an input is the recorded one; folders made before inputs had checksums do without."""
    if isinstance(was, dict) and isinstance(now, dict) and "checksum" not in was:
        now = {name: value for name, value in now.items() if name != "checksum"}
    return bool(was == now)
