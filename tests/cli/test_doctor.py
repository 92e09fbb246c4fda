"""The doctor finds this machine healthy, and notices a backend that is not."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gdn2 import doctor, gated_delta_rule
from gdn2.bench import timing
from gdn2.cli import app
from gdn2.ops import selfcheck, trust
from gdn2.ops.backends import why_not
from gdn2.ops.cuda import band
from gdn2.ops.selfcheck import Check, Checkup
from tests.closeness import relative_error

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
ROWS = ["output", "final state", "dq", "dk", "dv", "dg", "db", "dw", "d initial state"]


def torch_rule(**operands: Any) -> tuple[Tensor, Tensor | None]:
    return gated_delta_rule(**operands, backend="torch")


def test_the_command_finds_this_machine_well(tmp_path: Path) -> None:
    target = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "gdn2", "doctor", "--device", "cpu", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all checks passed"
    for row in ROWS:
        assert sum(line.startswith(f" {row} ") for line in lines) == 2, row  # fp64 and fp32
    for part in ("rule", "convolution", "norms"):
        assert any(line.split()[:2] == [part, "torch"] for line in lines), part

    record = json.loads(target.read_text())
    assert record["passed"] is True
    assert record["failures"] == []
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert (record["kernels"], record["distrusted"], record["verdict_file"]) == ([], [], None)
    (checkup,) = [c for c in record["checkups"] if c["name"] == "torch"]
    cells = {(c["scenario"], c["dtype"], c["quantity"]): c for c in checkup["checks"]}
    scenarios = ["mild", "strong", "packed", "no erase", "grouped"]
    wanted = {(s, d, r) for s in scenarios for d in ("fp64", "fp32") for r in ROWS}
    assert set(cells) == wanted - {("no erase", d, "db") for d in ("fp64", "fp32")}
    bounds = {"fp64": (1e-12, 1e-12), "fp32": (5e-6, 2e-5)}
    for (_, dtype, quantity), cell in cells.items():
        assert cell["tolerance"] == bounds[dtype][quantity.startswith("d")]
        assert 0 < cell["error"] <= cell["tolerance"]
    assert min(c["error"] for c in cells.values() if c["dtype"] == "fp32") > 1e-9  # really fp32


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -dy


negated: Any = Negated.apply


@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "b", "w", "initial_state"])
def test_a_wrong_sign_in_one_gradient_is_named(operand: str) -> None:
    def broken(**operands: Any) -> tuple[Tensor, Tensor | None]:
        if operand in operands:
            operands[operand] = negated(operands[operand])
        return torch_rule(**operands)

    checkup = doctor.check_backend(broken, "broken", CPU)
    wrong = {check.quantity for check in checkup.checks if not check.passed}
    assert wrong == {selfcheck.GRADIENTS[operand]}
    assert all(c.error == pytest.approx(2) for c in checkup.checks if not c.passed)
    assert f"broken, fp32, strong: {selfcheck.GRADIENTS[operand]}" in checkup.failures


def run_with(
    rule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, list[str]]:
    monkeypatch.setattr(doctor, "available_rules", lambda device: {"ill": rule})
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", *options])
    return result.exit_code, result.stdout.splitlines()


def test_a_wrong_backend_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(**operands: Any) -> tuple[Tensor, Tensor | None]:
        return torch_rule(**operands | {"k": negated(operands["k"])})

    target = tmp_path / "ill.json"
    code, lines = run_with(broken, monkeypatch, "--json", str(target))
    assert code == 1
    assert lines[-1].startswith("failed: ill, fp64, mild: dk; ill, fp64, strong: dk;")
    assert sum("FAIL" in line for line in lines) == 2
    record = json.loads(target.read_text())
    assert record["passed"] is False
    failed = [c for c in record["checkups"][0]["checks"] if not c["passed"]]
    assert {c["quantity"] for c in failed} == {"dk"}
    assert len(failed) == len(record["failures"]) == 10


def test_a_leak_between_packed_sequences_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(**operands: Any) -> tuple[Tensor, Tensor | None]:
        if operands["cu_seqlens"] is None:
            return torch_rule(**operands)
        first = operands.pop("initial_state")
        o, _ = torch_rule(**operands | {"cu_seqlens": None, "initial_state": first[:1]})
        return o, first * 1

    code, lines = run_with(leaky, monkeypatch)
    assert code == 1
    assert "fp64, packed: output" in lines[-1]
    assert "mild" not in lines[-1]


def test_values_that_are_not_finite_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def overflowing(**operands: Any) -> tuple[Tensor, Tensor | None]:
        o, state = torch_rule(**operands)
        spikes = (operands["g"] < -100).sum(-1, keepdim=True).amax(2, keepdim=True)
        return o + torch.where(spikes > 0, torch.inf, 0.0), state

    target = tmp_path / "ill.json"
    code, lines = run_with(overflowing, monkeypatch, "--json", str(target))
    assert code == 1
    assert lines[-1] == "failed: ill, fp64, strong: output; ill, fp32, strong: output"
    checks = json.loads(target.read_text())["checkups"][0]["checks"]
    assert [c["error"] for c in checks if not c["passed"]] == [None, None]


def test_a_backend_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(**operands: Any) -> tuple[Tensor, Tensor | None]:
        if operands["cu_seqlens"] is not None:
            raise RuntimeError("no [packed] sequences\nhere")
        return torch_rule(**operands)

    code, lines = run_with(raising, monkeypatch)
    assert code == 1
    problem = "packed: RuntimeError: no [packed] sequences"
    assert lines[-1] == f"failed: ill, fp64, {problem}; ill, fp32, {problem}"


def test_every_backend_that_runs_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.available_rules(CPU)) == [
        name for name in ("triton", "torch") if why_not(name, CPU) is None
    ]
    monkeypatch.setattr(doctor, "why_not", lambda backend, device, **_: None)
    assert list(doctor.available_rules(CPU)) == ["triton", "torch"]


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the doctor take the CPU for a GPU that kernels run on; returns where it writes."""
    monkeypatch.setattr(doctor, "why_not", lambda backend, device, **_: None)
    monkeypatch.setattr(doctor, "available_rules", lambda device: {})
    monkeypatch.setattr(trust, "_known", {})
    monkeypatch.setattr(trust, "identity", lambda device: "this one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gdn2" / "kernels.json"


def test_windows_say_what_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert doctor.window_part(CPU).backend == "torch"
    monkeypatch.setattr(doctor, "takes_heads", lambda width, dtype, device: True)
    monkeypatch.setattr(band, "lack", lambda device: None)
    assert doctor.window_part(gpu).backend == "cudnn"
    monkeypatch.setattr(band, "lack", lambda device: "it is not installed")
    part = doctor.window_part(gpu)
    assert part.backend == "cudnn, triton"
    assert part.why == "two triangles by cuDNN: it is not installed"
    monkeypatch.setattr(doctor, "takes_heads", lambda width, dtype, device: False)
    assert doctor.window_part(gpu).backend == "flex"


def kernel(name: str, error: float, *problems: str) -> Checkup:
    checks = (Check("alone", "fp32", "o", 1e-7, 2e-5), Check("alone", "bf16", "R", error, 2e-2))
    return Checkup(name, checks, problems)


def test_a_wrong_kernel_is_named_and_not_used_again(
    gpu_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = (kernel("scan", 0.3), kernel("step", 1e-3), kernel("conv", 0.0, "bf16, alone: Oops"))
    monkeypatch.setattr(doctor, "check_kernels", lambda device, suspects: (kernels, []))
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    (scan,) = (line for line in lines if line.startswith(" scan "))
    assert scan.split() == ["scan", "1.0e-07", "3e-01", "FAIL", "distrusted"]
    assert any(line.split() == ["step", "1.0e-07", "1.0e-03", "trusted"] for line in lines)
    assert lines[-2] == f"scan, conv: not used from now on, as {gpu_like} says"
    assert lines[-1] == "failed: scan, bf16, alone: R; conv, bf16, alone: Oops"
    found = {"scan": "scan, bf16, alone: R", "conv": "conv, bf16, alone: Oops"}
    assert json.loads(gpu_like.read_text()) == {"this one": found}
    assert trust.trusted("step", CPU) and not trust.trusted("scan", CPU)


def test_a_new_verdict_replaces_the_old(gpu_like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the old one is forgotten while the kernels are checked."""
    trust.record(CPU, {"scan": "wrong"})
    seen: list[bool] = []

    def check_kernels(
        device: torch.device, suspects: trust.Verdict
    ) -> tuple[tuple[Checkup, ...], list[str]]:
        seen.append(trust.trusted("scan", device))
        assert [*suspects] == ["scan"]
        return (kernel("scan", 1e-3),), []

    monkeypatch.setattr(doctor, "check_kernels", check_kernels)
    report = doctor.diagnose("cpu")
    assert seen == [True]
    assert report.failures == []
    assert json.loads(gpu_like.read_text()) == {"this one": {}}


def test_kernels_right_alone_and_wrong_together(
    gpu_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**operands: Any) -> tuple[Tensor, Tensor | None]:
        return torch_rule(**operands | {"k": negated(operands["k"])})

    found = (kernel("scan", 1e-3),), list[str]()
    monkeypatch.setattr(doctor, "check_kernels", lambda device, suspects: found)
    monkeypatch.setattr(doctor, "available_rules", lambda device: {"triton": broken})
    doctor.diagnose("cpu")
    assert json.loads(gpu_like.read_text()) == {"this one": {"rule": "triton, fp64, mild: dk"}}


def test_a_kernel_that_stops_the_gpu_takes_no_other_with_it(
    gpu_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked last from then on, and what was known of those that it kept from being checked is known still."""
    stopped, seen = list[str](), list[str]()

    def check_kernel(name: str, device: torch.device, dtype: str) -> Iterator[Check]:
        seen.append(name)
        if name == "two" or stopped:
            stopped.append(name)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield Check("alone", dtype, "o", 0.0, 1e-5)

    def synchronize(device: torch.device) -> None:
        if stopped:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    checks: Any = pytest.importorskip("gdn2.ops.triton.checks")
    monkeypatch.setattr(checks, "CHECKS", dict.fromkeys(("one", "two", "three", "four")))
    monkeypatch.setattr(checks, "check_kernel", check_kernel)
    monkeypatch.setattr(timing, "synchronize", synchronize)
    monkeypatch.setattr(doctor, "available_rules", lambda device: {"triton": torch_rule})
    trust.record(CPU, {"four": "wrong once", "rule": "together"})
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 1 and set(seen) == {"one", "two"}
    said = (
        "three, four, triton: not checked, the GPU stopped at two, which comes last the next time"
    )
    assert said in result.stdout.splitlines()
    (known,) = json.loads(gpu_like.read_text()).values()
    assert set(known) == {"two", "four", "rule"} and known["four"] == "wrong once"
    assert known["two"] == "two, the GPU stopped"
    stopped.clear()
    seen.clear()
    report = doctor.diagnose("cpu")
    assert [*dict.fromkeys(seen)] == ["one", "three", "four", "two"]
    assert report.unchecked == ("triton",) and report.as_json()["distrusted"] == ["two"]
    (known,) = json.loads(gpu_like.read_text()).values()
    assert set(known) == {"two", "rule"}


def test_operands_are_as_described() -> None:
    strong, packed, grouped = (selfcheck.SCENARIOS[i] for i in (1, 2, 4))
    g = selfcheck.make_operands(strong, torch.float32)["g"]
    for spike, share in {-20.0: 0.07, -1000.0: 0.03}.items():
        assert float((g == spike).double().mean()) == pytest.approx(share, rel=0.2)
    assert float(g.max()) < 0
    operands = selfcheck.make_operands(grouped, torch.bfloat16)
    assert operands["k"].dtype == operands["b"].dtype == torch.bfloat16
    assert operands["g"].dtype == operands["initial_state"].dtype == torch.float32
    assert operands["g"].shape[2:] == (2, 1)
    assert selfcheck.make_operands(packed, torch.float64)["initial_state"].shape[0] == 6


def test_the_measure_of_error_is_that_of_the_tests() -> None:
    zero, tiny, one = torch.zeros(3), torch.full((3,), 1e-32), torch.ones(3)
    nan = torch.tensor([1.0, torch.nan, 1.0])
    pairs = [(one, one), (one * 1.5, one), (tiny, zero), (zero, tiny), (one, zero), (nan, one)]
    for x, y in pairs:
        assert selfcheck.relative_error(x, y) == relative_error(x, y)
    assert selfcheck.relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert selfcheck.relative_error(one, torch.ones(3, 1)) == float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "error: device: got 'tpu', expected 'cpu' or 'cuda'\n"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--colour"], "No such option"),
    ],
)
def test_a_mistake_is_no_traceback(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
