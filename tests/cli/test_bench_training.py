"""The training benchmark's numbers fit together, and what fails is a row with the reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from gdn2 import __version__
from gdn2.bench import (
    timing,
    trainers,
    training,
    training_cold,
    training_paper,
    training_report,
)
from gdn2.bench.machine import describe_machine
from gdn2.bench.timing import Timing
from gdn2.bench.trainers import Plan, Shape, Trainer, build_own, random_batch, variants
from gdn2.bench.training import Result, Row
from gdn2.cli import app
from gdn2.data.batch import Batch
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.layers.delta import DeltaMixer
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import preset_names
from gdn2.models.summary import forward_flops
from gdn2.training.step import StepResult, train_step
from gdn2.training.world import World

CPU = torch.device("cpu")
TINY = ["gdn2-1m-hybrid", "--device", "cpu", "--steps", "2", "--threads", "1"]
SMALL = ModelConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=4,
    cell=(
        DeltaConfig(num_heads=2, key_head_dim=8, value_head_dim=8, gate_rank=8),
        AttentionConfig(num_heads=3, head_dim=8, window=5),
    ),
)
NAMES = ("tiny-a", "tiny-b")


def bench(folder: Path, *options: str) -> tuple[Any, dict[str, Any]]:
    """What the command prints, and what it writes."""
    target = folder / "bench.json"
    result = CliRunner().invoke(app, ["bench", "training", *options, "--json", str(target)])
    assert result.exit_code == 0, result.output
    return result, json.loads(target.read_text())


def tiny_plan(*shapes: Shape, names: tuple[str, ...] = NAMES[:1], **settings: Any) -> Plan:
    return Plan(
        names, shapes or (Shape(2, 13),), ("fp32",), CPU, compile=False, steps=1, **settings
    )


def rendered(result: Result) -> str:
    """What the tables say."""
    target = StringIO()
    training_report.render(result, Console(width=120, file=target))
    return target.getvalue()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any name is a preset, of the small model."""
    for module in (training, trainers):
        monkeypatch.setattr(module, "find_preset", lambda name: SMALL)


def test_rows_hold_what_was_measured(tmp_path: Path) -> None:
    done, record = bench(tmp_path, *TINY, "--shape", "2x33", "--shape", "1x5", "--peers")
    result = record["result"]
    assert record["cold_seconds"] == {}
    assert result["plan"]["shapes"] == ["2x33", "1x5"]
    assert (result["plan"]["weights"], result["plan"]["compile"]) == (["fp32"], False)
    assert result["machine"]["threads"] == 1
    assert result["machine"]["versions"]["gdn2"] == __version__
    assert result["notes"] == ["no peers: fla trains on a GPU only"]
    assert result["notes"][0] in done.stdout.splitlines()
    rows = {row["shape"]: row for row in result["rows"]}
    assert list(rows) == ["2x33", "1x5"]
    for shape, tokens in {"2x33": 66, "1x5": 5}.items():
        row, took = rows[shape], rows[shape]["step"]
        assert row["failure"] is None
        assert 0 < took["low"] <= took["median"] <= took["high"]
        assert took["repeats"] == 2
        assert row["tokens_per_second"] == pytest.approx(tokens / took["median"])
        assert row["first_seconds"] > 0
        assert (row["mfu"], row["peak_bytes"], row["paper_tokens_per_second"]) == (None,) * 3
        assert f"{row['tokens_per_second']:,.0f}" in done.stdout
        assert f"gdn2-1m-hybrid {shape} gdn2 fp32: {row['tokens_per_second']:,.0f}" in done.stderr
    assert "gdn2-1m-hybrid on cpu, not compiled" in done.stdout


