"""`gdn2 bench accuracy`: how far output and gradients are from fp64 on the same operands, at decays of any strength."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isinf
from typing import Any

import torch
from torch import Tensor

from gdn2.bench import forms, timing
from gdn2.bench.forms import Operands, Sizes
from gdn2.bench.machine import Machine, describe_machine
from gdn2.bench.operator import Shape
from gdn2.bench.peers import Operator, find_peers
from gdn2.bench.timing import DTYPES
from gdn2.ops.arguments import SOLVE_PRECISIONS, new_state
from gdn2.ops.backends import choose, using
from gdn2.ops.rule import gated_delta_rule, gated_delta_step
from gdn2.ops.selfcheck import relative_error

SHAPE = {"cpu": "1x256x2x64x64", "cuda": "4x1024x16x128x128"}
DECAYS = ("initial", "0", "-1", "-5", "-20", "-200", "spiky")
SPIKE, SPIKES = -300.0, 0.1  # log-decay of tokens that forget all, and how many of them do
PEER = "fla"
STEPS = "steps"  # what decoding gives where training gave o


@dataclass(frozen=True)
class Plan:
    """What to compare: all variants at every decay."""

    shape: Shape
    decays: tuple[str, ...]
    backend: str
    device: torch.device
    dtype: str
    solve_precision: str = "ieee"
    peers: bool = False


@dataclass(frozen=True)
class Row:
    """One variant at one decay: the relative error of each quantity; None where it is lost or no number."""

    decay: str
    variant: str
    errors: dict[str, float | None]


@dataclass(frozen=True)
class Result:
    plan: Plan
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what was left out, and why

    def as_json(self) -> dict[str, Any]:
        """Plain data, shape and device by their names."""
        names = {"shape": str(self.plan.shape), "device": str(self.plan.device)}
        return asdict(self) | {"plan": asdict(self.plan) | names}


def read_plan(
    *,
    shape: str | None,
    decays: str | None,
    backend: str,
    device: str | None,
    dtype: str | None,
    solve_precision: str,
    peers: bool,
) -> Plan:
    """Check what was asked for and fill in the rest."""
    where = timing.find_device(device)
    dtype = timing.find_dtype(dtype, where)
    if solve_precision not in SOLVE_PRECISIONS:
        expected = ", ".join(SOLVE_PRECISIONS)
        raise ValueError(f"solve precision: got {solve_precision!r}, expected one of {expected}")
    names = DECAYS if decays is None else tuple(dict.fromkeys(decays.split(",")))
    for name in names:
        check_decay(name)
    return Plan(
        shape=Shape.parse(shape or SHAPE[where.type]),
        decays=names,
        backend=choose(backend, where, DTYPES[dtype]),
        device=where,
        dtype=dtype,
        solve_precision=solve_precision,
        peers=peers,
    )


def check_decay(name: str) -> None:
    """Refuse what is neither a word for decays nor a log-decay."""
    if name in ("initial", "spiky"):
        return
    try:
        decay = float(name)
        fits = decay <= 0 and (isinf(decay) or -decay <= torch.finfo(torch.float32).max)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"decay: got {name!r}, expected initial, spiky or a number of fp32 up to 0"
        )


def make_operands(plan: Plan, decay: str) -> Operands:
    """Operands as the paper initialises them, all log-decays or some of them replaced."""
    batch, length, heads, d_k, d_v = plan.shape
    sizes = Sizes(batch, length, heads, heads, d_k, d_v)
    operands = forms.make_operands("gdn2", sizes, DTYPES[plan.dtype], plan.device)
    g = operands["g"].detach()
    if decay == "spiky":
        rand = torch.Generator(plan.device).manual_seed(1)
        chance = torch.rand(g.shape, generator=rand, dtype=g.dtype, device=g.device)
        g = torch.where(chance < SPIKES, SPIKE, g)
    elif decay != "initial":
        g = torch.full_like(g, float(decay))
    return operands | {"g": g.requires_grad_()}


def differentiate(operator: Operator, operands: Operands, d_output: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of all operands."""
    output = operator(**operands)
    grads = torch.autograd.grad(output, list(operands.values()), d_output.to(output.dtype))
    return {"o": output.detach(), **{f"d{n}": x for n, x in zip(operands, grads, strict=True)}}


@torch.no_grad()
def by_steps(**operands: Tensor) -> Tensor:
    """The output, one token after the other."""
    q, v = operands["q"], operands["v"]
    state, output = new_state(q, v, len(q)), torch.empty_like(v)
    for t in range(q.shape[1]):
        token: Any = {name: x[:, t : t + 1] for name, x in operands.items()}
        output[:, t : t + 1] = gated_delta_step(**token, state=state, inplace=True)[0]
    return output


def run(plan: Plan, found: Callable[[Result], None] = lambda so_far: None) -> Result:
    """Compare all variants; `found` is given what is known after each decay."""
    rule: Any = partial(gated_delta_rule, solve_precision=plan.solve_precision)
    variants: dict[str, Operator] = {plan.backend: _output_of(partial(rule, backend=plan.backend))}
    notes: list[str] = []
    if plan.peers:
        peers, notes = find_peers(plan.device, packed=False, form="gdn2")
        variants |= {name: peer for name, peer in peers.items() if name.startswith(PEER)}
    result = Result(plan, describe_machine(), (), tuple(notes))
    exact = _output_of(partial(gated_delta_rule, backend="torch"))
    for decay in plan.decays:
        operands = make_operands(plan, decay)
        rand = torch.Generator(plan.device).manual_seed(2)
        d_output = torch.randn(operands["v"].shape, generator=rand, device=plan.device)
        wide = {n: x.detach().double().requires_grad_() for n, x in operands.items()}
        right = differentiate(exact, wide, d_output.to(operands["v"].dtype))
        right[STEPS] = right["o"]
        for name, operator in variants.items():
            try:
                outcome = differentiate(operator, operands, d_output)
            except Exception as failure:
                if name == plan.backend:
                    raise
                reason = str(failure).strip().partition("\n")[0]
                note = f"no {name} at log-decay {decay}: {reason}"
                result = replace(result, notes=(*result.notes, note))
                continue
            if name == plan.backend:
                # else a GPU's kernel steps, whichever backend is compared
                with using(plan.backend):
                    outcome[STEPS] = by_steps(**operands)
            errors = {n: relative_error(x, right[n]) for n, x in outcome.items()}
            known = {n: e if e < float("inf") else None for n, e in errors.items()}
            result = replace(result, rows=(*result.rows, Row(decay, name, known)))
        found(result)
    return result


def _output_of(rule: Callable[..., tuple[Tensor, Any]]) -> Operator:
    return lambda **operands: rule(**operands)[0]
