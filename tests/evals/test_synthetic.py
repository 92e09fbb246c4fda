"""The synthetic grid: cells are equal in state, trained once, scored right, and picked up where they were left."""

from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gdn2.bench import synthetic
from gdn2.bench.synthetic import (
    GRIDS,
    Cell,
    Grid,
    Problem,
    Result,
    find_grid,
    run,
    run_configs,
)
from gdn2.bench.synthetic_report import plot, render
from gdn2.data.config import open_source
from gdn2.data.synthetic import ParityConfig, RecallConfig
from gdn2.models.folder import load_model
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import FAMILIES
from gdn2.training.config import RunConfig
from gdn2.training.faults import TrainingError
from gdn2.training.loop import RunEnd, train

TINY = Grid(
    (
        Problem("2 pairs", RecallConfig(pairs=2, vocab_size=12), 8),
        Problem("parity", ParityConfig(), 5),
    ),
    families=("gdn2", "transformer"),
    states=(512, 1024),
    rates=(1e-2,),
    steps=3,
    rows=4,
)


class Trainer:
    """Trains, and counts; `stop_at` is a training that is interrupted, `break_at` one that cannot go on."""

    def __init__(self, stop_at: int = -1, break_at: int = -1) -> None:
        self.calls: list[str] = []
        self._stop_at, self._break_at = stop_at, break_at

    def __call__(self, config: RunConfig) -> RunEnd:
        number = len(self.calls)
        self.calls.append(config.run.dir)
        if number == self._break_at:
            raise TrainingError("10 steps in a row were skipped")
        if number == self._stop_at:
            return replace(train(config, until=2), stopped_by="SIGTERM")
        return train(config)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(synthetic, "VALIDATION_ROWS", 16)
    return use(monkeypatch, Trainer())


def use(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> Trainer:
    monkeypatch.setattr(synthetic, "train", trainer)
    return trainer


def small(**others: Any) -> Grid:
    """One problem, one family, one state."""
    return replace(TINY, problems=TINY.problems[:1], families=("gdn2",), states=(512,), **others)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "transformer"])
@pytest.mark.parametrize("state", [512, 2048])
def test_states_are_equally_large(family: str, state: int) -> None:
    (config,) = run_configs(TINY, TINY.problems[0], family, state, Path("x"), "cpu")
    layers = LanguageModel(config.model).new_state(1, 8).layers
    assert len(layers) == 2
    for layer in layers:
        assert max(tensor.numel() for tensor in layer) == state


@pytest.mark.parametrize("name", GRIDS)
def test_named_grids_can_be_trained(name: str) -> None:
    """Every run of every cell has a config that fits, and a folder of its own, but for attention."""
    grid = find_grid(name)
    for problem in grid.problems:
        for family in grid.families:
            dirs = [
                config.run.dir
                for state in grid.states
                for config in run_configs(grid, problem, family, state, Path("x"), "cpu")
            ]
            assert len(set(dirs)) == len(grid.rates) * (
                1 if family == "transformer" else len(grid.states)
            )
            open_source(problem.data, problem.length, 0, "train").batch(0, 1)


def test_accuracies_are_those_of_the_trained_models(trainer: Trainer, tmp_path: Path) -> None:
    so_far: list[int] = []
    result = run("tiny", TINY, tmp_path, "cpu", lambda r: so_far.append(len(r.cells)))
    assert so_far == list(range(1, 9))
    assert len(trainer.calls) == 6  # attention has no state to vary
    assert result.stopped_by is None
    assert [c.chance for c in result.cells] == [1 / 2] * 8
    for cell in result.cells:
        (problem,) = (p for p in TINY.problems if p.name == cell.problem)
        folder = cell.family if cell.family == "transformer" else f"{cell.family}-{cell.state}"
        model = load_model(tmp_path / problem.name.replace(" ", "-") / f"{folder}-0.01" / "model")
        rows = open_source(problem.data, problem.length, 0, "validation").batch(0, 16)
        with torch.no_grad():
            logits = model(rows.ids).logits
        assert logits is not None
        asked = rows.targets >= 0
        right = (logits.argmax(-1) == rows.targets)[asked].double().mean()
        assert cell.accuracy == pytest.approx(float(right))
        assert (cell.rate, cell.failure) == (1e-2, None)


