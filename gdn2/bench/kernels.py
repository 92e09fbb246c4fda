"""`gdn2 bench kernels`: where the time of the operator goes, kernel by kernel, and what registers they have."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from gdn2.bench import operator, timing
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.operator import Plan, Shape
from gdn2.bench.peers import KEPT, own_operator
from gdn2.bench.profile import Kernel, cpu_operators, gpu_spans, summed
from gdn2.bench.profile_report import shortened
from gdn2.bench.tables import new_table
from gdn2.ops.cuda import launch

REPEATS = {"cpu": 3, "cuda": 30}
SHAPE = {"cpu": "1x2048x4x64x64", "cuda": "4x4096x16x128x128"}
# A kernel's registers a thread, and the bytes that do not fit into them.
OfThreads = dict[str, tuple[int, int]]
MOST = 30  # kernels that are listed; a CPU has more operators


@dataclass(frozen=True)
class Part:
    """What the kernels of one pass took."""

    shape: Shape
    measured: str  # which pass
    programs: int | None  # of a CUDA kernel that share a multiprocessor; None: as many as usual
    kernels: tuple[Kernel, ...]  # longest first
    of_threads: OfThreads  # of the CUDA kernels

    @property
    def seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


@dataclass(frozen=True)
class Result:
    plan: Plan
    machine: Machine
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, shapes and device by their names."""
        names = {"shapes": [*map(str, self.plan.shapes)], "device": str(self.plan.device)}
        parts = [
            asdict(part)
            | {"shape": str(part.shape), "kernels": [k._asdict() for k in part.kernels]}
            for part in self.parts
        ]
        return {"plan": asdict(self.plan) | names, "machine": asdict(self.machine), "parts": parts}


def read_plan(
    shapes: list[str] | None,
    device: str | None,
    programs: Sequence[int] = (),
    **operands: Any,
) -> Plan:
    """Check what was asked for."""
    where = timing.find_device(device)
    for number in programs:
        if number < 1:
            raise ValueError(f"programs: got {number}, expected at least 1")
    if programs and where.type != "cuda":
        raise ValueError(f"programs: got {programs[0]} on {where}, expected a GPU, which has them")
    (plan,) = operator.read_plans(
        shapes=shapes or [SHAPE[where.type]],
        backends="triton" if where.type == "cuda" else "torch",
        device=device,
        **operands,
    )
    return plan


def run(plan: Plan, programs: Sequence[int] = ()) -> Result:
    """Profile the forward, the backward with it, and both with kept factors; by kernels for several programs too."""
    parts: list[Part] = []
    for shape in plan.shapes:
        for number in (None, *programs):
            with launch.trying(number) as loaded:
                found = [(name, _profile(call, plan.device)) for name, call in _passes(plan, shape)]
                spilled = {k[0]: kernel.of_threads() for k, kernel in loaded.items() if kernel}
            parts += [
                Part(shape, name, number, kernels, _of(kernels, spilled)) for name, kernels in found
            ]
    return Result(plan, describe_machine(), tuple(parts))


def _passes(plan: Plan, shape: Shape) -> Iterator[tuple[str, Callable[[], object]]]:
    operands = operator.make_operands(shape, plan)
    d_output = torch.randn_like(operands["v"])
    lengths = operator.packed_lengths(plan.packed, shape)
    bounds = torch.tensor([0, *lengths], device=plan.device).cumsum(0)
    packing = {"cu_seqlens": bounds} if lengths else {}
    for measured, recompute in (("forward", True), ("backward", True), ("backward", False)):
        rule = own_operator(plan.backends[0], plan.chunk_size, recompute)
        name = operator.PASSES[measured] + ("" if recompute else KEPT)
        yield (
            name,
            partial(operator.run_pass, measured, partial(rule, **packing), operands, d_output),
        )


def _profile(call: Callable[[], object], device: torch.device) -> tuple[Kernel, ...]:
    is_gpu, repeats = device.type == "cuda", REPEATS[device.type]
    for _ in range(repeats):  # compiled and warm
        call()
    timing.synchronize(device)
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(repeats):
            call()
        timing.synchronize(device)
    return summed(gpu_spans(profiler), repeats) if is_gpu else cpu_operators(profiler, repeats)


def _of(kernels: Sequence[Kernel], spilled: OfThreads) -> OfThreads:
    return {kernel.name: spilled[kernel.name] for kernel in kernels if kernel.name in spilled}


def render(result: Result, console: Console) -> None:
    """Print a table for each pass."""
    for part in result.parts:
        shared = f", {part.programs} programs a multiprocessor" if part.programs else ""
        took = f"{part.seconds * 1e6:,.0f} µs"
        title = f"{part.measured} at {part.shape}, {result.plan.operands}{shared}: {took}"
        columns = ("µs", "part", "calls", "registers", "spilled bytes", "kernel")
        table = new_table(columns, left=("kernel",), title=title)
        for kernel in part.kernels[:MOST]:
            table.add_row(
                f"{kernel.seconds * 1e6:,.1f}",
                f"{kernel.seconds / part.seconds:.1%}",
                f"{kernel.calls:,.1f}",
                *map(str, part.of_threads.get(kernel.name, ("", ""))),
                shortened(kernel.name),
            )
        others = part.kernels[MOST:]
        if others:
            seconds = sum(kernel.seconds for kernel in others)
            row = f"{seconds * 1e6:,.1f}", f"{seconds / part.seconds:.1%}"
            table.add_row(*row, "", "", "", f"{len(others)} others")
        console.print(table)
