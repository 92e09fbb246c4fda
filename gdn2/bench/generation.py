"""`gdn2 bench generation`: how fast a model reads prompts and writes tokens."""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from gdn2.bench import timing
from gdn2.bench.decode import per_step
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.tables import new_table
from gdn2.bench.timing import DTYPES, Timing
from gdn2.layers.joint import lay_side_by_side
from gdn2.models.decode import Decoding, Steps
from gdn2.models.folder import open_model
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import Prefilled, prefill
from gdn2.models.sampling import Draws, Sampling, sample
from gdn2.models.summary import in_bytes

# Batches and contexts.
DEFAULTS = {"cpu": ((1,), (256,)), "cuda": ((1, 16, 64), (1024, 16384))}


@dataclass(frozen=True)
class Plan:
    """What to time: a model at every batch and context."""

    model: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    device: torch.device
    dtype: str
    tokens: int = 16  # steps timed together
    seconds: float = 1.0  # to spend on each number


@dataclass(frozen=True)
class Row:
    """Times at one batch and context."""

    batch: int
    context: int
    prefill: Timing  # of all prompts
    step: Timing  # of one token for every row
    state_bytes: int  # of one row

    @property
    def prefill_speed(self) -> float:
        return self.batch * self.context / self.prefill.median

    @property
    def decode_speed(self) -> float:
        return self.batch / self.step.median


@dataclass(frozen=True)
class Result:
    plan: Plan
    machine: Machine
    rows: tuple[Row, ...]
    eager_because: str | None  # why no CUDA graph was timed

    def as_json(self) -> dict[str, Any]:
        """Plain data; speeds are tokens a second of all rows together."""
        rows = [
            {**asdict(row), "prefill_speed": row.prefill_speed, "decode_speed": row.decode_speed}
            for row in self.rows
        ]
        plan = asdict(self.plan) | {"device": str(self.plan.device)}
        return asdict(self) | {"plan": plan, "rows": rows}


def read_plan(
    *,
    model: str,
    batches: list[int] | None,
    contexts: list[int] | None,
    device: str | None,
    dtype: str | None,
    **settings: Any,
) -> Plan:
    """Check what was asked for and fill in the rest."""
    where = timing.find_device(device)
    usual_batches, usual_contexts = DEFAULTS[where.type]
    sizes = (tuple(batches or usual_batches), tuple(contexts or usual_contexts))
    plan = Plan(model, *sizes, where, timing.find_dtype(dtype, where), **settings)
    timing.check_seconds(plan.seconds)
    for name, values in {
        "batch": plan.batches,
        "context": plan.contexts,
        "tokens": (plan.tokens,),
    }.items():
        for value in values:
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
    return plan


def run(plan: Plan) -> Result:
    """Time every batch and context, one after the other."""
    model = open_model(plan.model, device=plan.device, dtype=DTYPES[plan.dtype])
    lay_side_by_side(model)
    steps = Steps(model)
    sizes = product(plan.batches, plan.contexts)
    rows = tuple(time_one(model, steps, plan, batch, context) for batch, context in sizes)
    return Result(plan, describe_machine(), rows, steps.eager_because)


def time_one(model: LanguageModel, steps: Steps, plan: Plan, batch: int, context: int) -> Row:
    """Time the prefill of random prompts, and steps from their end."""
    rand = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (batch, context), generator=rand)
    reading = timing.measure(
        lambda: prefill(model, prompts), plan.device, warmup=1, seconds=plan.seconds, least=3
    )
    ready = prefill(model, prompts)
    start = start_decoding(model, ready, plan.tokens)
    running = steps.start(start.map(torch.clone), Sampling())

    def write() -> None:
        # From the same place each time: the copy is one pass over the state for many.
        for own, old in zip(running.now.tensors(), start.tensors(), strict=True):
            own.copy_(old)
        for _ in range(plan.tokens):
            running.step()

    writing = timing.measure(write, plan.device, seconds=plan.seconds, least=3)
    step = per_step(writing, plan.tokens)
    return Row(batch, context, reading, step, ready.state.nbytes // batch)


def start_decoding(model: LanguageModel, ready: Prefilled, tokens: int) -> Decoding:
    """The first token of every row, and room for the next ones."""
    rows, vocabulary = ready.logits.shape
    history: list[Tensor] = []
    draws = Draws.start(range(rows), Sampling(), vocabulary, history, ready.logits.device)
    first = sample(ready.logits, Sampling(), draws)
    return Decoding(first, model.reserve(ready.state, tokens), draws)


def render(result: Result, console: Console) -> None:
    """Print one row for each batch and context."""
    plan = result.plan
    columns = ("batch", "context", "prefill tokens/s", "ms/step", "spread", "decode tokens/s")
    title = f"{plan.model}, {plan.dtype} on {plan.device}"
    table = new_table((*columns, "state a row"), left=(), title=title)
    for row in result.rows:
        table.add_row(
            str(row.batch),
            str(row.context),
            f"{row.prefill_speed:,.0f}",
            f"{row.step.median * 1e3:.3f}",
            f"{row.step.spread:.0%}",
            f"{row.decode_speed:,.1f}",
            in_bytes(row.state_bytes),
        )
    console.print(table)
    by_graph = result.eager_because is None
    said = "steps are CUDA graphs" if by_graph else f"steps are eager: {result.eager_because}"
    console.print(said, soft_wrap=True)
