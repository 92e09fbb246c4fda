"""The training loop: steps until the run's tokens are used up, saved on the way, resumed by the same call."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from gdn2.data.batch import Batch, Source, micro_batches
from gdn2.data.prefetch import Prefetch
from gdn2.data.synthetic import Task
from gdn2.data.tokenizers import Tokenizer
from gdn2.models.language_model import LanguageModel
from gdn2.models.run_folder import MODEL, read_metrics
from gdn2.models.summary import count_parameters
from gdn2.ops.backends import using
from gdn2.training.checkpoints import CheckpointError
from gdn2.training.config import RunConfig
from gdn2.training.faults import (
    StopRequest,
    TrainingError,
    diagnose,
    is_lack_of_memory,
    is_lack_of_others,
)
from gdn2.training.health import health
from gdn2.training.metrics import Metrics, check_tensorboard
from gdn2.training.progress import Progress
from gdn2.training.run import Run, own_folder
from gdn2.training.schedule import rate_at
from gdn2.training.speed import Speed
from gdn2.training.step import StepResult, train_step
from gdn2.training.validation import validate
from gdn2.training.world import World
from gdn2.training.writing import sample


@dataclass(frozen=True)
class RunEnd:
    """Where a call of `train` left its run."""

    folder: Path
    step: int
    steps: int
    validation: dict[str, float]  # the last one, if this call made any
    stopped_by: str | None  # a signal, if one ended it

    @property
    def is_finished(self) -> bool:
        return self.step == self.steps


def train(config: RunConfig, *, until: int | None = None) -> RunEnd:
    """Train, or go on with the run in `config.run.dir`; at the step `until`, if given, save and leave.

    Raises ValueError where the config is wrong or differs from the run's, TrainingError where the run cannot go on.
    """
    check_tensorboard(config.log.tensorboard)
    world = World.start(config.parallel, config.engine.device)
    try:
        with own_folder(config, world), using(config.engine.backend):
            run = Run(config, world)
            with closing(run.checkpoints):
                return _Loop(run).go(until)
    except OSError as reason:
        raise TrainingError(f"{reason}; checkpoints are as they were") from None
    except RuntimeError as reason:
        if is_lack_of_others(reason):
            said = "another process has ended, see what it said; checkpoints are as they were"
            raise TrainingError(said) from None
        if not is_lack_of_memory(reason):
            raise
        advice = "fewer batch.micro_rows, engine.activation_checkpointing=true, or a smaller model"
        raise TrainingError(f"there is not enough memory; take {advice}") from None
    finally:
        world.close()


def check_numbers(end: RunEnd) -> None:
    """Raise TrainingError where a model that was trained to its end predicts nothing."""
    for name, value in (end.validation or _recorded(end.folder)).items():
        if end.is_finished and not isfinite(value):
            made = f"the model in {end.folder / MODEL} predicts nothing"
            raise TrainingError(f"{name} is {value:g}: {made}; a lower optimiser.lr may help")


def _recorded(folder: Path) -> dict[str, float]:
    """What the last validation of a run found that an earlier call has finished."""
    last = read_metrics(folder)[-1:]
    found = (
        (name, x) for line in last for name, x in line.items() if name.startswith("validation")
    )
    return {name: nan if x is None else x for name, x in found}


class _Loop:
    def __init__(self, run: Run) -> None:
        self.run, self.config, self.world, self.place = run, run.config, run.world, run.place
        shown = self.world.is_main
        self.progress = Progress(self.config.steps, self.place.step, shown=shown)
        folder = run.folder if shown else None
        tensorboard = self.config.log.tensorboard
        self.metrics = self.world.agreed(
            lambda: Metrics(folder, self.place.step, tensorboard=tensorboard)
        )
        batch = self.config.batch
        self.speed = Speed(
            self.config.model, batch.length, self.world.device, self.world.size, run.compute
        )
        self.accumulated = batch.rows // (batch.micro_rows * self.world.size)
        self.validation: dict[str, float] = {}
        self.saved_step, self.saved_at = self.place.step, time.monotonic()

    def go(self, until: int | None) -> RunEnd:
        steps = self.config.steps
        last = steps if until is None else min(until, steps)
        with (
            self.progress,
            self.metrics,
            StopRequest(said=self.world.is_main) as stop,
            self._batches() as batches,
        ):
            self._greet()
            self.speed.restart()
            while self.place.step < last and not self.world.any(bool(stop)):
                self._take_step([next(batches) for _ in range(self.accumulated)])
                if self._save_is_due():
                    self._save()
            self._leave(stop.by)
        return RunEnd(self.run.folder, self.place.step, steps, self.validation, stop.by)

    def _batches(self) -> Prefetch:
        batch, world = self.config.batch, self.world
        firsts = micro_batches(
            self.place.step,
            rows=batch.rows,
            micro=batch.micro_rows,
            rank=world.rank,
            ranks=world.size,
        )
        on_gpu = world.device.type == "cuda"
        ahead = 2 * max(1, self.accumulated)
        return Prefetch(self.run.source, firsts, batch.micro_rows, ahead=ahead, pin=on_gpu)

    def _take_step(self, batches: Sequence[Batch]) -> None:
        section, place = self.config.optimiser, self.place
        tokens = (place.step + 1) * self.config.batch.tokens
        lr = section.lr * rate_at(tokens, self.config.schedule)
        result = train_step(
            self.run.model, self.run.optimiser, self.world, batches, lr=lr, clip=section.clip
        )
        place.step += 1
        place.skips += not result.is_finite
        place.skips_in_a_row = 0 if result.is_finite else place.skips_in_a_row + 1
        line = {"step": place.step, "tokens": tokens, "lr": lr, **result._asdict()}
        line |= {"skips": place.skips, **self.speed.lap(self.config.batch.tokens), **self._look()}
        self._try(lambda: self.metrics.write(line))
        self.progress.update(line)
        if not result.is_finite:
            self._pass_over(result, batches[0])
        self.speed.restart()

    def _try(self, write: Callable[[], None]) -> None:
        """A disk that is full is said, and no reason to stop."""
        try:
            write()
        except (CheckpointError, OSError) as reason:
            self.progress.say(f"{reason}; training goes on")

    def _say_sample(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        """Nothing of the run depends on it, so it does not end one either."""
        try:
            self.progress.say(sample(model, tokenizer, self.config.samples))
        except ValueError as reason:
            self.progress.say(f"no sample: {reason}; training goes on")

    def _pass_over(self, result: StepResult, batch: Batch) -> None:
        """Say that a step moved nothing; after too many, end the run with the reason."""
        row = self.place.skips_in_a_row
        found = f"loss {result.loss:g}, gradient norm {result.gradient_norm:g}"
        self.progress.say(f"step {self.place.step} skipped, {row} in a row: {found}")
        if row >= self.config.optimiser.max_skips:
            reason = diagnose(self.run.model, batch, result, self.world)
            raise TrainingError(f"{row} steps in a row were skipped ({found}): {reason}")

    def _look(self) -> dict[str, Any]:
        """What is looked at now and then: validation, samples, health."""
        config, step = self.config, self.place.step
        found: dict[str, Any] = {}
        is_turn = _is_turn(step, config.validation.every_steps) or step == config.steps
        if is_turn and self.run.held_out is not None:
            found |= self._validate(self.run.held_out)
        if self.run.tokenizer is not None and _is_turn(step, config.samples.every_steps):
            model = self.run.plain_model()
            if model is not None:
                self._say_sample(model, self.run.tokenizer)
        if _is_turn(step, config.log.health_every_steps):
            model = self.run.plain_model()
            if model is not None:
                rows = self.run.held_out or self.run.source
                batch = rows.batch(0, config.batch.micro_rows)
                found["health"] = health(model, batch)
        return found

    def _validate(self, held_out: Source) -> dict[str, float]:
        self.validation = self._measure(held_out)
        for length, rows in self.run.held_out_at.items():
            found = self._measure(rows)
            self.validation |= {f"{name}_{length}": value for name, value in found.items()}
        return self.validation

    def _measure(self, held_out: Source) -> dict[str, float]:
        """As many tokens at every length: of longer rows there are fewer."""
        batch, length = self.config.batch, held_out.length
        rows, micro_rows = (
            max(1, rows * batch.length // length)
            for rows in (self.config.validation.rows, batch.micro_rows)
        )
        return validate(
            self.run.model,
            held_out,
            self.world,
            rows=rows,
            micro_rows=micro_rows,
            with_accuracy=isinstance(held_out, Task),
        )

    def _save_is_due(self) -> bool:
        section, step = self.config.checkpoint, self.place.step
        waited = time.monotonic() - self.saved_at
        by_time = section.every_seconds is not None and waited >= section.every_seconds
        by_step = _is_turn(step, section.every_steps) or _is_turn(step, section.milestone_steps)
        by_step = by_step or _reaches(step, self.config.batch.tokens, section.every_tokens)
        return by_step or self.world.any(self.world.is_main and by_time)

    def _save(self) -> None:
        self.saved_step, self.saved_at = self.place.step, time.monotonic()
        self._try(self.metrics.sync)
        self._try(self.run.save)
        self.speed.restart()

    def _leave(self, stopped_by: str | None) -> None:
        """Save what is not saved yet, and the model of a run that has come to its end."""
        step, steps = self.place.step, self.config.steps
        if self.saved_step < step:
            self._save()
        try:
            self.run.checkpoints.wait()
        except CheckpointError as reason:
            kept = "checkpoints before it are as they were, the same command goes on from them"
            raise TrainingError(f"{reason}; {kept}") from None
        if step == steps:
            self.run.export()
            found = "".join(f"{name} {value:.4f}, " for name, value in self.validation.items())
            self.progress.say(f"finished: {found}the model is in {self.run.folder / MODEL}")
        else:
            why = stopped_by or "stopped"
            self.progress.say(
                f"{why}: saved after step {step} of {steps}; the same command resumes"
            )

    def _greet(self) -> None:
        config, world = self.config, self.world
        model = self.run.model
        blocks, whole = count_parameters(model.blocks), count_parameters(model)
        where = f"{world.size} × {world.device.type}" if world.size > 1 else str(world.device)
        first = config.run.init_from
        begun = "from the beginning" if first is None else f"with the weights of {first}"
        if self.place.step:
            begun = f"resumed after step {self.place.step}"
        self.progress.say(
            f"{self.run.folder}: {blocks:,} parameters in the blocks, {whole:,} with embedding and head, on {where}, "
            f"{config.steps} steps of {config.batch.tokens:,} tokens, {begun}"
        )


def _is_turn(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _reaches(step: int, tokens: int, every: int | None) -> bool:
    """Whether a step of so many tokens brings the run to another multiple of `every`."""
    return every is not None and step * tokens // every > (step - 1) * tokens // every
