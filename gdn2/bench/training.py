"""`gdn2 bench training`: how fast models train, beside the paper's numbers and a twin made of other people's layers."""

import gc
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gdn2.bench import timing
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.timing import Timing, measure_together
from gdn2.bench.trainers import (
    Build,
    Plan,
    Shape,
    Trainer,
    TwinTrainer,
    random_batches,
    unseen_steps,
    variants,
)
from gdn2.bench.training_paper import SHAPES, paper_speed
from gdn2.data.batch import Batch
from gdn2.models.presets import preset as find_preset
from gdn2.models.summary import training_flops
from gdn2.training.speed import peak_flops
from gdn2.training.world import World

DEFAULTS = {  # presets, shapes and weights
    "cpu": (("gdn2-1m-hybrid",), ("2x256",), "fp32"),
    "cuda": (("gdn2-1.3b-hybrid",), SHAPES, "bf16"),
}
WEIGHTS = ("bf16", "fp32")
WARMUP = {"cpu": 2, "cuda": 10}
FIRST_WARMUP = {"cpu": 2, "cuda": 30}  # a GPU is slower warm: the first shape would be the fastest


@dataclass(frozen=True)
class Row:
    """One model at one shape: what a step takes, or why there is none."""

    preset: str
    shape: Shape
    variant: str  # whose, and the dtype of its weights
    failure: str | None = None
    step: Timing | None = None
    first_seconds: float | None = None  # until the first step was done: building, compiling, tuning
    peak_bytes: int | None = None  # of this model alone, all it holds included; on a GPU only
    mfu: float | None = None  # counted FLOPs over the GPU's dense bf16 peak
    loss: float | None = None  # of the first step at this shape

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step is None else self.shape.tokens / self.step.median

    @property
    def paper(self) -> float | None:
        """Tokens a second that the paper reports, on an H100."""
        return paper_speed(self.preset, str(self.shape))


@dataclass(frozen=True)
class Result:
    plan: Plan
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what was left out, and why

    def as_json(self) -> dict[str, Any]:
        """Plain data, shapes and device by their names."""
        names = {"shapes": [*map(str, self.plan.shapes)], "device": str(self.plan.device)}
        rows = [
            asdict(row)
            | {"shape": str(row.shape), "tokens_per_second": row.tokens_per_second}
            | {"paper_tokens_per_second": row.paper}
            for row in self.rows
        ]
        return asdict(self) | {"plan": asdict(self.plan) | names, "rows": rows}


def read_plan(
    *,
    presets: list[str] | None,
    shapes: list[str] | None,
    weights: str | None,
    device: str | None,
    compile: bool | None,
    peers: bool,
    steps: int,
    recompute: bool = True,
) -> Plan:
    """Check what was asked for and fill in the rest."""
    where = timing.find_device(device)
    usual_presets, usual_shapes, usual_weights = DEFAULTS[where.type]
    dtypes = tuple(dict.fromkeys((weights or usual_weights).split(",")))
    for name in dtypes:
        if name not in WEIGHTS:
            raise ValueError(f"weights: got {name!r}, expected one of {', '.join(WEIGHTS)}")
    if steps < 1:
        raise ValueError(f"steps: got {steps}, expected at least 1")
    names = tuple(dict.fromkeys(presets or usual_presets))
    for name in names:
        find_preset(name)
    sizes = tuple(dict.fromkeys(map(Shape.parse, shapes or usual_shapes)))
    compiled = where.type == "cuda" if compile is None else compile
    return Plan(names, sizes, dtypes, where, compiled, peers, steps, recompute)


def run(plan: Plan, found: Callable[[Result], None] = lambda so_far: None) -> Result:
    """Time all presets, one after the other; `found` is given what is known whenever there is one more row."""
    result = Result(plan, describe_machine(), (), ())
    world = World(0, 1, plan.device, None)
    try:
        for name in plan.presets:
            build, lack = variants(name, plan, world)
            result = replace(result, notes=tuple(dict.fromkeys([*result.notes, *lack])))
            contest = Contest(name, plan, build)
            for shape in plan.shapes:
                for row in contest.time(shape):
                    result = replace(result, rows=(*result.rows, row))
                    found(result)
            contest.release()
    finally:
        world.close()
    return result


