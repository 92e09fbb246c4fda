"""`gdn2 bench tune`: each kernel alone, launched in a few ways, on the GPU at hand; the fastest right ones to paste.

Compiling takes longest, so every way is first compiled, and tried on a few tokens, in a process of its own, many at a
time. That fills Triton's cache, and what dies there, dies there. What is left is timed here, one at a time.
"""

# ruff: noqa: PLC0415 (the kernels need Triton, which is optional)
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gdn2.bench import operator, timing
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.operator import Plan, Shape
from gdn2.bench.tables import new_table
from gdn2.bench.timing import DTYPES
from gdn2.ops.arguments import CHUNK_SIZES
from gdn2.ops.backends import why_not
from gdn2.ops.chunk_op import pack

if TYPE_CHECKING:
    from gdn2.ops.triton.launch import Launch

SHAPE = "4x4096x16x128x128"
REPEATS = 20
MOST_PROCESSES = 16  # each holds a context on the GPU, about half a GiB

TOLERANCE = {"bf16": 2e-2, "fp16": 5e-3, "fp32": 2e-5}
Way = tuple[str, "Launch"]  # a kernel, and how to launch it
Stage = Callable[[], list[Tensor]]
Timer = Callable[[Stage, str], float]  # seconds of one kernel in a call of its stage

# Key blocks, value blocks, warps and stages to be combined; a scan's key block must cover all keys.
CANDIDATES: dict[str, tuple[tuple[int, ...], ...]] = {
    "decays": ((32, 64, 128), (0,), (1, 2, 4), (1,)),
    "scores": ((16, 32, 64, 128), (0,), (2, 4, 8), (1,)),
    "solve": ((64, 128), (64, 128), (2, 4, 8), (1,)),
    "scan": ((256,), (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4)),
    "scan_reverse": ((256,), (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4)),
    "gradient_values": ((0,), (32, 64, 128), (2, 4, 8), (1, 2)),
    "gradient_states": ((32, 64, 128), (32, 64, 128), (4, 8), (1, 2)),
    "gradient_keys": ((16, 32, 64, 128), (0,), (2, 4, 8), (1,)),
}


@dataclass(frozen=True)
class Trial:
    """One way to launch a kernel: its time, or why it has none."""

    kernel: str
    how: "Launch"
    default: bool
    seconds: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Result:
    shape: Shape
    dtype: str
    chunk_size: int
    machine: Machine
    trials: tuple[Trial, ...]

    @property
    def best(self) -> dict[str, Trial]:
        """The fastest way to launch each kernel."""
        timed = [trial for trial in self.trials if trial.seconds is not None]
        return {t.kernel: t for t in sorted(timed, key=lambda t: -(t.seconds or 0))}

    def literal(self) -> str:
        """Rows of the launch table, with microseconds."""
        best = self.best
        rows = [best[kernel] for kernel in CANDIDATES if kernel in best]
        return "\n".join(
            f'    "{t.kernel}": {_literal(t.how)},  # {(t.seconds or 0) * 1e6:.0f}' for t in rows
        )

    def as_json(self) -> dict[str, Any]:
        trials = [asdict(t) | {"how": t.how._asdict()} for t in self.trials]
        return asdict(self) | {"shape": str(self.shape), "trials": trials, "best": self.literal()}


def read_plan(shape: str | None, dtype: str, chunk_size: int) -> Plan:
    """Check what was asked for, before anything is compiled."""
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(TOLERANCE)}")
    if chunk_size not in CHUNK_SIZES[1:]:  # kernels take 32 tokens at least
        raise ValueError(f"chunk_size: got {chunk_size}, expected one of {CHUNK_SIZES[1:]}")
    obstacle = why_not("triton", timing.find_device(None), kernels=())
    if obstacle is not None:
        raise ValueError(f"tune: there are no kernels to time here: {obstacle}")
    sizes = Shape.parse(shape or SHAPE)
    return Plan((sizes,), ("triton",), torch.device("cuda"), dtype, chunk_size=chunk_size)


