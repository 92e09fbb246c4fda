"""The picture of runs."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from gdn2.models.run_folder import read_metrics
from gdn2.training.metrics import Metrics
from gdn2.training.plot import _draw_validation, curve, other_lengths, plot_runs, smoothed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Metrics(tmp_path, 0) as metrics:
        for step in range(1, 301):
            line = {"step": step, "tokens": 10 * step, "loss": 3.0 / step}
            line |= {"gradient_norm": 1.0 + step % 2, "tokens_per_second": 100.0}
            metrics.write(line | ({"validation_loss": 1.0} if step % 100 == 0 else {}))
        metrics.write({"step": 301, "tokens": 3010, "loss": float("nan")})
    return tmp_path


def test_curves_leave_out_what_is_not_there(run: Path) -> None:
    lines = read_metrics(run)
    places, values = curve(lines, "loss")
    assert places == [10 * step for step in range(1, 301)]
    assert values == [3.0 / step for step in range(1, 301)]
    assert curve(lines, "validation_loss") == ([1000, 2000, 3000], [1.0, 1.0, 1.0])


def test_smoothing_is_a_mean_of_what_came_before(run: Path) -> None:
    """Of 300 values, over a fiftieth: six."""
    places, values = smoothed(curve(read_metrics(run), "gradient_norm"))
    assert places[-1] == 3000
    assert values[:3] == pytest.approx([2.0, 1.5, 5 / 3])
    assert values[5:] == pytest.approx([1.5] * 295)


def test_a_picture_of_several_runs(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "curves.png"
    plot_runs([run, run], file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000


def test_validation_at_other_lengths_is_drawn(tmp_path: Path) -> None:
    numbers = {"loss": 3.0, "validation_loss": 3.0, "validation_loss_16": 2.5}
    with Metrics(tmp_path, 0) as metrics:
        for step in range(1, 9):
            line = {"step": step, "tokens": step, **numbers, "validation_accuracy_32": 0.5}
            metrics.write({**line, "validation_loss_8": 4.0} if step % 2 else line)
    lines = read_metrics(tmp_path)
    assert other_lengths(lines) == [8, 16]
    assert curve(lines, "validation_loss_8") == ([1, 3, 5, 7], [4.0] * 4)
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    axes = Figure().subplots()
    _draw_validation(axes, lines, "C0", "run")
    assert [line.get_label() for line in axes.lines[1:]] == ["run at 8", "run at 16"]
    assert np.asarray(axes.lines[1].get_ydata()).tolist() == [4.0] * 4
    plot_runs([tmp_path], tmp_path / "a.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "validation_loss_8": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1: validation_loss_8: got 'x', expected a number$"):
        plot_runs([tmp_path], tmp_path / "a.png")


def test_names_of_runs_are_no_formulas(run: Path, tmp_path: Path) -> None:
    """And none is left out of the legend."""
    pytest.importorskip("matplotlib")
    others = [shutil.copytree(run, tmp_path / name) for name in (r"$\foo$", "_a")]
    with warnings.catch_warnings(action="error"):
        plot_runs(others, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000


def test_what_cannot_be_drawn_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^out: got 'a.txt', expected a name that ends in .png"):
        plot_runs([run], Path("a.txt"))
    with pytest.raises(ValueError, match=r"^out: got 'no/a.png', expected a folder that exists"):
        plot_runs([run], Path("no/a.png"))
    with pytest.raises(ValueError, match=r"^run: got '.*empty', expected a folder with steps"):
        plot_runs([run, tmp_path / "empty"], tmp_path / "a.png")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "loss": "low"}\n')
    with pytest.raises(
        ValueError, match=r"metrics.jsonl, line 1: loss: got 'low', expected a number$"
    ):
        plot_runs([run, broken], tmp_path / "a.png")
    (broken / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: got {'loss': 1}, expected a tab"):
        plot_runs([run, broken], tmp_path / "a.png")
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"^out: got .*folder.png.*, expected a file to write to"):
        plot_runs([run], tmp_path / "folder.png")
