"""The operator's benchmark on the console: plans run behind a progress bar, results as tables."""

from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.progress import Progress

from gdn2.bench import timing
from gdn2.bench.operator import PASSES, Plan, Result, Row, run
from gdn2.bench.tables import new_table


def run_all(
    plans: list[Plan],
    threads: int | None,
    console: Console,
    found: Callable[[list[Result]], None] = lambda so_far: None,
) -> list[Result]:
    """Time plans one after the other, behind a progress bar; `found` is given what is known after each."""
    # Drawn between repetitions, and seldom: a thread that draws takes its time from what is timed.
    hidden = not console.is_terminal
    with Progress(console=console, transient=True, auto_refresh=False, disable=hidden) as bar:
        task = bar.add_task("timing", total=len(plans))

        def progress(before: int, done: float) -> None:
            draw = int(20 * (before + done)) > int(20 * bar.tasks[0].completed)
            bar.update(task, completed=before + done, refresh=draw)

        results: list[Result] = []
        with timing.use_threads(threads):
            for number, plan in enumerate(plans):
                results.append(run(plan, partial(progress, number)))
                found(results)
        return results


def render(result: Result, console: Console) -> None:
    """Print a table for each shape, with the backends of each pass together."""
    plan = result.plan
    columns: dict[str, Callable[[Row], str]] = {
        "pass": lambda row: PASSES[row.measured],
        "backend": lambda row: row.backend,
        "ms": lambda row: f"{row.timing.median * 1e3:.3f}",
        "spread": lambda row: f"{row.timing.spread:.0%}",
        "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
        f"vs {result.baseline}": lambda row: "–" if row.speedup is None else f"{row.speedup:.2f}×",
    }
    if plan.device.type == "cuda":
        columns["MiB"] = lambda row: f"{(row.timing.peak_bytes or 0) / 2**20:.0f}"
        columns["floor ms"] = lambda row: f"{row.floor_seconds * 1e3:.3f}"
        columns["over it"] = lambda row: f"{row.timing.median / row.floor_seconds:.1f}×"
    else:
        columns["µs/token"] = lambda row: f"{row.microseconds_per_token:.3f}"
    if any(row.growth != 1 for row in result.rows):
        columns["growth"] = lambda row: f"{row.growth:.2f}×"
    for shape in plan.shapes:
        title = f"{shape}, {plan.operands}, {plan.dtype} on {plan.device}"
        table = new_table(columns, left=("pass", "backend"), title=title)
        for row in (row for row in result.rows if row.shape == shape):
            table.add_row(*(cell(row) for cell in columns.values()))
        console.print(table)
    for note in result.notes:
        console.print(note, markup=False, soft_wrap=True)
    if plan.device.type == "cuda":
        speed = f"{result.copy_bytes_per_second / 1e12:.2f} TB/s, as a copy here"
        console.print(f"floor: inputs read once a pass, outputs written once, at {speed}")


def render_cold(seconds: dict[str, float], console: Console) -> None:
    """Print what the first call takes in a fresh process, if it was timed."""
    if seconds:
        each = ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items())
        console.print(f"first {PASSES['backward']} with nothing compiled: {each}", soft_wrap=True)
