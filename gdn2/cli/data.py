"""The verb that prepares text: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from pathlib import Path
from typing import Annotated

import typer

from gdn2.cli.base import app


@app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Text files, JSON lines (both also .gz or .zst) and parquet files, or folders of them; "
            "hf://NAME or hf://NAME@REVISION for a dataset of the hub; python for the standard library's source."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; the same command goes on in it.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json, a SentencePiece .model, or a folder.")
    ] = "bytes",
    bos: Annotated[
        str,
        typer.Option(help="Token before each document: auto (the tokenizer's own), none, a name."),
    ] = "auto",
    eos: Annotated[str, typer.Option(help="Token after each document, likewise.")] = "none",
    field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    config: Annotated[str | None, typer.Option(help="Configuration of a hub's dataset.")] = None,
    split: Annotated[str, typer.Option(help="Split of a hub's dataset.")] = "train",
    workers: Annotated[
        int | None, typer.Option(help="Processes; by default one for each core.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens that fill a shard.")] = 2**26,
    verify: Annotated[
        bool, typer.Option("--verify", help="At the end, read all shards and compare checksums.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count lines without a text; do not stop at one.")
    ] = False,
) -> None:
    """Turn text into token shards to train on, with checksums and the documents' boundaries.

    Interrupted, even killed, the same command goes on where the last whole shard ended, to the same result.
    """
    from rich.console import Console

    from gdn2.cli.bar import ReadingBar
    from gdn2.data.prepare import prepare as write_shards
    from gdn2.data.shards import TokenFolder

    try:
        with ReadingBar(Console(stderr=True)) as bar:
            done = write_shards(
                inputs,
                out,
                tokenizer=tokenizer,
                bos=bos,
                eos=eos,
                field=field,
                config=config,
                split=split,
                workers=workers,
                shard_tokens=shard_tokens,
                skip_bad=skip_bad,
                report=bar.show,
            )
    except KeyboardInterrupt:
        typer.echo("Ctrl-C: finished shards are kept, the same command goes on", err=True)
        raise typer.Exit(130) from None
    if verify:
        TokenFolder(out, verify=True)
    skipped = f", {done.skipped:,} bad lines skipped" if done.skipped else ""
    checked = ", as their checksums say" if verify else ""
    typer.echo(f"{out}: {done.tokens:,} tokens in {done.documents:,} documents{skipped}{checked}")
