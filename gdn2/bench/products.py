"""`gdn2 bench products`: the ways in which a GPU's library can multiply what a training step multiplies.

Each way runs for a while, so that a GPU at the limit of its power comes to the clocks that the way leaves it: then the
fastest is the one that takes the least energy.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from gdn2.bench.tables import new_table
from gdn2.bench.timing import synchronize
from gdn2.bench.trainers import Plan, Shape, own_trainer, random_batch
from gdn2.models.presets import preset as find_preset
from gdn2.ops.cuda.build import CudaError
from gdn2.ops.cuda.multiply import Multiplier, Problem, Way, library_version, multiplier
from gdn2.ops.products import counting
from gdn2.training.world import World

LEAST_FLOPS = 1e10  # of a product; smaller ones take a few microseconds
VARIED = 2  # proposals, the library's first ones, of which other tiles and options are tried
SLOW = 1.2  # times the fastest so far: of ways that take longer a look is enough
START = 2e-5  # seconds that the host may take to start a call
SHORTER = 5  # parts of the time that the best ways get; all others get one
FINALISTS = 6
WORTH = 0.995  # a way that takes a larger part of torch's time is not worth a choice
ROUNDING = 1e-2  # of bf16 results that were summed up in different orders, and far from wrong ones


class Choice(NamedTuple):
    """One problem: how often a step meets it, and what it takes."""

    problem: Problem
    calls: int
    usual_seconds: float  # by torch
    best_seconds: float  # by the way, or by torch
    way: Way | None  # None where torch's is the best

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        named = {"problem": self.problem._asdict(), "way": self.way and self.way._asdict()}
        return self._asdict() | named


def check(device: torch.device, seconds: float) -> None:
    """Refuse a device without the library, and no time."""
    if device.type != "cuda":
        raise ValueError(f"device: got {device.type}, expected cuda, whose library is asked")
    if not 0 < seconds < inf:
        raise ValueError(f"seconds: got {seconds}, expected a finite number above 0")
    try:
        library_version()
    except CudaError as missing:
        raise ValueError(f"device: got {device}, expected its library, but {missing}") from None


def met_in_a_step(plan: Plan, name: str, shape: Shape) -> Counter[Problem]:
    """How often a training step meets each problem."""
    world, config = World(0, 1, plan.device, None), find_preset(name)
    batch = random_batch(shape, config.vocab_size, plan.device)
    torch.compiler.reset()
    try:
        with counting() as met:
            trainer = own_trainer(config, plan, world, plan.weights[0])
            trainer.step(batch)  # compiles, and may call what it never calls again
            met.clear()
            trainer.step(batch)
            found = met.copy()
        del trainer
    finally:
        world.close()
        torch.compiler.reset()
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return Counter({p: n for p, n in found.items() if flops(p) >= LEAST_FLOPS})


def choices(met: Counter[Problem], device: torch.device, seconds: float) -> Iterator[Choice]:
    """The best way for each problem, those that take a step the longest first."""
    for problem in sorted(met, key=lambda p: -met[p] * flops(p)):
        yield best_way(problem, met[problem], device, seconds)


def best_way(problem: Problem, calls: int, device: torch.device, seconds: float) -> Choice:
    """Try all ways shortly; time torch's and the best of them twice, the second time in the opposite order."""
    a, b = draw(problem, device)
    out = a.new_empty(problem.rows, problem.columns)
    usual: Callable[[], object] = partial(torch.mm, a, b, out=out)
    usual()
    right, multiply = out.clone(), multiplier(problem, device)
    tried = {way: partial(multiply, a, b, out, way) for way in candidates(multiply)}
    is_right = partial(matches, out, right)
    fast = by_speed(tried, is_right, device, seconds / SHORTER)
    runs: dict[Way | None, Callable[[], object]] = {None: usual}
    runs |= {way: tried[way] for way in fast[:FINALISTS]}
    took = dict.fromkeys(runs, 0.0)
    for order in ([*runs], [*runs][::-1]):
        for key in order:
            took[key] += sustained(runs[key], device, seconds) / 2
    fastest = min(took, key=lambda way: took[way])
    best = fastest if took[fastest] < WORTH * took[None] else None
    return Choice(problem, calls, took[None], took[best], best)


def candidates(multiply: Multiplier) -> list[Way]:
    """What the library proposes, then variants of its first proposals."""
    proposed = multiply.ways()
    varied = (variant for way in proposed[:VARIED] for variant in multiply.variants(way))
    return [*dict.fromkeys([*proposed, *varied])]


def by_speed(
    runs: Mapping[Way, Callable[[], object]],
    is_right: Callable[[Callable[[], object]], bool],
    device: torch.device,
    seconds: float,
) -> list[Way]:
    """Ways that work, are right and not slow, the fastest first."""
    took: dict[Way, float] = {}
    for way, run in runs.items():
        with suppress(CudaError):
            run()  # brings the kernel to the GPU
            once = _timed(run, 2, device) / 2
            if once < SLOW * min(took.values(), default=inf) + START and is_right(run):
                calls = max(2, int(seconds / once))
                took[way] = _timed(run, calls, device) / calls
    return sorted(took, key=lambda way: took[way])


def matches(out: Tensor, right: Tensor, run: Callable[[], object]) -> bool:
    """Whether a way gives what torch's gives, up to rounding."""
    out.zero_()
    run()
    return bool((out.float() - right.float()).norm() < ROUNDING * right.float().norm())


def sustained(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds a call, when calls have gone on for half of the time."""
    once = _timed(run, 2, device) / 2
    calls = max(2, int(seconds / once / 2))
    _timed(run, calls, device)
    return _timed(run, calls, device) / calls


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(torch.cuda.current_stream(device))
    for _ in range(calls):
        run()
    end.record(torch.cuda.current_stream(device))
    synchronize(device)
    return start.elapsed_time(end) / 1e3


def draw(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Operands that lie as the problem says."""
    rand = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int, turned: bool, stride: int) -> Tensor:
        shape = (columns if turned else rows, stride)
        x = torch.randn(shape, generator=rand, device=device).bfloat16()
        return x[:, :rows].t() if turned else x[:, :columns]

    p = problem
    a = matrix(p.rows, p.inner, p.a_turned, p.a_stride)
    return a, matrix(p.inner, p.columns, p.b_turned, p.b_stride)


def flops(problem: Problem) -> int:
    """Multiplications and additions."""
    return 2 * problem.rows * problem.columns * problem.inner


def render(found: Sequence[Choice], console: Console) -> None:
    """Print a table, and what a step gains."""
    columns = ("product", "calls", "µs by torch", "TFLOP/s", "µs chosen", "gain")
    table = new_table(columns, left=("product",))
    for choice in found:
        p, usual, best = choice.problem, choice.usual_seconds, choice.best_seconds
        turned = "".join("ᵀ" if t else " " for t in (p.a_turned, p.b_turned))
        table.add_row(
            f"{p.rows} × {p.inner} × {p.columns} {turned}".rstrip(),
            f"{choice.calls}",
            f"{usual * 1e6:,.1f}",
            f"{flops(p) / usual / 1e12:,.0f}",
            "–" if choice.way is None else f"{best * 1e6:,.1f}",
            "–" if choice.way is None else f"{1 - best / usual:.1%}",
        )
    console.print(table)
    usual = sum(choice.calls * choice.usual_seconds for choice in found)
    best = sum(choice.calls * choice.best_seconds for choice in found)
    console.print(f"of a step: {usual * 1e3:.1f} ms by torch, {best * 1e3:.1f} ms as chosen")
