"""A checkpoint is whole or not there, and what it held comes back to the bit, to any number of processes."""

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from gdn2.models.folder import load_model
from gdn2.models.language_model import LanguageModel
from gdn2.models.run_folder import step_of
from gdn2.training.checkpoints import CheckpointError, Checkpoints
from gdn2.training.shard import build_model, full_weights
from gdn2.training.train_state import train_state
from gdn2.training.world import World
from tests.training.spawn import alone, in_processes, start_process
from tests.training.tiny import HYBRID, build, export, losses, new_optimiser, plain_losses

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def filled(model: LanguageModel, optimiser: AdamW, value: float) -> None:
    """Make everything that is saved tell the step it was saved at."""
    for parameter in model.parameters():
        parameter.data.fill_(value)
        moments = ("exp_avg", "exp_avg_sq")
        optimiser.state[parameter] = {key: torch.full_like(parameter, value) for key in moments}
        optimiser.state[parameter]["step"] = torch.tensor(value)


def save(checkpoints: Checkpoints, step: int, model: LanguageModel, optimiser: AdamW) -> None:
    filled(model, optimiser, step)
    checkpoints.save(step, model, optimiser, {"step": step}, export)
    checkpoints.wait()


def loaded_step(checkpoints: Checkpoints, model: LanguageModel, optimiser: AdamW) -> int:
    """The step of the newest checkpoint, every number of which must tell it."""
    newest = checkpoints.newest()
    assert newest is not None
    filled(model, optimiser, -1)
    assert checkpoints.load(newest, model, optimiser) == {"step": newest.step}
    for name, tensor in train_state(model, optimiser).items():
        assert (tensor == newest.step).all(), name
    for parameter in load_model(newest.path / "model").parameters():
        assert (parameter == newest.step).all()
    return newest.step


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_goes_on_to_the_bit_twice(compute: torch.dtype, tmp_path: Path) -> None:
    with alone() as world:
        straight = build(world, compute)
        expected = losses(world, *straight, 0, 6)
        curve: list[float] = []
        for leg in range(3):
            run = build(world, compute, seed=leg)
            checkpoints = Checkpoints(tmp_path, world, keep=1)
            newest = checkpoints.newest()
            if newest is None:
                run = build(world, compute)
            else:
                extra = checkpoints.load(newest, *run)
                assert extra == {"curve": curve, "nested": {"a": [1, None, "ü"]}}
            curve += losses(world, *run, 2 * leg, 2 * leg + 2)
            extra = {"curve": curve, "nested": {"a": [1, None, "ü"]}}
            checkpoints.save(2 * leg + 2, *run, extra, export)
            checkpoints.wait()
        assert curve == expected
        found, wanted = train_state(*run), train_state(*straight)
        assert found.keys() == wanted.keys()
        assert len(found) == 4 * len(list(straight[0].parameters()))
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        assert names(tmp_path) == ["step-00000006"]
        exported = dict(load_model(tmp_path / "step-00000006" / "model").named_parameters())
        weights = full_weights(straight[0], world)
        assert weights is not None
        for name, weight in weights.items():
            assert torch.equal(exported[name], weight), name


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    with alone() as world:
        run = build(world)
        filled(*run, 1)
        changed = Event()

        def late_export(path: Path, weights: dict[str, Tensor]) -> None:
            assert changed.wait(60)
            export(path, weights)

        checkpoints = Checkpoints(tmp_path, world, keep=1)
        checkpoints.save(1, *run, {"step": 1}, late_export)
        assert names(tmp_path) in ([], [".step-00000001.partial"])
        filled(*run, 2)
        changed.set()
        assert loaded_step(checkpoints, *run) == 1


def leg(world: World, folder: Path, first: int, last: int) -> list[float]:
    """Resume, train and save."""
    run = build(world, seed=first + 5)  # the seed of the first leg is the reference's
    checkpoints = Checkpoints(folder, world, keep=1)
    newest = checkpoints.newest()
    assert (newest is None) == (first == 0)
    if newest is not None:
        assert checkpoints.load(newest, *run) == {"step": first}
    curve = losses(world, *run, first, last)
    checkpoints.save(last, *run, {"step": last}, export)
    checkpoints.wait()
    return curve


