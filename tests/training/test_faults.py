"""Numbers that are none: what a step does, what a run does, and what is said about where they come from."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.data.batch import Batch
from gdn2.data.synthetic import Task
from gdn2.layers.plain import to_plain
from gdn2.models.files import write_json
from gdn2.models.language_model import LanguageModel
from gdn2.training import checkpoint_files, faults, loop, step
from gdn2.training.config import OptimiserSection
from gdn2.training.faults import StopRequest, TrainingError, diagnose
from gdn2.training.loop import train
from gdn2.training.optimiser import build_optimiser
from gdn2.training.step import StepResult, train_step
from gdn2.training.world import World
from tests.training.runs import ROWS, assert_same_run, config, lines
from tests.training.spawn import alone, be_one_of, free_port, start_process


@pytest.fixture
def world() -> Iterator[World]:
    with alone() as world:
        yield world


def model() -> LanguageModel:
    return LanguageModel(config(Path("unused")).model)


def batch() -> Batch:
    ids = torch.arange(48).view(2, 24) % 32
    return Batch(ids, ids.roll(-1, 1))


BAD = StepResult(math.nan, math.nan)


def poisoned(monkeypatch: pytest.MonkeyPatch, at: set[int]) -> None:
    """Make the loss of these calls NaN, counted from 1."""
    calls, real = iter(range(1, 10**6)), step.loss_of

    def loss_of(*arguments: Any) -> Tensor:
        return real(*arguments) * (math.nan if next(calls) in at else 1.0)

    monkeypatch.setattr(step, "loss_of", loss_of)


def test_a_bad_step_moves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model()
    optimiser = build_optimiser(own, OptimiserSection())
    poisoned(monkeypatch, {2})
    options: Any = {"lr": 1e-2, "clip": 1.0}
    assert train_step(own, optimiser, world, [batch()], **options).is_finite
    before = [p.detach().clone() for p in own.parameters()]
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in optimiser.state.items()}
    assert not train_step(own, optimiser, world, [batch()], **options).is_finite
    assert all(torch.equal(p, old) for p, old in zip(own.parameters(), before, strict=True))
    for parameter, state in optimiser.state.items():
        assert all(torch.equal(state[name], old) for name, old in moments[parameter].items())
    assert train_step(own, optimiser, world, [batch()], **options).is_finite
    assert all(p.isfinite().all() for p in own.parameters())


def test_a_run_counts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned(monkeypatch, {3, 5})  # of two calls a step: steps 2 and 3
    train(config(tmp_path, validation={"every_steps": None}), until=6)
    found = lines(tmp_path)
    assert [line["skips"] for line in found] == [0, 1, 2, 2, 2, 2]
    assert [line["loss"] is None for line in found] == [False, True, True, False, False, False]
    assert "step 3 skipped, 2 in a row: loss nan, gradient norm nan" in capsys.readouterr().err


def test_skips_are_remembered_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, set(range(1, 1000)))
    chosen = config(tmp_path, optimiser={"max_skips": 4})
    train(chosen, until=2)
    with pytest.raises(TrainingError, match=r"^4 steps in a row were skipped \(loss nan, gradient"):
        train(chosen)


def test_the_diagnosis_stands_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, set(range(1, 1000)))
    monkeypatch.setattr(loop, "diagnose", lambda *_: "the reason")
    with pytest.raises(TrainingError, match=r": the reason$"):
        train(config(tmp_path, optimiser={"max_skips": 1}))


def test_a_broken_parameter_is_named(world: World) -> None:
    own = model()
    for name in ("blocks.1.mlp.up_proj.weight", "norm.weight"):
        own.get_parameter(name).data.view(-1)[3] = math.inf
    said = diagnose(own, batch(), BAD, world)
    assert said == "the parameter blocks.1.mlp.up_proj.weight is not finite"


def test_a_broken_block_is_named(world: World) -> None:
    own = model()
    own.get_parameter("blocks.1.mlp.down_proj.weight").data.fill_(3e38)
    said = diagnose(own, batch(), BAD, world)
    assert said == "the output of block 1 is the first that is not finite, all weights are"


def test_a_broken_gradient_is_named(world: World) -> None:
    own = model()
    for name in ("embedding.weight", "blocks.0.mixer.q_proj.weight"):
        parameter = own.get_parameter(name)
        parameter.grad = torch.full_like(parameter, math.nan)
    said = diagnose(own, batch(), BAD, world)
    first = "blocks.0.mixer.q_proj.weight"
    assert said == f"the gradient of {first} is the first that is not finite, all weights are"


def test_a_sum_that_is_too_large_is_said(world: World) -> None:
    said = diagnose(model(), batch(), StepResult(2.0, math.inf), world)
    assert said == "loss 2, norm of the gradient inf, every part finite"


def test_hooks_of_a_diagnosis_are_taken_off(world: World) -> None:
    own = model()
    diagnose(own, batch(), BAD, world)
    assert not any(block._forward_hooks for block in own.blocks)


def test_other_threads_may_train() -> None:
    """Where no handlers of signals may be set."""
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> bool:
        with StopRequest() as request:
            return bool(request)

    with ThreadPoolExecutor() as threads:
        assert threads.submit(enter).result() is False
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(said=True):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == "\nSIGTERM: saving after this step; again leaves at once\n"


def test_a_signal_asks_though_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tee`, which Ctrl-C has ended too."""

    def write(*_: Any) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("os.write", write)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.by == "Ctrl-C"


