"""`gdn2 bench profile`: where the time of a training step goes, kernel by kernel, and what a GPU draws meanwhile."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from gdn2.bench import timing
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.trainers import (
    Plan,
    Shape,
    Trainer,
    TwinTrainer,
    random_batches,
    unseen_steps,
    variants,
)
from gdn2.bench.training import WARMUP
from gdn2.models.presets import preset as find_preset
from gdn2.training.world import World

QUERY = "clocks.sm,power.draw,temperature.gpu"
UNITS = ("MHz", "W", "°C")


class Kernel(NamedTuple):
    """All calls of one kernel in a step; on a CPU, of one operator."""

    name: str
    calls: float
    seconds: float


class Sample(NamedTuple):
    """What a GPU says of itself."""

    clock: float  # MHz
    power: float  # W
    temperature: float  # °C


@dataclass(frozen=True)
class Profile:
    """A step of one preset at one shape."""

    preset: str
    shape: Shape
    variant: str  # whose, and the dtype of its weights
    step_seconds: float  # without the profiler
    busy_seconds: float  # with it, in which anything runs
    idle_seconds: float  # and in which nothing does, from the first kernel to the last
    kernels: tuple[Kernel, ...]  # longest first
    samples: tuple[Sample, ...]  # while steps were timed
    machine: Machine

    def as_json(self) -> dict[str, Any]:
        """Plain data, the shape by its name."""
        kernels = [kernel._asdict() for kernel in self.kernels]
        samples = [sample._asdict() for sample in self.samples]
        return asdict(self) | {"shape": str(self.shape), "kernels": kernels, "samples": samples}


def run(plan: Plan, said: Callable[[str], None] = lambda line: None) -> Iterator[Profile]:
    """Profile each variant of each preset at each shape alone; `said` is told what comes next, or cannot be built."""
    world = World(0, 1, plan.device, None)
    try:
        for name in plan.presets:
            build, lack = variants(name, plan, world)
            for line in lack:
                said(line)
            for shape, variant in product(plan.shapes, build):
                said(f"profiling {name}, {shape}, {variant}")
                torch.compiler.reset()
                yield _profile(plan, name, shape, variant, build[variant]())
    finally:
        world.close()


def _profile(
    plan: Plan, name: str, shape: Shape, variant: str, trainer: Trainer | TwinTrainer
) -> Profile:
    vocabulary, warm = find_preset(name).vocab_size, 1 + WARMUP[plan.device.type]
    seeds = range(warm + 2 * plan.steps)
    step = unseen_steps(trainer, random_batches(shape, vocabulary, plan.device, seeds))
    for _ in range(warm):
        step()
    with sampling(plan.device) as samples:
        start = time.perf_counter()
        for _ in range(plan.steps):
            step()
        timing.synchronize(plan.device)
        seconds = (time.perf_counter() - start) / plan.steps
    is_gpu = plan.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(plan.steps):
            step()
        timing.synchronize(plan.device)
    spans = gpu_spans(profiler) if is_gpu else []
    kernels = summed(spans, plan.steps) if is_gpu else cpu_operators(profiler, plan.steps)
    busy, idle = (x / plan.steps for x in occupation(spans))
    busy = busy if is_gpu else sum(kernel.seconds for kernel in kernels)
    machine = describe_machine()
    found = (seconds, busy, idle, kernels, tuple(samples), machine)
    return Profile(name, shape, variant, *found)


class Span(NamedTuple):
    """One call on a GPU, in seconds."""

    start: float
    end: float
    name: str


def gpu_spans(profiler: Any) -> list[Span]:
    """All calls on a GPU, by their start."""
    events = (e for e in profiler.events() if e.device_type.name == "CUDA")
    spans = (Span(e.time_range.start / 1e6, e.time_range.end / 1e6, e.name) for e in events)
    return sorted(spans)


def occupation(spans: Iterable[Span]) -> tuple[float, float]:
    """Seconds in which any of the calls ran, and in which none did between the first and the last."""
    busy = idle = 0.0
    end: float | None = None
    for span in spans:
        end = span.start if end is None else end
        idle += max(0.0, span.start - end)
        busy += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    return busy, idle


def summed(spans: Iterable[Span], steps: int) -> tuple[Kernel, ...]:
    """Calls of each kernel, whatever it was instantiated for."""
    times: dict[str, list[float]] = {}
    for span in spans:
        name = re.sub(r"^void |<.*", "", span.name)
        times.setdefault(name, []).append(span.end - span.start)
    return _longest_first(Kernel(n, len(t) / steps, sum(t) / steps) for n, t in times.items())


def cpu_operators(profiler: Any, steps: int) -> tuple[Kernel, ...]:
    """Operators by their own time, without those they call."""
    return _longest_first(
        Kernel(event.key, event.count / steps, event.self_cpu_time_total / 1e6 / steps)
        for event in profiler.key_averages()
    )


def _longest_first(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


@contextmanager
def sampling(device: torch.device) -> Iterator[list[Sample]]:
    """Ask a GPU five times a second how it is, where there is a way to; the list is filled at the end."""
    found: list[Sample] = []
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        yield found
        return
    # by its own name: the tool counts all GPUs of a machine, torch those that CUDA_VISIBLE_DEVICES leaves
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = f"GPU-{uuid.removeprefix('GPU-')}"
    asked = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "200", "-i", name]
    process = subprocess.Popen([tool, *asked], stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        process.terminate()
        said, _ = process.communicate()
        found += parsed(said)


def parsed(said: str) -> list[Sample]:
    """Lines of three numbers; a GPU that does not tell one of them tells nothing."""
    samples = []
    for line in said.splitlines():
        try:
            samples.append(Sample(*map(float, line.split(","))))
        except (TypeError, ValueError):
            continue
    return samples
