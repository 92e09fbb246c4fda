"""`gdn2 bench operator`: the time of the operator's passes, backend beside backend."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn2.bench import forms, timing
from gdn2.bench.forms import FORMS, SHARING, Operands, Sizes
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.peers import KEPT, Operator, find_peers, own_operator
from gdn2.bench.timing import DTYPES, Timing
from gdn2.ops.backends import BACKENDS, choose

PASSES = {"forward": "fwd", "training": "fwd train", "backward": "fwd + bwd"}
DEFAULTS = {  # shapes and backends
    "cpu": (["1x2048x4x64x64"], "torch,reference"),
    "cuda": (["4x4096x16x128x128"], "auto"),
}
# The documented figures: a device, and shapes and backends timed together.
SUITES = {
    "cpu": (
        "cpu",
        [
            (["1x2048x4x64x64"], "torch,reference"),
            (["1x1024x4x64x64", "1x16384x4x64x64"], "torch"),
        ],
    ),
    "hopper": (
        "cuda",
        [([f"{rows}x{2**14 // rows}x16x128x128" for rows in (8, 4, 2, 1)], "auto")],
    ),
}


class Shape(NamedTuple):
    """Sizes of the operands."""

    batch: int
    length: int
    heads: int
    key_width: int
    value_width: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        sizes = text.split("x")
        if len(sizes) != 5 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"shape: got {text!r}, expected BxTxHxDkxDv, such as 1x2048x4x64x64")
        return cls(*map(int, sizes))

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Plan:
    """What to time together: every backend and pass at every shape."""

    shapes: tuple[Shape, ...]
    backends: tuple[str, ...]
    device: torch.device
    dtype: str
    passes: tuple[str, ...] = tuple(PASSES)
    chunk_size: int = 64
    packed: str = ""  # lengths of packed sequences, or how many; empty is a dense batch
    form: str = "gdn2"
    value_heads: int | None = None  # as many as heads, or several for each
    recompute: bool | None = None  # None: beside peers, which do either, both ways; else recompute
    peers: bool = False
    seconds: float = 1.0  # to spend on each variant

    @property
    def baseline(self) -> str:
        return "reference" if "reference" in self.backends else self.backends[0]

    @property
    def operands(self) -> str:
        """What they are besides their shape."""
        shared = f", {self.value_heads} value heads" if self.value_heads else ""
        return self.form + shared + (f", packed {self.packed}" if self.packed else "")


@dataclass(frozen=True)
class Row:
    """The time of one pass of one backend at one shape."""

    shape: Shape
    measured: str  # which pass
    backend: str
    timing: Timing
    first_seconds: float  # the very first call, with whatever is compiled or tuned then
    floor_seconds: float  # a copy of the bytes that must move
    tokens_per_second: float
    microseconds_per_token: float
    speedup: float | None = None  # the baseline's time over this one
    growth: float = 1.0  # time per token over that of the shortest sequence


@dataclass(frozen=True)
class Result:
    plan: Plan
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what was left out, and why
    baseline: str  # whose times the others are compared with
    copy_bytes_per_second: float

    def as_json(self) -> dict[str, Any]:
        """Plain data, shapes and device by their names."""
        names = {"shapes": [*map(str, self.plan.shapes)], "device": str(self.plan.device)}
        plan = asdict(self.plan) | names
        rows = [asdict(row) | {"shape": str(row.shape)} for row in self.rows]
        return asdict(self) | {"plan": plan, "rows": rows}


def read_plans(
    *,
    suite: str | None = None,
    shapes: list[str] | None = None,
    backends: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    passes: str = ",".join(PASSES),
    **settings: Any,
) -> list[Plan]:
    """Check what was asked for and fill in the rest; a suite is several plans."""
    if suite is not None:
        _one("suite", suite, SUITES)
        if shapes or backends or settings.get("packed") or device not in (None, SUITES[suite][0]):
            raise ValueError(f"suite: got {suite!r}, which sets shape, backend, packed and device")
    where = timing.find_device(SUITES[suite][0] if suite else device)
    usual_shapes, usual_backends = DEFAULTS[where.type]
    asked = SUITES[suite][1] if suite else [(shapes or usual_shapes, backends or usual_backends)]
    dtype = timing.find_dtype(dtype, where)
    settings["form"] = _one("form", settings.get("form", "gdn2"), FORMS)
    plans = [
        Plan(
            shapes=tuple(Shape.parse(text) for text in sizes),
            backends=tuple(choose(name, where) for name in _listed("backend", names, BACKENDS)),
            device=where,
            dtype=dtype,
            passes=_listed("passes", passes, PASSES),
            **settings,
        )
        for sizes, names in asked
    ]
    timing.check_seconds(plans[0].seconds)
    for shape in (shape for plan in plans for shape in plan.shapes):
        packed_lengths(settings.get("packed", ""), shape)  # a mistake shows before any timing
        check_value_heads(settings.get("value_heads"), settings["form"], shape)
    return plans


def check_value_heads(value_heads: int | None, form: str, shape: Shape) -> None:
    """Refuse what no head could be shared by."""
    if value_heads is None:
        return
    if form not in SHARING:
        expected = f"none but for {' and '.join(SHARING)}"
        raise ValueError(f"value heads: got {value_heads} for {form}, expected {expected}")
    if value_heads < 1 or value_heads % shape.heads:
        expected = f"a multiple of the shape's {shape.heads} heads"
        raise ValueError(f"value heads: got {value_heads}, expected {expected}")


def _listed(option: str, text: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """Names between commas, each one of those allowed."""
    return tuple(_one(option, name, allowed) for name in dict.fromkeys(text.split(",")))


def _one(option: str, name: str, allowed: Iterable[str]) -> str:
    """A name that is allowed."""
    if name not in allowed:
        raise ValueError(f"{option}: got {name!r}, expected one of {', '.join(allowed)}")
    return name


def packed_lengths(packed: str, shape: Shape) -> list[int]:
    """Lengths that add up to the shape's: as listed, or so many at random; none for a dense batch."""
    if not packed:
        return []
    numbers = [int(n) if n.isdecimal() else 0 for n in packed.split(",")]
    documents = numbers[0] if len(numbers) == 1 else len(numbers)
    fits = min(numbers) > 0 and documents <= shape.length and shape.batch == 1
    if not fits or (len(numbers) > 1 and sum(numbers) != shape.length):
        expected = (
            f"lengths that add up to {shape.length}, or a number of documents, and a batch of 1"
        )
        raise ValueError(f"packed: got {packed!r} for shape {shape}, expected {expected}")
    if len(numbers) > 1:
        return numbers
    cuts = sorted(random.Random(0).sample(range(1, shape.length), documents - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, shape.length], strict=True)]


