"""The kernel of sums of squares, interpreted, beside torch in fp64; what it does not take is torch's."""

import pytest
import torch
from torch import Tensor

from gdn2.ops import squares as op
from gdn2.ops.squares import kernel_takes, sum_of_squares
from gdn2.ops.triton import squares as kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "PART", 16)


def draw(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


def exact(tensors: list[Tensor]) -> float:
    return sum(float(x.double().square().sum()) for x in tensors)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("by_kernel", [True, False])
def test_all_tensors_are_summed(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "kernel_takes", lambda tensors: by_kernel)
    tensors = [*draw(1, 15, 16, 63, 64, 65, 0, 200), *(x.bfloat16() for x in draw(7, 130))]
    found = sum_of_squares(tensors, CPU)
    assert found.dtype == torch.float32 and found.ndim == 0
    assert float(found) == pytest.approx(exact(tensors), rel=1e-6)
    assert float(sum_of_squares([], CPU)) == 0


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_seen(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "kernel_takes", lambda tensors: True)
    tensors = draw(70, 70)
    tensors[1][69] = wrong
    assert not sum_of_squares(tensors, CPU).isfinite()


def test_which_tensors_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = draw(64)
    assert not kernel_takes([x])  # on a CPU
    monkeypatch.setattr(op, "why_not", lambda *_, **__: None)
    assert kernel_takes([x, x]) and kernel_takes([x.bfloat16()])
    for other in (x.half(), x.double(), x[::2], x[1:]):
        assert not kernel_takes([other])
    assert not kernel_takes([x, x[1:]])


def test_a_kernel_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: list[Tensor]) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(op, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(op, "_failed", set())
    monkeypatch.setattr(kernels, "sum_of_squares", fail)
    tensors = draw(7, 64)
    with pytest.warns(UserWarning, match="leaves sums of squares to torch: no compiler"):
        found = sum_of_squares(tensors, CPU)
    assert float(found) == pytest.approx(exact(tensors), rel=1e-6)
    assert float(sum_of_squares(tensors, CPU)) == float(found)