def candidates(kernels: Iterable[str]) -> Iterator[Way]:
    """Every way to launch the kernels."""
    from gdn2.ops.triton.launch import Launch

    for kernel in kernels:
        if kernel not in CANDIDATES:
            expected = ", ".join(CANDIDATES)
            raise ValueError(f"kernel: got {kernel!r}, expected one of {expected}")
        yield from ((kernel, Launch(*sizes)) for sizes in product(*CANDIDATES[kernel]))


def prepare(shape: Shape, plan: Plan) -> dict[str, Stage]:
    """For each kernel the stage that launches it, on tensors that the stages before have made."""
    from gdn2.ops.triton import stages
    from gdn2.ops.triton.table import dense_table

    tensors = {n: x.detach() for n, x in operator.make_operands(shape, plan).items()}
    x = pack(**tensors, scale=shape.key_width**-0.5)
    table = dense_table(shape.batch, shape.length, plan.chunk_size, plan.device)
    sizes = (shape.batch, shape.heads, shape.key_width, shape.value_width)
    state = torch.zeros(sizes, device=plan.device)
    do = torch.randn_like(x.v)
    sums = stages.decays(x, table)
    f = stages.intra(x, table, "ieee", sums)
    _, _, starts, R = stages.scan(x, f, table, state, outputs=False, save=True)
    assert starts is not None and R is not None
    dR, ends, _ = stages.scan_reverse(x, f, table, do, state)

    def decays() -> list[Tensor]:
        return list(stages.decays(x, table))

    def intra() -> list[Tensor]:
        return stages.intra(x, table, "ieee", sums).tensors()

    def scan() -> list[Tensor]:
        forward = stages.scan(x, f, table, state, outputs=True, save=False)
        again = stages.scan(x, f, table, state, outputs=False, save=True)
        return [y for y in (*forward, *again) if y is not None]

    def scan_reverse() -> list[Tensor]:
        return list(stages.scan_reverse(x, f, table, do, state))

    def gradient() -> list[Tensor]:
        return stages.gradient(x, f.A, f.deep, table, sums, do, [starts, R, ends, dR])

    return {
        "decays": decays,
        "scores": intra,
        "solve": intra,
        "scan": scan,
        "scan_reverse": scan_reverse,
        "gradient_values": gradient,
        "gradient_states": gradient,
        "gradient_keys": gradient,
    }


def try_out(plan: Plan, kernel: str, how: "Launch") -> str:
    """Compile one way to launch a kernel and run it on a few tokens; returns what went wrong, if anything."""
    try:
        few = plan.shapes[0]._replace(batch=1, length=2 * plan.chunk_size)
        attempt(prepare(few, plan)[kernel], kernel, how)
        timing.synchronize(plan.device)
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure).strip()}".partition("\n")[0]
    return ""


def attempt(stage: Stage, kernel: str, how: "Launch") -> list[Tensor]:
    """Run a stage with one of its kernels launched in a given way."""
    from gdn2.ops.triton.launch import overriding

    with overriding(kernel, how):
        return stage()


def compile_ahead(plan: Plan, ways: list[Way]) -> list[str]:
    """Try all ways out, each in a process of its own; returns what went wrong with each."""
    workers = max(1, min(MOST_PROCESSES, os.cpu_count() or 1, len(ways)))
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        return [_problem(future) for future in [pool.submit(try_out, plan, *way) for way in ways]]


def _problem(future: "Future[str]") -> str:
    try:
        return future.result()
    except BrokenProcessPool:
        return ""  # a crash takes the other processes with it: what they had is tried here instead


