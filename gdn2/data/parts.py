"""The kinds of text inputs, each a list of numbered items that can be read from any of them on."""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gdn2.data import corpus
from gdn2.data.extras import need
from gdn2.data.opening import Opened

PARQUET_ROWS = 256  # read at once
END = 2**19  # bytes at each end of a file that its checksum is of
BYTE_ORDER_MARK = "\N{BYTE ORDER MARK}"  # before files that some editors write; no part of the text


class Item(NamedTuple):
    """One line or row: a text, or what is wrong with it; and how many bytes of the part were read by then."""

    number: int
    text: str
    mistake: str | None
    read: int


class Part(Protocol):
    """A file, or what is read like one."""

    @property
    def name(self) -> str:
        """What the part is called, wherever it lies."""
        ...

    @property
    def size(self) -> int:
        """Its bytes; 0 where nobody knows."""
        ...

    @property
    def checksum(self) -> str | None:
        """What tells it from another of its name and size, wherever it lies; None where only they do."""
        ...

    def items(self, first: int) -> Iterator[Item]:
        """Its items from number `first` on."""
        ...


class File:
    """What files have in common; `name` is their path within the folder that was given."""

    def __init__(self, path: Path, name: str, field: str) -> None:
        self.path, self.name, self.field = path, name, field
        self.size = path.stat().st_size

    @property
    def checksum(self) -> str:
        """A checksum of both ends alone, since files may hold terabytes."""
        found = blake2b(digest_size=8)
        with self.path.open("rb") as file:
            found.update(file.read(END))
            file.seek(max(file.tell(), self.size - END))
            found.update(file.read(END))
        return found.hexdigest()


class TextFile(File):
    """A plain text, which is one document."""

    def items(self, first: int) -> Iterator[Item]:
        if first > 0:
            return
        with Opened(self.path) as opened:
            data = opened.content.read()
        try:
            text, line = data.decode(), 0
        except UnicodeDecodeError as reason:
            text, line = "", data.count(b"\n", 0, reason.start) + 1
        mistake = f"{self.path}, line {line}: got text that is not UTF-8" if line else None
        yield Item(0, text.removeprefix(BYTE_ORDER_MARK), mistake, self.size)


class JsonLines(File):
    """A JSON object on each line; blank lines are none."""

    def items(self, first: int) -> Iterator[Item]:
        with Opened(self.path) as opened:
            for number, line in enumerate(opened.content):
                if number >= first and not line.isspace():
                    where = f"{self.path}, line {number + 1}"
                    yield _item(number, opened.read, where, self._text, line)

    def _text(self, line: bytes) -> str:
        decoded = line.decode()
        try:
            record = json.loads(decoded.removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError) as reason:
            raise ValueError(f"got invalid JSON ({reason}), expected an object") from None
        return _field_of(record, self.field)


class ParquetFile(File):
    """A table with the texts in one column."""

    def items(self, first: int) -> Iterator[Item]:
        arrow = need("pyarrow", "data", str(self.path))
        table = need("pyarrow.parquet", "data", str(self.path))
        try:
            with table.ParquetFile(self.path) as file:
                for number, value in self._values(file, first):
                    where = f"{self.path}, row {number + 1}"
                    read = self.size * (number + 1) // file.metadata.num_rows
                    yield _item(number, read, where, self._text, value)
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as reason:
            if isinstance(reason, OSError) and reason.errno is not None:
                raise  # the disk's, and not the library's word for bytes that it cannot read
            line = " ".join(str(reason).split())
            raise ValueError(f"{self.path}: damaged ({line}), expected a parquet file") from None

    def _text(self, value: Any) -> str:
        return _checked(value.as_py(), self.field)

    def _values(self, file: Any, first: int) -> Iterator[tuple[int, Any]]:
        if self.field not in file.schema_arrow.names:
            known = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{self.path}: no column {self.field!r}, expected one of {known}")
        start = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if start + rows > first:
                number = start
                for batch in file.iter_batches(PARQUET_ROWS, [group], [self.field]):
                    for value in batch.column(0):
                        if number >= first:
                            yield number, value
                        number += 1
            start += rows


class HubDataset:
    """A dataset of the Hugging Face hub, or a folder that the library datasets reads, streamed."""

    size, checksum = 0, None

    def __init__(self, name: str, config: str | None, split: str, field: str) -> None:
        """Name a dataset as on the hub, with @revision behind it to hold on to one version."""
        self._dataset, _, self._revision = name.partition("@")
        self._config, self._split, self._field = config, split, field
        self.name = " ".join(filter(None, (f"hf://{name}", config, split)))

    def items(self, first: int) -> Iterator[Item]:
        library = need("datasets", "data", self.name)
        try:
            rows = library.load_dataset(
                self._dataset,
                self._config,
                split=self._split,
                revision=self._revision or None,
                streaming=True,
            )
            for number, row in enumerate(rows.skip(first), first):
                where = f"{self.name}, row {number + 1}"
                yield _item(number, 0, where, self._text, row)
        except Exception as reason:  # the network's, the hub's and the file formats' mistakes
            line = " ".join(str(reason).split())
            raise ValueError(f"{self.name}: {line or type(reason).__name__}") from None

    def _text(self, row: Any) -> str:
        return _field_of(row, self._field)


class Library:
    """The source text of Python's standard library."""

    name, checksum = "python", None

    def __init__(self) -> None:
        self.size = sum(file.stat().st_size for file in corpus.library_files())

    def items(self, first: int) -> Iterator[Item]:
        read = 0
        for number, text in enumerate(corpus.documents()):
            read += len(text.encode())
            if number >= first:
                yield Item(number, text, None, read)


def _item(number: int, read: int, where: str, text: Callable[[Any], str], raw: Any) -> Item:
    """An item with the text of something raw, or with the mistake that getting it is."""
    try:
        return Item(number, text(raw), None, read)
    except UnicodeError:
        return Item(number, "", f"{where}: got text that is not UTF-8", read)
    except ValueError as mistake:
        return Item(number, "", f"{where}: {mistake}", read)


def _field_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"got {type(record).__name__}, expected an object")
    if field not in record:
        known = ", ".join(map(repr, record)) or "no field"
        raise ValueError(f"no field {field!r}, expected it among {known}")
    return _checked(record[field], field)


def _checked(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {field!r}: got {type(value).__name__}, expected a string")
    value.encode()  # JSON can spell half a surrogate pair, which no text holds
    return value
