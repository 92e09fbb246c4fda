"""Further verbs under `gdn2 bench`, which look closer: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from itertools import product
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
def accuracy(
    shape: Annotated[
        str | None, typer.Option(help="BxTxHxDkxDv: batch, length, heads, key and value width.")
    ] = None,
    decay: Annotated[
        str | None,
        typer.Option(
            help="With commas: initial, spiky, or log-decays such as -5; by default some."
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="triton, torch, reference or auto.")] = "auto",
    solve_precision: Annotated[
        str, typer.Option(help="Of fp32 products in the inverse: ieee or tf32.")
    ] = "ieee",
    device: Device = None,
    dtype: Dtype = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare other implementations too, where installed.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare output and gradients with fp64 on the same operands, at decays of any strength.

    Errors are ‖x − y‖ / ‖y‖; that under "steps" is of the output as decoding gives it, one token after the other.
    """
    from gdn2.bench.accuracy import Result, read_plan, run
    from gdn2.bench.accuracy_report import render

    plan = read_plan(
        shape=shape,
        decays=decay,
        backend=backend,
        device=device,
        dtype=dtype,
        solve_precision=solve_precision,
        peers=peers,
    )

    def save(result: Result) -> None:
        typer.echo(f"log-decay {result.rows[-1].decay}: done", err=True)
        write(json_file, {"result": result.as_json()})

    render(run(plan, save), console())


@bench.command()
def profile(
    preset: Presets = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxT: batch and length of a step; on a GPU 4x4096. Repeatable."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Dtypes of the weights, with commas: bf16, fp32; on a GPU bf16."),
    ] = None,
    compile: Compile = None,
    recompute: Recompute = True,
    steps: Annotated[int, typer.Option(help="Steps to time, and to profile.")] = 5,
    device: Device = None,
    peers: Twin = False,
    json_file: JsonFile = None,
) -> None:
    """Say where the time of a training step goes, kernel by kernel, and what the GPU draws meanwhile."""
    from gdn2.bench.profile import run
    from gdn2.bench.profile_report import render
    from gdn2.bench.timing import find_device
    from gdn2.bench.training import read_plan

    usual = ["4x4096"] if find_device(device).type == "cuda" else None
    plan = read_plan(
        presets=preset,
        shapes=shape or usual,
        weights=weights,
        device=device,
        compile=compile,
        peers=peers,
        steps=steps,
        recompute=recompute,
    )
    found = []
    for one in run(plan, lambda line: typer.echo(line, err=True)):
        render(one, console())
        found.append(one.as_json())
        write(json_file, {"profiles": found})


@bench.command()
def kernels(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxTxHxDkxDv: batch, length, heads, key and value width. Repeatable."),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            help="gdn2; kda: one gate a head; gdn: also one decay; mamba2: one decay, no gates."
        ),
    ] = "gdn2",
    value_heads: Annotated[
        int | None, typer.Option(help="Value heads, several for each head of the shape.")
    ] = None,
    packed: Annotated[
        str, typer.Option(help="Pack sequences: their lengths, with commas, or how many.")
    ] = "",
    programs: Annotated[
        list[int] | None,
        typer.Option(
            help="Also with CUDA kernels of which so many share a multiprocessor. Repeatable."
        ),
    ] = None,
    device: Device = None,
    json_file: JsonFile = None,
) -> None:
    """Say where the operator's time goes, kernel by kernel, and which registers do not fit.

    With fewer programs a multiprocessor each thread of a CUDA kernel has more registers, which shows what spills cost.
    """
    from gdn2.bench.kernels import read_plan, render, run

    numbers, operands = programs or [], {"form": form, "value_heads": value_heads, "packed": packed}
    result = run(read_plan(shape, device, numbers, **operands), numbers)
    render(result, console())
    write(json_file, result.as_json())


@bench.command()
def products(
    preset: Presets = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BxT: batch and length of a step; by default 4x4096. Repeatable."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="To spend on each of the best ways, twice.")] = 0.2,
    device: Device = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Leave all products to torch again, and time nothing.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Choose how this GPU multiplies what a training step on it alone multiplies in bf16.

    The GPU's library knows several ways for each product; the fastest of them is kept for later training on this
    machine, where it is faster than torch's. Results may differ from torch's in their last bits.
    """
    from gdn2.bench.products import check, choices, met_in_a_step, render
    from gdn2.bench.timing import find_device
    from gdn2.bench.training import read_plan
    from gdn2.ops import products as kept

    where = find_device(device)
    check(where, seconds)
    if forget:
        typer.echo(f"nothing is chosen any more: {kept.forget(where)}")
        return
    plan = read_plan(
        presets=preset,
        shapes=shape or ["4x4096"],
        weights="bf16",
        device=device,
        compile=None,
        peers=False,
        steps=1,
    )
    records = []
    file = kept.choose(where, {})  # before anything is timed: it can be written
    for name, size in product(plan.presets, plan.shapes):
        met = met_in_a_step(plan, name, size)
        found = []
        for choice in choices(met, where, seconds):
            found.append(choice)
            kept.choose(where, {choice.problem: choice.way})  # now, for it may be stopped
            typer.echo(f"{name}, {size}: {len(found)} of {len(met)} products", err=True)
        render(found, console())
        typer.echo(f"chosen in {file}")
        records += [choice.as_json() for choice in found]
        write(json_file, {"choices": records})


@bench.command()
def figures(
    name: Annotated[
        list[str] | None, typer.Argument(help="Only these, anew; by default all that are missing.")
    ] = None,
    file: Annotated[
        Path,
        typer.Option("--json", dir_okay=False, callback=in_a_folder, help="Where to keep them."),
    ] = Path("figures.json"),
    minutes: Annotated[
        float | None, typer.Option(help="Begin nothing that would take longer than this in all.")
    ] = None,
    device: Device = None,
    list_them: Annotated[bool, typer.Option("--list", help="Say what there is, and stop.")] = False,
) -> None:
    """Take all that commands measure for docs/performance.md, beside peers where these are installed.

    Each is kept as soon as it is there, in the file and on a page of Markdown beside it; the same command again takes
    those that are missing, have failed, or were taken by other code.
    """
    from gdn2.bench.figures import choose, missing, read, take, terminable
    from gdn2.bench.timing import find_device

    there_is = "cuda" if list_them and device == "cuda" else find_device(device).type
    wanted = choose(there_is, name or [])
    left = missing(wanted, read(file))
    if list_them:
        for figure in wanted:
            state = "missing" if figure in left else "there"
            typer.echo(f"{figure.name}: {figure.about}, about {figure.minutes:g} min, {state}")
        return
    with terminable():
        failures = take(
            wanted if name else left, file, minutes, lambda line: typer.echo(line, err=True)
        )
    for line in failures:
        typer.echo(line)
    typer.echo(f"{file}: {len(wanted) - len(missing(wanted, read(file)))} of {len(wanted)} figures")
    raise typer.Exit(1 if failures else 0)
