"""`gdn2 bench decode`: the time of one decode step, beside a copy of the same bytes."""

# ruff: noqa: PLC0415 (peers and kernels are imported where they are asked for)
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gdn2.bench import operator, timing
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.tables import new_table
from gdn2.bench.timing import DTYPES, Timing
from gdn2.ops.arguments import MAX_WIDTH
from gdn2.ops.backends import why_not
from gdn2.ops.rule import gated_delta_step

Operands = dict[str, Tensor]
Step = Callable[[Tensor], object]  # takes a state [N, H, d_k, d_v]
SHAPES = {
    "cpu": ["1x4x64x64"],
    "cuda": [f"{batch}x16x128x128" for batch in (1, 16, 128, 512)],
}
VALUE_BLOCKS = (8, 16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
LEAST_STEPS = 4  # in one graph
COPY = "copy"  # of the state, to compare with


class Shape(NamedTuple):
    """Sizes of the state."""

    batch: int
    heads: int
    key_width: int
    value_width: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        sizes = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
        if len(sizes) != 4 or min(sizes) < 1 or max(sizes[2:]) > MAX_WIDTH:
            expected = f"BxHxDkxDv with widths up to {MAX_WIDTH}, such as 1x16x128x128"
            raise ValueError(f"shape: got {text!r}, expected {expected}")
        return cls(*sizes)

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Plan:
    """What to time: a step at every shape."""

    shapes: tuple[Shape, ...]
    device: torch.device
    dtype: str
    tokens: int = 1
    peers: bool = False
    sweep: bool = False
    seconds: float = 1.0  # to spend on each variant


@dataclass(frozen=True)
class Row:
    """The time of one step of one implementation at one shape."""

    shape: Shape
    name: str
    timing: Timing
    bytes_per_second: float  # of the state, read once and written once
    of_copy: float  # a copy's time over this one


@dataclass(frozen=True)
class Result:
    plan: Plan
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what was left out, and why

    def as_json(self) -> dict[str, Any]:
        """Plain data, shapes and device by their names."""
        names = {"shapes": [*map(str, self.plan.shapes)], "device": str(self.plan.device)}
        rows = [asdict(row) | {"shape": str(row.shape)} for row in self.rows]
        return asdict(self) | {"plan": asdict(self.plan) | names, "rows": rows}


def read_plan(
    *, shapes: list[str] | None, device: str | None, dtype: str | None, **settings: Any
) -> Plan:
    """Check what was asked for and fill in the rest."""
    where = timing.find_device(device)
    dtype = timing.find_dtype(dtype, where)
    sizes = tuple(map(Shape.parse, shapes or SHAPES[where.type]))
    plan = Plan(sizes, where, dtype, **settings)
    timing.check_seconds(plan.seconds)
    if plan.tokens < 1:
        raise ValueError(f"tokens: got {plan.tokens}, expected at least 1")
    if plan.sweep and (reason := why_not("triton", where, DTYPES[dtype], ("step",))):
        raise ValueError(f"sweep: got True, but {reason}; expected a GPU that runs the kernel")
    return plan


def run(plan: Plan) -> Result:
    """Time a step at each shape, the variants of a shape interleaved with a copy of its state."""
    rows: list[Row] = []
    notes: list[str] = []
    for shape in plan.shapes:
        operands, states = make_operands(shape, plan), make_states(shape, plan)
        own = tiled_steps(operands, sweep_tiles(shape)) if plan.sweep else own_steps(operands)
        calls = {name: repeated(step, states) for name, step in {COPY: torch.clone, **own}.items()}
        peers, missing = find_peers(operands, plan.device) if plan.peers else ({}, [])
        for name, step in peers.items():
            try:
                calls[name] = repeated(step, states)
            except Exception as failure:
                reason = str(failure).strip().partition("\n")[0]
                missing.append(f"no {name} at {shape}: {reason}")
        notes += [note for note in missing if note not in notes]
        timings = timing.measure_together(calls, plan.device, seconds=plan.seconds)
        rows += make_rows(shape, {n: per_step(t, len(states)) for n, t in timings.items()}, states)
    return Result(plan, describe_machine(), tuple(rows), tuple(notes))


def make_operands(shape: Shape, plan: Plan) -> Operands:
    """Tokens as in `gdn2 bench operator`, without gradients."""
    whole = operator.Shape(shape.batch, plan.tokens, *shape[1:])
    like = operator.Plan((whole,), ("reference",), plan.device, plan.dtype)
    return {name: x.detach() for name, x in operator.make_operands(whole, like).items()}


def make_states(shape: Shape, plan: Plan) -> Tensor:
    """States [steps, N, H, d_k, d_v]: on a GPU more than its cache holds, so that each is read from memory."""
    dtype = torch.promote_types(DTYPES[plan.dtype], torch.float32)
    steps = 1
    if plan.device.type == "cuda":
        steps = max(LEAST_STEPS, timing.L2_FLUSH_BYTES // (math.prod(shape) * dtype.itemsize))
    return torch.zeros(steps, *shape, dtype=dtype, device=plan.device)


def repeated(step: Step, states: Tensor) -> Callable[[], object]:
    """A call that steps each state once: on a GPU a replay of one graph."""

    def step_all() -> list[object]:
        # all results are kept, so that no new state lies in the memory of another
        return [step(state) for state in states]

    if not states.is_cuda:
        return step_all
    step(states[0])  # compiles and tunes, which a graph cannot hold
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step_all()
    return graph.replay


def own_steps(operands: Operands) -> dict[str, Step]:
    """Our step, in place and with a new state."""
    given: Any = operands
    return {
        "gdn2": lambda state: gated_delta_step(**given, state=state, inplace=True),
        "gdn2, new state": lambda state: gated_delta_step(**given, state=state),
    }


def tiled_steps(operands: Operands, tiles: Iterable[tuple[int, int]]) -> dict[str, Step]:
    """The kernel in place with each of these (value channels, warps) per program."""
    from gdn2.ops.triton.step import Tile, step

    q, k, v, g, b, w = (operands[name] for name in "qkvgbw")
    scale = q.shape[-1] ** -0.5

    def tiled(tile: Tile, state: Tensor) -> Tensor:
        return step(q, k, v, g, b, w, scale, state, state, tile)

    return {f"{block} × {warps}": partial(tiled, Tile(block, warps)) for block, warps in tiles}


def sweep_tiles(shape: Shape) -> list[tuple[int, int]]:
    """Tiles that differ at a shape: one as wide as all value channels is the last."""
    blocks = [block for block in VALUE_BLOCKS if block < 2 * shape.value_width]
    return [*product(blocks, WARPS)]


def find_peers(operands: Operands, device: torch.device) -> tuple[dict[str, Step], list[str]]:
    """Other people's steps by name, or one line that says why there are none."""
    if device.type != "cuda":
        return {}, ["no peers: fla decodes on a GPU only"]
    try:
        with warnings.catch_warnings(action="ignore"):
            from fla.ops.gdn2 import fused_recurrent_gdn2
    except ImportError as missing:
        return {}, [f"no peers: {missing}; pip install 'gdn2[bench]' installs fla"]

    def fla(state: Tensor) -> object:
        return fused_recurrent_gdn2(**operands, initial_state=state, output_final_state=True)

    return {"fla": fla}, []


def per_step(took: Timing, steps: int) -> Timing:
    """The time of one of the steps that were timed together."""
    median, low, high = (x / steps for x in (took.median, took.low, took.high))
    return Timing(median, low, high, took.repeats)


def make_rows(shape: Shape, timings: dict[str, Timing], states: Tensor) -> list[Row]:
    """Compare steps with a copy, which reads and writes as many bytes."""
    moved, copy = 2 * states[0].nbytes, timings[COPY].median
    return [
        Row(shape, name, took, moved / took.median, copy / took.median)
        for name, took in timings.items()
    ]


def render(result: Result, console: Console) -> None:
    """Print a table for each shape."""
    plan = result.plan
    tokens = f"{plan.tokens} token" + "s" * (plan.tokens > 1)
    for shape in plan.shapes:
        rows = [row for row in result.rows if row.shape == shape]
        table = (sweep_table if plan.sweep else step_table)(rows)
        table.title = f"{shape}, {tokens}, {plan.dtype} on {plan.device}"
        console.print(table)
    for note in result.notes:
        console.print(note, markup=False, soft_wrap=True)


def step_table(rows: list[Row]) -> Table:
    """One row for each implementation."""
    table = new_table(("", "µs", "spread", "GB/s", "of copy"), left=("",))
    for row in rows:
        took = row.timing
        speed = f"{row.bytes_per_second / 1e9:.1f}", f"{row.of_copy:.0%}"
        table.add_row(row.name, f"{took.median * 1e6:.2f}", f"{took.spread:.0%}", *speed)
    return table


def sweep_table(rows: list[Row]) -> Table:
    """Microseconds by value channels and warps of a program, beside a copy's."""
    took = {row.name: f"{row.timing.median * 1e6:.2f}" for row in rows}
    columns = ("channels", *(f"{warps} warps" for warps in WARPS), COPY)
    table = new_table(columns, left=("channels",))
    for block in VALUE_BLOCKS:
        cells = [took.get(f"{block} × {warps}", "") for warps in WARPS]
        table.add_row(str(block), *cells, took[COPY] if block == VALUE_BLOCKS[0] else "")
    return table
