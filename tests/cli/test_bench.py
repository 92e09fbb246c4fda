"""The benchmark's numbers fit together, and its options are read as written."""

import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gdn2 import __version__, gated_delta_rule
from gdn2.bench import operator, peers, plot, timing
from gdn2.cli import app

CPU = torch.device("cpu")
TINY = ["--shape", "2x65x2x16x8", "--device", "cpu", "--seconds", "0.01"]


def bench(*options: str) -> tuple[str, list[dict[str, Any]]]:
    """What the command prints, and what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "bench.json"
        result = CliRunner().invoke(app, ["bench", "operator", *options, "--json", str(target)])
        assert result.exit_code == 0, result.output
        return result.stdout, json.loads(target.read_text())["results"]


def test_what_no_memory_holds_is_one_line() -> None:
    options = ["--shape", "1x1000000000000x1x128x128", "--backend", "torch", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench", "operator", *options])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: got ") and done.stderr.count("\n") == 1
    assert "can't allocate memory" in done.stderr
    assert done.stderr.endswith(", expected what fits into memory\n")


def test_rows_hold_what_was_measured() -> None:
    printed, (result,) = bench(*TINY, "--threads", "1")
    rows = {(row["measured"], row["backend"]): row for row in result["rows"]}
    passes, backends = ["forward", "training", "backward"], ["torch", "reference"]
    assert list(rows) == [(measured, backend) for measured in passes for backend in backends]
    assert result["plan"]["dtype"] == "fp32"
    assert result["plan"]["shapes"] == ["2x65x2x16x8"]
    assert result["machine"]["threads"] == 1
    assert result["machine"]["versions"]["gdn2"] == __version__
    for (measured, _), row in rows.items():
        took = row["timing"]
        assert 0 < took["low"] <= took["median"] <= took["high"]
        assert took["repeats"] >= 5
        reference = rows[measured, "reference"]["timing"]["median"]
        assert row["speedup"] == pytest.approx(reference / took["median"])
        assert row["tokens_per_second"] == pytest.approx(130 / took["median"])
        assert row["microseconds_per_token"] == pytest.approx(took["median"] / 130 * 1e6)
        assert f"{took['median'] * 1e3:.3f}" in printed
        # q, k, g and b of width 16, v and w of width 8; in the backward gradients of all, and the output's
        moved = 80 + 8 if measured != "backward" else 3 * 80 + 2 * 8
        floor = 4 * 2 * 65 * 2 * moved / result["copy_bytes_per_second"]
        assert row["floor_seconds"] == pytest.approx(floor)
    assert (
        rows["backward", "torch"]["timing"]["median"] > rows["forward", "torch"]["timing"]["median"]
    )
    assert "2x65x2x16x8, gdn2, fp32 on cpu" in printed
    assert "vs reference" in printed


def test_time_per_token_is_compared_with_the_shortest() -> None:
    shapes = [o for T in (130, 65, 32) for o in ("--shape", f"1x{T}x1x16x16")]
    other = ["--shape", "1x65x2x16x16"]
    options = ["--backend", "torch", "--passes", "forward", "--seconds", "0.01", "--device", "cpu"]
    printed, (result,) = bench(*shapes, *other, *options)
    rows = {row["shape"]: row for row in result["rows"]}
    assert len(rows) == 4
    shortest = rows["1x32x1x16x16"]["microseconds_per_token"]
    for T in (130, 65, 32):
        row = rows[f"1x{T}x1x16x16"]
        assert row["growth"] == pytest.approx(row["microseconds_per_token"] / shortest)
    assert rows["1x65x2x16x16"]["growth"] == 1
    assert "growth" in printed


def test_the_documented_figures() -> None:
    first, second = operator.read_plans(suite="cpu")
    assert first.baseline == "reference"
    assert first.backends == ("torch", "reference")
    assert [str(shape) for shape in first.shapes] == ["1x2048x4x64x64"]
    assert [shape.length for shape in second.shapes] == [1024, 16384]
    assert {first.device.type, second.device.type} == {"cpu"}
    assert first.dtype == "fp32"


def test_the_figures_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes that peers publish, with peers and both ways to handle the backward."""
    monkeypatch.setattr(timing, "find_device", torch.device)
    monkeypatch.setattr(operator, "choose", lambda backend, device: "triton")
    fake_fla(monkeypatch, gated_delta_rule)
    (plan,) = operator.read_plans(suite="hopper", peers=True)
    sizes = [(8, 2048), (4, 4096), (2, 8192), (1, 16384)]
    assert [(s.batch, s.length) for s in plan.shapes] == sizes
    assert {s[2:] for s in plan.shapes} == {(16, 128, 128)}
    assert (plan.device.type, plan.dtype) == ("cuda", "bf16")
    kept = ["triton-no-recompute", "fla-no-recompute"]
    assert sorted(operator.find_operators(plan)[0]) == sorted(["triton", "fla", *kept])
    (plan,) = operator.read_plans(suite="hopper", recompute=False, peers=True)
    assert sorted(operator.find_operators(plan)[0]) == ["fla", kept[1], "triton"]
    (plan,) = operator.read_plans(suite="hopper")
    assert list(operator.find_operators(plan)[0]) == ["triton"]


