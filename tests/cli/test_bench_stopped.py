"""Benchmarks that are stopped half-way: what they found until then is in their file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn2.bench import accuracy, operator, profile, report
from gdn2.bench.training import Contest
from gdn2.cli import app

CPU = ["--device", "cpu"]


def only_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is stopped by Ctrl-C the second time."""
    calls: list[object] = []

    def stopped(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return call(*given, **options)

    return stopped


def stopped(target: Path, *command: str) -> dict[str, Any]:
    """What a command that is stopped has written."""
    done = CliRunner().invoke(app, ["bench", *command, *CPU, "--json", str(target)])
    assert done.exit_code == 130, done.output
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "run", only_once(operator.run))
    times = ["--suite", "cpu", "--seconds", "0.001", "--passes", "forward"]
    found = stopped(tmp_path / "file", "operator", *times)
    assert len(found["results"]) == 1
    assert found["results"][0]["rows"]


def test_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Contest, "time", only_once(Contest.time))
    sizes = ["--shape", "1x8", "--shape", "2x4", "--steps", "1"]
    found = stopped(tmp_path / "file", "training", "gdn2-1m-hybrid", *sizes)
    assert [row["shape"] for row in found["result"]["rows"]] == ["1x8"]


def test_accuracy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accuracy, "make_operands", only_once(accuracy.make_operands))
    found = stopped(tmp_path / "file", "accuracy", "--shape", "1x40x2x16x8", "--decay", "0,-1")
    assert [row["decay"] for row in found["result"]["rows"]] == ["0"]


def test_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile, "_profile", only_once(profile._profile))
    sizes = ["--shape", "1x8", "--shape", "2x4", "--steps", "1"]
    found = stopped(tmp_path / "file", "profile", "gdn2-1m-hybrid", *sizes)
    assert [one["shape"] for one in found["profiles"]] == ["1x8"]
