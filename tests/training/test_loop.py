"""The training loop against a loop written out, and against itself interrupted."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import gdn2
from gdn2.data.config import open_source
from gdn2.data.locking import locked
from gdn2.data.prepare import prepare
from gdn2.layers.delta import DeltaMixer
from gdn2.layers.joint import lay_side_by_side
from gdn2.layers.plain import to_plain
from gdn2.models.files import write_json
from gdn2.ops.backends import in_force
from gdn2.training.checkpoints import CheckpointError, Checkpoints
from gdn2.training.config import ParallelSection, RunConfig
from gdn2.training.faults import TrainingError
from gdn2.training.loop import train
from gdn2.training.metrics import Metrics
from gdn2.training.run import Run, own_folder
from gdn2.training.run_file import config_from, load_config
from gdn2.training.world import World
from tests.training.runs import (
    LENGTH,
    ROWS,
    STEPS,
    assert_same_run,
    config,
    lines,
    losses,
    weights,
)
from tests.training.spawn import in_processes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    end = train(config(folder))
    assert end.is_finished
    assert end.stopped_by is None
    return folder


def written_out(run: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in plain torch, with whole batches."""
    model = gdn2.LanguageModel(run.model, seed=run.run.seed)
    source = open_source(run.data, LENGTH, run.run.seed, "train")
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1]
    vectors = [p for name, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    found = []
    for step in range(1, STEPS + 1):
        ids, targets, _ = source.batch((step - 1) * ROWS, ROWS)
        logits = model(ids).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        down = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 3))) / 2
        for group in adam.param_groups:
            group["lr"] = 1e-2 * (step / 3 if step < 3 else down)
        adam.step()
        found.append(loss.item())
    return found, {name: p.detach() for name, p in model.named_parameters()}


def test_the_loop_is_adamw_with_a_schedule(whole: Path) -> None:
    expected, parameters = written_out(config(whole))
    assert losses(whole) == pytest.approx(expected, rel=2e-5)
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, parameters[name], rtol=2e-3, atol=2e-4)
    assert expected[-1] < expected[0] - 0.3


def test_metrics_of_every_step(whole: Path) -> None:
    found = lines(whole)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in found] == [i * ROWS * LENGTH for i in range(1, STEPS + 1)]
    looked = [line["step"] for line in found if "validation_loss" in line]
    assert looked == [5, 10, STEPS]
    assert all(line["gradient_norm"] > 0 and line["skips"] == 0 for line in found)


def test_validation_counts_every_target_once(whole: Path) -> None:
    run = config(whole)
    model = gdn2.load(whole / "model")
    ids, targets, _ = open_source(run.data, LENGTH, 0, "validation").batch(0, run.validation.rows)
    with torch.no_grad():
        logits = model(ids).logits.flatten(0, 1)
    flat = targets.flatten()
    right = (logits.argmax(-1) == flat)[flat >= 0].double().mean()
    last = lines(whole)[-1]
    assert last["validation_loss"] == pytest.approx(float(cross_entropy(logits, flat)), rel=1e-5)
    assert last["validation_accuracy"] == pytest.approx(float(right), abs=1e-9)


def test_interrupted_runs_are_the_same_to_the_bit(whole: Path, tmp_path: Path) -> None:
    for until in (STEPS // 2, STEPS // 2, 9, None):
        end = train(config(tmp_path), until=until)
        assert end.step == (until or STEPS)
    assert_same_run(tmp_path, whole)


def test_a_finished_run_stays_as_it_is(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes(), weights(whole)
    end = train(config(whole))
    assert end.is_finished
    assert (whole / "metrics.jsonl").read_bytes() == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in weights(whole).items())


@pytest.mark.parametrize("micro_rows", [1, 8])
def test_accumulation_changes_nothing(micro_rows: int, whole: Path, tmp_path: Path) -> None:
    """Needles have one target a row and copying several, so micro-batches differ in what they count."""
    parts = [
        {"type": "needle", "keys": 4, "values": 4, "fillers": 8, "needles": 1},
        {"type": "copying", "symbols": 15, "items": 5},
    ]
    mixed = {"type": "mixture", "parts": parts, "weights": [1, 1]}
    runs = {}
    for rows in (4, micro_rows):
        chosen = config(tmp_path / str(rows), batch={"micro_rows": rows})
        table = to_plain(chosen) | {"data": mixed}
        train(config_from(table), until=6)
        runs[rows] = losses(tmp_path / str(rows))
    assert runs[micro_rows] == pytest.approx(runs[4], rel=1e-5)


def test_a_resume_with_another_config_is_refused(tmp_path: Path) -> None:
    train(config(tmp_path), until=4)
    with pytest.raises(ValueError, match=r"^optimiser.lr: got 0.5, expected 0.01"):
        train(config(tmp_path, optimiser={"lr": 0.5}))
    moved = config(tmp_path, batch={"micro_rows": 2}, validation={"every_steps": None})
    assert train(moved, until=6).step == 6


def test_one_run_in_a_folder_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path, "run.dir"),
        pytest.raises(ValueError, match=r"^run.dir: .* is being written by another process"),
    ):
        train(config(tmp_path))
    assert train(config(tmp_path), until=1).step == 1


