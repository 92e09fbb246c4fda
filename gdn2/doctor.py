"""`gdn2 doctor`: what this machine is, what each part would run on, and whether it computes the right thing here.

Every backend that can run is compared with the token loop in fp64 on the CPU, on this machine, with this compiler, and
every kernel with the equations. What fails is not used from then on: `gdn2.ops.trust` remembers it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gdn2.bench import timing
from gdn2.bench.machine import OPTIONAL, Machine, describe_machine
from gdn2.ops import trust
from gdn2.ops.backends import BACKENDS, RULE, why_not
from gdn2.ops.cuda import band
from gdn2.ops.rule import gated_delta_rule
from gdn2.ops.selfcheck import QUANTITIES, SCENARIOS, Check, Checkup, Rule, compare
from gdn2.ops.window_attention import takes_heads

STOPPED = "the GPU stopped"  # what is wrong with a kernel after which nothing runs any more
CHECKED = {"cpu": ("fp64", "fp32"), "cuda": ("fp32", "bf16")}


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
    kernels: tuple[Checkup, ...]  # each alone; none where they cannot run
    checkups: tuple[Checkup, ...]  # of the backends
    verdict_file: str | None  # where later processes read which kernels failed
    unchecked: tuple[str, ...] = ()  # kernels and backends after one that stopped the GPU

    @property
    def failures(self) -> list[str]:
        return [f for checkup in (*self.kernels, *self.checkups) for f in checkup.failures]

    def as_json(self) -> dict[str, Any]:
        """Plain data; an infinite error is null, as JSON has no infinity."""
        record = asdict(self)
        for checkup in (*record["kernels"], *record["checkups"]):
            for check in checkup["checks"]:
                check["passed"] = check["error"] <= check["tolerance"]
                check["error"] = None if check["error"] == float("inf") else check["error"]
        distrusted = [checkup.name for checkup in self.kernels if checkup.failures]
        return {
            **record,
            "distrusted": distrusted,
            "failures": self.failures,
            "passed": not self.failures,
        }


def diagnose(device_name: str | None = None) -> Report:
    """Look at the machine and check all that runs on the device; what fails there is remembered."""
    device = timing.find_device(device_name)
    suspects = trust.distrusted(device) if why_not("triton", device, kernels=()) is None else {}
    trust.presume_innocent(device)  # an earlier verdict must not keep anything from being checked
    rules, unchecked = available_rules(device), list[str]()
    kernels, checkups = tuple[Checkup, ...](), tuple[Checkup, ...]()
    if why_not("triton", device) is None:
        kernels, unchecked = check_kernels(device, suspects)
    if unchecked or not answers(device):
        unchecked += rules
    else:
        with timing.use_threads(1):  # on tiny operands threads mostly wait: 3 s became 39 s
            checkups = tuple(check_backend(rule, name, device) for name, rule in rules.items())
    unknown = [*unchecked, trust.TOGETHER] if unchecked else []
    still = {name: what for name, what in suspects.items() if name in unknown}
    file = remember(device, kernels, checkups, still) if kernels else None
    found = (parts(device), kernels, checkups, file, tuple(unchecked))
    return Report(describe_machine(), str(device), *found)


def answers(device: torch.device) -> bool:
    """Whether a device does what it is given: a GPU on which a kernel wrote astray does no more for its process."""
    try:
        timing.synchronize(device)
    except RuntimeError:
        return False
    return True


def remember(
    device: torch.device,
    kernels: Iterable[Checkup],
    checkups: Iterable[Checkup],
    still: Mapping[str, str],
) -> str | None:
    """Write down which kernels failed, or that they fail together, beside what is still known, and return where."""
    wrong = {**still, **{c.name: c.failures[0] for c in kernels if c.failures}}
    together = [c.failures[0] for c in checkups if c.name == "triton" and c.failures]
    file = trust.record(device, wrong | ({trust.TOGETHER: together[0]} if together else {}))
    return None if file is None else str(file)


def available_rules(device: torch.device) -> Mapping[str, Rule]:
    """Return the backends that can run, except the token loop they are measured against."""
    names = [n for n in BACKENDS if n not in ("auto", "reference") and why_not(n, device) is None]
    return {name: partial(gated_delta_rule, backend=name) for name in names}


def parts(device: torch.device) -> tuple[Part, ...]:
    """What each part of the package would run on."""
    cuda = device.type == "cuda"
    flex = "FlexAttention for other windows and packed sequences, SDPA otherwise"
    return (
        kernel_part("rule", device, RULE),
        kernel_part("decode step", device, ("step",)),
        kernel_part("convolution", device, ("conv",)),
        kernel_part("norms", device, ("norm",)),
        kernel_part("products of single rows", device, ("matvec",)),
        kernel_part("gates of decoding", device, ("delta_inputs",)),
        kernel_part("activation of the MLP", device, ("swiglu",)),
        Part("attention", "flex, sdpa" if cuda else "sdpa", flex if cuda else "flex needs CUDA"),
        window_part(device),
        kernel_part("gradients of the loss", device, ("cross_entropy",)),
        kernel_part("log-decays", device, ("log_decay",)),
        kernel_part("steps of AdamW", device, ("adamw",)),
    )


def window_part(device: torch.device) -> Part:
    """The part that attends over windows that divide the length, in bf16 with as many key heads as others."""
    name = "whole windows"
    if device.type != "cuda":
        return Part(name, "torch", "two triangles")
    if takes_heads(128, torch.bfloat16, device):
        obstacle = band.lack(device)
        if obstacle is None:
            return Part(name, "cudnn", "told of windows by nvidia-cudnn-frontend")
        return Part(name, "cudnn, triton", f"two triangles by cuDNN: {obstacle}")
    return Part(name, "flex", "two triangles need Hopper or newer, and a kernel that is trusted")


def kernel_part(name: str, device: torch.device, kernels: Sequence[str]) -> Part:
    """A part that runs on Triton kernels wherever these can be used."""
    obstacle = why_not("triton", device, kernels=kernels)
    if obstacle is None:
        return Part(name, "triton", "Triton kernels run here")
    return Part(name, "torch", f"no triton: {obstacle}")


def check_backend(rule: Rule, name: str, device: torch.device) -> Checkup:
    """Compare a backend with the token loop in every scenario and dtype."""
    return checkup(
        name,
        {
            f"{dtype}, {scenario.name}": partial(compare, rule, scenario, dtype, device)
            for dtype in CHECKED[device.type]
            for scenario in SCENARIOS
        },
    )


def check_kernels(
    device: torch.device, suspects: Mapping[str, str]
) -> tuple[tuple[Checkup, ...], list[str]]:
    """Compare each kernel alone with the equations written out, and name those that could not be checked.

    There are some after one that stops the GPU; so those that did before are checked last.
    """
    from gdn2.ops.triton.ahead import compile_together  # noqa: PLC0415 (optional dependency)
    from gdn2.ops.triton.checks import CHECKS, check_kernel  # noqa: PLC0415

    def rehearse() -> None:
        for kernel, dtype in product(CHECKS, CHECKED["cuda"]):
            with suppress(Exception):  # will be reported when it is checked
                list(check_kernel(kernel, device, dtype))

    compile_together("doctor", device, rehearse)
    found: list[Checkup] = []
    left = sorted(CHECKS, key=lambda kernel: STOPPED in suspects.get(kernel, ""))
    while left and answers(device):
        kernel = left.pop(0)
        alone = partial(check_kernel, kernel, device)
        made = checkup(kernel, {f"{x}, alone": partial(alone, x) for x in CHECKED["cuda"]})
        stopped = Checkup(kernel, (), (STOPPED, *made.problems))
        found.append(made if answers(device) else stopped)
    return tuple(found), left


def checkup(name: str, cases: Mapping[str, Callable[[], Iterator[Check]]]) -> Checkup:
    """Make all checks of a backend or kernel, behind a progress bar."""
    checks: list[Check] = []
    problems: list[str] = []
    bar = Console(stderr=True)
    hidden = not bar.is_terminal
    for case, check in track(cases.items(), name, console=bar, transient=True, disable=hidden):
        try:
            checks += check()
        except Exception as failure:  # a kernel that does not compile is a finding, not a crash
            reason = str(failure).strip().partition("\n")[0]
            problems.append(f"{case}: {type(failure).__name__}: {reason}")
    return Checkup(name, tuple(checks), tuple(problems))


def render(report: Report, console: Console) -> None:
    """Print the report; the last line says whether all is well."""
    console.print(_machine_table(report.machine))
    table = _table(f"What runs on {report.device}", "part", "backend", "why")
    for part in report.parts:
        table.add_row(part.name, part.backend, part.why)
    console.print(table)
    if report.kernels:
        console.print(_kernel_table(report.kernels))
    for backend in report.checkups:
        for dtype in dict.fromkeys(check.dtype for check in backend.checks):
            chosen = [check for check in backend.checks if check.dtype == dtype]
            console.print(_error_table(f"{backend.name}, {dtype}", chosen))
    console.print(*(f"{s.name}: {s.about}" for s in SCENARIOS), sep="; ", style="dim")
    distrusted = [kernel.name for kernel in report.kernels if kernel.failures]
    if distrusted:
        where = f", as {report.verdict_file} says" if report.verdict_file else ""
        names = ", ".join(distrusted)
        console.print(f"{names}: not used from now on{where}", soft_wrap=True, markup=False)
    if report.unchecked and report.kernels:
        names = ", ".join(report.unchecked)
        why = f"the GPU stopped at {report.kernels[-1].name}, which comes last the next time"
        console.print(f"{names}: not checked, {why}", soft_wrap=True, markup=False)
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


def _kernel_table(kernels: Sequence[Checkup]) -> Table:
    dtypes = CHECKED["cuda"]
    title = "Kernels alone: largest relative error against the equations in fp64"
    table = _table(title, "kernel", *dtypes, "verdict")
    for kernel in kernels:
        worst = {c.dtype: c for c in sorted(kernel.checks, key=lambda c: c.error / c.tolerance)}
        verdict = "trusted" if worst else "not used here"
        if kernel.failures:
            verdict = "[bold red]distrusted"
        table.add_row(kernel.name, *(_cell(worst.get(dtype)) for dtype in dtypes), verdict)
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
