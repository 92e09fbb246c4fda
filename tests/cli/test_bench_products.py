"""Which way a product takes is found by time, among those that are right."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from gdn2.bench import products as bench
from gdn2.bench.trainers import Plan, Shape
from gdn2.cli import app
from gdn2.models.presets import preset
from gdn2.ops import products as kept
from gdn2.ops.cuda.build import CudaError
from gdn2.ops.cuda.multiply import Problem, Way, problem_of

CPU = torch.device("cpu")
PROBLEM = Problem(6, 3, 4, True, False, 8, 5)
WAYS = {name: Way(name, 0) for name in ("other", "fair", "slow", "fast", "wrong", "broken")}
SECONDS = {
    "other": 1.1, "fair": 1.2, "slow": 3.0, "fast": 1.0, "wrong": 0.1, "broken": 0.1, None: 2.0
}  # fmt: skip


class Fake:
    """In place of the library."""

    def ways(self) -> list[Way]:
        return [WAYS[name] for name in ("fair", "broken", "wrong", "slow")]

    def variants(self, way: Way) -> list[Way]:
        return [way] + [WAYS[name] for name in ("fast", "other") if way is WAYS["fair"]]

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, way: Way) -> None:
        if way.algorithm == "broken":
            raise CudaError("cublasLtMatmul: got status 15, expected 0")
        out.copy_(a @ b * (1.1 if way.algorithm == "wrong" else 1))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Times that stand for the ways, and the order in which they were asked for."""
    asked: list[str | None] = []

    def timed(run: Any, calls: int, device: torch.device) -> float:
        name = run.args[-1].algorithm if run.func is not torch.mm else None
        asked.append(name)
        return calls * SECONDS[name]

    monkeypatch.setattr(bench, "multiplier", lambda problem, device: Fake())
    monkeypatch.setattr(bench, "_timed", timed)
    monkeypatch.setattr(bench, "FINALISTS", 2)
    return asked


def test_the_fastest_that_is_right(timed: list[str | None]) -> None:
    found = bench.best_way(PROBLEM, 7, CPU, 0.1)
    assert found == bench.Choice(PROBLEM, 7, 2.0, 1.0, WAYS["fast"])
    tried = ["fair", "fair", "wrong", "slow", "fast", "fast", "other", "other"]  # two after a look
    finals: list[str | None] = [None, "fast", "other", "other", "fast", None]
    assert timed == tried + [name for name in finals for _ in "123"]
    assert found.as_json()["way"] == {"algorithm": "fast", "workspace": 0}


def test_torch_is_kept_where_nothing_is_gained(
    timed: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fair", "fast", "other"):
        monkeypatch.setitem(SECONDS, name, 1.999)
    found = bench.best_way(PROBLEM, 7, CPU, 0.1)
    assert (found.way, found.best_seconds, found.as_json()["way"]) == (None, 2.0, None)


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
def test_operands_lie_as_in_the_step(a_turned: bool, b_turned: bool) -> None:
    problem = Problem(6, 3, 4, a_turned, b_turned, 8, 5)
    assert problem_of(*bench.draw(problem, CPU)) == problem


def test_products_of_a_step_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each block's map back from the MLP, and none in fp32, which the library is not asked for."""
    plan = Plan(("gdn2-1m-hybrid",), (Shape(1, 16),), ("bf16",), CPU, compile=False)
    assert not bench.met_in_a_step(plan, "gdn2-1m-hybrid", Shape(1, 16))  # all are small
    monkeypatch.setattr(bench, "LEAST_FLOPS", 0)
    config = preset("gdn2-1m-hybrid")
    met = bench.met_in_a_step(plan, "gdn2-1m-hybrid", Shape(1, 16))
    width, inner = config.hidden_size, config.intermediate_size
    assert met[Problem(16, width, inner, False, True, inner, inner)] == config.num_hidden_layers
    wide = replace(plan, weights=("fp32",))
    assert not bench.met_in_a_step(wide, "gdn2-1m-hybrid", Shape(1, 16))


def test_longest_first_and_a_table(timed: list[str | None]) -> None:
    small, large = Problem(2, 2, 2, False, True, 2, 2), PROBLEM
    found = [*bench.choices(Counter({small: 1, large: 5}), CPU, 0.1)]
    assert [choice.problem for choice in found] == [large, small]
    kept = found[1]._replace(way=None, best_seconds=2.0)
    console = Console(file=StringIO(), width=100)
    bench.render([found[0], kept], console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    first, second = (line for line in lines if " × " in line)
    assert "6 × 4 × 3 ᵀ" in first and "50.0%" in first and "1,000,000.0" in first
    assert second.split()[-2:] == ["–", "–"]
    assert "of a step: 12000.0 ms by torch, 7000.0 ms as chosen" in lines


def test_a_gpu_without_the_library_or_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise CudaError("libcublasLt.so.0 is not to be found")

    gpu = torch.device("cuda")
    for seconds in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"^seconds: got {seconds}, expected a finite number"):
            bench.check(gpu, seconds)
    monkeypatch.setattr(bench, "library_version", missing)
    reason = r"^device: got cuda, expected its library, but libcublasLt.so.0 is not to be found$"
    with pytest.raises(ValueError, match=reason):
        bench.check(gpu, 0.1)
    monkeypatch.setattr(bench, "library_version", lambda: 130100)
    bench.check(gpu, 0.1)


def test_mistakes_are_one_line() -> None:
    invoke: Callable[..., Any] = CliRunner().invoke
    done = invoke(app, ["bench", "products", "--device", "cpu"])
    assert done.exit_code == 2
    assert done.output == "error: device: got cpu, expected cuda, whose library is asked\n"


def test_what_is_chosen_is_kept_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed: list[str | None]
) -> None:
    """A run that is stopped has lost the product at work only."""
    small, large = Problem(2, 2, 2, False, True, 2, 2), PROBLEM
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setattr(kept, "identity", lambda device: "Some GPU, some library")
    monkeypatch.setattr(kept, "checked", lambda way: way)  # names, and no algorithms
    monkeypatch.setattr(bench, "check", lambda device, seconds: None)
    monkeypatch.setattr(bench, "met_in_a_step", lambda *_: Counter({small: 1, large: 5}))
    every = bench.best_way

    def stopped(problem: Problem, *others: Any) -> bench.Choice:
        if problem == small:
            raise KeyboardInterrupt
        return every(problem, *others)

    def chosen() -> dict[Problem, Way]:
        rows = json.loads(kept.choices_file().read_text())["Some GPU, some library"]
        return {Problem(*problem): Way(*way) for problem, way in rows}

    invoke: Callable[..., Any] = CliRunner().invoke
    arguments = ["bench", "products", "gdn2-1m-hybrid", "--shape", "1x16", "--device", "cpu"]
    monkeypatch.setattr(bench, "best_way", stopped)
    assert invoke(app, arguments).exit_code != 0
    assert chosen() == {large: WAYS["fast"]}
    monkeypatch.setattr(kept, "_known", {})
    kept.forget(CPU)
    monkeypatch.setattr(bench, "best_way", every)
    done = invoke(app, arguments)
    assert done.exit_code == 0 and f"chosen in {kept.choices_file()}" in done.output
    assert chosen() == {large: WAYS["fast"], small: WAYS["fast"]}
