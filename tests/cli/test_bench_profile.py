"""The profile of a training step: sums of what was seen, and samples of what a GPU says."""

import json
import stat
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gdn2.bench.machine import describe_machine
from gdn2.bench.profile import (
    Kernel,
    Profile,
    Sample,
    Span,
    occupation,
    parsed,
    sampling,
    summed,
)
from gdn2.bench.profile_report import MOST, render
from gdn2.bench.trainers import Shape
from gdn2.cli import app


def spans(*given: tuple[float, float, str]) -> list[Span]:
    return [Span(*one) for one in given]


def test_time_is_busy_or_idle() -> None:
    """Calls may overlap, follow at once, or leave a gap."""
    seen = spans((1, 3, "a"), (2, 2.5, "b"), (3, 4, "a"), (6, 7, "c"), (6.5, 8, "a"))
    assert occupation(seen) == (5, 2)
    assert occupation([]) == (0, 0)


def test_calls_are_summed_by_kernel() -> None:
    seen = spans(
        (0, 1, "void at::native::reduce<float, 4>(int)"),
        (1, 4, "scan_kernel"),
        (4, 6, "void at::native::reduce<double>(int)"),
        (6, 7, "Memset (Device)"),
    )
    expected = (
        ("at::native::reduce", 1, 1.5),
        ("scan_kernel", 0.5, 1.5),
        ("Memset (Device)", 0.5, 0.5),
    )
    assert summed(seen, 2) == tuple(Kernel(*row) for row in expected)


def test_samples_are_numbers_or_nothing() -> None:
    assert parsed("1500, 690.5, 64\n[N/A], 1, 2\n\n1,2\n1600, 1, 2\n") == [
        Sample(1500, 690.5, 64),
        Sample(1600, 1, 2),
    ]


def test_a_gpu_is_asked_while_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    said = "echo 1500, 690, 64\necho 1600, 700, 65\nexec sleep 60\n"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{said}')
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    visible = SimpleNamespace(uuid="dfa2ac9f-0000-0000-0000-000000000000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: visible)
    start = time.monotonic()
    with sampling(torch.device("cuda")) as found:
        time.sleep(0.5)
    assert found == [Sample(1500, 690, 64), Sample(1600, 700, 65)]
    assert time.monotonic() - start < 20  # it does not outlive the steps
    # not by its number: CUDA_VISIBLE_DEVICES may hide others before it
    assert f"-i GPU-{visible.uuid}" in (tmp_path / "asked").read_text()
    with sampling(torch.device("cpu")) as found:
        pass
    assert found == []
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with sampling(torch.device("cuda")) as found:
        pass
    assert found == []


def test_a_table_lists_the_longest_and_sums_the_others() -> None:
    kernels = [Kernel(f"kernel {i}", 2, 1e-3) for i in range(MOST + 3)]
    kernels[0] = Kernel("a name of many words " * 10, 2, 1e-3)
    samples = (Sample(1500, 690, 64), Sample(1600, 695, 65))
    found = Profile(
        *("tiny", Shape(2, 512), "gdn2 bf16", 0.1, 0.043, 0.007, tuple(kernels), samples),
        describe_machine(),
    )
    console = Console(file=StringIO(), width=100)
    render(found, console)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert "100.0 ms a step, 10,240 tokens/s" in text
    assert all("1.00" in line for line in text.splitlines() if "500.0" in line)
    assert text.count("500.0") == MOST
    assert f"kernel {MOST - 1}" in text and f"kernel {MOST}" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["3.00", "6.0%", "6.0", "3", "others"] in lines
    assert ["7.00", "14.0%", "nothing", "runs"] in lines
    assert "1500 to 1600 MHz" in text and "690 to 695 W" in text and "64 to 65 °C" in text


def test_the_command(tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    options = ["--shape", "1x16", "--device", "cpu", "--steps", "1", "--weights", "fp32,bf16"]
    options += ["--json", str(target), "--peers"]
    done = CliRunner().invoke(app, ["bench", "profile", "gdn2-1m-hybrid", *options])
    assert done.exit_code == 0, done.output
    found, other = json.loads(target.read_text())["profiles"]
    assert other["variant"] == "gdn2 bf16"
    assert "profiling gdn2-1m-hybrid, 1x16, gdn2 bf16" in done.output
    assert "no peers: fla trains on a GPU only" in done.output
    assert (found["preset"], found["shape"]) == ("gdn2-1m-hybrid", "1x16")
    assert found["variant"] == "gdn2 fp32"
    assert found["step_seconds"] > 0 and found["idle_seconds"] == 0
    seconds = [kernel["seconds"] for kernel in found["kernels"]]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) == pytest.approx(found["busy_seconds"])
    assert "aten::mm" in {kernel["name"] for kernel in found["kernels"]}
    assert "aten::mm" in done.output


def test_mistakes_are_one_line() -> None:
    done = CliRunner().invoke(app, ["bench", "profile", "--device", "cpu", "--steps", "0"])
    assert (done.exit_code, done.output) == (2, "error: steps: got 0, expected at least 1\n")
