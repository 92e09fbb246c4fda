"""The report's tables hold the paper's numbers, put ours beside them, and are safe to show."""

import hashlib
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gdn2.bench.training_paper import PRESETS, SHAPES, paper_speed
from gdn2.evals.report.document import (
    Block,
    Cell,
    Document,
    Heading,
    Notes,
    Paragraph,
    Picture,
    Section,
    Table,
)
from gdn2.evals.report.evaluation import Evaluation, read_evaluation
from gdn2.evals.report.identity import family, section, title, variant
from gdn2.evals.report.markdown import to_markdown
from gdn2.evals.report.page import to_html
from gdn2.evals.report.paper import (
    FULL,
    HYBRID,
    RECURRENT,
    SCALAR_ERASE,
    SCALAR_WRITE,
    TABLES,
    WIDE_ERASE,
    Column,
    PaperTable,
)
from gdn2.evals.report.tables import MISSING, marked, with_ours
from gdn2.models.config import ModelConfig
from gdn2.models.presets import preset
from tests.evals.report_cases import NASTY, results

TEX = Path(__file__).parents[3] / "shared" / "paper" / "gated-deltanet-2.tex"
LABELS = {
    2: "tab_commonsense_results",
    3: "tab_niah_results",
    4: "tab_recall_results",
    5: "tab_ablation",
}
CHECKSUM = "c76e9de002455260d9f53c1f34d2ca98a9861c8de14c6c438c8585ad18909eb8"
with_paper = pytest.mark.skipif(not TEX.is_file(), reason="the paper's source is not here")
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: f"table {table.number}")


def tex_table(number: int) -> tuple[str, str]:
    """Head and body of a table in the paper's source."""
    text = TEX.read_text()
    end = text.index(f"\\label{{{LABELS[number]}}}")
    begin = text.rindex("\\begin{tabular}", 0, end)
    head, _, body = text[begin : text.index("\\end{tabular}", begin)].partition("\\midrule")
    return head, body


def tex_rows(number: int) -> list[list[str]]:
    """Cells of the rows with numbers."""
    rows = (row.split("&") for row in tex_table(number)[1].split("\\\\"))
    return [[cell.strip() for cell in row] for row in rows if len(row) > 1]


def tex_mark(cell: str) -> str:
    if re.search(r"\\(textbf|niahbest)", cell):
        return "best"
    return "second" if re.search(r"\\(underline|niahsecond)", cell) else ""


def tex_number(cell: str) -> float:
    (number,) = re.findall(r"\d+\.\d+", cell)
    return float(number)


def own_rows(table: PaperTable) -> list[tuple[str, tuple[float, ...]]]:
    return [row for part in table.sections.values() for row in part.items()]


@with_paper
@every_table
def test_every_number_and_mark_is_the_papers(table: PaperTable) -> None:
    printed = tex_rows(table.number)
    rows = own_rows(table)
    assert len(printed) == len(rows)
    shown = [row for part in with_ours(table, []).sections for row in part.rows]
    for cells, (name, values), (shown_name, shown_cells) in zip(printed, rows, shown, strict=True):
        if table.number < 5:
            assert name in cells[0]
        else:
            assert re.split(r"[ ,]", name)[0] in cells[0]
        assert [tex_number(cell) for cell in cells[1:]] == list(values)
        assert shown_name == name
        assert [cell.text for cell in shown_cells] == [
            re.findall(r"\d+\.\d+", c)[0] for c in cells[1:]
        ]
        assert [cell.mark for cell in shown_cells] == [tex_mark(cell) for cell in cells[1:]]


@with_paper
@every_table
def test_columns_are_the_papers(table: PaperTable) -> None:
    _, *names = re.findall(r"\\textbf\{([^}]*)\}", tex_table(table.number)[0])
    tops = [column.top for column in table.columns]
    if table.number == 3:
        groups = list(dict.fromkeys(tops))
        assert names == groups + [column.bottom for column in table.columns]
    else:
        assert names == tops


@with_paper
def test_the_figure_is_the_papers() -> None:
    text = TEX.read_text()
    curves = re.findall(r"coordinates \{\s*(\(1,[^}]*?)\s*\}", text)
    assert len(curves) == len(PRESETS)
    for name, curve in zip(PRESETS, curves, strict=True):
        printed = [float(speed) for _, speed in re.findall(r"\((\d),([\d.]+)\)", curve)]
        found = [paper_speed(name, shape) for shape in SHAPES]
        assert found == pytest.approx([1e3 * speed for speed in printed])


def test_no_number_has_changed_since_it_was_compared() -> None:
    content = [[table.number, [list(row) for row in own_rows(table)]] for table in TABLES]
    assert hashlib.sha256(json.dumps(content).encode()).hexdigest() == CHECKSUM