def one_process_fails(world: World, folder: Path) -> list[str]:
    """The lines each process hears when the disk of the last one is full."""
    run = build(world)
    checkpoints = Checkpoints(folder, world, keep=2)
    save(checkpoints, 1, *run)
    lines = []
    for step in (2, 3):
        with full_disk() if world.rank == world.size - 1 else nullcontext():
            try:
                save(checkpoints, step, *run)
            except CheckpointError as error:
                lines.append(str(error))
    assert loaded_step(checkpoints, *run) == 1
    save(checkpoints, 4, *run)
    assert loaded_step(checkpoints, *run) == 4
    return lines


@contextmanager
def full_disk() -> Iterator[None]:
    """No file gets to the disk any more."""

    def fail(_: int) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    kept, os.fsync = os.fsync, fail  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = kept


@contextmanager
def small_files() -> Iterator[None]:
    """A write beyond 4 kB fails, as one on a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path: Path) -> None:
    curve = in_processes(2, leg, tmp_path, 0, 5)[0]
    curve += in_processes(4, leg, tmp_path, 5, 10)[3]
    curve += in_processes(4, leg, tmp_path, 10, 15, replicate=2)[1]
    with alone() as world:
        curve += leg(world, tmp_path, 15, 20)
    assert curve == pytest.approx(plain_losses(20), rel=1e-6)


def test_a_failure_of_one_process_is_told_to_all(tmp_path: Path) -> None:
    first, second = in_processes(2, one_process_fails, tmp_path)
    assert first == second
    assert len(first) == 2
    assert all("step-0000000" in line and "No space left on device" in line for line in first)
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize("trouble", [full_disk, small_files])
def test_a_full_disk_costs_no_checkpoint(
    trouble: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path, world, keep=1)
        save(checkpoints, 1, *run)
        with trouble(), pytest.raises(CheckpointError) as caught:
            save(checkpoints, 2, *run)
        line = str(caught.value)
        assert line.startswith(f"{tmp_path / 'step-00000002'}: got ")
        assert "No space left on device" in line or "File too large" in line
        assert "\n" not in line
        assert names(tmp_path) == ["step-00000001"]
        assert loaded_step(checkpoints, *run) == 1
        save(checkpoints, 2, *run)
        assert loaded_step(checkpoints, *run) == 2
        assert names(tmp_path) == ["step-00000002"]


def test_a_failure_is_told_by_the_next_save_which_saves(tmp_path: Path) -> None:
    def fail(path: Path, weights: dict[str, Tensor]) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))

    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path, world, keep=1)
        checkpoints.save(1, *run, {}, fail)
        with pytest.raises(CheckpointError, match=r"step-00000001: got No space .*/model\)"):
            checkpoints.save(2, *run, {})
        checkpoints.wait()
        assert names(tmp_path) == ["step-00000002"]


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone() as world, pytest.raises(CheckpointError, match="file/run: got Not a directory"):
        Checkpoints(tmp_path / "file" / "run", world, keep=1)
    with alone() as world, pytest.raises(CheckpointError, match="file: got File exists"):
        Checkpoints(tmp_path / "file", world, keep=1)


def truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path: Path) -> None:
    file = path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def folder_for_sums(path: Path) -> None:
    (path / "checksums.json").unlink()
    (path / "checksums.json").mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "__0_0.distcp other than it was written"),
    "flipped": (flip, "model.safetensors other than it was written"),
    "missing": (lambda path: (path / ".metadata").unlink(), ".metadata: No such file"),
    "no sums": (lambda path: (path / "checksums.json").unlink(), "checksums.json: got no such"),
    "empty sums": (
        lambda path: (path / "checksums.json").write_text("{}"),
        "checksums.json names no file",
    ),
    "sums that are no file": (
        folder_for_sums,
        "checksums.json",
    ),
    "half the sums": (
        lambda path: (path / "checksums.json").write_text('{"extra.json":'),
        "checksums.json: got Expecting value",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, line = DAMAGE[kind]
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path, world, keep=2)
        for step in (1, 2):
            save(checkpoints, step, *run)
        harm(tmp_path / "step-00000002")
        again = Checkpoints(tmp_path, world, keep=2)
        assert loaded_step(again, *run) == 1
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
        save(again, 2, *run)  # takes the damaged one's place
        assert loaded_step(Checkpoints(tmp_path, world, keep=2), *run) == 2
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert capsys.readouterr().err == ""


def test_the_newest_and_the_milestones_stay(tmp_path: Path) -> None:
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path, world, keep=2, milestones=4)
        assert checkpoints.newest() is None
        for step in range(11):
            save(checkpoints, step, *run)
        assert names(tmp_path) == [f"step-{step:08}" for step in (0, 4, 8, 9, 10)]


def test_damaged_checkpoints_count_for_nothing(tmp_path: Path) -> None:
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path, world, keep=3)
        for step in (2, 4, 6):
            save(checkpoints, step, *run)
        for step in (4, 6):
            truncate(tmp_path / f"step-{step:08}")
        again = Checkpoints(tmp_path, world, keep=1)
        assert loaded_step(again, *run) == 2
        save(again, 5, *run)
        assert loaded_step(Checkpoints(tmp_path, world, keep=1), *run) == 5


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(tmp_path, world, keep=2)
        save(checkpoints, 7, *run)
        written = (tmp_path / "step-00000007").stat().st_ino
        save(checkpoints, 7, *run)
        again = Checkpoints(tmp_path, world, keep=2)
        loaded_step(again, *run)
        save(again, 7, *run)
        assert (tmp_path / "step-00000007").stat().st_ino == written


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.partial" / "model").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    with alone() as world:
        assert Checkpoints(tmp_path, world, keep=2).newest() is None
    assert names(tmp_path) == ["notes.txt"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with alone() as world:
        checkpoints = Checkpoints(tmp_path, world, keep=2)
        save(checkpoints, 1, *build(world))
        newest = checkpoints.newest()
        assert newest is not None
        for other, line in (
            (
                replace(HYBRID, vocab_size=31),
                r"model\.\S+: got shape \(29, 18\), expected \(31, 18",
            ),
            (replace(HYBRID, num_hidden_layers=4), r"got model\.blocks\.2\S+, .* those of the"),
        ):
            model = build_model(
                other,
                seed=0,
                world=world,
                weights=torch.float32,
                compute=torch.float32,
                compile=False,
                checkpoint_blocks=False,
            )
            with pytest.raises(ValueError, match=line):
                checkpoints.load(newest, model, new_optimiser(model))


@pytest.mark.parametrize(("keep", "milestones"), [(0, None), (1, 0)])
def test_numbers_that_make_no_sense_are_refused(
    keep: int, milestones: int | None, tmp_path: Path
) -> None:
    with alone() as world, pytest.raises(ValueError, match="got 0, expected"):
        Checkpoints(tmp_path, world, keep=keep, milestones=milestones)


def save_for_ever(folder: Path) -> None:
    torch.set_num_threads(1)
    with alone() as world:
        run = build(world)
        checkpoints = Checkpoints(folder, world, keep=2, milestones=5)
        newest = checkpoints.newest()
        step = 0 if newest is None else newest.step
        while True:
            step += 1
            save(checkpoints, step, *run)


def kill_at_random_moments(folder: Path, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    rand = random.Random(0)
    reached = 0
    for _ in range(times):
        process = start_process(save_for_ever, folder)
        deadline = time.monotonic() + 60
        while max((step_of(path) or 0 for path in folder.iterdir()), default=0) <= reached:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rand.uniform(0, 0.3))
        process.kill()
        process.join()
        with alone() as world:
            step = loaded_step(Checkpoints(folder, world, keep=2), *build(world))
        assert step > reached
        reached = step
        assert capsys.readouterr().err == ""


def test_a_kill_leaves_whole_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_at_random_moments(tmp_path, 4, capsys)


@pytest.mark.slow
def test_many_kills_leave_whole_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_at_random_moments(tmp_path, 25, capsys)