def test_a_run_ends_well_though_nobody_reads_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rich.console.Console.print", say)
    assert train(config(tmp_path)).is_finished
    assert (tmp_path / "model").is_dir()


def test_a_run_ends_well_though_whoever_read_it_has_left(tmp_path: Path) -> None:
    """As `gdn2 train … 2>&1 | head -n 1`, or where Ctrl-C ends `tee` too."""
    file = tmp_path / "run.json"
    write_json(file, to_plain(config(tmp_path / "run")))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gdn2", "train", str(file)]
    done = subprocess.run(command, stderr=writer, timeout=120, check=False)
    os.close(writer)
    assert done.returncode == 0
    train(config(tmp_path / "read"))
    assert_same_run(tmp_path / "run", tmp_path / "read")


def test_the_first_signal_asks_and_a_later_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop.by == "Ctrl-C"
        signal.raise_signal(signal.SIGINT)  # torchrun's echo of the same
        monkeypatch.setattr(faults, "SAME_SIGNAL", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def lose_a_disk(rank: int, port: int, folder: Path) -> None:
    """Train as one of two, of which the second loses its data while both still save."""
    be_one_of(2, rank, port)
    seal, draw = checkpoint_files.seal, Task.batch

    def seal_slowly(folder: Path, rank: int) -> dict[str, str]:
        time.sleep(1)
        return seal(folder, rank)

    def read(source: Task, first: int, rows: int) -> Batch:
        if rank == 1 and first >= 2 * ROWS:
            raise OSError("the disk is gone")
        return draw(source, first, rows)

    checkpoint_files.seal = seal_slowly
    Task.batch = read  # type: ignore[assignment, method-assign]
    said = "the disk is gone" if rank == 1 else "another process has ended"
    with pytest.raises(TrainingError, match=rf"^{said}.*; checkpoints are as they were$"):
        train(config(folder, checkpoint={"every_steps": 1}))


def test_what_ends_one_process_ends_all(tmp_path: Path) -> None:
    port = free_port()
    processes = [start_process(lose_a_disk, rank, port, tmp_path) for rank in range(2)]
    try:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert checkpoint_files.steps_in(tmp_path / "checkpoints") == [2, 1]
    assert checkpoint_files.damage(tmp_path / "checkpoints" / "step-00000002") is None
