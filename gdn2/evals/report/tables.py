"""The paper's tables with our rows beside theirs, the best and the second best marked as in the paper."""

from collections.abc import Iterable, Sequence
from itertools import islice
from math import isfinite
from typing import TypeAlias

from gdn2.evals.report.document import Cell, Mark, Section, Table
from gdn2.evals.report.evaluation import Evaluation
from gdn2.evals.report.identity import family, section, variant
from gdn2.evals.report.paper import Column, PaperTable

MISSING = "–"
UNKNOWN, VARIANTS = "Models of unknown kind", "Variants"
Row: TypeAlias = tuple[str, Sequence[float | None]]


def with_ours(table: PaperTable, ours: Iterable[Evaluation]) -> Table:
    """A section of ours after each of the paper's; rows of ours are only compared with each other."""
    paper, own = _paper_sections(table), _own_sections(table, ours)
    titles = [*paper, *(title for title in own if title not in paper)]
    sections = [whose[title] for title in titles for whose in (paper, own) if title in whose]
    return Table("Model", tuple((c.top, c.bottom) for c in table.columns), tuple(sections))


def _paper_sections(table: PaperTable) -> dict[str, Section]:
    titles = list(table.sections)
    found = {}
    for contest in [titles] if table.is_one_contest else [[title] for title in titles]:
        rows = [row for title in contest for row in table.sections[title].items()]
        cells = iter(marked(table.columns, rows, seconds=not table.is_one_contest))
        for title in contest:
            own = islice(cells, len(table.sections[title]))
            found[title] = Section(f"{title}, paper", tuple(own))
    return found


def _own_sections(table: PaperTable, ours: Iterable[Evaluation]) -> dict[str, Section]:
    """Rows with at least one number, by the section that they belong to."""
    found: dict[str, list[Row]] = {}
    for evaluation in ours:
        values = [evaluation.measures.get(column.measure) for column in table.columns]
        place = _place(table, evaluation)
        if place is not None and any(value is not None for value in values):
            title, name = place
            found.setdefault(title, []).append((name, values))
    return {
        title: Section(
            f"{title}, ours",
            tuple(marked(table.columns, rows, seconds=not table.is_one_contest)),
        )
        for title, rows in found.items()
    }


def _place(table: PaperTable, evaluation: Evaluation) -> tuple[str, str] | None:
    """The section of a row and its name; None if it belongs elsewhere."""
    config = evaluation.config
    if table.is_one_contest:
        kind = None if config is None else variant(config)
        return None if kind is None else (VARIANTS, f"{kind}: {evaluation.label}")
    if config is None:
        return UNKNOWN, evaluation.label
    return section(config), f"{family(config)}: {evaluation.label}"


def marked(
    columns: Sequence[Column], rows: Sequence[Row], *, seconds: bool = True
) -> list[tuple[str, tuple[Cell, ...]]]:
    """Rows that are compared with each other, column by column, as cells."""
    cells = [
        _column([values[i] for _, values in rows], column, seconds)
        for i, column in enumerate(columns)
    ]
    return [(name, tuple(column[i] for column in cells)) for i, (name, _) in enumerate(rows)]


def _column(values: Sequence[float | None], column: Column, seconds: bool) -> list[Cell]:
    """Numbers that are printed alike share a mark; a number alone has none to be better than."""
    printed = [None if v is None else round(v, column.digits) for v in values]
    known = [v for v in printed if v is not None and isfinite(v)]
    ranking = sorted(set(known), reverse=not column.is_lower_better)
    places: tuple[Mark, ...] = ("best", "second") if seconds else ("best",)
    marks = dict(zip(ranking, places, strict=False)) if len(known) > 1 else {}
    return [
        Cell(MISSING) if v is None else Cell(f"{v:.{column.digits}f}", marks.get(v, ""))
        for v in printed
    ]
