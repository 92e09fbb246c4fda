"""A report as one HTML page that needs nothing beside it: styles and pictures are inside."""

from base64 import b64encode
from collections.abc import Iterator
from html import escape
from itertools import groupby

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

MARKS = {"": "{}", "best": "<b>{}</b>", "second": "<u>{}</u>"}
STYLE = """
:root { color-scheme: light dark; --line: #8886; --shade: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
thead th[colspan] { text-align: center; }
th:first-child { text-align: left; min-width: 8rem; max-width: 16rem; white-space: normal; overflow-wrap: anywhere; }
th:first-child { position: sticky; left: 0; background: Canvas; }
tbody th { font-weight: normal; }
th.section { background: var(--shade); font-style: italic; text-align: left; white-space: nowrap; }
figure { margin: 1.5rem 0; overflow-x: auto; } img { max-width: max(100%, 44rem); height: auto; background: white; }
figcaption, details { font-size: .9rem; } summary { cursor: pointer; }
"""


def to_html(document: Document) -> str:
    """The text of a file."""
    title = escape(document.title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(map(_block, document.blocks))
        + "\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Notes(title, items):
            listed = "".join(f"<li>{escape(item)}</li>" for item in items)
            return f"<details><summary>{escape(title)}</summary><ul>{listed}</ul></details>"
        case Picture(_, caption, content):
            source = f"data:image/png;base64,{b64encode(content).decode()}"
            said = escape(caption)
            image = f'<img alt="{said}" src="{source}">'
            return f"<figure>{image}<figcaption>{said}</figcaption></figure>"
        case Table():
            return f'<div class="scroll"><table>{"".join(_table(block))}</table></div>'


def _table(table: Table) -> Iterator[str]:
    tops = [(top, len(list(same))) for top, same in groupby(table.head, lambda head: head[0])]
    two_lines = any(bottom for _, bottom in table.head)
    corner = f'<th scope="col"{" rowspan=2" * two_lines}>{escape(table.corner)}</th>'
    yield f"<thead><tr>{corner}{''.join(_top(*top) for top in tops)}</tr>"
    if two_lines:
        yield f"<tr>{''.join(f'<td>{escape(bottom)}</td>' for _, bottom in table.head)}</tr>"
    yield "</thead><tbody>"
    for section in table.sections:
        if section.title:
            span = f'colspan="{len(table.head) + 1}"'
            yield f'<tr><th class="section" {span}>{escape(section.title)}</th></tr>'
        for name, cells in section.rows:
            yield f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>'
    yield "</tbody>"


def _top(text: str, columns: int) -> str:
    span = f' colspan="{columns}"' if columns > 1 else ""
    return f'<th scope="col"{span}>{escape(text)}</th>'


def _cell(cell: Cell) -> str:
    return f"<td>{MARKS[cell.mark].format(escape(cell.text))}</td>"
