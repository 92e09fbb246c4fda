"""The paper's figure of training throughput with our speeds beside the paper's, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gdn2.bench.report_inputs import Speed
from gdn2.bench.training_paper import PRESETS, SHAPES, paper_speed
from gdn2.bench.training_report import look
from gdn2.data.extras import need
from gdn2.evals.report.document import Cell, Section, Table
from gdn2.evals.report.identity import family
from gdn2.evals.report.tables import MISSING
from gdn2.models.presets import preset

PAPER = "Paper, 1.3B on an H100, all but the Transformer hybrids"


class Curve(NamedTuple):
    """Tokens a second at each of the figure's shapes."""

    preset: str
    variant: str  # whose, and the dtype of its weights
    name: str
    speeds: tuple[float | None, ...]


def paper_curves() -> list[Curve]:
    """What the paper's figure shows."""
    return [
        Curve(
            name, "paper", family(preset(name)), tuple(paper_speed(name, shape) for shape in SHAPES)
        )
        for name in PRESETS
    ]


def own_curves(speeds: Sequence[Speed]) -> dict[str, list[Curve]]:
    """Ours at the figure's shapes, by machine."""
    known = {(s.machine, s.preset, s.variant, s.kept, s.shape): s.tokens_per_second for s in speeds}
    found: dict[str, list[Curve]] = {}
    for own in dict.fromkeys(key[:4] for key in known if key[4] in SHAPES):
        machine, name, variant, kept = own
        curve = tuple(known.get((*own, shape)) for shape in SHAPES)
        label = f"{name}, {variant}" + ", factors kept" * kept
        found.setdefault(machine, []).append(Curve(name, variant, label, curve))
    return found


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Thousands of tokens a second; length × batch as in the paper."""
    sections = [_section(PAPER, paper_curves())]
    sections += [_section(f"Ours, {m}", curves) for m, curves in own_curves(speeds).items()]
    return Table("Model", tuple((_label(shape), "") for shape in SHAPES), tuple(sections))


def left_out(speeds: Sequence[Speed]) -> list[str]:
    """Shapes that were timed and that the figure has no place for."""
    return list(dict.fromkeys(speed.shape for speed in speeds if speed.shape not in SHAPES))


def draw_speeds(speeds: Sequence[Speed], file: Path) -> None:
    """Draw the figure into a file; the paper's curves are dashed."""
    figure = need("matplotlib.figure", "plot", "picture").Figure(
        figsize=(9, 5), layout="constrained"
    )
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for title, curves in {"paper": paper_curves(), **own_curves(speeds)}.items():
        for curve in curves:
            colour = colours.setdefault(curve.preset, f"C{len(colours)}")
            values = [float("nan") if speed is None else speed / 1e3 for speed in curve.speeds]
            label = f"{title}: {curve.name}"
            axes.plot(range(len(SHAPES)), values, color=colour, label=label, **look(curve.variant))
    axes.set_xticks(range(len(SHAPES)), [_label(shape) for shape in SHAPES])
    axes.set_xlabel("length × batch")
    axes.set_ylabel("thousands of tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", handlelength=4)
    figure.savefig(file, dpi=150)


def _section(title: str, curves: Sequence[Curve]) -> Section:
    return Section(title, tuple((c.name, tuple(map(_cell, c.speeds))) for c in curves))


def _cell(speed: float | None) -> Cell:
    return Cell(MISSING if speed is None else f"{speed / 1e3:.2f}")


def _label(shape: str) -> str:
    batch, length = map(int, shape.split("x"))
    return f"{length // 1024}K×{batch}"
