"""The paper's figure of training throughput with our speeds beside the paper's, as a table and as a picture."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from gdn2.bench.report_inputs import Speed
from gdn2.bench.training_paper import PRESETS, SHAPES, paper_speed
from gdn2.data.extras import need
from gdn2.evals.report.document import Cell, Section, Table
from gdn2.evals.report.identity import family
from gdn2.evals.report.tables import MISSING
from gdn2.models.presets import preset

PAPER = "Paper, 1.3B on an H100, all but the Transformer hybrids"
Curves = Mapping[str, Mapping[str, float]]  # thousands of tokens a second, by name and shape


def paper_curves() -> Curves:
    """What the paper's figure shows."""
    speeds = {name: {s: paper_speed(name, s) for s in SHAPES} for name in PRESETS}
    return {
        family(preset(name)): {shape: speed / 1e3 for shape, speed in curve.items() if speed}
        for name, curve in speeds.items()
    }


def own_curves(speeds: Iterable[Speed]) -> dict[str, dict[str, dict[str, float]]]:
    """Ours at the figure's shapes, by machine."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for speed in speeds:
        if speed.shape in SHAPES:
            curves = found.setdefault(speed.machine, {})
            curve = curves.setdefault(f"{speed.preset}, {speed.variant}", {})
            curve[speed.shape] = speed.tokens_per_second / 1e3
    return found


def speed_table(speeds: Iterable[Speed]) -> Table:
    """Thousands of tokens a second; length × batch as in the paper."""
    sections = [_section(PAPER, paper_curves())]
    sections += [_section(f"Ours, {m}", curves) for m, curves in own_curves(speeds).items()]
    return Table("Model", tuple((_label(shape), "") for shape in SHAPES), tuple(sections))


def left_out(speeds: Iterable[Speed]) -> list[str]:
    """Shapes that were timed and that the figure has no place for."""
    return list(dict.fromkeys(speed.shape for speed in speeds if speed.shape not in SHAPES))


def draw_speeds(speeds: Iterable[Speed], file: Path) -> None:
    """Draw the figure into a file; the paper's curves are dashed."""
    figure = need("matplotlib.figure", "plot", "picture").Figure(
        figsize=(9, 5), layout="constrained"
    )
    axes = figure.subplots()
    own = {
        f"{name}, {machine}": curve
        for machine, curves in own_curves(speeds).items()
        for name, curve in curves.items()
    }
    for curves, style, whose in ((paper_curves(), "--", "paper: "), (own, "-", "ours: ")):
        for name, curve in curves.items():
            values = [curve.get(shape, float("nan")) for shape in SHAPES]
            axes.plot(range(len(SHAPES)), values, style, marker="o", label=whose + name)
    axes.set_xticks(range(len(SHAPES)), [_label(shape) for shape in SHAPES])
    axes.set_xlabel("length × batch")
    axes.set_ylabel("thousands of tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    figure.savefig(file, dpi=150)


def _section(title: str, curves: Curves) -> Section:
    return Section(
        title,
        tuple(
            (name, tuple(_cell(curve.get(shape)) for shape in SHAPES))
            for name, curve in curves.items()
        ),
    )


def _cell(speed: float | None) -> Cell:
    return Cell(MISSING if speed is None else f"{speed:.2f}")


def _label(shape: str) -> str:
    batch, length = map(int, shape.split("x"))
    return f"{length // 1024}K×{batch}"