def test_saves_by_tokens(tmp_path: Path) -> None:
    """A save is due with the step that reaches another multiple, though no step ends at it."""
    tokens = ROWS * LENGTH
    every = {"every_steps": None, "every_tokens": 5 * tokens // 2, "keep": 9}
    train(config(tmp_path, checkpoint=every))
    found = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    assert found == [3, 5, 8, 10, STEPS]


def bytes_run(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run on text, which has a tokenizer."""
    plain = to_plain(config(folder, model={"vocab_size": 256}, **sections))
    return config_from(plain | {"data": {"type": "python"}})


LOOKS: dict[str, dict[str, Any]] = {
    "samples": {"every_steps": 2, "prompt": "import ", "tokens": 5},
    "log": {"health_every_steps": 3},
}


def test_looking_at_a_model_leaves_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a bit of a run depends on what it is asked to write or on what is measured in it."""
    train(bytes_run(tmp_path / "alone"), until=6)
    assert "import " not in capsys.readouterr().err
    train(bytes_run(tmp_path / "seen", **LOOKS), until=6)
    assert capsys.readouterr().err.count("\nimport ") == 3
    seen = lines(tmp_path / "seen")
    assert [line["step"] for line in seen if line.pop("health", None)] == [3, 6]
    assert seen == lines(tmp_path / "alone")
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints/step-00000006/model/model.safetensors")
        for name in ("alone", "seen")
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_run_that_keeps_factors_is_the_same(whole: Path, tmp_path: Path) -> None:
    keeping = config(tmp_path, engine={"recompute": False})
    mixer = Run(keeping, World.start(ParallelSection(), "cpu")).model.mixers[0]
    assert isinstance(mixer, DeltaMixer) and not mixer.recompute
    train(keeping)
    assert_same_run(tmp_path, whole)


def test_a_run_token_by_token_is_the_same(whole: Path, tmp_path: Path) -> None:
    train(config(tmp_path, engine={"device": "cpu", "backend": "reference"}))
    assert losses(tmp_path) != losses(whole)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-3)
    assert in_force() == "auto"


def test_a_sample_is_of_a_copy(tmp_path: Path) -> None:
    """Inference may lay weights out anew, where memory of the model in training must stay."""
    run = Run(bytes_run(tmp_path), World.start(ParallelSection(), "cpu"))
    before = {
        name: (x.data_ptr(), x.stride(), x.clone()) for name, x in run.model.named_parameters()
    }
    copy = run.plain_model()
    assert copy is not None
    theirs = {x.untyped_storage().data_ptr() for x in copy.parameters()}
    lay_side_by_side(copy)
    for name, x in run.model.named_parameters():
        place, stride, value = before[name]
        assert x.untyped_storage().data_ptr() not in theirs, name
        assert (x.data_ptr(), x.stride()) == (place, stride), name
        assert torch.equal(x, value), name


def test_without_held_out_rows_there_is_no_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("All of it is learnt. " * 9)
    prepare([str(tmp_path / "a.txt")], tmp_path / "tokens", workers=1)
    tokens = {"type": "tokens", "path": str(tmp_path / "tokens"), "validation_fraction": 0.0}
    plain = to_plain(config(tmp_path / "run", model={"vocab_size": 256}, log=LOOKS["log"]))
    end = train(config_from(plain | {"data": tokens}))
    assert end.is_finished
    assert end.validation == {}
    found = lines(tmp_path / "run")
    assert not any("validation_loss" in line for line in found)
    assert [line["step"] for line in found if "health" in line] == [3, 6, 9, 12]


def test_what_cannot_fit_is_refused_at_once(tmp_path: Path) -> None:
    small = config(tmp_path, model={"vocab_size": 31})
    with pytest.raises(
        ValueError, match=r"^model.vocab_size: got 31, expected at least the data's 32"
    ):
        train(small)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^run.dir: got .*file.*, expected a folder to write to"):
        train(config(tmp_path / "file"))


def test_a_damaged_checkpoint_costs_no_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(tmp_path), until=9)
    newest = tmp_path / "checkpoints" / "step-00000009"
    (data,) = newest.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-7])
    train(config(tmp_path))
    assert "step-00000009" in capsys.readouterr().err
    assert_same_run(tmp_path, whole)