@pytest.mark.parametrize(("index", "first"), [(0, 2), (2, 0)])
def test_averages_are_means_of_their_columns(index: int, first: int) -> None:
    for name, values in own_rows(TABLES[index]):
        mean = sum(values[first:-1]) / len(values[first:-1])
        assert mean == pytest.approx(values[-1], abs=0.0051), name


def column(*, lower: bool = False, digits: int = 1) -> Column:
    return Column("x", "", "x", digits, is_lower_better=lower)


def marks(values: list[float | None], **options: Any) -> list[tuple[str, str]]:
    seconds = options.pop("seconds", True)
    rows = [(str(i), [value]) for i, value in enumerate(values)]
    found = marked([column(**options)], rows, seconds=seconds)
    assert [name for name, _ in found] == [name for name, _ in rows]
    return [(cell.text, cell.mark) for _, (cell,) in found]


def test_marks_follow_the_printed_numbers() -> None:
    best, second = "best", "second"
    assert marks([1.0, 3.0, 2.0]) == [("1.0", ""), ("3.0", best), ("2.0", second)]
    assert marks([1.0, 3.0], lower=True) == [("1.0", best), ("3.0", second)]
    assert marks([3.04, 3.01, 2.0, 2.0])[:2] == [("3.0", best)] * 2
    assert marks([3.04, 3.01, 2.0, 2.0])[2:] == [("2.0", second)] * 2
    assert marks([1.0, 3.0], seconds=False) == [("1.0", ""), ("3.0", best)]
    assert marks([None, 3.0]) == [(MISSING, ""), ("3.0", "")]
    assert marks([float("inf"), 3.0, 4.0], lower=True) == [
        ("inf", ""),
        ("3.0", best),
        ("4.0", second),
    ]
    assert marks([]) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gdn2-15m", ("Gated DeltaNet-2", RECURRENT, FULL)),
        ("gdn2-15m-hybrid", ("Gated DeltaNet-2", HYBRID, None)),
        ("gdn2-scalar-erase-15m", ("Gated DeltaNet-2, variant", RECURRENT, SCALAR_ERASE)),
        ("gdn2-scalar-write-15m", ("Gated DeltaNet-2, variant", RECURRENT, SCALAR_WRITE)),
        ("gdn2-erase-range-2-15m", ("Gated DeltaNet-2, variant", RECURRENT, WIDE_ERASE)),
        ("kda-15m", ("KDA", RECURRENT, None)),
        ("gdn-15m-hybrid", ("Gated DeltaNet", HYBRID, None)),
        ("deltanet-15m", ("DeltaNet", RECURRENT, None)),
        ("mamba2-15m", ("Mamba-2", RECURRENT, None)),
        ("mamba3-siso-15m-hybrid", ("Mamba-3 (SISO)", HYBRID, None)),
        ("mamba3-mimo-15m", ("Mamba-3 (MIMO)", RECURRENT, None)),
        ("transformer-15m", ("Transformer", HYBRID, None)),
    ],
)
def test_models_are_recognised(name: str, expected: tuple[str, str, str | None]) -> None:
    config = preset(name)
    assert (family(config), section(config), variant(config)) == expected
    assert title(config) == expected[0] + ", hybrid" * name.endswith("hybrid")


def read(name: str, config: ModelConfig, **options: Any) -> Evaluation:
    return read_evaluation(results(name, config, **options), Path("results.json"))


def row_of(table: Table, name: str) -> tuple[str, list[str]]:
    """The section of a row, and its texts."""
    ((title, cells),) = [
        (part.title, cells) for part in table.sections for row, cells in part.rows if row == name
    ]
    return title, [cell.text for cell in cells]


def test_our_rows_have_their_numbers_in_the_papers_columns() -> None:
    """Column i of the paper's Tables 2 and 4 together holds i."""
    ours = [read("a", preset("gdn2-15m")), read("b", preset("kda-15m-hybrid"), shift=0.5)]
    two, three, four, five = (with_ours(table, ours) for table in TABLES)
    title, texts = row_of(two, "Gated DeltaNet-2: a, step 40")
    assert title == "Recurrent models, ours"
    assert texts == [f"{i}.00" for i in range(11)] + ["6.00"]
    assert row_of(two, "KDA: b, step 40")[0] == "Attention or hybrid models, ours"
    _, texts = row_of(three, "Gated DeltaNet-2: a, step 40")
    assert texts == ["10.2", "20.5", "41.0", "81.9"] * 2 + ["10.2", "20.5", "41.0"] * 2
    _, texts = row_of(four, "KDA: b, step 40")
    assert texts == [f"{i}.50" for i in range(11, 17)] + ["14.00"]
    title, texts = row_of(five, f"{FULL}: a, step 40")
    assert title == "Variants, ours"
    assert texts == ["0.00", "1.00", "6.00", "41.0", "20.5", "41.0", "13.50"]
    assert not any("KDA" in name for part in five.sections for name, _ in part.rows)


