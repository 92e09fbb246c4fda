"""The command `gdn2` itself, and what its verbs share."""

import json
import sys
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
            line = str(mistake)
        except BrokenPipeError:  # whoever read the output has left, such as `head`
            raise
        except OSError as reason:
            line = f"got {reason}, expected what can be read and written"
        except RuntimeError as failure:
            line = _lack_of_memory(failure)
        typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2)


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


def _lack_of_memory(failure: RuntimeError) -> str:
    """What an allocator of torch has refused, in one line; another failure goes on, such as an exit."""
    if "torch" not in sys.modules:
        raise failure
    from gdn2.training.faults import is_lack_of_memory  # noqa: PLC0415 (help needs none)

    if not is_lack_of_memory(failure):
        raise failure
    return f"got {str(failure).splitlines()[0]}, expected what fits into memory"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gdn2 {__version__}")
        raise typer.Exit()


def in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file whose folder does not exist before anything is computed for it."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def console() -> Any:
    """Where tables go: whole, also in a log."""
    from rich.console import Console  # noqa: PLC0415 (help needs none)

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=100)


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Write what a verb found as JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", dir_okay=False, callback=in_a_folder, help="Write all numbers to this file."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default the GPU where there is one.")
]
Dtype = Annotated[
    str | None, typer.Option(help="fp64, fp32, bf16 or fp16; by default fp32, on a GPU bf16.")
]

Backend = Annotated[
    str,
    typer.Option(help="torch, or reference, a token at a time: without any kernels of gdn2."),
]
Presets = Annotated[list[str] | None, typer.Argument(help="Presets, such as gdn2-1.3b-hybrid.")]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="By default on a GPU.")
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute/--no-recompute",
        help="Recompute the chunks' matrices in the backward, or keep them.",
    ),
]
Twin = Annotated[
    bool, typer.Option("--peers", help="Time the same model built from fla's layers too.")
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
