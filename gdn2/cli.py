"""The command `gdn2`: its verbs and their options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gdn2 import __version__


class Verbs(typer.core.TyperGroup):
    """A caller's mistake is one line and exit code 2, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as mistake:
            typer.echo(f"error: {mistake}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Gated DeltaNet-2: linear attention with channel-wise erase and write gates.",
)
bench = typer.Typer(no_args_is_help=True, help="Time the package on this machine.")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gdn2 {__version__}")
        raise typer.Exit()


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file whose folder does not exist before anything is computed for it."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=100)  # tables whole, also in a log


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", dir_okay=False, callback=_in_a_folder, help="Write all numbers to this file."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default the GPU where there is one.")
]


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Say which version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(json_file: JsonFile = None, device: Device = None) -> None:
    """Say what this machine is and what each part would run on, and check every backend on it.

    Exit code 1 if a backend computes something wrong.
    """
    from gdn2.doctor import diagnose, render

    report = diagnose(device)
    render(report, _console())
    _write(json_file, report.as_json())
    raise typer.Exit(1 if report.failures else 0)


@bench.command()
def operator(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxTxHxDkxDv: batch, length, heads, key and value width. Repeatable."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Time the documented figures instead of a shape: cpu.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backends, with commas: triton, torch, reference or auto.")
    ] = None,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32, bf16 or fp16; by default fp32, on a GPU bf16.")
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk: 16, 32, 64 or 128.")] = 64,
    packed: Annotated[
        str, typer.Option(help="Pack sequences: their lengths, with commas, or how many.")
    ] = "",
    erase: Annotated[bool, typer.Option("--erase/--no-erase", help="With an erase gate.")] = True,
    passes: Annotated[
        str, typer.Option(help="forward, training (forward for a backward), backward (both).")
    ] = "forward,training,backward",
    recompute: Annotated[
        bool, typer.Option(help="Recompute the chunks' matrices in the backward.")
    ] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads torch may use.")] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time other implementations too, where installed.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time to spend on each variant.")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Time the operator's forward and backward, backends beside each other.

    Repetitions take turns, so the ratios hold on a busy machine. Spread is the distance of the quartiles, growth the
    time per token over that of the shortest sequence.
    """
    from rich.console import Console

    from gdn2.bench.operator import read_plans, render, run_all

    plans = read_plans(
        suite=suite,
        shapes=shape,
        backends=backend,
        device=device,
        dtype=dtype,
        passes=passes,
        chunk_size=chunk_size,
        packed=packed,
        erase=erase,
        recompute=recompute,
        peers=peers,
        seconds=seconds,
    )
    results = run_all(plans, threads, Console(stderr=True))
    for result in results:
        render(result, _console())
    _write(json_file, {"results": [result.as_json() for result in results]})
