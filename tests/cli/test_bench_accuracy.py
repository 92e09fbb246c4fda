"""The benchmark of accuracy: errors are those of what was computed, whoever computed it."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from gdn2.bench import accuracy
from gdn2.bench.accuracy import (
    DECAYS,
    SPIKE,
    SPIKES,
    STEPS,
    Plan,
    Row,
    by_steps,
    make_operands,
    read_plan,
    run,
)
from gdn2.bench.accuracy_report import render
from gdn2.bench.machine import describe_machine
from gdn2.cli import app
from gdn2.ops.backends import in_force
from gdn2.ops.rule import gated_delta_rule, gated_delta_step

QUANTITIES = ["o", "dq", "dk", "dv", "dg", "dw", "db", STEPS]


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "shape": "1x40x2x16x8",
        "decays": None,
        "backend": "torch",
        "device": "cpu",
        "dtype": "fp32",
        "solve_precision": "ieee",
        "peers": False,
    }
    return read_plan(**(given | changes))


def half_wrong(**operands: Tensor) -> Tensor:
    """A peer whose output and gradients are half as large again."""
    rule: Any = gated_delta_rule
    o: Tensor = rule(**operands, backend="torch")[0]
    return 1.5 * o


def broken(**operands: Tensor) -> Tensor:
    return half_wrong(**operands) * torch.nan


def printed(result: accuracy.Result) -> str:
    console = Console(file=StringIO(), width=120)
    render(result, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_all_decays_are_near_fp64() -> None:
    result = run(plan())
    assert [row.decay for row in result.rows] == [*DECAYS]
    for row in result.rows:
        assert [*row.errors] == QUANTITIES
        assert all(error is not None and error < 2e-6 for error in row.errors.values()), row


def test_steps_are_those_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = make_operands(plan(dtype="fp64"), "initial")
    rule: Any = gated_delta_rule
    right = rule(**operands, backend="reference")[0]
    torch.testing.assert_close(by_steps(**operands), right, rtol=1e-12, atol=1e-14)
    monkeypatch.setattr(accuracy, "gated_delta_step", lambda **x: (2 * x["v"], None))
    (row,) = run(plan(decays="-1")).rows
    assert (row.errors["o"] or 0.0) < 2e-6
    assert (row.errors[STEPS] or 0.0) > 0.1


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_steps_are_by_the_backend_that_is_compared(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a kernel of its own would take them."""
    seen: list[str] = []

    def step(**operands: Any) -> tuple[Tensor, Tensor]:
        seen.append(in_force())
        return gated_delta_step(**operands)

    monkeypatch.setattr(accuracy, "gated_delta_step", step)
    run(plan(shape="1x3x1x8x8", decays="0", backend=backend))
    assert seen == [backend] * 3 and in_force() == "auto"


def test_decays_are_those_asked_for() -> None:
    chosen = plan()
    usual, flat, spiky = (make_operands(chosen, name)["g"] for name in ("initial", "-5", "spiky"))
    assert bool((flat == -5).all())
    spikes = spiky == SPIKE
    assert torch.equal(spiky[~spikes], usual[~spikes])
    assert abs(float(spikes.float().mean()) - SPIKES) < 0.03
    others = [make_operands(chosen, name)["q"] for name in ("initial", "-5", "spiky")]
    assert all(torch.equal(others[0], other) for other in others)


def test_a_peer_is_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {"fla": half_wrong, "fla-broken": broken, "other": broken}
    monkeypatch.setattr(accuracy, "find_peers", lambda *_, **__: (peers, ["a note"]))
    result = run(plan(peers=True, decays="0", dtype="bf16"))
    ours, wrong, nothing = result.rows
    assert (ours.variant, wrong.variant, nothing.variant) == ("torch", "fla", "fla-broken")
    assert all(error == pytest.approx(0.5, abs=1e-2) for error in wrong.errors.values())
    assert set(nothing.errors.values()) == {None}
    text = printed(result)
    assert "over fla" in text and "lost" in text and "a note" in text
    assert ours.errors["o"] is not None and wrong.errors["o"] is not None
    assert f"{ours.errors['o'] / wrong.errors['o']:.2f}" in text
    json.dumps(result.as_json(), allow_nan=False)


def test_all_of_the_table_fits_into_a_log() -> None:
    """Which is a hundred characters wide; no name and no number is cut."""
    own: dict[str, float | None] = dict.fromkeys(QUANTITIES, 1.7e-3)
    kept = "fla-no-recompute"
    # Nobody's steps but ours.
    others: dict[str, float | None] = dict.fromkeys(QUANTITIES[:-1], 3.4e-3)
    found = {"triton": own, "fla": others, kept: others}
    chosen = replace(plan(decays="initial,-200", dtype="bf16"), backend="triton")
    rows = [Row(decay, name, found[name]) for decay in chosen.decays for name in found]
    result = accuracy.Result(chosen, describe_machine(), tuple(rows), ())
    console = Console(file=StringIO(), width=100)
    render(result, console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["log-decay", "variant", *QUANTITIES] in lines
    for decay in chosen.decays:
        assert [decay, "triton", *["1.7e-03"] * 8] in lines
        assert [decay, kept, *["3.4e-03"] * 7, "–"] in lines
        assert [decay, "over", "fla", *["0.50"] * 7, "–"] in lines


def test_a_peer_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(accuracy, "find_peers", lambda *_, **__: ({"fla": fail}, []))
    result = run(plan(peers=True, decays="0"))
    assert [row.variant for row in result.rows] == ["torch"]
    assert result.notes == ("no fla at log-decay 0: no such kernel",)
    monkeypatch.setattr(accuracy, "gated_delta_rule", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        run(plan(decays="0"))


def test_the_command(tmp_path: Path) -> None:
    target = tmp_path / "accuracy.json"
    options = ["--device", "cpu", "--shape", "1x40x2x16x8", "--decay", "0,-200"]
    done = CliRunner().invoke(app, ["bench", "accuracy", *options, "--json", str(target)])
    assert done.exit_code == 0, done.output
    record = json.loads(target.read_text())["result"]
    assert [row["decay"] for row in record["rows"]] == ["0", "-200"]
    assert record["plan"]["shape"] == "1x40x2x16x8"
    assert "1x40x2x16x8, fp32 on cpu" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--decay", "3"), "decay: got '3', expected initial, spiky or a number of fp32 up to 0"),
        (("--decay", "-1e39"), "decay: got '-1e39', expected"),
        (("--decay", "nan"), "decay: got 'nan', expected"),
        (("--decay", "slow"), "decay: got 'slow', expected"),
        (("--shape", "1x2"), "shape: got '1x2', expected BxTxHxDkxDv"),
        (("--dtype", "fp8"), "dtype: got 'fp8', expected one of"),
        (("--solve-precision", "fast"), "solve precision: got 'fast', expected one of ieee, tf32"),
        (("--backend", "cuda"), "backend: got 'cuda', expected one of"),
    ],
)
def test_mistakes_are_one_line(options: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "accuracy", "--device", "cpu", *options])
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {said}")
    assert done.output.count("\n") == 1