class Contest:
    """The variants of one preset, built once and timed in turns, or one by one where memory has no room for all."""

    def __init__(self, name: str, plan: Plan, build: dict[str, Build]) -> None:
        self.name, self.plan, self.build = name, plan, build
        self.config = find_preset(name)
        self.trainers: dict[str, Trainer | TwinTrainer] = {}
        self.broken: dict[str, str] = {}  # variants that fail for other reasons than memory
        self.is_crowded = False
        self.is_warm = False
        self.seeds = itertools.count()  # of batches, each seen once

    def time(self, shape: Shape) -> list[Row]:
        """A row for each variant."""
        torch.compiler.reset()  # each shape is compiled as in a run of its own, not as one of many
        able = [name for name in self.build if name not in self.broken]
        rows = [Row(self.name, shape, name, why) for name, why in self.broken.items()]
        return [*self._try(shape, able), *rows] if able else rows

    def release(self, keep: Iterable[str] = ()) -> None:
        """Give back the memory of all variants but some."""
        self.trainers = {name: self.trainers[name] for name in keep if name in self.trainers}
        gc.collect()
        if self.plan.device.type == "cuda":
            with suppress(RuntimeError):  # a GPU that has failed fails here too
                torch.cuda.empty_cache()

    def _try(self, shape: Shape, names: list[str]) -> list[Row]:
        """Time variants in turns; where that fails each alone, so that none stands in the way of the others."""
        if self.is_crowded and len(names) > 1:
            return [row for name in names for row in self._try(shape, [name])]
        try:
            return self._measure(shape, names)
        except Exception as failure:
            is_memory = isinstance(failure, torch.OutOfMemoryError)
            lines = str(failure).strip().splitlines()
            reason = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
        self.release()  # behind the handler, whose traceback holds tensors
        if len(names) > 1:
            self.is_crowded = is_memory
            return [row for name in names for row in self._try(shape, [name])]
        if not is_memory:
            self.broken[names[0]] = reason
        return [Row(self.name, shape, names[0], reason)]

    def _measure(self, shape: Shape, names: list[str]) -> list[Row]:
        self.release(keep=names)
        plan = self.plan
        warm = (WARMUP if self.is_warm else FIRST_WARMUP)[plan.device.type]
        seeds = itertools.islice(self.seeds, batches_needed(warm, plan.steps))
        batches = random_batches(shape, self.config.vocab_size, plan.device, seeds)
        first = {name: self._first_step(name, batches[0]) for name in names}
        calls = {name: unseen_steps(self.trainers[name], batches[1:]) for name in names}
        steps = measure_together(calls, plan.device, warmup=warm, seconds=0, least=plan.steps)
        self.is_warm = True
        return [self._row(shape, name, steps[name], *first[name]) for name in names]

    def _first_step(self, name: str, batch: Batch) -> tuple[float, float]:
        """Seconds until a variant's first step at a shape was done, and its loss."""
        device, start = self.plan.device, time.perf_counter()
        before = _allocated(device)
        is_new = name not in self.trainers
        if is_new:
            self.trainers[name] = self.build[name]()
        loss = self.trainers[name].step(batch)
        timing.synchronize(device)
        if is_new:
            self.trainers[name].held_bytes = _allocated(device) - before
        return time.perf_counter() - start, loss

    def _row(self, shape: Shape, name: str, step: Timing, first: float, loss: float) -> Row:
        held, peak = self.trainers[name].held_bytes, peak_flops(self.plan.device)
        flops = shape.tokens * training_flops(self.config, shape.length)
        return Row(
            preset=self.name,
            shape=shape,
            variant=name,
            step=step,
            first_seconds=first,
            peak_bytes=None if step.peak_bytes is None else held + step.peak_bytes,
            mfu=None if peak is None else flops / step.median / peak,
            loss=loss,
        )


def batches_needed(warm: int, steps: int) -> int:
    """One batch for the first step, one for the peak of memory, two for each round: a CPU's timer calls twice."""
    return 2 + 2 * (warm + steps)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
