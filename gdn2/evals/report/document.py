"""A report before it is written: headings, paragraphs, tables and pictures, whatever the format."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Mark: TypeAlias = Literal["", "best", "second"]


@dataclass(frozen=True)
class Cell:
    text: str
    mark: Mark = ""


@dataclass(frozen=True)
class Section:
    """Rows that belong together: each a name and its cells."""

    title: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True)
class Table:
    corner: str  # above the names of the rows
    head: tuple[tuple[str, str], ...]  # two lines for each column; equal neighbours above are one
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Picture:
    """A PNG; `name` is its file's, beside Markdown."""

    name: str
    caption: str
    content: bytes


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Notes:
    """A list that is folded away where the format can."""

    title: str
    items: tuple[str, ...]


Block: TypeAlias = Heading | Paragraph | Table | Picture | Notes


@dataclass(frozen=True)
class Document:
    title: str
    blocks: tuple[Block, ...]
