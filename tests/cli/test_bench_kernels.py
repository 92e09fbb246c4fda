"""Where the operator's time goes: each pass has its kernels, and CUDA kernels say what registers they have."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gdn2.bench.kernels import MOST, Part, Result, read_plan, render
from gdn2.bench.machine import describe_machine
from gdn2.bench.operator import Shape
from gdn2.bench.profile import Kernel
from gdn2.cli import app

PASSES = ["fwd", "fwd + bwd", "fwd + bwd-no-recompute"]


def test_each_pass_has_its_kernels(tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    options = ["--shape", "1x70x2x16x16", "--device", "cpu", "--json", str(target)]
    done = CliRunner().invoke(app, ["bench", "kernels", *options])
    assert done.exit_code == 0, done.output
    record = json.loads(target.read_text())
    assert record["plan"]["shapes"] == ["1x70x2x16x16"] and record["plan"]["device"] == "cpu"
    forward, backward, kept = record["parts"]
    assert [part["measured"] for part in record["parts"]] == PASSES
    names = [{kernel["name"] for kernel in part["kernels"]} for part in (forward, backward, kept)]
    assert all("gdn2::chunk_forward" in found for found in names)
    assert [("gdn2::chunk_backward" in found) for found in names] == [False, True, True]
    for part in record["parts"]:
        seconds = [kernel["seconds"] for kernel in part["kernels"]]
        assert seconds == sorted(seconds, reverse=True) and seconds[0] > 0
        assert part["of_threads"] == {} and part["programs"] is None
        (call,) = (k for k in part["kernels"] if k["name"] == "gdn2::chunk_forward")
        assert call["calls"] == 1
    assert all(
        f"{part['measured']} at 1x70x2x16x16, gdn2" in done.stdout for part in record["parts"]
    )


def test_packed_sequences_and_other_forms() -> None:
    command = ["bench", "kernels", "--shape", "1x70x2x16x16", "--device", "cpu"]
    for options, operands in (
        (["--form", "mamba2", "--packed", "30,40"], "mamba2, packed 30,40"),
        (["--form", "gdn", "--value-heads", "6"], "gdn, 6 value heads"),
    ):
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
        assert f"fwd at 1x70x2x16x16, {operands}: " in done.stdout


def test_tables_say_what_registers_there_are() -> None:
    plan = read_plan(["1x64x2x64x64"], "cpu", form="kda")
    kernels = (Kernel("intra", 1, 3e-4), Kernel("scan_kernel", 2, 1e-4))
    part = Part(Shape(1, 64, 2, 64, 64), "fwd", None, kernels, {"intra": (128, 8)})
    alone = replace(part, programs=1, of_threads={"intra": (254, 0)})
    out = StringIO()
    render(Result(plan, describe_machine(), (part, alone)), Console(file=out, width=100))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["300.0", "75.0%", "1.0", "128", "8", "intra"] in lines
    assert ["300.0", "75.0%", "1.0", "254", "0", "intra"] in lines
    assert lines.count(["100.0", "25.0%", "2.0", "scan_kernel"]) == 2
    assert "fwd at 1x64x2x64x64, kda, 1 programs a multiprocessor: 400 µs" in out.getvalue()


def test_long_lists_are_cut() -> None:
    plan = read_plan(["1x64x2x64x64"], "cpu")
    kernels = tuple(Kernel(f"kernel{i}", 1, 1e-6) for i in range(MOST + 2))
    out = StringIO()
    part = Part(plan.shapes[0], "fwd", None, kernels, {})
    render(Result(plan, describe_machine(), (part,)), Console(file=out, width=100))
    assert f"kernel{MOST - 1}" in out.getvalue() and f"kernel{MOST}" not in out.getvalue()
    assert "2 others" in out.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--programs", "0"], "programs: got 0, expected at least 1"),
        (["--programs", "2"], "programs: got 2 on cpu, expected a GPU, which has them"),
        (["--form", "gdn3"], "form: got 'gdn3', expected one of gdn2, gdn, kda, mamba2"),
        (["--shape", "4x4"], "shape: got '4x4', expected BxTxHxDkxDv, such as 1x2048x4x64x64"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", "cpu", *options])
    assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")