@pytest.mark.usefixtures("small")
def test_a_step_trains_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first loss is that of the first weights on the first batch; no batch comes twice."""
    batch = random_batch(Shape(2, 13), SMALL.vocab_size, CPU)
    assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
    with torch.no_grad():
        logits = LanguageModel(SMALL, seed=0)(batch.ids).logits
    losses = cross_entropy(logits.mT, batch.targets, reduction="none")
    (row,) = training.run(tiny_plan()).rows
    assert row.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    seen: list[tuple[int, ...]] = []
    real = Trainer.step

    def step(trainer: Trainer, batch: Batch) -> float:
        seen.append(tuple(batch.ids.flatten().tolist()))
        return real(trainer, batch)

    monkeypatch.setattr(Trainer, "step", step)
    plan = tiny_plan(Shape(2, 13), Shape(1, 26))
    first, second = training.run(plan).rows
    assert first.loss == row.loss
    assert seen[0] == tuple(batch.ids.flatten().tolist())
    drawn = training.batches_needed(training.FIRST_WARMUP["cpu"], plan.steps)
    assert len(seen) == 2 * (drawn - 1)  # all but that for the peak of memory, which a CPU has not
    assert len({ids[:5] for ids in seen}) == len(seen)
    fresh = random_batch(Shape(1, 26), SMALL.vocab_size, CPU, seed=drawn)
    with torch.no_grad():
        unmoved = LanguageModel(SMALL, seed=0)(fresh.ids, targets=fresh.targets).loss
    assert unmoved is not None
    assert second.loss != pytest.approx(float(unmoved), rel=1e-4)


@pytest.mark.usefixtures("small")
def test_utilisation_is_of_counted_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "peak_flops", lambda device: 1e9)
    (row,) = training.run(tiny_plan()).rows
    assert row.step is not None
    flops = 3 * 26 * forward_flops(LanguageModel(SMALL), 13)
    assert row.mfu == pytest.approx(flops / row.step.median / 1e9)


@pytest.mark.usefixtures("small")
def test_factors_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[LanguageModel] = []

    def build(*arguments: Any) -> LanguageModel:
        built.append(build_own(*arguments))
        return built[-1]

    monkeypatch.setattr(trainers, "build_own", build)
    results = [training.run(tiny_plan(recompute=recompute)) for recompute in (True, False)]
    for model, recompute in zip(built, (True, False), strict=True):
        assert {m.recompute for m in model.mixers if isinstance(m, DeltaMixer)} == {recompute}
    assert results[0].rows[0].loss == results[1].rows[0].loss
    titles = [rendered(result).splitlines()[0].strip() for result in results]
    assert titles == [f"tiny-a on cpu, not compiled{kept}" for kept in ("", ", factors kept")]


def test_memory_is_what_is_held_and_what_a_step_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, world = tiny_plan(), World(0, 1, CPU, None)
    contest = training.Contest("gdn2-1m", plan, variants("gdn2-1m", plan, world)[0])
    contest.trainers["gdn2 fp32"] = trainer = Trainer(LanguageModel(SMALL), world)
    trainer.held_bytes = 100
    took = Timing(1.0, 1.0, 1.0, 5, peak_bytes=11)
    assert contest._row(Shape(1, 4), "gdn2 fp32", took, 1.0, 2.0).peak_bytes == 111
    for now in ([7, 30], [30, 90]):  # counted when a variant is built, not at its later shapes
        monkeypatch.setattr(training, "_allocated", lambda device, now=now: now.pop(0))
        contest.build["new"] = lambda: Trainer(LanguageModel(SMALL), world)
        contest._first_step("new", random_batch(Shape(1, 4), SMALL.vocab_size, CPU))
        assert contest.trainers["new"].held_bytes == 23


def failing(failure: Callable[[], Exception], fails: Callable[[str], bool]) -> Any:
    """A `build_own` that fails for some dtypes, and counts what it has built."""
    real, built = trainers.build_own, []

    def build(config: ModelConfig, plan: Plan, world: Any, weights: str) -> LanguageModel:
        built.append(weights)
        if fails(weights):
            raise failure()
        return real(config, plan, world, weights)

    build.built = built  # type: ignore[attr-defined]
    return build


@pytest.mark.usefixtures("small")
def test_a_variant_that_fails_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = failing(lambda: RuntimeError("no [kernel]\nfor this"), lambda name: name == "bf16")
    monkeypatch.setattr(trainers, "build_own", build)
    plan = replace(tiny_plan(Shape(1, 4), Shape(2, 3), names=NAMES), weights=("bf16", "fp32"))
    seen: list[Result] = []
    result = training.run(plan, seen.append)
    assert [*seen] == [replace(result, rows=result.rows[:n]) for n in range(1, 9)]
    for row in result.rows:
        reason = "RuntimeError: no [kernel]" if row.variant == "gdn2 bf16" else None
        assert row.failure == reason
        assert (row.step is None) == (reason is not None)
    assert build.built == ["bf16", "bf16", "fp32"] * 2  # not tried again at the second shape
    assert "tiny-a 1x4 gdn2 bf16: RuntimeError: no [kernel]" in rendered(result).splitlines()


@pytest.mark.usefixtures("small")
def test_models_that_do_not_fit_together_are_timed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[int] = []

    def measure(calls: Any, *arguments: Any, **settings: Any) -> Any:
        groups.append(len(calls))
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timing.measure_together(calls, *arguments, **settings)

    monkeypatch.setattr(training, "measure_together", measure)
    plan = replace(tiny_plan(Shape(1, 4), Shape(2, 3)), weights=("bf16", "fp32"))
    rows = training.run(plan).rows
    assert [(str(row.shape), row.variant) for row in rows] == [
        (shape, f"gdn2 {dtype}") for shape in ("1x4", "2x3") for dtype in ("bf16", "fp32")
    ]
    assert all(row.failure is None and row.step is not None for row in rows)
    assert groups == [2, 1, 1, 1, 1]  # tried together once


@pytest.mark.usefixtures("small")
def test_memory_that_runs_out_at_one_shape_leaves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*arguments: Any, **settings: Any) -> Any:
        if arguments[3][0].ids.numel() > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        return train_step(*arguments, **settings)

    monkeypatch.setattr(trainers, "train_step", step)
    large, little = training.run(tiny_plan(Shape(3, 7), Shape(2, 7))).rows
    assert large.failure == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert little.failure is None


@pytest.mark.usefixtures("small")
def test_a_step_that_moves_nothing_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = StepResult(float("nan"), 1.0)
    monkeypatch.setattr(trainers, "train_step", lambda *args, **settings: nothing)
    (row,) = training.run(tiny_plan()).rows
    assert row.failure == "ValueError: loss nan, gradient norm 1.0"


def test_the_papers_numbers() -> None:
    assert training_paper.paper_speed("gdn2-1.3b-hybrid", "8x2048") == pytest.approx(38_000)
    assert training_paper.paper_speed("gdn2-1.3b-hybrid", "1x16384") == pytest.approx(36_110)
    assert training_paper.paper_speed("transformer-1.3b", "1x16384") == pytest.approx(29_360)
    assert training_paper.paper_speed("gdn2-1.3b-hybrid", "4x2048") is None
    assert training_paper.paper_speed("gdn2-1.3b", "4x4096") is None
    assert set(training_paper.PRESETS) <= set(preset_names())
    assert {Shape.parse(shape).tokens for shape in training_paper.SHAPES} == {16384}


def full_result() -> Result:
    """As on a GPU: ours, the twin and one that failed, at two of the paper's shapes."""
    shapes = (Shape(8, 2048), Shape(4, 4096))
    name = "gdn2-1.3b-hybrid"

    def row(shape: Shape, variant: str, seconds: float) -> Row:
        took = Timing(seconds, seconds, seconds, 10, 2**30)
        return Row(name, shape, variant, None, took, 30.0, 37 * 2**30, 0.41, 10.5)

    rows = (
        row(shapes[0], "gdn2 bf16", 0.32768),
        row(shapes[0], "fla bf16", 0.4096),
        row(shapes[1], "gdn2 bf16", 0.32768),
        Row(name, shapes[1], "fla bf16", "OutOfMemoryError: none left"),
    )
    plan = Plan((name,), shapes, ("bf16",), torch.device("cuda"), compile=True, peers=True)
    return Result(plan, describe_machine(), rows, ())


