"""The verbs that exchange models with others: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gdn2.cli.base import app


class Gate(StrEnum):
    """Output gates of the layer."""

    silu = "silu"
    sigmoid = "sigmoid"


@app.command(name="import")
def import_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .pth or .safetensors file, or a folder of the latter.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write the model's folder.")],
    output_gate: Annotated[
        Gate | None,
        typer.Option(help="silu in the released code, sigmoid in fla; the file does not say."),
    ] = None,
    erase_range: Annotated[float, typer.Option(help="What the erase gate reaches, 1 or 2.")] = 1.0,
    head_dim: Annotated[int, typer.Option(help="Channels of a head of attention.")] = 128,
    window: Annotated[int, typer.Option(help="Of attention, in tokens; 0 is all.")] = 2048,
    rotary_base: Annotated[float, typer.Option(help="Of attention's positions.")] = 10000.0,
    norm_eps: Annotated[float, typer.Option(help="Of all norms.")] = 1e-5,
    tied: Annotated[bool, typer.Option(help="The embedding is the head as well.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer's file or folder to put beside the model.")
    ] = None,
) -> None:
    """Make a model of a checkpoint of the released code, or of a model around fla's layer."""
    _need_transformers()
    from gdn2.hf.importing import Unsaid, import_model, read_checkpoint
    from gdn2.models.folder import save_model

    unsaid = Unsaid(
        output_gate=None if output_gate is None else output_gate.value,
        erase_range=erase_range,
        head_dim=head_dim,
        window=window or None,
        rotary_base=rotary_base,
        norm_eps=norm_eps,
        tied=tied,
    )
    model = import_model(read_checkpoint(checkpoint), unsaid)
    save_model(model, folder, tokenizer=tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    typer.echo(f"wrote {folder}: {parameters:,} parameters")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; a new folder.")],
    step: Annotated[
        int | None, typer.Option(help="Of a checkpoint that was kept; by default the latest.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="JSON of an evaluation, for the model card.")
    ] = None,
) -> None:
    """Write a trained model with its tokenizer, generation config and model card."""
    _need_transformers()
    from gdn2.data.tokenizers import load_tokenizer
    from gdn2.hf.export import export_run, find_model

    source = find_model(run, step)
    end = load_tokenizer(source).eos_id if any(source.glob("tokenizer.*")) else None
    stop_ids = [] if end is None else [end]
    export_run(run, folder, step=step, stop_ids=stop_ids, results=results)
    typer.echo(f"wrote {folder}")


def _need_transformers() -> None:
    if find_spec("transformers") is None:
        raise ValueError('transformers is not installed; pip install "gdn2[hf]" installs it')