def time_kernel(stage: Stage, kernel: str) -> float:
    """Seconds on the GPU that a kernel takes in one call of its stage."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEATS):
            stage()
        torch.cuda.synchronize()
    name = f"{kernel}_kernel"
    spent = [e.self_device_time_total for e in found.key_averages() if e.key == name]
    if not spent:
        raise RuntimeError(f"the profiler saw no {name}")
    return float(sum(spent)) / REPEATS / 1e6


def tune(
    plan: Plan,
    ways: list[Way],
    timer: Timer = time_kernel,
    ahead: Callable[[Plan, list[Way]], list[str]] = compile_ahead,
) -> Result:
    """Time every way to launch every kernel that gives what the usual way gives."""
    (shape,) = plan.shapes
    stages = prepare(shape, plan)
    trials = [
        Trial(kernel, usual(kernel, plan), True, timer(stages[kernel], kernel))
        for kernel in dict.fromkeys(kernel for kernel, _ in ways)
    ]
    for (kernel, how), problem in zip(ways, ahead(plan, ways), strict=True):
        found: tuple[float | None, str] = (None, problem)
        if not problem:
            found = time_way(kernel, how, stages[kernel], TOLERANCE[plan.dtype], timer)
        trials.append(Trial(kernel, how, False, *found))
    return Result(shape, plan.dtype, plan.chunk_size, describe_machine(), tuple(trials))


def usual(kernel: str, plan: Plan) -> "Launch":
    """How a kernel is launched by default."""
    from gdn2.ops.triton.launch import Scan, launch

    shape = plan.shapes[0]
    scan = Scan(
        chunk=plan.chunk_size,
        keys=shape.key_width,
        itemsize=DTYPES[plan.dtype].itemsize,
        values=shape.value_width,
        heads=shape.batch * shape.heads,
    )
    return launch(kernel, plan.device, scan if "scan" in kernel else None)


def time_way(
    kernel: str, how: "Launch", stage: Stage, tolerance: float, timer: Timer
) -> tuple[float | None, str]:
    """Seconds of one way to launch a kernel, or what is wrong with it."""
    try:
        actual, expected = attempt(stage, kernel, how), stage()
        error = max(_distance(x, y) for x, y in zip(actual, expected, strict=True))
        if not error <= tolerance:
            return None, f"another result: off by {error:.0e}"
        return timer(partial(attempt, stage, kernel, how), kernel), ""
    except Exception as failure:  # it does not compile, or takes more than the GPU has
        return None, f"{type(failure).__name__}: {str(failure).strip()}".partition("\n")[0]


def _distance(x: Tensor, y: Tensor) -> float:
    """‖x − y‖ / ‖y‖, where the tensors are: a check on the CPU would take longer than all else."""
    norm = float(y.double().norm())
    difference = float((x.double() - y.double()).norm())
    return difference / norm if norm else difference


def render(result: Result, console: Console) -> None:
    """Print each kernel's trials, fastest first, and the rows for the launch table."""
    best = result.best
    for kernel in dict.fromkeys(trial.kernel for trial in result.trials):
        title = f"{kernel} at {result.shape}, {result.dtype}, chunks of {result.chunk_size}"
        table = new_table(("launch", "µs", "over best", ""), left=("launch", ""), title=title)
        trials = [trial for trial in result.trials if trial.kernel == kernel]
        for trial in sorted(trials, key=lambda t: (t.seconds is None, t.seconds or 0)):
            least = best[kernel].seconds if kernel in best else None
            table.add_row(
                _literal(trial.how),
                f"{trial.seconds * 1e6:.1f}" if trial.seconds is not None else "–",
                f"{trial.seconds / least:.2f}×" if trial.seconds and least else "–",
                Text("default" if trial.default else trial.problem[:80]),
            )
        console.print(table)
    console.print("The fastest, as rows of gdn2/ops/triton/launch.py:")
    console.print(result.literal(), markup=False, highlight=False, soft_wrap=True)


def _literal(how: "Launch") -> str:
    return f"Launch({', '.join(map(str, how if how.num_stages > 1 else how[:3]))})"
