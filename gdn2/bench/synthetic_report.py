"""The synthetic grid on the console and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from gdn2.bench.synthetic import Cell, Result
from gdn2.bench.tables import new_table
from gdn2.data.extras import need
from gdn2.evals.heatmap import draw_percentages

JSON_FILE, PICTURE_FILE = "synthetic.json", "synthetic.png"


def by_family(cells: Sequence[Cell]) -> dict[str, dict[str, dict[int, Cell]]]:
    """Cells by family, problem and state."""
    found: dict[str, dict[str, dict[int, Cell]]] = {}
    for cell in cells:
        found.setdefault(cell.family, {}).setdefault(cell.problem, {})[cell.state] = cell
    return found


def render(result: Result, console: Console) -> None:
    """Print a table for each family."""
    states = sorted(result.grid.states)
    for family, problems in by_family(result.cells).items():
        title = f"{result.name}, {family}: right answers by numbers in a layer's state"
        table = new_table(("", "chance", *map(str, states)), left=("",), title=title)
        for problem, cells in problems.items():
            chance = next(iter(cells.values())).chance
            table.add_row(problem, f"{chance:.1%}", *(_words(cells.get(s)) for s in states))
        console.print(table)
    for cell in result.cells:
        if cell.failure:
            line = f"{cell.problem}, {cell.family}, {cell.state}: {cell.failure}"
            console.print(line, markup=False, soft_wrap=True)


def check_drawable() -> None:
    """Refuse what could not be drawn, before anything is trained for it."""
    need("matplotlib.figure", "plot", "picture")


def plot(cells: Sequence[Cell], file: Path) -> None:
    """Draw a panel for each family into a file: problems downward, states to the right."""
    families = by_family(cells)
    states = sorted({cell.state for cell in cells})
    rows = list(dict.fromkeys(cell.problem for cell in cells))
    figure = need("matplotlib.figure", "plot", "picture").Figure(
        figsize=(1.5 + (1 + 0.6 * len(states)) * len(families), 1.8 + 0.5 * len(rows)),
        layout="constrained",
    )
    panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    for axes, (family, problems) in zip(panels, families.items(), strict=True):
        values = [[_percent(problems, row, state) for state in states] for row in rows]
        image = draw_percentages(axes, values)
        axes.set_title(family)
        axes.set_xlabel("state")
        axes.set_xticks(range(len(states)), states)
        axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=list(panels), label="right answers in percent")
    figure.savefig(file, dpi=150)


def _percent(problems: Mapping[str, Mapping[int, Cell]], problem: str, state: int) -> float:
    cell = problems.get(problem, {}).get(state)
    return float("nan") if cell is None or cell.accuracy is None else 100 * cell.accuracy


def _words(cell: Cell | None) -> str:
    return "–" if cell is None or cell.accuracy is None else f"{cell.accuracy:.1%}"
