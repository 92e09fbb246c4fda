"""The verb about the machine: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
import typer

from gdn2.cli.base import Device, JsonFile, app, console, write


@app.command()
def doctor(json_file: JsonFile = None, device: Device = None) -> None:
    """Say what this machine is and what each part would run on, and check every backend and kernel on it.

    Exit code 1 if one computes something wrong; such a kernel is not used again on this GPU, until it passes.
    """
    from gdn2.doctor import diagnose, render

    report = diagnose(device)
    render(report, console())
    write(json_file, report.as_json())
    raise typer.Exit(1 if report.failures else 0)