def test_what_a_table_shows() -> None:
    lines = [" ".join(line.split()) for line in rendered(full_result()).splitlines()]
    assert "8x2048 gdn2 bf16 327.7 0% 50,000 30.0 41.0% 37.0 1.25× 38,000" in lines
    assert "8x2048 fla bf16 409.6 0% 40,000 30.0 41.0% 37.0 1.00× 38,000" in lines
    assert "4x4096 gdn2 bf16 327.7 0% 50,000 30.0 41.0% 37.0 – 37,250" in lines
    assert "4x4096 fla bf16 – – – – – – – 37,250" in lines
    assert "gdn2-1.3b-hybrid 4x4096 fla bf16: OutOfMemoryError: none left" in lines


def test_what_a_picture_shows(tmp_path: Path) -> None:
    result = full_result()
    name = "gdn2-1.3b-hybrid"
    assert training_report.curves(result) == {
        f"{name}, gdn2 bf16": pytest.approx([50, 50]),
        f"{name}, paper on H100": pytest.approx([38, 37.25]),
        f"{name}, fla bf16": [pytest.approx(40), None],
    }
    whose = "gdn2 bf16", "gdn2 fp32", "fla bf16", "paper on H100"
    looks = {tuple(training_report.look(variant).values()) for variant in whose}
    assert looks == {("-", "o"), ("-", "s"), (":", "o"), ("--", "o")}
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    training_report.plot(result, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_the_first_step_of_a_fresh_process(tmp_path: Path) -> None:
    options = ["--shape", "1x3", "--shape", "1x2", "--cold", "--no-recompute"]
    done, record = bench(tmp_path, *TINY, *options)
    assert record["result"]["plan"]["recompute"] is False
    ((name, seconds),) = record["cold_seconds"].items()
    assert name == "gdn2-1m-hybrid, fp32"
    assert seconds > 0
    line = f"first step with nothing compiled, {name}: {seconds:.1f} s"
    assert line in done.stdout.splitlines()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_fresh_process_gets_the_same_choices(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def note(command: list[str]) -> Any:
        commands.append(command)
        raise ValueError("not run")

    monkeypatch.setattr(training_cold, "run_fresh", note)
    training_cold.first_step_seconds(tiny_plan(recompute=recompute))
    (command,) = commands
    assert command[-2:] == ["--no-compile", "--recompute" if recompute else "--no-recompute"]


def test_a_fresh_process_that_fails_says_why() -> None:
    plan = tiny_plan(names=("gdn3-1m",))
    ((name, reason),) = training_cold.first_step_seconds(plan).items()
    assert name == "gdn3-1m, fp32"
    assert isinstance(reason, str)
    assert "error: preset: got 'gdn3-1m', expected" in reason


def test_the_usual_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "find_device", lambda name: torch.device("cuda"))
    asked: dict[str, Any] = dict.fromkeys(("presets", "shapes", "weights", "device", "compile"))
    plan = training.read_plan(**asked, peers=True, steps=10)
    assert plan.presets == ("gdn2-1.3b-hybrid",)
    assert [str(shape) for shape in plan.shapes] == ["8x2048", "4x4096", "2x8192", "1x16384"]
    assert (plan.weights, plan.compile) == (("bf16",), True)
    both = training.read_plan(**asked | {"weights": "bf16,fp32"}, peers=True, steps=10)
    assert both.weights == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "4x"], "shape: got '4x', expected BxT, such as 4x4096"),
        (["--shape", "0x8"], "shape: got '0x8', expected BxT, such as 4x4096"),
        (["--shape", "1x2x3"], "shape: got '1x2x3', expected BxT, such as 4x4096"),
        (["--weights", "fp16"], "weights: got 'fp16', expected one of bf16, fp32"),
        (["--steps", "0"], "steps: got 0, expected at least 1"),
        (["gdn2-1n-hybrid"], "preset: got 'gdn2-1n-hybrid', expected"),
        (["--threads", "0"], "threads: got 0, expected at least 1"),
        (["--plot", "a.txt"], "plot: got 'a.txt', expected a name that ends in .png, .pdf or .svg"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "training", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
