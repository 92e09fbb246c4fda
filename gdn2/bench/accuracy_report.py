"""The benchmark of accuracy on the console."""

from rich import box
from rich.console import Console
from rich.table import Table

from gdn2.bench.accuracy import PEER, Result, Row

LOST = "lost"  # no number, or nothing of a quantity that is not zero


def render(result: Result, console: Console) -> None:
    """Print the errors of all variants, and below those of a peer how many times its error ours is."""
    plan, quantities = result.plan, list(result.rows[0].errors)
    # As wide as a log, with decays and a peer beside ours: cells are kept whole, and near each other.
    table = Table(title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.title = f"relative errors against fp64, {plan.shape}, {plan.dtype} on {plan.device}"
    for name in ("log-decay", "variant", *quantities):
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for decay in plan.decays:
        rows = {row.variant: row for row in result.rows if row.decay == decay}
        for row in rows.values():
            table.add_row(decay, row.variant, *(_error(row, q) for q in quantities))
        if PEER in rows:
            ratios = (_ratio(rows[plan.backend], rows[PEER], q) for q in quantities)
            table.add_row(decay, f"over {PEER}", *ratios)
    console.print(table)
    for note in result.notes:
        console.print(note, markup=False, soft_wrap=True)


def _error(row: Row, quantity: str) -> str:
    if quantity not in row.errors:
        return "–"
    error = row.errors[quantity]
    return LOST if error is None else f"{error:.1e}"


def _ratio(ours: Row, theirs: Row, quantity: str) -> str:
    a, b = ours.errors[quantity], theirs.errors.get(quantity)
    return "–" if a is None or not b else f"{a / b:.2f}"
