"""Rows of evaluation data: from a file, or from the Hugging Face hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdn2.data.extras import need
from gdn2.data.opening import COMPRESSED, Opened

Row = dict[str, Any]
Kind = type | tuple[type, ...]  # of a field: one, or one of several
SUFFIXES = (".jsonl", *(f".jsonl{packed}" for packed in COMPRESSED))


def read_text(path: Path) -> str:
    """The text of a file, which may be compressed."""
    try:
        with Opened(path) as file:
            text = file.content.read().decode()
    except (OSError, UnicodeDecodeError) as reason:
        raise ValueError(f"{path}: got {reason}, expected a file of UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{path}: got an empty file, expected text")
    return text


def read_rows(path: Path) -> list[Row]:
    """The objects of a file with one in each line of JSON."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as reason:
                raise ValueError(
                    f"{path}, line {number}: got {reason}, expected an object of JSON"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number}: got a {type(row).__name__}, expected an object of JSON"
                )
            rows.append(row)
    return rows


def find_rows(place: Path, stems: Sequence[str]) -> Path:
    """The file itself, or that of a folder with the first of these names."""
    if not place.is_dir():
        return place
    names = [stem + suffix for stem in stems for suffix in SUFFIXES]
    for name in names:
        if (place / name).is_file():
            return place / name
    raise ValueError(f"{place}: got a folder without any of these, expected {' or '.join(names)}")


def hub_rows(dataset: str, split: str) -> list[Row]:
    """The rows of a dataset on the Hugging Face hub, which the library keeps in its cache."""
    datasets = need("datasets", "data", dataset)
    try:
        return list(datasets.load_dataset(dataset, split=split))
    except Exception as reason:  # the library raises errors of many libraries
        line = " ".join(str(reason).split())
        raise ValueError(
            f"{dataset}: got {line}, expected a dataset of the Hugging Face hub"
        ) from None


def text_field(row: Row, name: str, where: str) -> str:
    """A field that must be a string."""
    return field_of(row, name, where, str, "a string")


def list_field(row: Row, name: str, where: str) -> list[Any]:
    """A field that must be a list with something in it."""
    value: list[Any] = field_of(row, name, where, list, "a list")
    if not value:
        raise ValueError(f"{where}, field {name!r}: got an empty list, expected something in it")
    return value


def field_of(row: Row, name: str, where: str, kind: Kind, words: str) -> Any:
    """A field that must be there and of a kind, or of one of several."""
    if name not in row:
        raise ValueError(
            f"{where}: got fields {', '.join(row) or '(none)'}, expected also {name!r}"
        )
    if not isinstance(row[name], kind):
        raise ValueError(f"{where}, field {name!r}: got {row[name]!r}, expected {words}")
    return row[name]