def test_each_is_compared_with_its_like() -> None:
    shape = operator.Shape(1, 8, 1, 4, 4)
    times = {"triton": 2.0, "triton-no-recompute": 1.0, "fla": 6.0, "fla-no-recompute": 5.0}
    rows = [
        operator.make_row(shape, "backward", name, timing.Timing(t, t, t, 5), t, 0.5)
        for name, t in times.items()
    ]
    assert [row.speedup for row in operator.relate(rows, "fla")] == [3, 5, 1, 1]
    assert [row.speedup for row in operator.relate(rows, "triton")] == [1, 1, 2 / 6, 1 / 5]


def test_a_copy_has_a_speed() -> None:
    """Of some memory: between a slow laptop's and a cache's."""
    assert 1e8 < timing.copy_bytes_per_second(CPU) < 1e13


def test_the_first_call_of_a_fresh_process(tmp_path: Path) -> None:
    target = tmp_path / "cold.json"
    options = ["--backend", "torch", "--passes", "forward", "--cold", "--json", str(target)]
    result = CliRunner().invoke(app, ["bench", "operator", *TINY, *options])
    assert result.exit_code == 0, result.output
    ((name, seconds),) = json.loads(target.read_text())["cold_seconds"].items()
    assert name == "torch"
    assert seconds > 0
    line = f"first fwd + bwd with nothing compiled: torch {seconds:.1f} s"
    assert line in result.stdout.splitlines()


def test_what_a_picture_shows(tmp_path: Path) -> None:
    (plan,) = operator.read_plans(shapes=["1x16x1x8x8", "1x8x1x8x8"], device="cpu", seconds=0.01)
    result = operator.run(plan)
    shapes, panels = plot.panels([result])
    assert shapes == ["1x16x1x8x8", "1x8x1x8x8"]
    assert list(panels) == ["fwd", "fwd train", "fwd + bwd"]
    for title, panel in panels.items():
        assert list(panel) == ["torch", "floor", "reference"]
        for name in ("torch", "reference"):
            rows = [
                r for r in result.rows if (operator.PASSES[r.measured], r.backend) == (title, name)
            ]
            assert panel[name] == [row.timing.median * 1e3 for row in rows]
        assert panel["floor"][0] == pytest.approx(2 * panel["floor"][1])  # type: ignore[operator]
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    plot.plot([result], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_no_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    options = ["--plot", str(tmp_path / "bench.png")]
    result = CliRunner().invoke(app, ["bench", "operator", *TINY, *options])
    assert result.exit_code == 2
    message = "plot: matplotlib is not installed; pip install 'gdn2[plot]' installs it"
    assert result.stderr == f"error: {message}\n"
    assert result.stdout == ""


def test_tuning_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "tune"])
    assert result.exit_code == 2
    reason = "Triton kernels need a CUDA GPU, not cpu"
    assert result.stderr == f"error: tune: there are no kernels to time here: {reason}\n"


def test_a_backward_pass_returns_all_gradients() -> None:
    plan = operator.read_plans(shapes=["1x65x2x16x8"], device="cpu", dtype="fp64")[0]
    operands = operator.make_operands(plan.shapes[0], plan)
    run = peers.own_operator("torch", 16, recompute=True)
    d_output = torch.randn_like(operands["v"])
    gradients = operator.run_pass("backward", run, operands, d_output)
    o, _ = gated_delta_rule(**operands, backend="reference")  # type: ignore[arg-type]
    expected = torch.autograd.grad(o, list(operands.values()), d_output)
    assert isinstance(gradients, tuple)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    untracked = operator.run_pass("forward", run, operands, d_output)
    assert isinstance(untracked, Tensor)
    assert not untracked.requires_grad
    torch.testing.assert_close(untracked, o.detach(), rtol=1e-9, atol=1e-12)


