"""The verbs under `gdn2 bench`: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from pathlib import Path
from typing import Annotated

import typer

from gdn2.cli.base import (
    Compile,
    Device,
    Dtype,
    JsonFile,
    Presets,
    Recompute,
    Twin,
    bench,
    console,
    in_a_folder,
    write,
)


@bench.command()
def operator(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxTxHxDkxDv: batch, length, heads, key and value width. Repeatable."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="Time the documented figures instead of a shape: cpu or hopper."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backends, with commas: triton, torch, reference or auto.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk: 16, 32, 64 or 128.")] = 64,
    packed: Annotated[
        str, typer.Option(help="Pack sequences: their lengths, with commas, or how many.")
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            help="gdn2; kda: one gate a head; gdn: also one decay; mamba2: one decay, no gates."
        ),
    ] = "gdn2",
    value_heads: Annotated[
        int | None, typer.Option(help="Value heads, several for each head of the shape.")
    ] = None,
    passes: Annotated[
        str, typer.Option(help="forward, training (forward for a backward), backward (both).")
    ] = "forward,training,backward",
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute",
            help="Recompute the chunks' matrices in the backward; beside peers both, by default.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads torch may use.")] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time other implementations too, where installed.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also time a fresh process that has compiled nothing.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time to spend on each variant.")] = 1.0,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, callback=in_a_folder, help="Draw a picture."),
    ] = None,
) -> None:
    """Time the operator's forward and backward, backends beside each other.

    Repetitions take turns, so the ratios hold on a busy machine. Spread is the distance of the quartiles, growth the
    time per token over that of the shortest sequence.
    """
    from rich.console import Console

    from gdn2.bench.cold import first_call_seconds
    from gdn2.bench.operator import Result, read_plans
    from gdn2.bench.plot import check_plot, plot
    from gdn2.bench.report import render, render_cold, run_all

    check_plot(plot_file)
    plans = read_plans(
        suite=suite,
        shapes=shape,
        backends=backend,
        device=device,
        dtype=dtype,
        passes=passes,
        chunk_size=chunk_size,
        packed=packed,
        form=form,
        value_heads=value_heads,
        recompute=recompute,
        peers=peers,
        seconds=seconds,
    )
    first_calls = first_call_seconds(plans[0]) if cold else {}

    def save(results: list[Result]) -> None:
        records = [result.as_json() for result in results]
        write(json_file, {"results": records, "cold_seconds": first_calls})

    results = run_all(plans, threads, Console(stderr=True), save)
    for result in results:
        render(result, console())
    render_cold(first_calls, console())
    if plot_file is not None:
        plot(results, plot_file)


@bench.command()
def tune(
    shape: Annotated[
        str | None,
        typer.Option(help="BxTxHxDkxDv: batch, length, heads, key and value width."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk: 32, 64 or 128.")] = 64,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only this kernel, such as scan. Repeatable.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time each kernel alone, launched in different ways, and print the fastest as rows of the launch table.

    A way that does not compile, or gives another result than the usual one, is listed with the reason.
    """
    from gdn2.bench.tune import CANDIDATES, candidates, read_plan, render, tune

    plan = read_plan(shape, dtype, chunk_size)
    result = tune(plan, list(candidates(kernel or CANDIDATES)))
    render(result, console())
    write(json_file, result.as_json())


@bench.command()
def decode(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxHxDkxDv: batch, heads, key and value width. Repeatable."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 1,
    device: Device = None,
    dtype: Dtype = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Time the kernel with each tile and number of warps.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time other implementations too, where installed.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time to spend on each variant.")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Time one decode step beside a copy of the state, which moves as many bytes.

    On a GPU steps are timed by the graph: each on a state of its own, together more than the cache holds.
    """
    from gdn2.bench.decode import read_plan, render, run

    plan = read_plan(
        shapes=shape,
        device=device,
        dtype=dtype,
        tokens=tokens,
        sweep=sweep,
        peers=peers,
        seconds=seconds,
    )
    result = run(plan)
    render(result, console())
    write(json_file, result.as_json())


@bench.command()
def generation(
    model: Annotated[str, typer.Argument(help="A model's folder, or a preset.")],
    batch: Annotated[list[int] | None, typer.Option(help="Rows. Repeatable.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens before. Repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Steps that are timed together.")] = 16,
    device: Device = None,
    dtype: Dtype = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads torch may use.")] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on each number.")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Time prefill and decoding of a model, sampling included."""
    from gdn2.bench.generation import read_plan, render, run
    from gdn2.bench.timing import use_threads

    plan = read_plan(
        model=model,
        batches=batch,
        contexts=context,
        device=device,
        dtype=dtype,
        tokens=tokens,
        seconds=seconds,
    )
    with use_threads(threads):
        result = run(plan)
    render(result, console())
    write(json_file, result.as_json())


@bench.command()
def training(
    preset: Presets = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxT: batch and length of a step; on a GPU the paper's. Repeatable."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Dtypes of the weights, with commas: bf16, fp32; on a GPU bf16."),
    ] = None,
    compile: Compile = None,
    recompute: Recompute = True,
    steps: Annotated[int, typer.Option(help="Steps to time, after a few others.")] = 10,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads torch may use.")] = None,
    peers: Twin = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also time a fresh process that has compiled nothing.")
    ] = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, callback=in_a_folder, help="Draw a picture."),
    ] = None,
) -> None:
    """Time whole training steps on random tokens, beside the paper's numbers.

    Models take turns, so the ratios hold. What fails or does not fit into memory is a row with the reason.
    """
    from gdn2.bench.plot import check_plot
    from gdn2.bench.timing import use_threads
    from gdn2.bench.training import Result, read_plan, run
    from gdn2.bench.training_cold import first_step_seconds
    from gdn2.bench.training_report import line, plot, render, render_cold

    check_plot(plot_file)
    plan = read_plan(
        presets=preset,
        shapes=shape,
        weights=weights,
        device=device,
        compile=compile,
        peers=peers,
        steps=steps,
        recompute=recompute,
    )
    first_steps = first_step_seconds(plan) if cold else {}

    def save(result: Result) -> None:
        typer.echo(line(result.rows[-1]), err=True)
        write(json_file, {"result": result.as_json(), "cold_seconds": first_steps})

    with use_threads(threads):
        result = run(plan, save)
    render(result, console())
    render_cold(first_steps, console())
    if plot_file is not None:
        plot(result, plot_file)
