"""A report as Markdown, with its pictures in files beside it."""

import re
from collections.abc import Iterator

from gdn2.evals.report.document import (
    Block,
    Cell,
    Document,
    Heading,
    Notes,
    Paragraph,
    Picture,
    Table,
)

MARKS = {"": "{}", "best": "**{}**", "second": "<ins>{}</ins>"}


def to_markdown(document: Document) -> str:
    """The text of a file."""
    parts = [f"# {_plain(document.title)}", *map(_block, document.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Notes(title, items):
            return "\n".join([f"{_plain(title)}:\n", *(f"- {_plain(item)}" for item in items)])
        case Picture(name, caption, _):
            return f"![{_plain(caption)}]({name})\n\n{_plain(caption)}"
        case Table():
            return "\n".join(_table(block))


def _table(table: Table) -> Iterator[str]:
    """Heads are one line here, and a section is a row without numbers."""
    titles = [" ".join(filter(None, head)) for head in table.head]
    yield _row([table.corner, *titles])
    yield _row(["---", *("---:" for _ in titles)], escape=False)
    for section in table.sections:
        if section.title:
            yield _row([f"*{_plain(section.title)}*", *("" for _ in titles)], escape=False)
        for name, cells in section.rows:
            yield _row([_plain(name), *map(_cell, cells)], escape=False)


def _row(cells: list[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(map(_plain, cells) if escape else cells)} |"


def _cell(cell: Cell) -> str:
    return MARKS[cell.mark].format(_plain(cell.text))


def _plain(text: str) -> str:
    """Text on one line, in which nothing is markup."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", line)
