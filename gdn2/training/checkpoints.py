"""Checkpoints of a run: written behind its back, whole or not at all, and read by any number of processes.

step-00000100/   __0_0.distcp …  .metadata     weights and optimiser, in the format of torch.distributed.checkpoint
                 extra.json                    whatever else the run must remember
                 model/                        a model folder
                 checksums.json
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from gdn2.models.files import read_json
from gdn2.models.language_model import LanguageModel
from gdn2.models.run_folder import MODEL, checkpoint_path
from gdn2.ops.arguments import require
from gdn2.training import checkpoint_files as files
from gdn2.training.checkpoint_reader import CheckpointReader
from gdn2.training.shard import full_weights
from gdn2.training.train_state import State, blank_state, restore_optimiser, staged, train_state
from gdn2.training.world import World

EXTRA = "extra.json"
Export = Callable[[Path, dict[str, Tensor]], None]
T = TypeVar("T")

# One process needs no process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class CheckpointError(ValueError):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints of a run in one folder. Every method must be called by all processes."""

    def __init__(
        self, folder: Path, world: World, *, keep: int, milestones: int | None = None
    ) -> None:
        """Make the folder, and clear away what a killed process left half written.

        Args:
            folder: seen by all processes; a run's own.
            world: the processes that train.
            keep: how many of the newest stay.
            milestones: checkpoints of steps that are multiples of it stay for good.
        """
        require(keep >= 1, "keep", keep, "at least 1")
        fits = milestones is None or milestones >= 1
        require(fits, "milestones", milestones, "None or at least 1")
        self.folder = Path(folder).absolute()
        self._world, self._keep, self._milestones = world, keep, milestones
        # Its own group: the writing thread's messages must not meet those of training.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._writer: Thread | None = None
        self._failure: CheckpointError | None = None
        self._saved: int | None = None
        self._damaged: set[int] = set()
        self._by_main(self.folder, lambda: files.sweep(self.folder))

    def save(
        self,
        step: int,
        model: LanguageModel,
        optimiser: Optimizer,
        extra: dict[str, Any],
        export: Export | None = None,
    ) -> None:
        """Copy the state to the CPU and write it in a thread; a step that is saved already is not saved again.

        A failure is raised by the next call of `save`, which has begun its own by then, or of `wait`.

        Args:
            step: the state is that after so many steps.
            model: from `build_model`.
            optimiser: of the model's parameters.
            extra: anything JSON can hold; the main process's is written.
            export: writes a model folder from whole weights; called by the main process's thread.
        """
        text = json.dumps(extra)
        self._join()
        failure, self._failure = self._failure, None
        if step != self._saved:
            state = staged(train_state(model, optimiser))
            weights = full_weights(model, self._world) if export else None
            self._writer = Thread(target=self._save, args=(step, state, text, weights, export))
            self._writer.start()
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait until the last `save` is on the disk."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let the writing thread end, while the others can be heard: a process that exits would wait for it as well."""
        self._join()

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; those that are not are named on standard error and passed over."""
        self._join()
        step = self._by_main(self.folder, self._newest_step)
        return None if step is None else Checkpoint(step, checkpoint_path(self.folder, step))

    def load(
        self, checkpoint: Checkpoint, model: LanguageModel, optimiser: Optimizer
    ) -> dict[str, Any]:
        """Put a checkpoint into a model and its optimiser, and return its extra."""
        state = blank_state(checkpoint.path, model)
        reader = CheckpointReader(checkpoint.path)
        try:
            state_dict_loader.load(state, storage_reader=reader, **self._processes)
        except CheckpointException as failure:
            got = _reason(failure)
            raise ValueError(f"{checkpoint.path}: got {got}, expected a whole checkpoint") from None
        restore_optimiser(optimiser, model, state)
        self._saved = checkpoint.step
        return read_json(checkpoint.path / EXTRA)

    def _save(
        self,
        step: int,
        state: State,
        extra: str,
        weights: dict[str, Tensor] | None,
        export: Export | None,
    ) -> None:
        """What the writing threads of all processes do, in step with each other."""
        path = checkpoint_path(self.folder, step)
        written = files.partial(path)

        def write() -> None:
            state_dict_saver.save(state, checkpoint_id=written, **self._processes)

        def accompany() -> None:
            (written / EXTRA).write_text(extra)
            if export and weights:
                export(written / MODEL, weights)

        def publish() -> None:
            files.publish(path, {name: x for part in sums for name, x in part.items()})
            self._prune(step)

        try:
            self._by_main(path, lambda: files.begin(path))
            self._agreed(path, write)
            self._by_main(path, accompany)
            sums = self._agreed(path, lambda: files.seal(written, self._world.rank))
            self._by_main(path, publish)
            self._saved = step
        except CheckpointError as failure:
            self._failure = failure
            if self._world.is_main:
                files.abandon(path)

    def _agreed(self, path: Path, action: Callable[[], T]) -> list[T]:
        """What the action returns in each process; where it fails in any, the same error in all."""
        result, reason = None, None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            reason = _reason(error)
        outcomes: list[tuple[Any, str | None]] = [(result, reason)] * self._world.size
        if self._group is not None:
            try:
                dist.all_gather_object(outcomes, (result, reason), group=self._group)
            except RuntimeError as error:  # a process is gone
                outcomes = [(None, _reason(error))]
        for _, reason in outcomes:
            if reason is not None:
                raise CheckpointError(f"{path}: got {reason}, expected a folder to save in")
        return [result for result, _ in outcomes]

    def _by_main(self, path: Path, action: Callable[[], T]) -> T:
        """What the action returns in the main process, which alone does it."""
        return self._agreed(path, lambda: action() if self._world.is_main else cast(T, None))[0]

    def _newest_step(self) -> int | None:
        for step in files.steps_in(self.folder):
            path = checkpoint_path(self.folder, step)
            wrong = files.damage(path) or _foreign(path)
            if wrong is None:
                return step
            self._damaged.add(step)
            line = f"{path}: got {wrong}, expected a whole checkpoint; the one before is taken"
            print(line, file=sys.stderr)
        return None

    def _prune(self, newest: int) -> None:
        """Delete what need not stay. A damaged checkpoint of a later step counts for nothing."""
        self._damaged.discard(newest)
        older = [step for step in files.steps_in(self.folder) if step < newest]
        whole = [step for step in older if step not in self._damaged]
        for step in files.superfluous([newest, *whole], self._keep, self._milestones):
            files.discard(checkpoint_path(self.folder, step))

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    @property
    def _processes(self) -> dict[str, Any]:
        return {"process_group": self._group, "no_dist": self._group is None}


def _foreign(path: Path) -> str | None:
    """What a checkpoint's metadata hold that none written here do."""
    try:
        CheckpointReader(path).read_metadata()
    except ValueError as mistake:
        return str(mistake)
    return None


def _reason(error: BaseException) -> str:
    """One line that says what went wrong at the bottom of it."""
    if isinstance(error, CheckpointException):
        return _reason(next(iter(error.failures.values()))[0])
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror + (f" ({cause.filename})" if cause.filename else "")
    return " ".join(str(error).split()) or type(error).__name__
