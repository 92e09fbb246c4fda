"""`gdn2 doctor`: what this machine is, what each part would run on, and whether it computes the right thing here.

Every backend that can run is compared with the token loop in fp64 on the CPU, on this machine, with this compiler.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize, softplus

from gdn2.bench import timing
from gdn2.bench.timing import DTYPES, OPTIONAL, Machine
from gdn2.ops.arguments import state_dtype
from gdn2.ops.backends import BACKENDS, choose, why_not
from gdn2.ops.rule import gated_delta_rule

Rule = Callable[..., tuple[Tensor, Tensor | None]]  # called as `gated_delta_rule` is

GRADIENTS = {name: f"d{name}" for name in "qkvgbw"} | {"initial_state": "d initial state"}
QUANTITIES = ("output", "final state", *GRADIENTS.values())
CHECKED = {"cpu": ("fp64", "fp32"), "cuda": ("fp32", "bf16")}
# of output and final state, of gradients
TOLERANCES = {"fp64": (1e-12, 1e-12), "fp32": (5e-6, 2e-5), "bf16": (2e-2, 2e-2)}
VANISHING = 1e-30


@dataclass(frozen=True)
class Scenario:
    """One kind of operands; sizes are such that a chunk of 64 is met short, full and in part."""

    name: str
    about: str
    strong: bool = False
    lengths: tuple[int, ...] = ()  # packed sequences; else two of 130 tokens
    erase: bool = True
    heads: tuple[int, int, int, int] = (2, 2, 2, 2)  # of q and k, v, g, b
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
    """What was found of one backend."""

    backend: str
    checks: tuple[Check, ...]
    problems: tuple[str, ...] = ()  # scenarios it could not run at all

    @property
    def failures(self) -> list[str]:
        wrong = [c for c in self.checks if not c.passed]
        named = [f"{self.backend}, {c.dtype}, {c.scenario}: {c.quantity}" for c in wrong]
        return named + [f"{self.backend}, {problem}" for problem in self.problems]


@dataclass(frozen=True)
class Part:
    """What one part of the package would run on, and why."""

    name: str
    backend: str
    why: str


@dataclass(frozen=True)
class Report:
    machine: Machine
    device: str
    parts: tuple[Part, ...]
    checkups: tuple[Checkup, ...]

    @property
    def failures(self) -> list[str]:
        return [failure for checkup in self.checkups for failure in checkup.failures]

    def as_json(self) -> dict[str, Any]:
        """Plain data; an infinite error is null, as JSON has no infinity."""
        record = asdict(self)
        for checkup in record["checkups"]:
            for check in checkup["checks"]:
                check["passed"] = check["error"] <= check["tolerance"]
                check["error"] = None if check["error"] == float("inf") else check["error"]
        return {**record, "failures": self.failures, "passed": not self.failures}


def diagnose(device_name: str | None = None) -> Report:
    """Look at the machine and check every backend that runs on the device."""
    device = timing.find_device(device_name)
    rules = available_rules(device)
    with timing.use_threads(1):  # on tiny operands threads mostly wait: 3 s became 39 s
        checkups = tuple(check_backend(rule, name, device) for name, rule in rules.items())
    return Report(timing.describe_machine(), str(device), parts(device), checkups)


def available_rules(device: torch.device) -> Mapping[str, Rule]:
    """Return the backends that can run, except the token loop they are measured against."""
    names = [n for n in BACKENDS if n not in ("auto", "reference") and why_not(n, device) is None]
    return {name: partial(gated_delta_rule, backend=name) for name in names}


def parts(device: torch.device) -> tuple[Part, ...]:
    """What each part of the package would run on."""
    with warnings.catch_warnings(action="ignore"):  # the table says what the warning says
        rule = choose("auto", device)
    obstacle = why_not("triton", device)
    rule_why = "Triton kernels run here" if obstacle is None else f"no triton: {obstacle}"
    cuda = device.type == "cuda"
    flex = "FlexAttention for windows and packed sequences, SDPA otherwise"
    only = "the only implementation in this version"
    return (
        Part("rule", rule, rule_why),
        Part("decode step", "torch", only),
        Part("attention", "flex, sdpa" if cuda else "sdpa", flex if cuda else "flex needs CUDA"),
        *(Part(name, "torch", only) for name in ("convolution", "norms", "loss")),
    )


def check_backend(rule: Rule, name: str, device: torch.device) -> Checkup:
    """Compare a backend with the token loop in every scenario and dtype."""
    cases = [(dtype, scenario) for dtype in CHECKED[device.type] for scenario in SCENARIOS]
    checks: list[Check] = []
    problems: list[str] = []
    bar = Console(stderr=True)
    hidden = not bar.is_terminal
    for dtype, scenario in track(cases, name, console=bar, transient=True, disable=hidden):
        try:
            checks += compare(rule, scenario, dtype, device)
        except Exception as failure:  # a kernel that does not compile is a finding, not a crash
            reason = str(failure).strip().partition("\n")[0]
            problems.append(f"{dtype}, {scenario.name}: {type(failure).__name__}: {reason}")
    return Checkup(name, tuple(checks), tuple(problems))


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
    batch, length = (1, sum(scenario.lengths)) if scenario.lengths else (2, 130)
    qk_heads, v_heads, g_heads, b_heads = scenario.heads
    d_k, d_v = 32, 48
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
    rand = torch.Generator().manual_seed(1)
    # bf16 weights: every dtype holds them exactly, so all backends get the same loss
    weights = [torch.randn(x.shape, generator=rand).bfloat16().to(x) for x in (o, state)]
    gradients = torch.autograd.grad((o, state), list(leaves.values()), weights)
    named = {GRADIENTS[n]: d for n, d in zip(leaves, gradients, strict=True)}
    return {"output": o, "final state": state, **named}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖x − y‖ / ‖y‖ in fp64; 0 where both vanish, infinite where x is not finite or only y vanishes."""
    x, y = (tensor.detach().cpu().double() for tensor in (actual, expected))
    if x.shape != y.shape or not bool(x.isfinite().all()):
        return float("inf")
    norm = float(y.norm())
    if norm < VANISHING:
        return 0.0 if float(x.norm()) < VANISHING else float("inf")
    return float((x - y).norm()) / norm


