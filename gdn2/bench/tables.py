"""How tables of the benchmarks look."""

from collections.abc import Collection, Iterable

from rich import box
from rich.table import Table


def new_table(columns: Iterable[str], *, left: Collection[str], title: str | None = None) -> Table:
    """An empty table, whose columns stand to the right but for those named in `left`."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table
