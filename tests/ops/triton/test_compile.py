"""Kernels compiled for architectures that are not at hand: all of them fit, and scans take no more than estimated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gdn2.ops.triton import conv_launch, launch
from gdn2.ops.triton.launch import ARCHITECTURES, Scan, row
from tests.ops.triton.test_launch import KERNELS, SCANS

ROOT = Path(__file__).parents[3]


def compile_kernels(kernels: str, cases: list[str], cache: Path) -> list[tuple[str, str, Any]]:
    """Bytes of shared memory, or what is wrong, of each kernel in each case."""
    rows = run("compile_kernels", [kernels, *cases], cache)
    return [(case, kernel, result) for case, kernel, result in rows]


def run(script: str, given: list[str], cache: Path) -> Any:
    """What a script says that does not interpret."""
    command = [sys.executable, "-m", f"tests.ops.triton.{script}", *given]
    env = {n: value for n, value in os.environ.items() if n != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_compiled(rows: list[tuple[str, str, Any]]) -> None:
    """Every kernel was compiled, fits, and a scan takes no more than estimated."""
    for case, name, result in rows:
        assert isinstance(result, int), f"{name} at {case}: {result}"
        target, dtype, width, chunk = case.split(",")
        architecture = divmod(int(target), 10)
        assert result <= ARCHITECTURES[architecture].shared_memory, (case, name)
        if (kernel := name.removesuffix("_kernel")) in SCANS:
            scan = Scan(int(chunk), int(width), 4 if dtype == "fp32" else 2, int(width), heads=64)
            how = row(kernel, architecture, scan)
            assert result <= launch.scan_bytes(how, scan, architecture), (case, name)


def test_scans_compile(tmp_path: Path) -> None:
    """For each kind of matrix product."""
    cases = [f"{target},bf16,128,64" for target in (86, 90, 100)]
    rows = compile_kernels("scan,scan_reverse", cases, tmp_path)
    assert len(rows) == 3 * len(cases)  # the scan is launched for the forward and for the backward
    check_compiled(rows)


def test_the_gradient_of_a_convolution_is_loaded_ahead(tmp_path: Path) -> None:
    """An input and a gradient a step, which wait in shared memory: the rest of the window stays in registers."""
    [(_, _, shared)] = compile_kernels("convolve_gradient", ["90,bf16,128,64"], tmp_path)
    waiting = (conv_launch.STAGES - 1) * conv_launch.UNROLL * 2
    assert shared == waiting * conv_launch.BACKWARD_TILE * 2


HOPPER_AND_OTHERS = pytest.mark.parametrize(
    "targets", [(90,), pytest.param((80, 86, 100, 120), marks=pytest.mark.slow)], ids=str
)


@HOPPER_AND_OTHERS
def test_the_backward_without_an_erase_gate_compiles(
    targets: tuple[int, ...], tmp_path: Path
) -> None:
    """For each architecture, with and without room for the whole of a tile."""
    cases = [f"{target},bf16,{width},64" for target in targets for width in (64, 48)]
    rows = compile_kernels("states,plain_gradient", cases, tmp_path)
    assert len(rows) == 2 * len(cases)
    check_compiled(rows)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_all_kernels_compile(architecture: tuple[int, int], tmp_path: Path) -> None:
    target = "{}{}".format(*architecture)
    usual = [f"{target},{sizes}" for sizes in ("bf16,128,64", "bf16,256,64", "fp32,128,64")]
    rows = compile_kernels("all", usual, tmp_path)
    assert len(rows) == (len(KERNELS) + 1) * len(usual)
    large = [f"{target},{sizes}" for sizes in ("bf16,128,128", "bf16,256,128", "fp32,256,64")]
    check_compiled(rows + compile_kernels("scan,scan_reverse", large, tmp_path))


@pytest.mark.parametrize(
    ("architecture", "dtypes"),
    [
        ((9, 0), ["bf16"]),
        *(pytest.param(one, ["bf16", "fp32"], marks=pytest.mark.slow) for one in ARCHITECTURES),
    ],
    ids=str,
)
def test_what_the_doctor_starts_compiles(
    architecture: tuple[int, int], dtypes: list[str], tmp_path: Path
) -> None:
    """Every kernel, for the arguments it is given."""
    target = "{}{}".format(*architecture)
    found = run("compile_checks", [target, *dtypes], tmp_path)
    assert found["stopped"] == {}
    for name, variants in found["compiled"].items():
        assert variants, f"{name} is started by no check"
        assert max(variants) <= ARCHITECTURES[architecture].shared_memory, name
