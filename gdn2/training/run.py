"""What a run holds in memory, put together from its config, and from its newest checkpoint where there is one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gdn2.data.batch import Source
from gdn2.data.config import holds_out, open_source
from gdn2.data.locking import locked
from gdn2.layers.plain import from_plain
from gdn2.models.files import standing
from gdn2.models.language_model import LanguageModel
from gdn2.models.run_folder import CHECKPOINTS, METRICS, MODEL, WRITTEN, is_run, is_saved
from gdn2.ops.arguments import require
from gdn2.training.checkpoints import EXTRA, Checkpoints
from gdn2.training.config import RunConfig
from gdn2.training.faults import TrainingError
from gdn2.training.first_weights import check_fits, load_first_weights
from gdn2.training.optimiser import build_optimiser
from gdn2.training.run_file import DIGESTS, check_same_run, write_config
from gdn2.training.shard import build_model, full_weights, whole_model
from gdn2.training.world import World
from gdn2.training.writing import exporter, tokenizer_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Place:
    """Where a run is, beside its weights and its optimiser; all else is a function of its config."""

    step: int = 0  # steps done
    skips: int = 0  # of these, how many moved nothing
    skips_in_a_row: int = 0


@contextmanager
def own_folder(config: RunConfig, world: World) -> Iterator[None]:
    """Make the run's folder, and keep other runs out of it meanwhile."""
    folder = Path(config.run.dir)

    def enter() -> None:
        try:
            check_ours(folder)
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise _unwritable(reason) from None
        if world.is_main:
            lock.enter_context(locked(folder, "run.dir"))

    with ExitStack() as lock:
        world.agreed(enter)
        yield


def check_ours(folder: Path) -> None:
    """Raise ValueError where a run would write over files that no run has written."""
    names = (WRITTEN, DIGESTS, METRICS, MODEL)
    found = next((name for name in names if (folder / name).exists()), None)
    if found is not None and not is_run(folder):
        raise ValueError(
            f"run.dir: got {folder}, where {found} is of no run, expected a new folder or a run's"
        )


class Run:
    """Data, model, optimiser and checkpoints of a run, at the place where it goes on."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        self.folder = Path(config.run.dir)
        batch, seed = config.batch, config.run.seed
        at_once = batch.micro_rows * batch.length * world.size
        parts = f"{at_once}, micro_rows × length × {world.size} processes"
        require(batch.tokens % at_once == 0, "batch.tokens", batch.tokens, f"a multiple of {parts}")
        self.source = open_source(config.data, batch.length, seed, "train")
        self.held_out = None
        self.held_out_at: dict[int, Source] = {}  # at other lengths
        if holds_out(config.data):
            self.held_out = open_source(config.data, batch.length, seed, "validation")
            self.held_out_at = _at_other_lengths(config)
        needed = max(s.vocab_size for s in (self.source, self.held_out) if s is not None)
        fits = config.model.vocab_size >= needed
        require(fits, "model.vocab_size", config.model.vocab_size, f"at least the data's {needed}")
        self.tokenizer = tokenizer_of(config.data)
        if self.tokenizer is not None and config.samples.every_steps is not None:
            prompt = config.samples.prompt
            known = bool(self.tokenizer.encode(prompt))
            require(known, "samples.prompt", repr(prompt), "text that the data's tokenizer knows")
        self._export = exporter(config.model, self.tokenizer)
        self.checkpoints = self._open_folder()
        self.weights, self.compute = _dtypes(config, world)
        self.model = self._build()
        self.optimiser = build_optimiser(self.model, config.optimiser)
        self.place = self._resume()

    def save(self) -> None:
        """Save a checkpoint with a model folder in it."""
        self.checkpoints.save(
            self.place.step, self.model, self.optimiser, asdict(self.place), self._export
        )

    def export(self) -> None:
        """Write the model folder of the run."""
        weights = full_weights(self.model, self.world)
        self.world.agreed(
            lambda: None if weights is None else self._export(self.folder / MODEL, weights)
        )

    def plain_model(self) -> LanguageModel | None:
        """On the main process, a copy of the model that no other process has a part in."""
        weights = full_weights(self.model, self.world)
        if weights is None:
            return None
        return whole_model(self.config.model, weights).cast(self.compute).to(self.world.device)

    def _open_folder(self) -> Checkpoints:
        section, folder = self.config.checkpoint, self.folder / CHECKPOINTS
        try:
            self.world.agreed(self._check_folder)  # all of them, before anything is written
            self.world.agreed(
                lambda: write_config(self.config, self.folder) if self.world.is_main else None
            )
        except OSError as reason:
            raise _unwritable(reason) from None
        return Checkpoints(
            folder, self.world, keep=section.keep, milestones=section.milestone_steps
        )

    def _check_folder(self) -> None:
        first = self.config.run.init_from
        if is_saved(self.folder):
            check_same_run(self.config, self.folder)
        elif standing(self.folder / MODEL).exists():
            held = f"{self.folder}, which holds a finished model and no checkpoint to go on from"
            raise ValueError(f"run.dir: got {held}, expected a new folder or a run's")
        elif first is not None:
            check_fits(first, self.config.model)

    def _build(self) -> LanguageModel:
        engine = self.config.engine
        on_gpu = self.world.device.type == "cuda"
        return build_model(
            self.config.model,
            seed=self.config.run.seed,
            world=self.world,
            weights=self.weights,
            compute=self.compute,
            compile=on_gpu if engine.compile == "auto" else engine.compile == "on",
            checkpoint_blocks=engine.activation_checkpointing,
            recompute=engine.recompute,
        )

    def _resume(self) -> Place:
        newest = self.checkpoints.newest()
        if newest is not None:
            extra = self.checkpoints.load(newest, self.model, self.optimiser)
            return from_plain(Place, extra, str(newest.path / EXTRA))
        if is_saved(self.folder):
            folder = self.folder / CHECKPOINTS
            raise TrainingError(
                f"no checkpoint in {folder} is whole; move that folder away to begin anew"
            )
        first = self.config.run.init_from
        if first is not None:
            self.world.agreed(lambda: load_first_weights(first, self.model))
        return Place()


def _at_other_lengths(config: RunConfig) -> dict[int, Source]:
    lengths = (length for length in config.validation.lengths if length != config.batch.length)
    try:
        return {n: open_source(config.data, n, config.run.seed, "validation") for n in lengths}
    except ValueError as mistake:
        raise ValueError(f"validation.lengths: {mistake}") from None


def _unwritable(reason: OSError) -> ValueError:
    return ValueError(f"run.dir: got {reason}, expected a folder to write to")


def _dtypes(config: RunConfig, world: World) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of weights, and of what is computed with them."""
    weights, compute = config.precision.weights, config.precision.compute
    if compute == "auto":
        compute = "bf16" if world.device.type == "cuda" or weights == "bf16" else "fp32"
    return DTYPES[weights], DTYPES[compute]
