"""A picture of one or several runs: loss, speed and gradient norm over the tokens they have seen."""

# ruff: noqa: PLC0415 (matplotlib is optional)
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from gdn2.models.run_folder import METRICS, Line, measure_of, read_metrics

PANELS = {"loss": "loss", "tokens_per_second": "tokens/s", "gradient_norm": "gradient norm"}
SMOOTHING = 50  # parts of a run over which a curve is averaged
MARKERS = "^sDvp"  # of validation at other lengths

Curve = tuple[list[float], list[float]]


def check_plot(runs: Sequence[Path], file: Path) -> None:
    """Refuse a picture that could not be drawn."""
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"out: got {str(file)!r}, expected a name that ends in .png, .pdf or .svg")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"out: got {str(file)!r}, expected a folder that exists")
    for run in runs:
        lines = read_metrics(run)
        if not lines:
            raise ValueError(
                f"run: got {str(run)!r}, expected a folder with steps in its {METRICS}"
            )
    if find_spec("matplotlib") is None:
        raise ValueError('plot: matplotlib is not installed; pip install "gdn2[plot]" installs it')


def curve(lines: Sequence[Line], name: str) -> Curve:
    """Tokens, and the values of this name where there are some."""
    known = [(line["tokens"], line[name]) for line in lines if line.get(name) is not None]
    return [tokens for tokens, _ in known], [value for _, value in known]


def other_lengths(lines: Sequence[Line]) -> list[int]:
    """Lengths besides the training's at which there is a validation loss."""
    measures = map(measure_of, {name for line in lines for name in line})
    return sorted(n for measure, n in measures if measure == "validation_loss" and n is not None)


def smoothed(drawn: Curve) -> Curve:
    """Each value as the mean of itself and of those before it, over a part of the curve."""
    places, values = drawn
    window = max(1, len(values) // SMOOTHING)
    starts = (max(0, i + 1 - window) for i in range(len(values)))
    return places, [sum(values[a : i + 1]) / (i + 1 - a) for i, a in enumerate(starts)]


def _label(run: Path) -> str:
    """A run's name as it is: no formula, and none of those that legends leave out."""
    name = run.resolve().name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _draw_validation(axes: Any, lines: Sequence[Line], colour: str, label: str) -> None:
    """Dots, and for each other length hollow marks of its own."""
    axes.plot(*curve(lines, "validation_loss"), "o", color=colour, ms=4)
    for marker, length in zip(cycle(MARKERS), other_lengths(lines), strict=False):
        marks = curve(lines, f"validation_loss_{length}")
        axes.plot(*marks, marker, color=colour, mfc="none", ms=5, label=f"{label} at {length}")


def plot_runs(runs: Sequence[Path], file: Path) -> None:
    """Draw the runs into a file, a panel for each quantity; dots are validation."""
    check_plot(runs, file)
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for i, run in enumerate(runs):
            lines, colour = read_metrics(run), f"C{i % 10}"
            raw = curve(lines, name)
            axes.plot(*raw, color=colour, alpha=0.25, lw=0.7)
            axes.plot(*smoothed(raw), color=colour, lw=1.5, label=_label(run))
            if name == "loss":
                _draw_validation(axes, lines, colour, _label(run))
        axes.set_title(f"{title} (dots: validation)" if name == "loss" else title)
        axes.set_xlabel("tokens")
        if name == "gradient_norm":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except OSError as reason:
        raise ValueError(f"out: got {reason}, expected a file to write to") from None
