"""What there is to choose about a training run; the defaults are the paper's recipe where it has one."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from gdn2.data.config import DataConfig, at_home
from gdn2.layers.plain import at_least_one, check_types, none_or_at_least_one, positive
from gdn2.models.config import ModelConfig
from gdn2.ops.arguments import require


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run lives, its first weights, and the seed of these and of its order of data."""

    dir: str
    seed: int = 3407
    init_from: str | None = None  # a model folder, whose weights are the first

    def __post_init__(self) -> None:
        check_types(self)
        require(self.dir != "", "dir", repr(self.dir), "a folder")
        require(0 <= self.seed < 2**64, "seed", self.seed, "at least 0 and less than 2^64")
        object.__setattr__(self, "dir", at_home(self.dir))
        if self.init_from is not None:
            require(
                self.init_from != "", "init_from", repr(self.init_from), "a folder with a model"
            )
            object.__setattr__(self, "init_from", at_home(self.init_from))


@dataclass(frozen=True, kw_only=True)
class BatchSection:
    """What a step of the optimiser sees, whatever the number of processes."""

    tokens: int = 128 * 4096
    length: int = 4096
    micro_rows: int = 4  # that a process computes at once; gradients are accumulated over the rest

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "tokens", "length", "micro_rows")
        whole = self.tokens % (self.length * self.micro_rows) == 0
        expected = f"a multiple of {self.micro_rows} micro_rows of length {self.length}"
        require(whole, "tokens", self.tokens, expected)

    @property
    def rows(self) -> int:
        return self.tokens // self.length


@dataclass(frozen=True, kw_only=True)
class OptimiserSection:
    """AdamW, the bound of the gradient's norm, and how many steps in a row may be lost to numbers that are none."""

    lr: float = 4e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_all: bool = False  # vectors too, as the released training script does
    clip: float = 1.0
    max_skips: int = 10

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "max_skips")
        positive(self, "lr", "eps")
        require(self.clip > 0, "clip", self.clip, "more than 0")
        fits = 0 <= self.weight_decay < inf
        require(fits, "weight_decay", self.weight_decay, "at least 0 and finite")
        fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(fits, "betas", self.betas, "two numbers of at least 0 and less than 1")


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The run's length and its learning rate: a linear warm-up, then a cosine down to a part of the peak."""

    tokens: int
    warmup_tokens: int = 0
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "tokens")
        fits = 0 <= self.warmup_tokens < self.tokens
        expected = f"at least 0 and less than tokens, {self.tokens}"
        require(fits, "warmup_tokens", self.warmup_tokens, expected)
        fits = 0 <= self.final_fraction <= 1
        require(fits, "final_fraction", self.final_fraction, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """Dtypes of the weights that the optimiser moves, and of what is computed with them."""

    weights: Literal["fp32", "bf16"] = "fp32"
    compute: Literal["auto", "fp32", "bf16"] = "auto"  # bf16 on a GPU, fp32 on a CPU

    def __post_init__(self) -> None:
        check_types(self)
        fits = self.weights == "fp32" or self.compute != "fp32"
        require(fits, "compute", repr(self.compute), "'bf16' or 'auto' where weights is 'bf16'")


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """How the same numbers are computed: where, compiled or not, with how much memory."""

    device: str | None = None  # the GPU where there is one
    compile: Literal["auto", "on", "off"] = "auto"  # block by block; by default on a GPU
    backend: Literal["auto", "triton", "torch", "reference"] = "auto"  # as `gdn2.using` takes it
    activation_checkpointing: bool = False
    recompute: bool = True  # in the backward, what chunks of recurrent mixers can compute alone

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Among how many processes the weights are divided, and how many such groups there are; by default one group."""

    shard: int | None = None
    replicate: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "replicate")
        none_or_at_least_one(self, "shard")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When the run is saved, whichever comes first, and what is kept."""

    every_steps: int | None = None
    every_tokens: int | None = None
    every_seconds: float | None = 900.0
    keep: int = 2
    milestone_steps: int | None = None  # steps whose multiples are saved and kept for good

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "keep")
        none_or_at_least_one(self, "every_steps", "every_tokens", "milestone_steps")
        fits = self.every_seconds is None or self.every_seconds > 0
        require(fits, "every_seconds", self.every_seconds, "None or more than 0")


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """The loss on rows that are always the same and never trained on; at the end of the run too."""

    every_steps: int | None = 500
    rows: int = 64
    lengths: tuple[int, ...] = ()  # besides the training's; as many tokens of each

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "rows")
        none_or_at_least_one(self, "every_steps")
        fits = all(length >= 1 for length in self.lengths)
        fits = fits and len({*self.lengths}) == len(self.lengths)
        expected = "lengths of at least 1, each once"
        require(fits, "lengths", list(self.lengths), expected)


@dataclass(frozen=True, kw_only=True)
class SamplesSection:
    """Text that the model writes while it is trained."""

    every_steps: int | None = None
    prompt: str = "The"
    tokens: int = 64
    temperature: float = 0.8

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "tokens")
        none_or_at_least_one(self, "every_steps")
        require(self.prompt != "", "prompt", repr(self.prompt), "at least one character")
        fits = 0 <= self.temperature < inf
        require(fits, "temperature", self.temperature, "at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = False
    health_every_steps: int | None = None  # ranges of gates and norms of states, layer by layer

    def __post_init__(self) -> None:
        check_types(self)
        none_or_at_least_one(self, "health_every_steps")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run, whole: the same config on the same data is the same run."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    schedule: ScheduleSection
    batch: BatchSection = BatchSection()
    optimiser: OptimiserSection = OptimiserSection()
    precision: PrecisionSection = PrecisionSection()
    engine: EngineSection = EngineSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    samples: SamplesSection = SamplesSection()
    log: LogSection = LogSection()

    @property
    def steps(self) -> int:
        """Enough for the schedule's tokens."""
        return -(-self.schedule.tokens // self.batch.tokens)
