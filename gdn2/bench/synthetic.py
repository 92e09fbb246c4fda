"""`gdn2 synthetic`: small models of several families learn small tasks, with states of several sizes.

A cell is a training run of its own, in a folder of its own: what is finished is read, what was interrupted goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from gdn2.data.synthetic import (
    CopyConfig,
    ParityConfig,
    PermutationConfig,
    RecallConfig,
    TaskConfig,
)
from gdn2.layers.config import AttentionConfig, DeltaConfig, MixerConfig
from gdn2.layers.plain import nearest
from gdn2.models.config import ModelConfig
from gdn2.models.presets import FAMILIES
from gdn2.models.run_folder import METRICS, WRITTEN, Line, read_metrics
from gdn2.ops.arguments import require
from gdn2.training.config import (
    BatchSection,
    CheckpointSection,
    EngineSection,
    OptimiserSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    ValidationSection,
)
from gdn2.training.faults import TrainingError
from gdn2.training.loop import check_numbers, train
from gdn2.training.run_file import check_same_run

FORMAT = "gdn2 synthetic 1"
WIDTH, LAYERS, HEADS, HEAD_WIDTH = 64, 2, 2, 32
STATE_STEP = 512  # the least state that every family can have, and by which it grows
LARGEST_STATE = 256 * HEADS * HEAD_WIDTH
VALIDATION_ROWS = 512


@dataclass(frozen=True)
class Problem:
    """A task at a length."""

    name: str
    data: TaskConfig
    length: int


@dataclass(frozen=True)
class Grid:
    """Problems to learn by models of each family with states of each size, all in the same number of steps."""

    problems: tuple[Problem, ...]
    families: tuple[str, ...] = ("gdn2", "kda", "gdn", "mamba2", "transformer")
    states: tuple[int, ...] = (512, 1024, 2048, 4096)  # numbers that a layer remembers
    rates: tuple[float, ...] = (3e-3, 1e-2)  # of learning; the best of them counts
    steps: int = 2000
    rows: int = 64  # in a step

    def __post_init__(self) -> None:
        for family in self.families:
            fits = family in FAMILIES
            require(fits, "family", repr(family), nearest(family, FAMILIES))
        for state in self.states:
            fits = state % STATE_STEP == 0 and 0 < state <= LARGEST_STATE
            require(fits, "state", state, f"a multiple of {STATE_STEP} up to {LARGEST_STATE}")
        for rate in self.rates:
            require(rate > 0, "lr", rate, "more than 0")
        require(self.steps >= 1, "steps", self.steps, "at least 1")


GRIDS = {
    "mqar": Grid(
        tuple(Problem(f"{n} pairs", RecallConfig(pairs=n), 8 * n) for n in (4, 8, 16, 32))
    ),
    "copying": Grid(tuple(Problem(f"{n} symbols", CopyConfig(items=n), 64) for n in (4, 8, 16))),
    "tracking": Grid(
        (
            *(Problem(f"parity of {n}", ParityConfig(), n) for n in (16, 64)),
            *(Problem(f"S5, {n} factors", PermutationConfig(), n) for n in (8, 16)),
        ),
        families=("gdn2", "gdn2-erase-range-2", "kda", "mamba3-siso", "transformer"),
        states=(2048,),
    ),
}


@dataclass(frozen=True)
class Cell:
    """What one family learnt of one problem with one state: the part of right answers, or why there is none."""

    problem: str
    family: str
    state: int
    chance: float
    accuracy: float | None = None
    rate: float | None = None  # that led there
    failure: str | None = None


@dataclass(frozen=True)
class Result:
    name: str
    grid: Grid
    cells: tuple[Cell, ...]
    stopped_by: str | None = None  # a signal, if one came before the end

    def as_json(self) -> dict[str, Any]:
        cells = [asdict(cell) for cell in self.cells]
        return {"format": FORMAT, "name": self.name, "grid": asdict(self.grid), "cells": cells}


def find_grid(
    name: str,
    *,
    families: Sequence[str] | None = None,
    states: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    steps: int | None = None,
) -> Grid:
    """The grid of a name, with other values where some are given."""
    require(name in GRIDS, "grid", repr(name), nearest(name, GRIDS))
    grid = GRIDS[name]
    return replace(
        grid,
        families=tuple(families or grid.families),
        states=tuple(states or grid.states),
        rates=tuple(rates or grid.rates),
        steps=grid.steps if steps is None else steps,
    )


def run(
    name: str,
    grid: Grid,
    folder: Path,
    device: str | None = None,
    finished: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Train and score all cells that are not yet; `finished` is told what there is after each."""
    cells: list[Cell] = []
    stopped_by: str | None = None
    for problem, family, state in product(grid.problems, grid.families, grid.states):
        configs = list(run_configs(grid, problem, family, state, folder, device))
        cell, stopped_by = _learn(Cell(problem.name, family, state, problem.data.chance), configs)
        if stopped_by is not None:
            break
        cells.append(cell)
        finished(Result(name, grid, tuple(cells)))
    return Result(name, grid, tuple(cells), stopped_by)


