"""The verbs that compare: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from pathlib import Path
from typing import Annotated

import typer

from gdn2.cli.base import Device, app, console, write


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, evaluations or grids; JSON of eval, bench, synthetic."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("report"),
) -> None:
    """Put ours beside the paper's Tables 2 to 5 and its figure, with curves, needles and synthetic tasks.

    Writes report.html, one page with all its pictures inside, and report.md with pictures beside it.
    """
    from gdn2.bench.paper_report import write_report

    for file in write_report(paths, out):
        typer.echo(f"wrote {file}")


@app.command()
def synthetic(
    grid: Annotated[str, typer.Argument(help="mqar, copying or tracking.")] = "mqar",
    family: Annotated[
        list[str] | None, typer.Option(help="Mixers, such as gdn2 or kda. Repeatable.")
    ] = None,
    state: Annotated[
        list[int] | None, typer.Option(help="Numbers that a layer remembers. Repeatable.")
    ] = None,
    lr: Annotated[
        list[float] | None, typer.Option(help="Learning rate; of several the best counts.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each training.")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where the trainings are kept.")] = Path(
        "runs/synthetic"
    ),
    device: Device = None,
) -> None:
    """Train small models of several families on small tasks, and show what they learnt.

    Finished trainings are kept, an interrupted one goes on: the same command again does the rest.
    """
    from gdn2.bench.synthetic import find_grid, run
    from gdn2.bench.synthetic_report import JSON_FILE, PICTURE_FILE, check_drawable, plot, render

    check_drawable()
    chosen = find_grid(grid, families=family, states=state, rates=lr, steps=steps)
    place = folder / grid
    place.mkdir(parents=True, exist_ok=True)
    result = run(
        grid, chosen, place, device, lambda so_far: write(place / JSON_FILE, so_far.as_json())
    )
    if result.cells:
        render(result, console())
        plot(result.cells, place / PICTURE_FILE)
        typer.echo(f"wrote {place / JSON_FILE} and {place / PICTURE_FILE}")
    if result.stopped_by is not None:
        typer.echo(f"{result.stopped_by}: the same command does the rest")