def test_finished_cells_are_read_and_others_trained(trainer: Trainer, tmp_path: Path) -> None:
    grid = replace(TINY, families=("gdn2",))
    first = run("tiny", grid, tmp_path, "cpu")
    trainer.calls.clear()
    more = replace(grid, states=(512, 1024, 1536))
    second = run("tiny", more, tmp_path, "cpu")
    assert len(trainer.calls) == 2
    assert set(first.cells) <= set(second.cells)
    with pytest.raises(ValueError, match=r"^schedule\.tokens: got 128, expected 96"):
        run("tiny", replace(grid, steps=4), tmp_path, "cpu")


def test_an_interrupted_grid_goes_on(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = replace(TINY, families=("gdn2",))
    whole = run("tiny", grid, tmp_path / "whole", "cpu")
    use(monkeypatch, Trainer(stop_at=1))
    part = run("tiny", grid, tmp_path / "part", "cpu")
    assert (part.stopped_by, part.cells) == ("SIGTERM", whole.cells[:1])
    again = use(monkeypatch, Trainer())
    assert run("tiny", grid, tmp_path / "part", "cpu") == whole
    assert len(again.calls) == 3


def test_what_cannot_be_trained_is_a_cell_with_the_reason(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Trainer(break_at=0))
    one, other = run("tiny", replace(small(), states=(512, 1024)), tmp_path, "cpu").cells
    assert (one.accuracy, one.failure) == (None, "10 steps in a row were skipped")
    assert other.accuracy is not None


def test_a_model_without_numbers_is_no_result(tmp_path: Path) -> None:
    """Nor when it is read again, nor where nobody knows any more what a finished one has found."""
    grid = small(rates=(1e30,), steps=4)
    for expected in ("validation_loss is nan", "no validation by numbers at the end"):
        (cell,) = run("tiny", grid, tmp_path, "cpu").cells
        assert cell.accuracy is None and cell.failure is not None and expected in cell.failure
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    metrics.unlink()
    (cell,) = run("tiny", grid, tmp_path, "cpu").cells
    assert cell.failure is not None and "delete it to train again" in cell.failure


@pytest.mark.parametrize("rates", [(1e-3, 1e-2, 3e-2), (3e-2, 1e-2, 1e-3)])
def test_the_best_rate_counts(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, ...]
) -> None:
    found = {1e-3: 0.25, 1e-2: 0.75, 3e-2: 0.5}

    def learn(config: RunConfig) -> RunEnd:
        accuracy = {"validation_accuracy": found[config.optimiser.lr]}
        end = trainer(config)
        return replace(end, validation=end.validation | accuracy)

    monkeypatch.setattr(synthetic, "train", learn)
    (cell,) = run("tiny", small(rates=rates), tmp_path, "cpu").cells
    assert len(trainer.calls) == 3
    assert (cell.rate, cell.accuracy) == (1e-2, 0.75)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"families": ["gdn3"]}, "family: got 'gdn3', expected gdn or gdn2"),
        ({"states": [500]}, "state: got 500, expected a multiple of 512 up to 16384"),
        ({"rates": [0.0]}, "lr: got 0.0, expected more than 0"),
        ({"steps": 0}, "steps: got 0, expected at least 1"),
    ],
)
def test_grids_that_cannot_be_are_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        find_grid("mqar", **others)
    with pytest.raises(ValueError, match=r"^grid: got 'mqr', expected mqar"):
        find_grid("mqr")


def test_tables_and_pictures_show_every_cell(tmp_path: Path) -> None:
    cells = (
        Cell("2 pairs", "gdn2", 512, 0.5, accuracy=0.123, rate=1e-3),
        Cell("2 pairs", "gdn2", 1024, 0.5, failure="skipped"),
        Cell("2 pairs", "kda", 512, 0.5, accuracy=1.0, rate=1e-3),
    )
    result = Result("tiny", TINY, cells)
    target = StringIO()
    render(result, Console(width=120, file=target))
    lines = [line.split() for line in target.getvalue().splitlines()]
    assert ["2", "pairs", "50.0%", "12.3%", "–"] in lines
    assert ["2", "pairs", "50.0%", "100.0%", "–"] in lines
    assert "2 pairs, gdn2, 1024: skipped" in target.getvalue()
    assert result.as_json()["cells"] == [asdict(cell) for cell in cells]
    pytest.importorskip("matplotlib")
    plot(cells, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