def _learn(cell: Cell, configs: list[RunConfig]) -> tuple[Cell, str | None]:
    """The cell with the best accuracy over the rates, or the signal that came before that was known."""
    for config in configs:
        try:
            accuracy = known_accuracy(config)
            if accuracy is None:
                end = train(config)
                if end.stopped_by is not None:
                    return cell, end.stopped_by
                check_numbers(end)
                accuracy = end.validation.get("validation_accuracy")
                if accuracy is None:  # finished before, and nobody knows any more what it found
                    raise TrainingError(f"{end.folder}: no {METRICS}; delete it to train again")
        except TrainingError as reason:
            cell = replace(cell, failure=str(reason))
            continue
        if cell.accuracy is None or accuracy > cell.accuracy:
            cell = replace(cell, accuracy=accuracy, rate=config.optimiser.lr)
    return cell, None


def known_accuracy(config: RunConfig) -> float | None:
    """What a finished run found at its end; None if it is not finished, an error where that is no number."""
    folder = Path(config.run.dir)
    if not (folder / WRITTEN).exists():
        return None
    check_same_run(config, folder)
    lines = read_metrics(folder)
    last: Line = lines[-1] if lines else {}
    if last.get("step") != config.steps:
        return None
    if last.get("validation_loss") is None or "validation_accuracy" not in last:
        raise TrainingError(f"{folder}: no validation by numbers at the end")
    return float(last["validation_accuracy"])


def run_configs(
    grid: Grid, problem: Problem, family: str, state: int, folder: Path, device: str | None
) -> Iterator[RunConfig]:
    """The training runs of a cell, one for each rate. Attention has no state of a fixed size, and one folder."""
    mixer = sized(FAMILIES[family], state)
    model = family if isinstance(mixer, AttentionConfig) else f"{family}-{state}"
    tokens = grid.rows * problem.length
    for rate in grid.rates:
        yield RunConfig(
            run=RunSection(dir=str(folder / problem.name.replace(" ", "-") / f"{model}-{rate}")),
            model=ModelConfig(
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=LAYERS,
                cell=(mixer,),
                vocab_size=problem.data.vocab_size,
            ),
            data=problem.data,
            schedule=ScheduleSection(
                tokens=grid.steps * tokens, warmup_tokens=grid.steps // 10 * tokens
            ),
            batch=BatchSection(tokens=tokens, length=problem.length, micro_rows=grid.rows),
            optimiser=OptimiserSection(lr=rate),
            precision=PrecisionSection(compute="fp32"),
            engine=EngineSection(device=device, compile="off"),
            checkpoint=CheckpointSection(every_seconds=60.0, keep=1),
            validation=ValidationSection(every_steps=None, rows=VALIDATION_ROWS),
        )


def sized(mixer: MixerConfig, state: int) -> MixerConfig:
    """The mixer with a state of so many numbers in a layer."""
    match mixer:
        case DeltaConfig():
            return replace(
                mixer,
                num_heads=HEADS,
                key_head_dim=state // (HEADS * HEAD_WIDTH),
                value_head_dim=HEAD_WIDTH,
                gate_rank=None if mixer.gate_rank is None else HEAD_WIDTH,
            )
        case AttentionConfig():
            return replace(mixer, num_heads=HEADS, head_dim=HEAD_WIDTH)
        case _:
            inner = 2 * WIDTH
            return replace(mixer, inner_size=inner, head_dim=HEAD_WIDTH, state_size=state // inner)
