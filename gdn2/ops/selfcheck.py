"""Whether an implementation of the operator computes the right thing, on any machine: errors against the token loop.

The token loop runs in fp64 on the CPU on the same rounded operands, so it depends on nothing that is being checked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from gdn2.ops.arguments import state_dtype
from gdn2.ops.rule import gated_delta_rule

Rule = Callable[..., tuple[Tensor, Tensor | None]]  # called as `gated_delta_rule` is

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
GRADIENTS = {name: f"d{name}" for name in "qkvgbw"} | {"initial_state": "d initial state"}
QUANTITIES = ("output", "final state", *GRADIENTS.values())
# of output and final state, of gradients
TOLERANCES = {"fp64": (1e-12, 1e-12), "fp32": (5e-6, 2e-5), "bf16": (2e-2, 2e-2)}
VANISHING = 1e-30


@dataclass(frozen=True)
class Scenario:
    """One kind of operands; sizes are such that a chunk of 64 is met short, full and in part."""

    name: str
    about: str
    strong: bool = False
    lengths: tuple[int, ...] = ()  # packed sequences; else rows of 130 tokens
    rows: int = 2
    erase: bool = True
    heads: tuple[int, int, int, int] = (2, 2, 2, 2)  # of q and k, v, g, b
    widths: tuple[int, int] = (32, 48)
    scalar_gates: bool = False


SCENARIOS = (
    Scenario("mild", "log-decays around −0.1"),
    Scenario("strong", "a tenth of the log-decays −20 or −1000", strong=True),
    Scenario("packed", "sequences of 1 to 65 tokens", lengths=(1, 2, 15, 63, 64, 65)),
    Scenario("no erase", "b=None", erase=False),
    Scenario("grouped", "scalar gates, fewer key heads", heads=(1, 4, 2, 1), scalar_gates=True),
)


@dataclass(frozen=True)
class Check:
    """The relative error of one quantity in one scenario; infinite where it is not finite."""

    scenario: str
    dtype: str
    quantity: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Checkup:
    """What was found of one backend or kernel."""

    name: str
    checks: tuple[Check, ...]
    problems: tuple[str, ...] = ()  # what it could not run at all

    @property
    def failures(self) -> list[str]:
        wrong = [c for c in self.checks if not c.passed]
        named = [f"{self.name}, {c.dtype}, {c.scenario}: {c.quantity}" for c in wrong]
        return named + [f"{self.name}, {problem}" for problem in self.problems]


def compare(rule: Rule, scenario: Scenario, dtype: str, device: torch.device) -> Iterator[Check]:
    """Yield the error of every quantity; the oracle gets the operands as the backend does, rounded."""
    operands = make_operands(scenario, DTYPES[dtype])
    expected = results(
        partial(gated_delta_rule, backend="reference"),
        {name: x.double() for name, x in operands.items()},
        scenario,
    )
    actual = results(rule, {name: x.to(device) for name, x in operands.items()}, scenario)
    for quantity, y in expected.items():
        tolerance = TOLERANCES[dtype][quantity in GRADIENTS.values()]
        error = relative_error(actual[quantity], y)
        yield Check(scenario.name, dtype, quantity, error, tolerance)


def make_operands(scenario: Scenario, dtype: torch.dtype) -> dict[str, Tensor]:
    """Seeded operands on the CPU, rounded to the dtype; log-decays and states keep fp32 at least."""
    rand = torch.Generator().manual_seed(0)
    batch, length = (1, sum(scenario.lengths)) if scenario.lengths else (scenario.rows, 130)
    qk_heads, v_heads, g_heads, b_heads = scenario.heads
    d_k, d_v = scenario.widths
    g_width, b_width, w_width = (1, 1, 1) if scenario.scalar_gates else (d_k, d_k, d_v)

    def normal(heads: int, width: int) -> Tensor:
        shape = (batch, length, heads, width)
        return torch.randn(shape, generator=rand, dtype=torch.float64)

    g = -0.1 * softplus(2 * normal(g_heads, g_width))
    if scenario.strong:
        kind = torch.rand(g.shape, generator=rand, dtype=torch.float64)
        g = g.where(kind > 0.1, -20.0).where(kind > 0.03, -1000.0)
    state = (len(scenario.lengths) or batch, v_heads, d_k, d_v)
    wide = {"g": g, "initial_state": torch.randn(state, generator=rand, dtype=torch.float64)}
    narrow = {
        "q": normalize(normal(qk_heads, d_k), dim=-1),
        "k": normalize(normal(qk_heads, d_k), dim=-1),
        "v": normal(v_heads, d_v),
        "w": normal(v_heads, w_width).sigmoid(),
    }
    if scenario.erase:
        narrow["b"] = normal(b_heads, b_width).sigmoid()
    rounded = {name: x.to(dtype) for name, x in narrow.items()}
    return rounded | {name: x.to(state_dtype(rounded["q"])) for name, x in wide.items()}


def results(rule: Rule, operands: dict[str, Tensor], scenario: Scenario) -> dict[str, Tensor]:
    """Output, final state and the gradients of a random loss of both, by the names of `QUANTITIES`."""
    leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
    device = leaves["q"].device
    cu_seqlens = torch.tensor([0, *scenario.lengths], device=device).cumsum(0)
    o, state = rule(
        **leaves, cu_seqlens=cu_seqlens if scenario.lengths else None, output_final_state=True
    )
    assert state is not None
    gradients = torch.autograd.grad((o, state), list(leaves.values()), loss_weights(o, state))
    named = {GRADIENTS[n]: d for n, d in zip(leaves, gradients, strict=True)}
    return {"output": o, "final state": state, **named}


def loss_weights(*like: Tensor) -> list[Tensor]:
    """Weights of a random loss: bf16 numbers, which every dtype holds, so that all backends get the same loss."""
    rand = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=rand).bfloat16().to(x) for x in like]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖x − y‖ / ‖y‖ in fp64; 0 where both vanish, infinite where x is not finite or only y vanishes."""
    x, y = (tensor.detach().cpu().double() for tensor in (actual, expected))
    if x.shape != y.shape or not bool(x.isfinite().all()):
        return float("inf")
    norm = float(y.norm())
    if norm < VANISHING:
        return 0.0 if float(x.norm()) < VANISHING else float("inf")
    return float((x - y).norm()) / norm
