"""The one way to time."""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from gdn2.ops.arguments import require

Key = TypeVar("Key")
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
USUAL_DTYPE = {"cpu": "fp32", "cuda": "bf16"}
L2_FLUSH_BYTES = 256 * 2**20  # more than the L2 cache of any GPU
FLUSHES = 16
COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30}
MOST_REPEATS = 1000
MOST_THREADS = 4  # times the CPU's cores; a hundred thousand threads end the process


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median and quartiles of the repetitions; bytes at the peak, on a GPU only.

    There is no peak for a CPU: the resident set never shrinks there, so what it says depends on what ran before.
    """

    median: float
    low: float
    high: float
    repeats: int
    peak_bytes: int | None = None

    @property
    def spread(self) -> float:
        """Width between the quartiles, as a fraction of the median."""
        return (self.high - self.low) / self.median


def measure(
    call: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 2,
    seconds: float = 1.0,
    least: int = 5,
) -> Timing:
    """Time one call; see `measure_together`."""
    timings = measure_together({"": call}, device, warmup=warmup, seconds=seconds, least=least)
    return timings[""]


def measure_together(
    calls: Mapping[Key, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int = 2,
    seconds: float = 1.0,
    least: int = 5,
    progress: Callable[[float], None] = lambda done: None,
) -> dict[Key, Timing]:
    """Time calls round-robin, about `seconds` each and at least `least` times; returns a timing per name.

    Each round runs every call once: whatever else slows the machine hits them all, so their ratios hold.
    `progress` is told the fraction done, between repetitions.
    """
    time_call = _timer(device)
    round_seconds = 0.0
    for _ in range(max(warmup, 1)):
        start = time.perf_counter()
        for call in calls.values():
            time_call(call)
        synchronize(device)
        round_seconds = time.perf_counter() - start
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}

    wanted = min(seconds * len(calls) / max(round_seconds, 1e-9), MOST_REPEATS)
    rounds = min(max(int(wanted), least), MOST_REPEATS)
    samples: dict[Key, list[Callable[[], float]]] = {name: [] for name in calls}
    for done in range(rounds):
        for name, call in calls.items():
            samples[name].append(time_call(call))
        progress((done + 1) / rounds)
    synchronize(device)
    return {n: _summary([read() for read in reads], peaks[n]) for n, reads in samples.items()}


def check_seconds(seconds: float) -> None:
    """Refuse a time that nothing can take."""
    fits = 0 <= seconds < math.inf
    require(fits, "seconds", seconds, "a finite number of at least 0")


def _timer(device: torch.device) -> Callable[[Callable[[], object]], Callable[[], float]]:
    """Return a function that runs a call and returns how to read its seconds, once all is done."""
    if device.type != "cuda":

        def clock(call: Callable[[], object]) -> Callable[[], float]:
            call()  # heap and caches are as another call left them: seen to double the time
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            return lambda: elapsed

        return clock

    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)

    def events(call: Callable[[], object]) -> Callable[[], float]:
        # No synchronisation in here, and a millisecond of flushing: the host runs ahead whatever was timed before,
        # so launches count only where the GPU waits for them in the call itself.
        for _ in range(FLUSHES):
            flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    return events


def _summary(samples: list[float], peak: int | None) -> Timing:
    levels = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    median, low, high = torch.tensor(samples, dtype=torch.float64).quantile(levels).tolist()
    return Timing(median, low, high, len(samples), peak)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """GPU memory that a call takes at its peak, beyond what was held before; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()  # what cycles of earlier calls hold would be given back meanwhile
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written in a second by a copy too large for any cache: the speed nothing exceeds."""
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    took = measure(lambda: target.copy_(source), device, seconds=0.1)
    return 2 * source.nbytes / took.median


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_device(name: str | None) -> torch.device:
    """Return the device called "cpu" or "cuda"; None is the GPU where there is one."""
    usable = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if usable else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: got {name!r}, expected 'cpu' or 'cuda'")
    if name == "cuda" and not usable:
        raise ValueError("device: got 'cuda', but torch finds no CUDA GPU; expected 'cpu'")
    return torch.device(name)


def find_dtype(name: str | None, device: torch.device) -> str:
    """The name of a dtype, checked; where none is given, that of the usual one on a device."""
    name = name or USUAL_DTYPE[device.type]
    require(name in DTYPES, "dtype", repr(name), f"one of {', '.join(DTYPES)}")
    return name


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many CPU threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    cores = os.cpu_count() or 1
    most = MOST_THREADS * cores
    if count is not None:
        require(count >= 1, "threads", count, "at least 1")
        expected = f"at most {most}, {MOST_THREADS} times the CPU's {cores} cores"
        require(count <= most, "threads", count, expected)
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
