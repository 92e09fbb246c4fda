"""The CUDA kernels on a GPU they are for: taken, and equal to the Triton kernels they stand in for."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn2.ops import trust
from gdn2.ops.chunk_op import pack
from gdn2.ops.cuda.launch import takes
from gdn2.ops.operands import Operands
from tests.closeness import relative_error
from tests.gpu.test_kernels import COMPILED, USUAL, exact, on_gpu, run
from tests.ops.cases import Case

KERNELS = ("intra", "gradient")
HOPPER = COMPILED and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]
CASES = {
    "usual": USUAL,
    "128": replace(USUAL, d_k=128, d_v=128),
    "uneven": replace(USUAL, decay="uneven"),
    "mixed": replace(USUAL, decay="mixed"),
    "packed": replace(USUAL, lengths=(1, 63, 64, 65, 130)),
    "one gate a head": replace(USUAL, widths=("full", "one", "one")),
    "no write gate": replace(USUAL, widths=("full", "one", "none")),
    "kept factors": replace(USUAL, recompute=False),
}


def packed(case: Case) -> Operands:
    """The operands as the kernels get them."""
    given: dict[str, Any] = {"b": None, "w": None, **on_gpu(case)}
    del given["initial_state"]
    return pack(**given, scale=1.0)


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is near the equations in fp64, and neither is much further away than the other."""
    case = CASES[name]
    x = packed(case)
    assert all(takes(kernel, x, 64) for kernel in KERNELS)
    expected, ours = exact(case).named(), run(case).named()
    distrusted = dict.fromkeys(KERNELS, "for the test")
    monkeypatch.setitem(trust._known, trust._indexed(torch.device("cuda")), distrusted)
    assert not any(takes(kernel, x, 64) for kernel in KERNELS)
    triton = run(case).named()
    for quantity, y in expected.items():
        error, other = (relative_error(found[quantity], y) for found in (ours, triton))
        assert error <= max(1.3 * other, 2e-3), (quantity, error, other)


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"d_k": 96}, {"chunk_size": 32}])
def test_other_operands_are_left_to_triton(change: dict[str, object]) -> None:
    case = replace(USUAL, **change)  # type: ignore[arg-type]
    assert not takes("gradient", packed(case), case.chunk_size)