def make_operands(shape: Shape, plan: Plan) -> Operands:
    """Operands of the plan's form."""
    batch, length, heads, d_k, d_v = shape
    sizes = Sizes(batch, length, heads, plan.value_heads or heads, d_k, d_v)
    return forms.make_operands(plan.form, sizes, DTYPES[plan.dtype], plan.device)


def run_pass(measured: str, operator: Operator, operands: Operands, d_output: Tensor) -> object:
    """Run the forward, without or with autograd's record, or forward and backward."""
    with torch.set_grad_enabled(measured != "forward"):
        output = operator(**operands)
    if measured != "backward":
        return output
    return torch.autograd.grad(output, list(operands.values()), d_output)


def bytes_moved(measured: str, operands: Operands) -> int:
    """Bytes that a pass must move at least: each pass reads its inputs once and writes its outputs once."""
    inputs, output = sum(x.nbytes for x in operands.values()), operands["v"].nbytes
    return inputs + output if measured != "backward" else 3 * inputs + 2 * output


def find_operators(plan: Plan) -> tuple[dict[str, Operator], list[str]]:
    """Ours and, if asked for, other people's, with a line for what is missing."""
    ours = {b: own_operator(b, plan.chunk_size, plan.recompute is not False) for b in plan.backends}
    if not plan.peers:
        return ours, []
    if plan.recompute is None and "triton" in ours:  # the others keep the same either way
        ours[f"triton{KEPT}"] = own_operator("triton", plan.chunk_size, recompute=False)
    found, notes = find_peers(plan.device, bool(plan.packed), plan.form)
    return ours | found, notes


def run(plan: Plan, progress: Callable[[float], None] = lambda done: None) -> Result:
    """Time all variants of a plan, interleaved, so that their ratios hold on a busy machine too."""
    operators, notes = find_operators(plan)
    speed = timing.copy_bytes_per_second(plan.device)
    calls: dict[tuple[Shape, str, str], Callable[[], object]] = {}
    first: dict[tuple[Shape, str, str], tuple[float, float]] = {}
    for shape in plan.shapes:
        operands = make_operands(shape, plan)
        d_output = torch.randn_like(operands["v"])
        lengths = packed_lengths(plan.packed, shape)
        bounds = torch.tensor([0, *lengths], device=plan.device).cumsum(0)
        packing = {"cu_seqlens": bounds} if lengths else {}
        for measured, (name, operator) in product(plan.passes, operators.items()):
            if measured == "forward" and name.endswith(KEPT):
                continue  # without a backward nothing is kept
            call = partial(run_pass, measured, partial(operator, **packing), operands, d_output)
            start = time.perf_counter()
            try:
                call()
                timing.synchronize(plan.device)
            except Exception as failure:
                own = name.removesuffix(KEPT) in plan.backends
                if own and not isinstance(failure, torch.OutOfMemoryError):
                    raise
                reason = str(failure).strip().partition("\n")[0]
                notes.append(f"no {PASSES[measured]} of {name} at {shape}: {reason}")
                continue
            key = shape, measured, name
            floor = bytes_moved(measured, operands) / speed
            calls[key], first[key] = call, (time.perf_counter() - start, floor)
    timings = timing.measure_together(calls, plan.device, seconds=plan.seconds, progress=progress)
    rows = [make_row(*key, timings[key], *first[key]) for key in calls]
    beside = "fla" if "fla" in operators and plan.baseline != "reference" else plan.baseline
    machine = describe_machine()
    return Result(plan, machine, relate(rows, beside), tuple(notes), beside, speed)


def make_row(
    shape: Shape, measured: str, backend: str, took: Timing, first: float, floor: float
) -> Row:
    """Return a row that is compared with nothing yet."""
    rate = shape.batch * shape.length / took.median
    return Row(shape, measured, backend, took, first, floor, rate, 1e6 / rate)


def relate(rows: list[Row], baseline: str) -> tuple[Row, ...]:
    """Compare each row with the baseline at its shape, and with its own backend at the shortest length.

    What keeps its factors is compared with a baseline that does so too, if there is one.
    """

    def related(row: Row) -> Row:
        same = [r for r in rows if r.measured == row.measured]
        kept = f"{baseline}{KEPT}" if row.backend.endswith(KEPT) else baseline
        base = [r for b in (kept, baseline) for r in same if (r.shape, r.backend) == (row.shape, b)]
        speedup = base[0].timing.median / row.timing.median if base else None
        sizes = row.shape._replace(length=0)
        kin = [r for r in same if (r.shape._replace(length=0), r.backend) == (sizes, row.backend)]
        shortest = min(kin, key=lambda r: r.shape.length)
        growth = row.microseconds_per_token / shortest.microseconds_per_token
        return replace(row, speedup=speedup, growth=growth)

    return tuple(map(related, rows))
