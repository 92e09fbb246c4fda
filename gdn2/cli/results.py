"""An evaluation on the screen: options read, a bar of its answers, a table of its results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from gdn2.cli.bar import Lines
from gdn2.evals.heatmap import check_picture, heat_map
from gdn2.evals.needles import KINDS
from gdn2.evals.run import Progress
from gdn2.ops.arguments import require

LONGEST = 2**24  # tokens of a needle's prompt


class AnswerBar:
    """A line for each task once it asks."""

    def __init__(self, console: Console) -> None:
        self._lines = Lines(console)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bars = Bars(
            *columns, TimeRemainingColumn(), console=console, disable=self._lines.wanted
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "AnswerBar":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        task, done, total = progress
        if task not in self._tasks:
            self._tasks[task] = self._bars.add_task(task)
        self._bars.update(self._tasks[task], completed=done, total=total)
        self._lines.say(f"{task}: {done:,} of {total:,}", done=done == total)


def read_size(text: str) -> int | None:
    """A number of rows; None is auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"batch-size: got {text!r}, expected auto or a positive number")
    return int(text)


def read_lengths(text: str) -> tuple[int, ...] | None:
    """Lengths with commas between them; None where there is nothing."""
    if not text:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"lengths: got {text!r}, expected numbers with commas between them")
    lengths = tuple(map(int, parts))
    for length in lengths:
        require(0 < length <= LONGEST, "lengths", length, f"1 to {LONGEST}")
    return lengths


def show(record: dict[str, Any], console: Console) -> None:
    """A row for each task with its metrics, and below them the averages."""
    table = Table("task", "samples", "metrics", title=record["name"])
    for name, task in record["tasks"].items():
        table.add_row(name, str(task["samples"]), _words(task["metrics"]))
    for column, value in record["columns"].items():
        if column.startswith("Avg."):
            table.add_row(column, "", f"{value:.2f}")
    console.print(table)


def say(reasons: dict[str, dict[str, str]]) -> None:
    """A line on standard error for each task without results."""
    for kind, tasks in reasons.items():
        for reason in tasks.values():
            typer.echo(f"{kind}: {reason}", err=True)


def check_heat_map(tasks: Sequence[str], file: Path | None) -> None:
    """Refuse a picture that could not be drawn, before anything is computed for it."""
    if file is not None:
        check_picture(file, [name for name in tasks if name in KINDS])


def draw_needles(record: dict[str, Any], file: Path) -> None:
    """The heat map of all needle tasks that have results."""
    tasks = record["tasks"]
    heat_map({KINDS[name].title: tasks[name]["metrics"] for name in KINDS if name in tasks}, file)


def _words(metrics: dict[str, Any]) -> str:
    by_length = metrics.get("by_length", {})
    parts = [f"{name} {value:.2f}" for name, value in metrics.items() if name != "by_length"]
    parts += [f"{length}: {found['accuracy']:.1f}" for length, found in by_length.items()]
    return ", ".join(part for part in parts if "stderr" not in part)
