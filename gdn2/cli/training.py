"""The verbs about training: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from pathlib import Path
from typing import Annotated

import typer

from gdn2.cli.base import app
from gdn2.training.embedded import config_names


@app.command()
def train(
    config: Annotated[
        str,
        typer.Argument(help=f"A TOML file, or one that comes along: {', '.join(config_names())}."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values put over it: section.key=value …")
    ] = None,
) -> None:
    """Train a model; the same command again goes on where the run was left.

    SIGTERM or Ctrl-C saves and leaves, a second Ctrl-C leaves at once. Exit code 1 if the run cannot go on, or ends
    with a validation loss that is no number.
    """
    from gdn2.training.faults import TrainingError
    from gdn2.training.loop import check_numbers, train
    from gdn2.training.run_file import load_config

    try:
        end = train(load_config(config, overrides or []))
        check_numbers(end)
    except TrainingError as reason:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1) from None


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="The picture: .png, .pdf or .svg.")] = Path("runs.png"),
) -> None:
    """Draw loss, throughput and gradient norm of one or several runs."""
    from gdn2.training.plot import plot_runs

    plot_runs(runs, out)
    typer.echo(f"wrote {out}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the run is kept.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small model on this machine in about two minutes, resume it, draw it and let it write."""
    from gdn2.training.demo import demo
    from gdn2.training.faults import TrainingError

    try:
        demo(folder, typer.echo)
    except TrainingError as reason:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1) from None
