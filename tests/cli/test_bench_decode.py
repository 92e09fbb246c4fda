"""The decode benchmark's numbers fit together, and its options are read as written."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from gdn2 import __version__, gated_delta_step
from gdn2.bench import decode
from gdn2.bench.decode import Plan, Result, Shape
from gdn2.bench.machine import describe_machine
from gdn2.bench.timing import Timing
from gdn2.cli import app
from tests.closeness import assert_close

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
TINY = ["--device", "cpu", "--seconds", "0.01", "--shape", "2x2x16x8"]


def bench(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What the command prints, and what it writes."""
    target = folder / "bench.json"
    result = CliRunner().invoke(app, ["bench", "decode", *options, "--json", str(target)])
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(target.read_text())


def test_rows_hold_what_was_measured(tmp_path: Path) -> None:
    printed, result = bench(tmp_path, *TINY, "--shape", "1x1x5x3", "--tokens", "3", "--peers")
    assert result["plan"]["shapes"] == ["2x2x16x8", "1x1x5x3"]
    assert (result["plan"]["dtype"], result["plan"]["tokens"]) == ("fp32", 3)
    assert result["machine"]["versions"]["gdn2"] == __version__
    assert result["notes"] == ["no peers: fla decodes on a GPU only"]
    rows = {(row["shape"], row["name"]): row for row in result["rows"]}
    for shape, elements in {"2x2x16x8": 2 * 2 * 16 * 8, "1x1x5x3": 5 * 3}.items():
        names = [name for where, name in rows if where == shape]
        assert names == ["copy", "gdn2", "gdn2, new state"]
        copy = rows[shape, "copy"]["timing"]["median"]
        for name in names:
            row = rows[shape, name]
            took = row["timing"]
            assert 0 < took["low"] <= took["median"] <= took["high"]
            assert row["bytes_per_second"] == pytest.approx(2 * 4 * elements / took["median"])
            assert row["of_copy"] == pytest.approx(copy / took["median"])
            assert f"{took['median'] * 1e6:.2f}" in printed
        assert f"{shape}, 3 tokens, fp32 on cpu" in printed


def test_a_step_is_the_operator() -> None:
    """On the operands of the benchmark, whatever it is called."""
    plan = Plan((Shape(2, 2, 16, 8),), CPU, "fp64", tokens=3)
    operands: Any = decode.make_operands(plan.shapes[0], plan)
    assert operands["v"].shape == (2, 3, 2, 8)
    assert not any(x.requires_grad for x in operands.values())
    start = torch.randn(2, 2, 16, 8, dtype=torch.float64)
    _, expected = gated_delta_step(**operands, state=start)
    steps = decode.own_steps(operands)
    for name, inplace in {"gdn2": True, "gdn2, new state": False}.items():
        state = start.clone()
        steps[name](state)
        assert_close(name, state, expected if inplace else start, 1e-14)


def test_every_state_is_stepped_and_kept() -> None:
    states = torch.arange(3.0).view(3, 1, 1, 1, 1)
    made: Any = decode.repeated(lambda state: state + 1, states)()
    assert [float(x) for x in made] == [1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("bf16", torch.float32), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_states_are_fp32_or_wider(dtype: str, wanted: torch.dtype) -> None:
    states = decode.make_states(Shape(2, 3, 4, 5), Plan((), CPU, dtype))
    assert (states.shape, states.dtype) == ((1, 2, 3, 4, 5), wanted)


def test_time_is_divided_by_the_steps() -> None:
    took = decode.per_step(Timing(8.0, 6.0, 12.0, 5, peak_bytes=3), 4)
    assert took == Timing(2.0, 1.5, 3.0, 5, None)


def test_a_sweep_is_printed_by_channels_and_warps() -> None:
    shape = Shape(1, 2, 16, 20)
    tiles = decode.sweep_tiles(shape)
    assert {block for block, _ in tiles} == {8, 16, 32}
    names = {f"{block} × {warps}": (block + warps) * 1e-6 for block, warps in tiles}
    took = {name: Timing(t, t, t, 5) for name, t in {"copy": 7e-6, **names}.items()}
    rows = decode.make_rows(shape, took, torch.zeros(1, *shape))
    plan = Plan((shape,), CPU, "fp32", sweep=True)
    console = Console(width=100, record=True)
    decode.render(Result(plan, describe_machine(), tuple(rows), ()), console)
    lines = [line.split() for line in console.export_text().splitlines()]
    for block in (8, 16, 32):
        cells = [f"{block + warps:.2f}" for warps in decode.WARPS]
        assert [str(block), *cells, *(["7.00"] if block == 8 else [])] in lines
    assert ["64"] in lines


def fake_fla(monkeypatch: pytest.MonkeyPatch, recurrent: Any) -> None:
    module = types.ModuleType("fla.ops.gdn2")
    module.fused_recurrent_gdn2 = recurrent  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gdn2", module)


def test_a_peer_gets_operands_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    fake_fla(monkeypatch, lambda **options: given.update(options))
    plan = Plan((Shape(1, 2, 16, 8),), CPU, "fp32")
    operands = decode.make_operands(plan.shapes[0], plan)
    peers, notes = decode.find_peers(operands, CUDA)
    assert (list(peers), notes) == (["fla"], [])
    state = torch.zeros(1, 2, 16, 8)
    peers["fla"](state)
    assert given.pop("initial_state") is state
    assert given.pop("output_final_state") is True
    assert given == operands


def test_a_missing_peer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    peers, (note,) = decode.find_peers({}, CUDA)
    assert peers == {}
    assert note.startswith("no peers: ")
    assert "pip install 'gdn2[bench]'" in note


def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(state: Tensor) -> None:
        raise RuntimeError("no [kernel]\nfor this machine")

    plan = Plan((Shape(1, 1, 4, 4), Shape(1, 2, 4, 4)), CPU, "fp32", peers=True, seconds=0.01)
    monkeypatch.setattr(decode, "find_peers", lambda *_: ({"fla": failing}, []))
    monkeypatch.setattr(decode, "repeated", started)
    result = decode.run(plan)
    assert [row.name for row in result.rows] == ["copy", "gdn2", "gdn2, new state"] * 2
    assert result.notes == ("no fla at 1x1x4x4: no [kernel]", "no fla at 1x2x4x4: no [kernel]")


def started(step: decode.Step, states: Tensor) -> Any:
    """A first step before any timing, as on a GPU."""
    step(states[0])
    return lambda: step(states[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--shape", "1x2x3"],
            "shape: got '1x2x3', expected BxHxDkxDv with widths up to 256, such",
        ),
        (["--shape", "1x0x8x8"], "shape: got '1x0x8x8', expected BxHxDkxDv"),
        (["--shape", "1x1x257x8"], "shape: got '1x1x257x8', expected BxHxDkxDv with widths up to"),
        (["--tokens", "0"], "tokens: got 0, expected at least 1"),
        (["--dtype", "int8"], "dtype: got 'int8', expected one of fp64, fp32, bf16, fp16"),
        (["--seconds", "inf"], "seconds: got inf, expected a finite number of at least 0"),
        (["--seconds", "-1"], "seconds: got -1.0, expected a finite number of at least 0"),
        (
            ["--sweep"],
            "sweep: got True, but Triton kernels need a CUDA GPU, not cpu; expected",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
