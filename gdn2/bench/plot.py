"""A picture of the operator's benchmark: bars for each backend, beside each other, a panel for each pass."""

# ruff: noqa: PLC0415 (matplotlib is optional)
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gdn2.bench.operator import PASSES, Result

# Milliseconds of each backend at every shape; None where it has none.
Panel = dict[str, list[float | None]]
FLOOR = "bytes that must move"


def check_plot(file: Path | None) -> None:
    """Refuse a picture that could not be drawn, before anything is timed for it."""
    if file is not None and file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(
            f"plot: got {str(file)!r}, expected a name that ends in .png, .pdf or .svg"
        )
    if file is not None and find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; pip install 'gdn2[plot]' installs it")


def panels(results: Sequence[Result]) -> tuple[list[str], dict[str, Panel]]:
    """Shapes, and for each pass the times of each backend and the floor at these."""
    shapes = list(dict.fromkeys(str(row.shape) for result in results for row in result.rows))
    found: dict[str, Panel] = {}
    for row in (row for result in results for row in result.rows):
        panel = found.setdefault(PASSES[row.measured], {})
        place = shapes.index(str(row.shape))
        for name, seconds in (
            (row.backend, row.timing.median),
            ("floor", row.floor_seconds),
        ):
            panel.setdefault(name, [None] * len(shapes))[place] = seconds * 1e3
    return shapes, found


def plot(results: Sequence[Result], file: Path) -> None:
    """Draw the times of all results into a file."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    shapes, found = panels(results)
    backends = list(dict.fromkeys(b for panel in found.values() for b in panel if b != "floor"))
    figure = Figure(figsize=(1 + 4 * len(found), 4.8), layout="constrained")
    for axes, (title, panel) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        present = [backend for backend in backends if backend in panel]
        width = 0.8 / len(present)
        for i, backend in enumerate(present):
            places = [x - 0.4 + (i + 0.5) * width for x in range(len(shapes))]
            heights = [t or 0.0 for t in panel[backend]]
            axes.bar(places, heights, width, label=backend, color=f"C{backends.index(backend)}")
        for x, t in enumerate(panel["floor"]):
            axes.plot([x - 0.4, x + 0.4], [t or 0.0] * 2, color="black", lw=1, label=FLOOR)
        axes.set_title(title)
        axes.set_ylabel("ms")
        axes.set_xticks(range(len(shapes)), shapes, rotation=20, ha="right", fontsize="small")
    # one entry for each name, whichever panels it is in
    marks = {
        name: mark
        for axes in figure.axes
        for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=len(marks))
    plan, gpus = results[0].plan, results[0].machine.gpus
    figure.suptitle(f"{plan.dtype} on {gpus[0].name if gpus else results[0].machine.cpu}")
    figure.savefig(file, dpi=150)
