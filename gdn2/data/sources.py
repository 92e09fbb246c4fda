"""Where text comes from: files, folders of files, datasets of the Hugging Face hub, Python's standard library.

Every input becomes parts, every part numbered items, in an order that never changes. So a place in the text is two
numbers, and reading can go on from any place.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gdn2.data.opening import COMPRESSED
from gdn2.data.parts import HubDataset, JsonLines, Library, ParquetFile, Part, TextFile

HUB, LIBRARY = "hf://", "python"
KINDS: dict[str, type[TextFile | JsonLines | ParquetFile]] = {
    ".txt": TextFile,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonLines,  # what many datasets call their JSON lines
    ".parquet": ParquetFile,
}


class Place(NamedTuple):
    """A part, and how many of its items lie before."""

    part: int
    item: int


class Document(NamedTuple):
    """A text, the place after it, and how many bytes were read and items skipped up to there."""

    text: str
    after: Place
    read: int
    skipped: int


def open_parts(
    inputs: Sequence[str],
    *,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    without: Path | None = None,
) -> list[Part]:
    """The parts of inputs, each a file, a folder, "hf://name" or "python".

    Args:
        inputs: a folder is searched for files of known kinds, in the order of their paths.
        field: where JSON lines, parquet files and datasets hold the text.
        config: which configuration of a dataset, where it has several.
        split: which split of a dataset.
        without: a folder that is passed over where a search comes by.
    """
    parts: list[Part] = []
    for given in inputs:
        if not given.removeprefix(HUB):  # as a path, nothing at all would be the current folder
            raise ValueError(
                f"inputs: got {given!r}, expected a file, a folder, {HUB}NAME or {LIBRARY}"
            )
        if given.startswith(HUB):
            parts.append(HubDataset(given.removeprefix(HUB), config, split, field))
        elif given == LIBRARY:
            parts.append(Library())
        else:
            parts += _files(Path(given), field, without)
    return parts


def read_documents(
    parts: Sequence[Part], start: Place, skipped: int = 0, *, skip_bad: bool = False
) -> Iterator[Document]:
    """The texts of parts from a place on.

    A bad item is a ValueError, or with `skip_bad` an empty text, and one more on top of those skipped before.
    """
    before = sum(part.size for part in parts[: start.part])
    for i in range(start.part, len(parts)):
        for item in parts[i].items(start.item if i == start.part else 0):
            if item.mistake is not None and not skip_bad:
                raise ValueError(item.mistake)
            skipped += item.mistake is not None
            yield Document(item.text, Place(i, item.number + 1), before + item.read, skipped)
        before += parts[i].size


def _files(path: Path, field: str, without: Path | None) -> list[Part]:
    files = {path.name: path}
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*"))
        passed = _below(path, without)
        shown = (name for name in names if not f"/{name}".count("/."))
        files = {name: path / name for name in shown if not name.startswith(passed)}
    kinds = {name: _kind(file) for name, file in files.items() if file.is_file()}
    parts: list[Part] = [
        kind(files[name], name, field) for name, kind in kinds.items() if kind is not None
    ]
    if not parts:
        what = "no file of a known kind" if path.exists() else "no such file or folder"
        known = f"{', '.join(KINDS)} (all but the last also {' or '.join(COMPRESSED)})"
        raise ValueError(f"input {str(path)!r}: {what}, expected {known}, {HUB}NAME or {LIBRARY}")
    return parts


def _below(path: Path, inner: Path | None) -> tuple[str, ...]:
    """How names of files in an inner folder begin, as seen from a folder; none where it does not lie below."""
    root, inner = path.resolve(), inner and inner.resolve()
    return (f"{inner.relative_to(root).as_posix()}/",) if inner and root in inner.parents else ()


def _kind(file: Path) -> type[TextFile | JsonLines | ParquetFile] | None:
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        inner = KINDS.get(Path(file.stem).suffix.lower())
        return inner if inner is not ParquetFile else None
    return KINDS.get(suffix)