def test_operands_follow_the_initialisation_of_the_paper() -> None:
    plan = operator.read_plans(shapes=["1x2048x4x64x32"], device="cpu", dtype="bf16")[0]
    x = operator.make_operands(plan.shapes[0], plan)
    assert x["g"].dtype == torch.float32
    assert {x[name].dtype for name in "qkvbw"} == {torch.bfloat16}
    # At the median of the input's noise the decay is rate · step: between 1e-3 and 1.6 at the extremes.
    typical = -x["g"].detach().median(1).values
    assert 1e-3 < float(typical.min()) < 1e-2
    assert 0.3 < float(typical.max()) < 1.7
    assert 0.02 < float(typical.median()) < 0.3
    torch.testing.assert_close(
        x["k"].detach().float().norm(dim=-1), torch.ones(1, 2048, 4), atol=1e-2, rtol=0
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"form": "kda"}, {"g": (2, 4), "v": (2, 3), "beta": (2, 1)}),
        ({"form": "mamba2"}, {"g": (2, 1), "v": (2, 3)}),
        ({"form": "gdn"}, {"g": (2, 1), "v": (2, 3), "beta": (2, 1)}),
        ({"form": "gdn", "value_heads": 6}, {"g": (6, 1), "v": (6, 3), "beta": (6, 1)}),
        ({"value_heads": 6}, {"g": (2, 4), "v": (6, 3), "w": (6, 3), "b": (2, 4)}),
    ],
    ids=str,
)
def test_other_forms_have_other_operands(
    settings: dict[str, Any], expected: dict[str, tuple[int, int]]
) -> None:
    (plan,) = operator.read_plans(shapes=["1x8x2x4x3"], device="cpu", **settings)
    x = operator.make_operands(plan.shapes[0], plan)
    found = {n: tuple(t.shape[2:]) for n, t in x.items()}
    assert found == {"q": (2, 4), "k": (2, 4)} | expected


def test_packed_lengths_add_up() -> None:
    shape = operator.Shape(1, 130, 2, 16, 16)
    assert operator.packed_lengths("", shape) == []
    assert operator.packed_lengths("1,64,65", shape) == [1, 64, 65]
    for count in (1, 7, 130):
        lengths = operator.packed_lengths(str(count), shape)
        assert (len(lengths), sum(lengths)) == (count, 130)
        assert min(lengths) > 0


def test_packed_and_without_gates() -> None:
    options = ["--packed", "1,64", "--form", "mamba2", "--passes", "backward", "--peers"]
    printed, (result,) = bench("--shape", "1x65x2x16x8", *TINY[2:], *options)
    assert {row["measured"] for row in result["rows"]} == {"backward"}
    assert result["plan"]["packed"] == "1,64"
    assert result["notes"] == ["no peers: fla packs sequences on a GPU only"]
    assert result["plan"]["form"] == "mamba2"
    assert result["notes"][0] in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "gdn3"}, "form: got 'gdn3', expected one of gdn2, gdn, kda, mamba2"),
        ({"value_heads": 3}, "value heads: got 3, expected a multiple of the shape's 2 heads"),
        ({"value_heads": 0}, "value heads: got 0, expected a multiple of the shape's 2 heads"),
        (
            {"form": "kda", "value_heads": 4},
            "value heads: got 4 for kda, expected none but for gdn2 and gdn",
        ),
    ],
    ids=str,
)
def test_what_no_form_has_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        operator.read_plans(shapes=["1x8x2x4x3"], device="cpu", **settings)


def test_a_missing_peer_is_one_line_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    printed, (result,) = bench(*TINY, "--passes", "forward", "--peers")
    (note,) = result["notes"]
    assert note.startswith("no peers: ")
    assert "pip install 'gdn2[bench]'" in note
    assert note in printed.splitlines()
    assert len(result["rows"]) == 2


def fake_fla(monkeypatch: pytest.MonkeyPatch, chunk: Any) -> None:
    module = types.ModuleType("fla.ops.gdn2")
    module.chunk_gdn2 = module.naive_chunk_gdn2 = chunk  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gdn2", module)


def test_a_peer_is_timed_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla(monkeypatch, gated_delta_rule)
    _, (result,) = bench(*TINY, "--passes", "backward", "--peers")
    assert [r["backend"] for r in result["rows"]] == ["torch", "reference", "fla-naive-chunk"]
    assert result["notes"] == []
    on_gpu, _ = peers.find_peers(torch.device("cuda"), packed=True, form="gdn2")
    assert list(on_gpu) == ["fla", "fla-no-recompute"]
    on_cpu, notes = peers.find_peers(CPU, packed=True, form="gdn2")
    assert on_cpu == {}
    assert notes == ["no peers: fla packs sequences on a GPU only"]
    assert peers.find_peers(CPU, packed=False, form="kda")[1] == [
        "no peers: fla has kda on a GPU only"
    ]


