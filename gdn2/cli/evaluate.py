"""The verb that evaluates: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from pathlib import Path
from typing import Annotated

import typer

from gdn2.cli.base import Device, Dtype, app, console, in_a_folder


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A model's folder; or a preset, with random weights.")
    ],
    suite: Annotated[
        list[str] | None, typer.Option(help="lm, commonsense, niah, recall or all. Repeatable.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks by name, with commas: of the suites, or of lm-eval.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of answers and results.")] = Path("eval"),
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' rows; by default from the hub.")
    ] = None,
    essays: Annotated[
        Path | None, typer.Option(help="RULER's PaulGrahamEssays.json, or a text, for needles.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Of needle prompts, with commas; by default the paper's.")
    ] = "",
    limit: Annotated[int | None, typer.Option(help="Only so many samples of each task.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of WikiText's windows.")] = 4096,
    needle_fit: Annotated[
        str, typer.Option(help="How needle prompts get their length: as ruler does, or lm_eval.")
    ] = "ruler",
    recall_length: Annotated[
        int, typer.Option(help="Tokens of a document of recall, question and answer included.")
    ] = 2048,
    carry_state: Annotated[
        bool,
        typer.Option("--carry-state", help="WikiText also with the state carried through."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, or a tokenizer's file or folder; by default the model's."),
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Rows at once, or auto.")] = "auto",
    save_requests: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Only write the requests to this file."),
    ] = None,
    from_requests: Annotated[
        Path | None, typer.Option(help="Only answer the requests of this file.")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Results from this file of answers, without a model.")
    ] = None,
    heat_map: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Draw the needles' results into this .png."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Evaluate a model in the paper's suites; the same command again goes on where it was.

    Answers and results lie in the folder --out. Requests can be written to a file, answered on a machine that has
    neither lm-eval nor data, and the answers be brought back.
    """
    from rich.console import Console

    from gdn2.bench.timing import DTYPES, find_device, find_dtype
    from gdn2.cli.results import (
        AnswerBar,
        check_heat_map,
        draw_needles,
        read_lengths,
        read_size,
        say,
        show,
    )
    from gdn2.evals import run
    from gdn2.evals.suites import CARRIED, Sources, tasks_of

    where = find_device(device)
    subject = run.Subject(
        name=model,
        device=where,
        dtype=DTYPES[find_dtype(dtype, where)],
        tokenizer_name=tokenizer,
        batch_size=read_size(batch_size),
    )
    if heat_map is not None and (from_requests or save_requests):
        given = "--from-requests" if from_requests else "--save-requests"
        raise ValueError(f"heat map: got {heat_map} beside {given}, which has no results to draw")
    with AnswerBar(Console(stderr=True)) as bar:
        if from_requests is not None:
            count = run.answer_requests(subject, from_requests, out, bar.show)
            typer.echo(f"{out / run.ANSWERS}: {count:,} requests are answered")
            return
        carried = (CARRIED,) if carry_state else ()
        asked = filter(None, map(str.strip, tasks.split(",")))
        names = tasks_of(suite or (), [*asked, *carried])
        check_heat_map(names, heat_map)
        sources = Sources(
            data=data,
            essays=essays,
            lengths=read_lengths(lengths),
            window=window,
            needle_fit=needle_fit,
            recall_length=recall_length,
        )
        if save_requests is not None:
            saved = run.save_requests(subject, names, sources, save_requests, limit)
            typer.echo(f"{save_requests}: {saved.requests:,} requests")
            say({"skipped": saved.skipped, "failed": saved.failed})
            raise typer.Exit(2 if saved.failed else 0)
        record = run.evaluate(
            subject, names, sources, out, limit=limit, answers=answers, report=bar.show
        )
    show(record, console())
    typer.echo(f"results are in {out / run.RESULTS}")
    say({kind: record[kind] for kind in ("skipped", "failed")})
    if heat_map is not None:
        draw_needles(record, heat_map)
    raise typer.Exit(2 if record["failed"] else 0)