def test_no_whole_checkpoint_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    train(config(tmp_path), until=3)
    (tmp_path / "checkpoints" / "step-00000003" / "checksums.json").unlink()
    with pytest.raises(TrainingError, match=r"no checkpoint in .* is whole; move that folder away"):
        train(config(tmp_path))


def test_training_goes_on_where_a_checkpoint_fails(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, save = [], Checkpoints.save

    def failing(self: Checkpoints, step: int, *arguments: Any) -> None:
        saved.append(step)
        if step == 4:
            raise CheckpointError("step-00000004: got no space, expected a folder to save in")
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", failing)
    train(config(tmp_path))
    assert saved == [4, 8, 12]
    assert "got no space, expected a folder to save in; training goes on" in capsys.readouterr().err
    assert_same_run(tmp_path, whole)


def test_a_full_disk_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Metrics, "write", full)
    assert train(config(tmp_path), until=2).step == 2
    assert "No space left on device; training goes on" in capsys.readouterr().err


def start(file: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gdn2", "train", str(file), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def long_run(folder: Path, steps: int = 60, save_every: int = 3) -> Path:
    """The file of a run that has hardly begun when it is first saved."""
    tokens = ROWS * LENGTH
    run = config(
        folder,
        schedule={"tokens": steps * tokens, "warmup_tokens": 3 * tokens},
        checkpoint={"every_steps": save_every},
    )
    file = folder.with_suffix(".json")
    write_json(file, to_plain(run))
    return file


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does."""
    for _ in range(2000):
        if process.poll() is not None or holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came about")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(sent: signal.Signals, tmp_path: Path) -> None:
    file = long_run(tmp_path / "run")
    process = start(file)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, process)
    process.send_signal(sent)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    step = lines(tmp_path / "run")[-1]["step"]
    name = "Ctrl-C" if sent == signal.SIGINT else "SIGTERM"
    assert f"{name}: saved after step {step} of 60; the same command resumes" in said
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08}").is_dir()


def kill_at_random(tmp_path: Path, *, steps: int, kills: int, seed: int) -> int:
    """Kill a run again and again while it trains and saves; it ends as if nothing had been. Return saves cut short."""
    train(load_config(long_run(tmp_path / "whole", steps, save_every=steps)))
    folder, rand = tmp_path / "killed", np.random.default_rng(seed)
    file, cut_short = long_run(folder, steps), 0
    metrics, step = folder / "metrics.jsonl", 0
    for left in range(kills, 0, -1):
        process = start(file)
        wait_for_new_lines(metrics, process)
        step = int(rand.integers(step, step + (steps - step) // (left + 1)))
        wait_until(partial(has_steps, metrics, step), process)
        time.sleep(float(rand.uniform(0.0, 0.02)))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        cut_short += any((folder / "checkpoints").glob(".*partial"))
    assert any((folder / "checkpoints").glob("step-*"))
    train(load_config(file))
    assert_same_run(folder, tmp_path / "whole")
    return cut_short


def has_steps(metrics: Path, count: int) -> bool:
    return metrics.read_text().count("\n") >= count


def wait_for_new_lines(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the run has cut its metrics off at the checkpoint it goes on from, or added a line to them."""

    def seen() -> tuple[int, int] | None:
        found = path.stat() if path.exists() else None
        return found and (found.st_ino, found.st_size)

    before = seen()
    wait_until(lambda: seen() not in (None, before), process)


def test_kills_lose_nothing(tmp_path: Path) -> None:
    kill_at_random(tmp_path, steps=100, kills=2, seed=0)


@pytest.mark.slow
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    assert kill_at_random(tmp_path, steps=2000, kills=25, seed=1) > 0


def find_locked(world: World, folder: Path) -> str:
    with pytest.raises(ValueError, match="run") as caught, own_folder(config(folder), world):
        pass
    return str(caught.value)


def test_all_processes_say_what_the_main_one_finds(tmp_path: Path) -> None:
    with locked(tmp_path, "run.dir"):
        said = in_processes(2, find_locked, tmp_path)
    assert said == [f"run.dir: {tmp_path} is being written by another process"] * 2


def test_two_processes_train_the_same_run(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    train(bytes_run(whole))
    write_json(tmp_path / "run.json", to_plain(bytes_run(tmp_path / "two", **LOOKS)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "gdn2", "train", str(tmp_path / "run.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\nimport ") == STEPS // LOOKS["samples"]["every_steps"]
    assert losses(tmp_path / "two") == pytest.approx(losses(whole), rel=1e-5)
    for step in (5, 10, STEPS):
        ours, theirs = (lines(folder)[step - 1] for folder in (tmp_path / "two", whole))
        assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)
    for name, value in weights(tmp_path / "two").items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-3, atol=1e-4)