def test_what_is_missing_is_a_dash_and_ours_are_compared_among_themselves() -> None:
    config = preset("gdn2-15m")
    part = results("part", config, shift=1.0, needles=False)
    del part["tasks"]["boolq"]
    ours = [read("whole", config), read_evaluation(part, Path("p"))]
    two, three = with_ours(TABLES[0], ours), with_ours(TABLES[1], ours)
    title, texts = row_of(two, "Gated DeltaNet-2: part, step 40")
    assert texts[-2:] == [MISSING, MISSING]
    (own,) = (part for part in two.sections if part.title == title)
    (_, whole), (_, other) = own.rows
    assert [cell.mark for cell in whole[:3]] == ["best", "best", "second"]
    assert [cell.mark for cell in other[:3]] == ["second", "second", "best"]
    assert [cell.mark for cell in whole[-2:]] == ["", ""]
    assert not any("part" in name for part in three.sections for name, _ in part.rows)


def test_a_model_that_nothing_tells_has_a_section_of_its_own() -> None:
    record = results("who", preset("gdn2-15m"))
    evaluation = read_evaluation(record | {"config": None}, Path("r"))
    assert row_of(with_ours(TABLES[0], [evaluation]), "who, step 40")[0].startswith(
        "Models of unkn"
    )
    record["model"] |= {"weights": "random", "step": 0}
    assert read_evaluation(record, Path("r")).label == "who, random weights"


def test_notes_say_how_and_give_what_has_no_column() -> None:
    record = results("a", preset("gdn2-15m"))
    about = {"protocol": "carried", "samples": 62, "limit": None}
    record["tasks"]["wikitext_carried"] = {**about, "metrics": {"word_perplexity": 17.256}}
    notes = read_evaluation(record, Path("r")).notes
    assert "piqa: how piqa is asked; 5 samples; only the first 5" in notes
    assert "wikitext_carried: carried; 62 samples; word_perplexity 17.26" in notes
    assert notes[-1] == "other: skipped, no data"


@pytest.mark.parametrize("path", ["model", "tasks", "name", "tasks.piqa.metrics"])
def test_results_that_are_cut_short_are_named(path: str) -> None:
    record = results("a", preset("gdn2-15m"))
    *above, last = path.split(".")
    table = record
    for key in above:
        table = table[key]
    del table[last]
    with pytest.raises(ValueError, match=r"^some/file: got KeyError .*, expected results in form"):
        read_evaluation(record, Path("some/file"))
    record = results("a", preset("gdn2-15m"))
    record["tasks"]["niah_single_1"]["metrics"]["by_length"]["1024"] = 3
    with pytest.raises(ValueError, match=r"^some/file: got TypeError .*, expected results in form"):
        read_evaluation(record, Path("some/file"))


class Reader(HTMLParser):
    """Checks that every element is closed in order, and keeps texts and attributes."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


PNG = b"\x89PNG and more"
BLOCKS: tuple[Block, ...] = (
    Heading(NASTY),
    Paragraph(NASTY),
    Notes(NASTY, (NASTY,)),
    Picture("a.png", NASTY, PNG),
    Table(
        NASTY,
        ((NASTY, ""), (NASTY, NASTY)),
        (Section(NASTY, ((NASTY, (Cell(NASTY), Cell("1", "best"))),)),),
    ),
)


def test_a_page_is_whole_and_shows_text_as_it_is() -> None:
    page = Reader(to_html(Document(NASTY, BLOCKS)))
    names = [tag for tag, _ in page.elements]
    assert "script" not in names
    assert page.texts.count(NASTY) == 13  # title twice; the two equal heads above are one
    ((_, image),) = [element for element in page.elements if element[0] == "img"]
    assert image["alt"] == NASTY
    kind, _, content = str(image["src"]).partition(",")
    assert kind == "data:image/png;base64"
    assert b64decode(content) == PNG


def test_heads_span_their_columns_and_rows_fit() -> None:
    page = to_html(Document("t", (with_ours(TABLES[1], []),)))
    assert re.findall(r'<th scope="col" colspan="(\d)">([\w-]+)', page) == [
        ("4", "S-NIAH-1"),
        ("4", "S-NIAH-2"),
        ("3", "S-NIAH-3"),
        ("3", "MK-NIAH-1"),
    ]
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', page)
    assert len(rows) == 13
    assert all(row.count("<td>") == 14 for row in rows)
    assert "<b>39.2</b>" in page
    assert "<u>32.0</u>" in page


def test_markdown_shows_text_as_it_is() -> None:
    text = to_markdown(Document(NASTY, BLOCKS))
    assert "<script" not in text
    assert text.startswith("# &lt;script>alert('x')&lt;/script> \\| \\*a\\* &amp; \"b\"\n")
    assert "](a.png)" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {4}
    assert lines[-1].endswith(" | **1** |")
    assert "a b" in to_markdown(Document("a\n b", ()))