def render(report: Report, console: Console) -> None:
    """Print the report; the last line says whether all is well."""
    console.print(_machine_table(report.machine))
    table = _table(f"What runs on {report.device}", "part", "backend", "why")
    for part in report.parts:
        table.add_row(part.name, part.backend, part.why)
    console.print(table)
    for checkup in report.checkups:
        for dtype in dict.fromkeys(check.dtype for check in checkup.checks):
            chosen = [check for check in checkup.checks if check.dtype == dtype]
            console.print(_error_table(f"{checkup.backend}, {dtype}", chosen))
    console.print(*(f"{s.name}: {s.about}" for s in SCENARIOS), sep="; ", style="dim")
    verdict = "failed: " + "; ".join(report.failures) if report.failures else "all checks passed"
    style = "bold red" if report.failures else "green"
    # one line, as it is: an error message may hold what reads as markup
    console.print(verdict, style=style, soft_wrap=True, markup=False, highlight=False)


def _machine_table(machine: Machine) -> Table:
    table = _table("This machine")
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib:.1f} GiB"
    table.add_row("system", machine.system)
    table.add_row("processor", f"{machine.cpu}, {machine.cores} cores{memory}")
    table.add_row("torch threads", str(machine.threads))
    for gpu in machine.gpus:
        details = f"compute {gpu.capability}, {gpu.memory_gib:.0f} GiB, driver {gpu.driver}"
        table.add_row("GPU", f"{gpu.name}, {details}")
    if not machine.gpus:
        table.add_row("GPU", "none that torch can use")
    table.add_row("python", machine.python)
    for package, version in machine.versions.items():
        if package not in OPTIONAL:
            table.add_row(package, version or "not installed")
    for extra in dict.fromkeys(OPTIONAL.values()):
        packages = [package for package in OPTIONAL if OPTIONAL[package] == extra]
        found = (f"{package} {machine.versions[package] or 'absent'}" for package in packages)
        table.add_row(f"extra {extra!r}", ", ".join(found))
    return table


def _error_table(title: str, checks: Sequence[Check]) -> Table:
    scenarios = list(dict.fromkeys(check.scenario for check in checks))
    table = _table(f"{title}: relative error against the token loop", "", *scenarios, "tolerance")
    cells = {(check.quantity, check.scenario): check for check in checks}
    for quantity in QUANTITIES:
        found = [cells.get((quantity, scenario)) for scenario in scenarios]
        tolerance = next((f"{c.tolerance:.0e}" for c in found if c is not None), "–")
        table.add_row(quantity, *map(_cell, found), tolerance)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.title_justify, table.show_header = "left", bool(columns)
    return table


def _cell(check: Check | None) -> str:
    if check is None:
        return "–"
    return f"{check.error:.1e}" if check.passed else f"[bold red]{check.error:.0e} FAIL"
