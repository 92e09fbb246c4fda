"""A profile on the console."""

from rich import box
from rich.console import Console
from rich.table import Table

from gdn2.bench.profile import UNITS, Profile

MOST = 40  # kernels that are listed
WIDEST = 56  # characters of a kernel's name, so that a row fits into a log


def render(found: Profile, console: Console) -> None:
    """Print the longest kernels, what is left, and how the GPU was."""
    speed = f"{found.shape.tokens / found.step_seconds:,.0f} tokens/s"
    what = f"{found.preset}, {found.shape}, {found.variant}"
    console.print(f"{what}: {found.step_seconds * 1e3:.1f} ms a step, {speed}", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("ms", "part", "calls", "µs each", "kernel"):
        table.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    total = found.busy_seconds + found.idle_seconds
    for kernel in found.kernels[:MOST]:
        each = f"{kernel.seconds / kernel.calls * 1e6:,.1f}"
        table.add_row(
            *_time(kernel.seconds, total), f"{kernel.calls:,.1f}", each, shortened(kernel.name)
        )
    others = found.kernels[MOST:]
    if others:
        seconds, calls = (sum(getattr(k, n) for k in others) for n in ("seconds", "calls"))
        table.add_row(*_time(seconds, total), f"{calls:,.1f}", "", f"{len(others)} others")
    if found.idle_seconds:
        table.add_row(*_time(found.idle_seconds, total), "", "", "nothing runs")
    console.print(table)
    for values, unit in zip(zip(*found.samples, strict=True), UNITS, strict=False):
        console.print(f"{min(values):.0f} to {max(values):.0f} {unit} while steps were timed")


def shortened(name: str) -> str:
    """A name without its end where it is too long."""
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"


def _time(seconds: float, total: float) -> tuple[str, str]:
    return f"{seconds * 1e3:.2f}", f"{seconds / total:.1%}"
