"""What the paths given to `gdn2 report` hold: runs, evaluations, training speeds and synthetic grids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from gdn2.bench.documented import COLD
from gdn2.bench.documented import FIGURES as FIGURES_NOW
from gdn2.bench.figures import FORMAT as FIGURES
from gdn2.bench.figures import read as read_figures
from gdn2.bench.synthetic import FORMAT as SYNTHETIC
from gdn2.bench.synthetic import Cell
from gdn2.bench.synthetic_report import JSON_FILE as GRID_FILE
from gdn2.bench.trainers import TWIN
from gdn2.evals.report.evaluation import Evaluation, read_evaluation
from gdn2.evals.results import FORMAT as RESULTS
from gdn2.evals.run import RESULTS as RESULTS_FILE
from gdn2.layers.plain import from_plain
from gdn2.models.files import read_json
from gdn2.models.run_folder import METRICS, WRITTEN, Line, read_metrics
from gdn2.training.config import RunConfig
from gdn2.training.run_file import load_config

Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """A training run: its config and the line of each step."""

    folder: Path
    config: RunConfig
    lines: list[Line]


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one model at one shape."""

    preset: str
    variant: str
    shape: str
    tokens_per_second: float
    machine: str
    kept: bool  # whether factors were kept for the backward, where it is ours


@dataclass(frozen=True)
class SyntheticGrid:
    """The cells of a synthetic grid."""

    name: str
    steps: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Inputs:
    runs: tuple[Run, ...]
    evaluations: tuple[Evaluation, ...]
    speeds: tuple[Speed, ...]
    grids: tuple[SyntheticGrid, ...]


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read folders of runs with the results and grids in them, and files that `eval`, `bench` and `synthetic` wrote."""
    files: list[Path] = []
    runs: list[Run] = []
    for path in paths:
        if path.is_dir():
            found = [
                file for name in (RESULTS_FILE, GRID_FILE) for file in sorted(path.rglob(name))
            ]
            has_steps = (path / METRICS).is_file()
            if not found and not has_steps:
                expected = f"a folder with a {METRICS}, a {RESULTS_FILE} or a {GRID_FILE}"
                raise ValueError(f"run: got {str(path)!r}, expected {expected}")
            runs += [_run(path)] if has_steps else []
            files += found
        else:
            files.append(path)
    once: dict[Path, Path] = {}
    for file in files:
        once.setdefault(file.resolve(), file)  # whatever else it is called
    records = {file: read_json(file) for file in once.values()}
    evaluations: list[Evaluation] = []
    speeds: list[Speed] = []
    grids: list[SyntheticGrid] = []
    for file, record in records.items():
        if record.get("format") == RESULTS:
            evaluations.append(read_evaluation(record, file))
        elif record.get("format") == SYNTHETIC:
            grids.append(_grid(record, file))
        elif _is_training_bench(record):
            speeds += _speeds(record["result"], file)
        elif record.get("format") == FIGURES:
            figures = read_figures(file)
            # Others are of earlier code, and their speeds may have been taken again under another name.
            shown = {one.name for some in FIGURES_NOW.values() for one in some} - {COLD}
            taken = (data for name, one in figures.items() if name in shown for data in one["data"])
            for data in filter(_is_training_bench, taken):
                speeds += _speeds(data["result"], file)
        else:
            expected = "results of gdn2 eval, gdn2 bench training or figures, or gdn2 synthetic"
            raise ValueError(f"{file}: got another file, expected {expected}")
    _check_once(speeds)
    return Inputs(tuple(runs), tuple(evaluations), tuple(speeds), tuple(grids))


def _check_once(speeds: Sequence[Speed]) -> None:
    """Refuse two speeds of one model: nobody could say which is shown."""
    seen: set[Speed] = set()
    for speed in speeds:
        about = replace(speed, tokens_per_second=0.0)
        if about in seen:
            what = f"{speed.preset}, {speed.variant} at {speed.shape} on {speed.machine}"
            raise ValueError(f"speeds: got two of {what}, expected one")
        seen.add(about)


def _run(folder: Path) -> Run:
    lines = read_metrics(folder)
    if not lines:
        raise ValueError(f"{folder / METRICS}: got no steps, expected at least one")
    return Run(folder, load_config(folder / WRITTEN), lines)


def _is_training_bench(record: Mapping[str, Any]) -> bool:
    result = record.get("result")
    rows = result.get("rows") if isinstance(result, dict) else None
    return isinstance(rows, list) and all(isinstance(row, dict) and "preset" in row for row in rows)


def _speeds(result: Mapping[str, Any], file: Path) -> list[Speed]:
    """Rows that have a speed; the others say why they have none where they were timed."""
    try:
        machine = result["machine"]
        name = machine["gpus"][0]["name"] if machine["gpus"] else machine["cpu"]
        keeps = not result.get("plan", {}).get("recompute", True)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file}: got no machine with its gpus, expected one") from None
    own = [field.name for field in fields(Speed) if field.name not in ("machine", "kept")]

    def about(row: Mapping[str, Any]) -> dict[str, Any]:
        kept = keeps and row.get("variant") != TWIN  # which has its own way
        return {key: row.get(key) for key in own} | {"machine": name, "kept": kept}

    return [
        _read(Speed, about(row), file)
        for row in result["rows"]
        if row.get("tokens_per_second") is not None
    ]


def _grid(record: Mapping[str, Any], file: Path) -> SyntheticGrid:
    grid = record.get("grid")
    steps = grid.get("steps") if isinstance(grid, dict) else None
    own = {"name": record.get("name"), "steps": steps, "cells": record.get("cells")}
    return _read(SyntheticGrid, own, file)


def _read(kind: type[Value], data: dict[str, Any], file: Path) -> Value:
    try:
        return from_plain(kind, data)
    except ValueError as mistake:
        raise ValueError(f"{file}: {mistake}") from None
