"""The training benchmark on the console and as a picture."""

# ruff: noqa: PLC0415 (matplotlib is optional)
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from gdn2.bench.machine import GIB
from gdn2.bench.tables import new_table
from gdn2.bench.trainers import TWIN, Shape
from gdn2.bench.training import Result, Row


def line(row: Row) -> str:
    """A row as one line, for who waits."""
    name = f"{row.preset} {row.shape} {row.variant}"
    if row.tokens_per_second is None:
        return f"{name}: {row.failure}"
    return f"{name}: {row.tokens_per_second:,.0f} tokens/s, first step {row.first_seconds:.1f} s"


def render(result: Result, console: Console) -> None:
    """Print a table for each preset."""
    plan = result.plan
    twins = {(r.preset, r.shape): r.tokens_per_second for r in result.rows if r.variant == TWIN}
    columns: dict[str, Callable[[Row], str]] = {
        "B × T": lambda row: str(row.shape),
        "model": lambda row: row.variant,
        "ms/step": lambda row: f"{row.step.median * 1e3:.1f}" if row.step else "–",
        "spread": lambda row: f"{row.step.spread:.0%}" if row.step else "–",
        "tokens/s": lambda row: _number(row.tokens_per_second, ",.0f"),
        "first s": lambda row: _number(row.first_seconds, ".1f"),
    }
    if plan.device.type == "cuda":
        columns["MFU"] = lambda row: _number(row.mfu, ".1%")
        columns["GiB"] = lambda row: _number(row.peak_bytes and row.peak_bytes / GIB, ".1f")
    if twins:
        columns["vs fla"] = lambda row: _ratio(row, twins)
    if any(row.paper for row in result.rows):
        columns["paper, H100"] = lambda row: _number(row.paper, ",.0f")
    for preset in plan.presets:
        compiled = "compiled" if plan.compile else "not compiled"
        kept = "" if plan.recompute else ", factors kept"
        title = f"{preset} on {plan.device}, {compiled}{kept}"
        table = new_table(columns, left=("B × T", "model"), title=title)
        for row in (row for row in result.rows if row.preset == preset):
            table.add_row(*(cell(row) for cell in columns.values()))
        console.print(table)
    failures = [line(row) for row in result.rows if row.failure]
    for note in (*result.notes, *failures):
        console.print(note, markup=False, soft_wrap=True)


def render_cold(seconds: dict[str, float | str], console: Console) -> None:
    """Print what the first step takes in a fresh process, if it was timed."""
    for name, took in seconds.items():
        said = took if isinstance(took, str) else f"{took:.1f} s"
        console.print(
            f"first step with nothing compiled, {name}: {said}", markup=False, soft_wrap=True
        )


def curves(result: Result) -> dict[str, list[float | None]]:
    """Thousands of tokens a second at every shape: of each model, and of the paper's where it has one."""
    places = {shape: i for i, shape in enumerate(result.plan.shapes)}
    found: dict[str, list[float | None]] = {}
    for row in result.rows:
        for name, speed in (
            (f"{row.preset}, {row.variant}", row.tokens_per_second),
            (f"{row.preset}, paper on H100", row.paper),
        ):
            if speed is not None:
                curve = found.setdefault(name, [None] * len(places))
                curve[places[row.shape]] = speed / 1e3
    return found


def plot(result: Result, file: Path) -> None:
    """Draw the speeds over the shapes, as the paper's figure does; the paper's own are dashed."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for name, curve in curves(result).items():
        preset, _, whose = name.partition(", ")
        colour = colours.setdefault(preset, f"C{len(colours)}")
        speeds = [float("nan") if speed is None else speed for speed in curve]
        axes.plot(range(len(curve)), speeds, color=colour, label=name, **look(whose))
    shapes = [str(shape) for shape in result.plan.shapes]
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_xlabel("batch × length")
    axes.set_ylabel("thousands of tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small", handlelength=4)
    gpus = result.machine.gpus
    figure.suptitle(f"Training on {gpus[0].name if gpus else result.machine.cpu}")
    figure.savefig(file, dpi=150)


def look(variant: str) -> dict[str, Any]:
    """How a curve is drawn: the paper's dashed, a twin's dotted, with squares for fp32 weights."""
    line = "--" if variant.startswith("paper") else ":" if variant == TWIN else "-"
    return {"linestyle": line, "marker": "s" if variant.endswith("fp32") else "o"}


def _number(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def _ratio(row: Row, twins: dict[tuple[str, Shape], float | None]) -> str:
    own, twin = row.tokens_per_second, twins.get((row.preset, row.shape))
    return "–" if own is None or twin is None else f"{own / twin:.2f}×"