def test_peers_get_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates without an axis of one, heads repeated that value heads share."""
    given: dict[str, Any] = {}

    def peer(**operands: Tensor) -> tuple[Tensor]:
        given.update({n: tuple(x.shape) for n, x in operands.items()})
        return (operands["v"],)

    fake_fla(monkeypatch, peer)
    for name, function in (
        ("kda", "chunk_kda"),
        ("simple_gla", "chunk_simple_gla"),
        ("gated_delta_rule", "chunk_gated_delta_rule"),
    ):
        module = types.ModuleType(f"fla.ops.{name}")
        setattr(module, function, peer)
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for settings, expected in (
        ({"form": "kda"}, {"g": (1, 8, 2, 4), "beta": (1, 8, 2)}),
        ({"form": "mamba2"}, {"g": (1, 8, 2)}),
        ({"form": "gdn", "value_heads": 6}, {"q": (1, 8, 2, 4), "g": (1, 8, 6)}),
        ({"value_heads": 6}, {"q": (1, 8, 6, 4), "g": (1, 8, 6, 4), "w": (1, 8, 6, 3)}),
    ):
        (plan,) = operator.read_plans(shapes=["1x8x2x4x3"], device="cpu", **settings)
        found, _ = peers.find_peers(torch.device("cuda"), packed=False, form=plan.form)
        given.clear()
        found["fla"](**operator.make_operands(plan.shapes[0], plan))
        assert given | expected == given


def test_forms_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        ["--form", "kda"],
        ["--form", "mamba2"],
        ["--value-heads", "4"],
        ["--form", "gdn", "--value-heads", "4"],
    ):
        _, (result,) = bench(*TINY, "--passes", "backward", *options)
        assert [r["backend"] for r in result["rows"]] == ["torch", "reference"]


def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(**operands: Tensor) -> None:
        raise RuntimeError("no [kernel]\nfor this machine")

    fake_fla(monkeypatch, failing)
    printed, (result,) = bench(*TINY, "--passes", "forward", "--peers")
    note = "no fwd of fla-naive-chunk at 2x65x2x16x8: no [kernel]"
    assert result["notes"] == [note]
    assert note in printed.splitlines()
    assert [row["backend"] for row in result["rows"]] == ["torch", "reference"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "1x2x3"], "shape: got '1x2x3', expected BxTxHxDkxDv, such as 1x2048x4x64x64"),
        (["--shape", "1x0x1x8x8"], "shape: got '1x0x1x8x8', expected BxTxHxDkxDv, such as 1x"),
        (["--backend", "numpy"], "backend: got 'numpy', expected one of auto, triton, torch, ref"),
        (["--dtype", "int8"], "dtype: got 'int8', expected one of fp64, fp32, bf16, fp16"),
        (
            ["--dtype", "bf16,fp32"],
            "dtype: got 'bf16,fp32', expected one of fp64, fp32, bf16, fp16",
        ),
        (["--form", "gdn2,kda"], "form: got 'gdn2,kda', expected one of gdn2, gdn, kda, mamba2"),
        (["--passes", "sideways"], "passes: got 'sideways', expected one of forward, training, b"),
        (["--chunk-size", "48"], "chunk_size: got 48, expected one of (16, 32, 64, 128)"),
        (["--threads", "0"], "threads: got 0, expected at least 1"),
        (["--threads", "100000"], "threads: got 100000, expected at most "),
        (["--seconds", "inf"], "seconds: got inf, expected a finite number of at least 0"),
        (["--seconds", "nan"], "seconds: got nan, expected a finite number of at least 0"),
        (["--seconds", "-1"], "seconds: got -1.0, expected a finite number of at least 0"),
        (["--suite", "gpu"], "suite: got 'gpu', expected one of cpu, hopper"),
        (["--suite", "cpu", "--backend", "torch"], "suite: got 'cpu', which sets shape, backend,"),
        (["--packed", "3,4"], "packed: got '3,4' for shape 1x2048x4x64x64, expected lengths that"),
        (["--packed", "8", "--shape", "2x64x1x8x8"], "packed: got '8' for shape 2x64x1x8x8, exp"),
        (["--plot", "a.txt"], "plot: got 'a.txt', expected a name that ends in .png, .pdf or .svg"),
        (["--packed", "a"], "packed: got 'a' for shape 1x2048x4x64x64, expected lengths that add"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options: list[str], message: str) -> None:
    device = [] if "--suite" in options else ["--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "operator", *device, *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_value_of_the_wrong_type_is_a_mistake_too() -> None:
    result = CliRunner().invoke(app, ["bench", "operator", "--chunk-size", "many"])
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"gdn2 {__version__}\n"
    for verb in ([], ["doctor"], ["bench"], ["bench", "operator"], ["bench", "tune"]):
        assert CliRunner().invoke(app, [*verb, "--help"]).exit_code == 0
