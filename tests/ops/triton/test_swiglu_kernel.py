"""The kernel of the activation's gradients, interpreted, against autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from gdn2.ops import swiglu as op
from gdn2.ops.swiglu import swiglu_backward, swiglu_linear
from gdn2.ops.triton import swiglu as kernels
from gdn2.ops.triton.swiglu import swiglu_gradient
from tests.closeness import assert_close

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
NAMES = ("d_gate", "d_up", "h")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a row."""
    monkeypatch.setattr(kernels, "BLOCK", 16)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gate, up and the gradient of their product."""
    rand = torch.Generator().manual_seed(sum(shape))
    return [3 * torch.randn(shape, generator=rand, dtype=torch.float64).to(dtype) for _ in range(3)]


def three(gate: Tensor, up: Tensor, dh: Tensor) -> list[Tensor]:
    """Both gradients, and the product again."""
    both, h = swiglu_gradient(gate, up, dh, again=True)
    assert both.is_contiguous() and h.is_contiguous()
    return [*both.chunk(2, -1), h]


def by_autograd(gate: Tensor, up: Tensor, dh: Tensor) -> list[Tensor]:
    gate, up = leaves = [x.double().requires_grad_() for x in (gate, up)]
    h = silu(gate) * up
    return [*torch.autograd.grad(h, leaves, dh.double()), h.detach()]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7,), (3, 33), (2, 5, 16), (2, 1, 3, 47)], ids=str)
def test_equals_autograd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = draw(*shape, dtype=dtype)
    found = three(*given)
    for name, actual, right in zip(NAMES, found, by_autograd(*given), strict=True):
        assert actual.dtype == dtype
        assert_close(name, actual, right, TOLERANCE[dtype])


@pytest.mark.usefixtures("poison")
def test_the_product_is_made_only_where_it_is_needed() -> None:
    given = draw(2, 5, 16)
    both, h = swiglu_gradient(*given, again=False)
    found, expected = both.chunk(2, -1), by_autograd(*given)[:2]
    for name, actual, right in zip(NAMES[:2], found, expected, strict=True):
        assert_close(name, actual, right, TOLERANCE[actual.dtype])
    assert h.numel() == 0


@pytest.mark.usefixtures("poison")
def test_rows_may_lie_apart() -> None:
    """At distances of their own; columns that lie apart are copied."""
    gate, up, dh = draw(5, 21)
    sides = [torch.full((5, width), torch.nan).double() for width in (42, 30, 23)]
    apart = [side[:, 2:23].copy_(x) for side, x in zip(sides, (gate, up, dh), strict=True)]
    for given in (apart, [gate.T.contiguous().T, up, dh]):
        for name, a, b in zip(NAMES, three(*given), by_autograd(gate, up, dh), strict=True):
            assert_close(name, a, b, 1e-14)


def test_saturated_gates_have_finite_gradients() -> None:
    gate = torch.tensor([[-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]])
    up, dh = torch.full_like(gate, 2.0), torch.full_like(gate, 0.5)
    found = three(gate, up, dh)
    for name, actual, right in zip(NAMES, found, by_autograd(gate, up, dh), strict=True):
        assert torch.allclose(actual.double(), right, rtol=1e-5, atol=1e-30), name


def test_half_types_round_once() -> None:
    """But for bf16, which the interpreter cuts off."""
    for dtype in (torch.bfloat16, torch.float16):
        given = draw(4, 33, dtype=dtype)
        wide = three(*(x.float() for x in given))
        for name, actual, right in zip(NAMES, three(*given), wide, strict=True):
            assert actual.dtype == dtype
            assert_close(name, actual, right.to(dtype), 8e-3 if dtype == torch.bfloat16 else 0.0)


@pytest.mark.usefixtures("poison")
def test_the_operator_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, both ways, where the forward has a kernel of its own."""
    gate, up, dh = draw(2, 3, 33, dtype=torch.float32)
    weight, dy = torch.randn(5, 33), torch.randn(2, 3, 5)
    results = []
    for takes in (False, True):
        monkeypatch.setattr(op, "_kernels_take", lambda x, takes=takes: takes)
        leaves = [x.clone().requires_grad_() for x in (gate, up, weight)]
        y = swiglu_linear(*leaves)
        results.append(
            [y, *torch.autograd.grad(y, leaves, dy), *swiglu_backward(gate, up, dh, True)]
        )
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_close(f"result {i}", a, b, 1e-6)
    assert not all(torch.equal(a, b) for a, b in zip(*results, strict=True))
