"""The verbs that exchange models with others: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from gdn2.cli.base import app


class Gate(StrEnum):
    """Output gates of the layer."""

    silu = "silu"
    sigmoid = "sigmoid"


class Format(StrEnum):
    """Whose names and forms weights are written in."""

    gdn2 = "gdn2"
    lit_gpt = "lit-gpt"
    fla = "fla"


@app.command(name="import")
def import_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .pth or .safetensors file, or a folder of the latter.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write; a new folder.")],
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
    name: Annotated[
        list[str] | None,
        typer.Option(help="What is called otherwise, such as norm=norm_f. Repeatable."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or a tokenizer's file or folder, for the model.")
    ] = None,
) -> None:
    """Make a model of a checkpoint of the released code, or of a model around fla's layer."""
    _need_transformers()
    from gdn2.data.tokenizers import load_tokenizer
    from gdn2.hf.foreign import taken
    from gdn2.hf.importing import Unsaid, import_model, read_checkpoint
    from gdn2.hf.recognising import read_names
    from gdn2.hf.special_tokens import write_special_tokens
    from gdn2.models.files import new_folder, standing
    from gdn2.models.folder import save_model
    from gdn2.ops.arguments import require

    require(not standing(folder).exists(), "folder", f"{folder}, which exists", "a new one")
    own = None if tokenizer is None else load_tokenizer(tokenizer)
    unsaid = Unsaid(
        output_gate=None if output_gate is None else output_gate.value,
        erase_range=erase_range,
        head_dim=head_dim,
        window=window or None,
        rotary_base=rotary_base,
        norm_eps=norm_eps,
        tied=tied,
        names=read_names(name or ()),
    )
    model = import_model(read_checkpoint(checkpoint), unsaid)
    with TemporaryDirectory() as files, new_folder(folder) as written:
        if own is None:
            save_model(model, written)
        else:
            fits = own.vocab_size <= model.config.vocab_size
            expected = f"at most the model's {model.config.vocab_size}"
            require(fits, "tokenizer", f"{own.vocab_size} tokens", expected)
            own.save(Path(files))
            save_model(model, written, tokenizer=files)
            write_special_tokens(written, own.bos_id, own.eos_id)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    said = taken(unsaid, model.config)
    typer.echo(f"wrote {folder}: {parameters:,} parameters; not in the file: {said}")


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="A training run's folder; for lit-gpt and fla also a model's.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write; a new folder.")],
    step: Annotated[
        int | None, typer.Option(help="Of a checkpoint that was kept; by default the latest.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON of gdn2 eval or lm-eval, for the model card."),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(help="gdn2 is for transformers too; lit-gpt and fla are weights alone."),
    ] = Format.gdn2,
    output_gate: Annotated[
        Gate | None,
        typer.Option(help="The model's, to write it where the format's code computes another."),
    ] = None,
) -> None:
    """Write a trained model with tokenizer, generation config and card; or its weights in other people's names."""
    _need_transformers()
    from gdn2.hf.export import find_model
    from gdn2.hf.foreign import find_weights
    from gdn2.models.run_folder import checkpoint_of
    from gdn2.ops.arguments import require
    from gdn2.training.checkpoint_files import damage

    is_ours = format is Format.gdn2
    source = find_model(run, step) if is_ours else find_weights(run, step)
    checkpoint = checkpoint_of(source.resolve())
    wrong = None if checkpoint is None else damage(checkpoint, "model/")
    if wrong is not None:
        raise ValueError(f"{checkpoint}: got {wrong}, expected a whole one; --step takes another")
    if is_ours:
        expected = "nothing: the format gdn2 says the model's own"
        require(output_gate is None, "output_gate", output_gate, expected)
        _export_run(run, folder, source, step, results)
    else:
        require(results is None, "results", results, f"nothing: {format} has no model card")
        _export_weights(source, folder, format, output_gate)


def _export_run(
    run: Path, folder: Path, source: Path, step: int | None, results: Path | None
) -> None:
    from gdn2.data.tokenizers import load_tokenizer
    from gdn2.hf.export import export_run

    own = load_tokenizer(source) if any(source.glob("tokenizer.*")) else None
    bos, eos = (None, None) if own is None else (own.bos_id, own.eos_id)
    export_run(run, folder, step=step, bos_id=bos, eos_id=eos, results=results)
    typer.echo(f"wrote {folder}")


def _export_weights(source: Path, folder: Path, format: Format, gate: Gate | None) -> None:
    from gdn2.hf.foreign import export_weights, in_options

    form: Literal["lit-gpt", "fla"] = "lit-gpt" if format is Format.lit_gpt else "fla"
    file, unsaid = export_weights(source, folder, form, None if gate is None else gate.value)
    typer.echo(f"wrote {file}, which gdn2 import reads with {in_options(unsaid)}")


def _need_transformers() -> None:
    if find_spec("transformers") is None:
        raise ValueError('transformers is not installed; pip install "gdn2[hf]" installs it')
