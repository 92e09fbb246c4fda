"""`gdn2 report`: the paper's tables and its figure with ours beside them, curves, needles and synthetic tasks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gdn2.bench.report_inputs import Inputs, Run, Speed, SyntheticGrid, read_inputs
from gdn2.bench.speed_report import draw_speeds, left_out, speed_table
from gdn2.bench.synthetic import Cell as GridCell
from gdn2.bench.synthetic_report import by_family, plot
from gdn2.data.extras import need
from gdn2.evals.heatmap import heat_map
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
from gdn2.evals.report.evaluation import Evaluation
from gdn2.evals.report.identity import title
from gdn2.evals.report.markdown import to_markdown
from gdn2.evals.report.page import to_html
from gdn2.evals.report.paper import TABLES
from gdn2.evals.report.tables import MISSING, with_ours
from gdn2.models.run_folder import is_run
from gdn2.models.summary import summarise
from gdn2.training.plot import curve, plot_runs

HTML, MARKDOWN = "report.html", "report.md"
TITLE = "Gated DeltaNet-2: ours beside the paper's"
DIFFERENCES = (
    "The paper's models have 1.3B parameters and have seen 100B tokens of FineWeb-Edu at length 4096. Numbers of "
    "models that are smaller, or were trained on other data, cannot be compared with them, but with each other if "
    "they were trained alike. So within each section the best number of a column is bold and the second best "
    "underlined: among the paper's rows as printed there, and among ours. A dash is a number that we do not have."
)


def write_report(paths: Sequence[Path], out: Path) -> list[Path]:
    """Read what the paths hold and write a folder with an HTML page, and with Markdown and its pictures."""
    need("matplotlib.figure", "plot", "report")
    if out.is_dir() and is_run(out):
        raise ValueError(f"out: got {out}, the folder of a run, expected one of the report's own")
    document = Document(TITLE, tuple(compose(read_inputs(paths))))
    pictures = [block for block in document.blocks if isinstance(block, Picture)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (out / picture.name).write_bytes(picture.content)
        (out / MARKDOWN).write_text(to_markdown(document), encoding="utf-8")
        (out / HTML).write_text(to_html(document), encoding="utf-8")
    except OSError as reason:
        raise ValueError(f"out: got {reason}, expected a folder to write to") from None
    return [out / HTML, out / MARKDOWN]


def compose(inputs: Inputs) -> Iterator[Block]:
    """The parts of the report."""
    yield Paragraph(DIFFERENCES)
    if inputs.runs:
        yield from _runs(inputs.runs)
    for table in TABLES:
        yield Heading(f"Table {table.number}: {table.title}")
        shown = with_ours(table, inputs.evaluations)
        yield shown
        nothing = " Nothing that was given has a number for this table."
        yield Paragraph(table.protocol + nothing * (len(shown.sections) == len(table.sections)))
    if inputs.evaluations:
        yield Heading("How ours were evaluated")
    for evaluation in inputs.evaluations:
        yield Notes(evaluation.label, evaluation.notes)
    yield from _needles(inputs.evaluations)
    yield from _speeds(inputs.speeds)
    for number, grid in enumerate(inputs.grids, 1):
        yield from _synthetic(grid, f"synthetic-{number}.png")


def _runs(runs: Sequence[Run]) -> Iterator[Block]:
    yield Heading("Runs")
    heads = ("model", "parameters", "data", "steps", "tokens", "loss", "validation")
    rows = tuple((str(run.folder), tuple(map(Cell, _run_words(run)))) for run in runs)
    yield Table("Run", tuple((head, "") for head in heads), (Section("", rows),))
    folders = [run.folder for run in runs]
    caption = "Loss, speed and gradient norm over the tokens seen; dots are validation."
    yield _picture("curves.png", caption, partial(plot_runs, folders))


def _run_words(run: Run) -> Iterator[str]:
    config, last = run.config, run.lines[-1]
    yield title(config.model)
    yield f"{summarise(config.model).parameters:,}"
    yield getattr(config.data, "path", config.data.type)
    yield f"{last['step']:,} of {config.steps:,}"
    yield f"{last['tokens']:,}"
    for name in ("loss", "validation_loss"):
        _, values = curve(run.lines, name)
        yield f"{values[-1]:.3f}" if values else MISSING


def _needles(evaluations: Sequence[Evaluation]) -> Iterator[Block]:
    drawn = [evaluation for evaluation in evaluations if evaluation.needles]
    if drawn:
        yield Heading("Needles by length and depth")
    for number, evaluation in enumerate(drawn, 1):
        draw = partial(heat_map, evaluation.needles)
        yield _picture(f"needles-{number}.png", evaluation.label, draw)


def _speeds(speeds: Sequence[Speed]) -> Iterator[Block]:
    yield Heading("Training throughput in thousands of tokens a second")
    yield speed_table(speeds)
    caption = "Training throughput: the paper's on an H100 dashed, ours solid, twins of fla's layers dotted."
    yield _picture("throughput.png", caption, partial(draw_speeds, speeds))
    shapes = left_out(speeds)
    if shapes:
        yield Paragraph(f"Timed at shapes that the figure has not: {', '.join(shapes)}.")


def _synthetic(grid: SyntheticGrid, name: str) -> Iterator[Block]:
    yield Heading(f"Synthetic tasks: {grid.name}, {grid.steps} steps")
    states = sorted({cell.state for cell in grid.cells})
    sections = tuple(
        Section(family, tuple((problem, _percents(row, states)) for problem, row in rows.items()))
        for family, rows in by_family(grid.cells).items()
    )
    head = tuple(("numbers in a layer's state", str(state)) for state in states)
    yield Table("Right answers, %", head, sections)
    caption = f"{grid.name}: right answers by problem and numbers in a layer's state."
    yield _picture(name, caption, partial(plot, grid.cells))


def _percents(row: Mapping[int, GridCell], states: Sequence[int]) -> tuple[Cell, ...]:
    found = [row[state].accuracy if state in row else None for state in states]
    return tuple(Cell(MISSING if x is None else f"{100 * x:.1f}") for x in found)


def _picture(name: str, caption: str, draw: Callable[[Path], None]) -> Picture:
    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        draw(file)
        return Picture(name, caption, file.read_bytes())
