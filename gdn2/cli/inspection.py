"""Further verbs under `gdn2 bench`, which look closer: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
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

    Errors are ‖x − y‖ / ‖y‖.
    """
    from gdn2.bench.accuracy import read_plan, run
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
    result = run(plan, lambda decay: typer.echo(f"log-decay {decay}: done", err=True))
    render(result, console())
    write(json_file, {"result": result.as_json()})


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
