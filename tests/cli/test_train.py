"""`gdn2 train`, `gdn2 plot` and `gdn2 demo`: what they write, what they say, and their exit codes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from gdn2.cli import app
from gdn2.data.config import CorpusConfig, open_source
from gdn2.layers.plain import to_plain
from gdn2.models.files import write_json
from gdn2.training import demo, step
from gdn2.training.run_file import load_config
from tests.training.runs import config, lines, losses


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run's config."""
    write_json(tmp_path / "run.json", to_plain(config(tmp_path / "run")))
    return tmp_path / "run.json"


def test_train_then_plot(file: Path, tmp_path: Path) -> None:
    result = run("train", str(file), "validation.rows=4", "run.seed=6")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run"
    found = lines(folder)[-1]["validation_loss"]
    assert f"finished: validation_loss {found:.4f}, validation_accuracy" in result.stderr
    assert f"the model is in {folder / 'model'}" in result.stderr
    assert load_config(folder / "config.json").run.seed == 6
    assert len(losses(folder)) == 12
    picture = tmp_path / "curves.png"
    result = run("plot", str(folder), str(folder), "--out", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "demmo"], "error: config: got 'demmo', expected a file or demo"),
        (["train", "demo", "optimiser.lrs=1"], "error: optimiser.lrs: unknown name, expected lr"),
        (["train", "demo", "lr"], "error: override: got 'lr', expected section.key=value"),
        (["plot", "nowhere"], "error: run: got 'nowhere', expected a folder with steps"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_run_says_how_large_its_model_is(file: Path, tmp_path: Path) -> None:
    """As `gdn2 show` counts: the paper's sizes are those of the blocks."""
    said = run("train", str(file)).stderr
    shapes = {x: y.shape for x, y in load_file(tmp_path / "run/model/model.safetensors").items()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    whole = sum(sizes.values())
    assert 0 < blocks < whole
    counts = f"{blocks:,} parameters in the blocks, {whole:,} with embedding and head"
    assert f"{tmp_path / 'run'}: {counts}, on cpu, 12 steps of 192 tokens" in said


def test_help_names_the_configs_that_come_along() -> None:
    said = run("train", "--help").output
    assert all(name in said for name in ("demo", "15m", "60m", "150m", "400m", "paper-1.3b"))


def test_another_config_for_the_same_folder_is_a_mistake(file: Path) -> None:
    assert run("train", str(file)).exit_code == 0
    result = run("train", str(file), "schedule.final_fraction=0.5")
    assert result.exit_code == 2
    assert "error: schedule.final_fraction: got 0.5, expected 0.1" in result.stderr


def test_a_run_that_cannot_go_on_has_exit_code_1(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step.loss_of
    monkeypatch.setattr(step, "loss_of", lambda *arguments: real(*arguments) / 0)
    result = run("train", str(file), "optimiser.max_skips=3")
    assert result.exit_code == 1
    assert "error: 3 steps in a row were skipped (loss inf" in result.stderr


def test_a_model_that_predicts_nothing_has_exit_code_1(file: Path, tmp_path: Path) -> None:
    said = f"error: validation_loss is nan: the model in {tmp_path / 'run/model'} predicts nothing"
    for _ in range(2):  # also where an earlier call has finished it
        result = run("train", str(file), "optimiser.lr=1e30", "optimiser.max_skips=100")
        assert result.exit_code == 1
        assert said in result.stderr


def test_demo_from_beginning_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fiftieth of its steps; the last test is the whole one."""
    short = ["schedule.tokens=20_480", "schedule.warmup_tokens=2048", "samples.tokens=20"]
    short += ["validation.rows=8", "engine.device=cpu"]
    monkeypatch.setattr(demo, "load_config", lambda name, own: load_config(name, [*own, *short]))
    result = run("demo", "--dir", str(tmp_path / "demo"))
    assert result.exit_code == 0, result.output
    assert "Interrupted on purpose after step 8" in result.stdout
    assert "resumed after step 8" in result.stderr
    assert "5. It writes:\n\ndef " in result.stdout
    assert "What to try next" in result.stdout
    assert [line["step"] for line in lines(tmp_path / "demo")] == list(range(1, 11))
    again = run("demo", "--dir", str(tmp_path / "demo"))
    assert "This run was finished before" in again.stdout


def byte_entropy() -> float:
    """The loss of a table of how often each byte occurs, on the rows that validation sees."""
    targets = open_source(CorpusConfig(), 256, 0, "validation").batch(0, 64).targets
    train_rows = open_source(CorpusConfig(), 256, 0, "train").batch(0, 4000)
    often = np.bincount(train_rows.ids.flatten().numpy(), minlength=256) + 1.0
    return float(-np.log(often / often.sum())[targets.flatten().numpy()].mean())


@pytest.mark.slow
def test_the_demo_beats_a_table_of_bytes_by_far(tmp_path: Path) -> None:
    result = run("demo", "--dir", str(tmp_path / "demo"))
    assert result.exit_code == 0, result.output
    found = lines(tmp_path / "demo")
    table = byte_entropy()
    assert 2.9 < table < 3.5
    assert found[-1]["validation_loss"] < table - 1.2
