"""Memory of forward and backward grows in proportion to the length."""

import subprocess
import sys

import pytest

PEAK = """
import sys
from pathlib import Path
import torch
from gdn2 import gated_delta_rule

def peak():  # not getrusage: its peak includes that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024  # MiB

def run(T):
    q, k, v, b, w = (torch.rand(1, T, 4, 64, requires_grad=True) for _ in "qkvbw")
    g = -torch.rand(1, T, 4, 64)
    o, _ = gated_delta_rule(q, k / 8, v, g, b, w)
    torch.autograd.grad(o.sum(), (q, v, b, w))

run(64)
before = peak()
run(int(sys.argv[1]))
print(peak() - before)
"""


def peak_mib(tokens: int) -> float:
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tokens)], capture_output=True, text=True, check=True
    )
    return float(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_is_linear_in_the_length() -> None:
    """From 8192 to 32768 tokens: four times at most, and 22 times the bytes of one operand.

    Operands, their gradients, output and its gradient are 14 such; states, residuals and two C × C matrices are kept (4
    at width 64); a segment's factors do not grow.
    """
    short, long = peak_mib(8192), peak_mib(32768)
    operand = 32768 * 4 * 64 * 4 / 2**20
    assert long < 4.4 * short, (short, long)
    assert long < 22 * operand, (long, operand)
