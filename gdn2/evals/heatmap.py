"""A picture of needle scores: accuracy by length and depth, a panel for each task."""

from collections.abc import Collection, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from gdn2.data.extras import need
from gdn2.evals.needle_task import BIN
from gdn2.evals.request import JSON
from gdn2.ops.arguments import require

DEPTHS = range(0, 100, BIN)


def grid(summary: Mapping[str, JSON]) -> tuple[list[str], list[list[float | None]]]:
    """Lengths in rising order, and for each tenth of the depth the accuracy at these; None where there is no sample."""
    by_length: Any = summary["by_length"]
    lengths = sorted(by_length, key=int)
    return lengths, [
        [by_length[length]["by_depth"].get(str(depth)) for length in lengths] for depth in DEPTHS
    ]


def check_picture(file: Path, tasks: Collection[str]) -> None:
    """Refuse a file that is no picture, and a picture of nothing."""
    require(file.suffix == ".png", "heat map", repr(str(file)), "a name that ends in .png")
    require(len(tasks) > 0, "heat map", "no results", "those of a needle task")
    need("matplotlib.figure", "plot", "heat map")


def heat_map(summaries: Mapping[str, Mapping[str, JSON]], file: Path) -> None:
    """Draw the summaries of needle tasks, by their titles, into a file."""
    check_picture(file, summaries)
    draw(summaries).savefig(file, dpi=150)


def draw(summaries: Mapping[str, Mapping[str, JSON]]) -> Any:
    """The picture as a figure of matplotlib."""
    figure = need("matplotlib.figure", "plot", "heat map").Figure(
        figsize=(1 + 3.5 * len(summaries), 4.5), layout="constrained"
    )
    panels = figure.subplots(1, len(summaries), squeeze=False, sharey=True)[0]
    for axes, (title, summary) in zip(panels, summaries.items(), strict=True):
        lengths, rows = grid(summary)
        values = [[float("nan") if value is None else value for value in row] for row in rows]
        image = draw_percentages(axes, values)
        axes.set_title(f"{title}: {summary['accuracy']:.1f} %")
        axes.set_xlabel("length in tokens")
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(DEPTHS)), [f"{depth}–{depth + BIN}" for depth in DEPTHS])
    panels[0].set_ylabel("depth of the needle in percent")
    figure.colorbar(image, ax=list(panels), label="accuracy in percent")
    return figure


def draw_percentages(axes: Any, rows: Sequence[Sequence[float]]) -> Any:
    """Draw rows of cells, each with its number in it unless that is NaN, and return matplotlib's image of them."""
    image = axes.imshow(rows, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if not isnan(value):
                ink = "white" if value < 60 else "black"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=ink)
    return image
