"""The map of a gated activation that keeps only what the activation is made of."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.nn.functional import linear, silu

from gdn2.ops.swiglu import swiglu_backward, swiglu_linear
from tests.closeness import assert_close, relative_error

EXACT = 1e-12
NAMES = ("y", "d_gate", "d_up", "d_weight")
Map = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(*shape: int, outputs: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gate, up, weight and the gradient of the result."""
    rand = torch.Generator().manual_seed(sum(shape))
    shapes = (shape, shape, (outputs, shape[-1]), (*shape[:-1], outputs))
    drawn = [torch.randn(size, generator=rand, dtype=torch.float64).to(dtype) for size in shapes]
    return [3 * drawn[0], *drawn[1:]]


def plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return linear(silu(gate) * up, weight)


def differentiated(map_: Map, gate: Tensor, up: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of all operands."""
    leaves = [x.detach().requires_grad_() for x in (gate, up, weight)]
    y = map_(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    "shape", [(6,), (1, 1), (4, 7), (2, 3, 8), (2, 0, 8), (1, 2, 3, 9)], ids=str
)
def test_equals_the_plain_formula(shape: tuple[int, ...]) -> None:
    drawn = draw(*shape)
    results = differentiated(swiglu_linear, *drawn), differentiated(plain, *drawn)
    for name, actual, expected in zip(NAMES, *results, strict=True):
        assert_close(name, actual, expected, EXACT)


def test_gradcheck() -> None:
    gate, up, weight, _ = (x.requires_grad_() for x in draw(2, 3, 4))
    assert gradcheck(swiglu_linear, (gate, up, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_no_worse_than_autograd(dtype: torch.dtype) -> None:
    drawn = draw(2, 64, 96, outputs=33, dtype=dtype)
    right = differentiated(plain, *(x.double() for x in drawn))
    own, other = (differentiated(f, *drawn) for f in (swiglu_linear, plain))
    for name, a, b, expected in zip(NAMES, own, other, right, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, expected) <= relative_error(b, expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_the_backward_makes_is_rounded_once(dtype: torch.dtype) -> None:
    gate, up, _, _ = draw(5, 33, dtype=dtype)
    dh = draw(5, 33, outputs=33)[3].to(dtype)
    wide = swiglu_backward(gate.float(), up.float(), dh.float(), True)
    for actual, expected in zip(swiglu_backward(gate, up, dh, True), wide, strict=True):
        assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_frozen_operands_get_no_gradient(frozen: tuple[int, ...]) -> None:
    drawn = draw(2, 3, 8)
    expected = differentiated(plain, *drawn)[1:]
    leaves = [x.requires_grad_(i not in frozen) for i, x in enumerate(drawn[:3])]
    y = swiglu_linear(*leaves)
    assert y.requires_grad == (len(frozen) < 3)
    if y.requires_grad:
        y.backward(drawn[3])
    for i, x in enumerate(leaves):
        assert (x.grad is None) == (i in frozen)
        if x.grad is not None:
            assert_close(NAMES[i + 1], x.grad, expected[i], EXACT)


def test_operands_may_be_strided() -> None:
    gate, up, weight, dy = draw(4, 6)
    both = torch.stack([gate, up], -1)
    strided = [both[..., 0], up.T.contiguous().T, weight.T.contiguous().T, dy[:1].expand(4, 5)]
    results = (
        differentiated(swiglu_linear, *strided),
        differentiated(plain, gate, up, weight, strided[3].contiguous()),
    )
    for name, actual, expected in zip(NAMES, *results, strict=True):
        assert_close(name, actual, expected, EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_compiler_is_told_what_the_operator_returns(dtype: torch.dtype) -> None:
    gate, up, _, _ = draw(3, 8, dtype=dtype)
    opcheck(swiglu_backward, (gate, up, up, True))
    opcheck(swiglu_backward, (gate, up, up, False))
    opcheck(swiglu_backward, (gate.T.contiguous().T, up[:, :1].expand(3, 8), up, True))
    images = [torch.zeros(2, 3, 4, 8, dtype=dtype).to(memory_format=torch.channels_last)] * 3
    opcheck(swiglu_backward, (*images, True))


def test_gradients_have_no_gradients_and_say_so() -> None:
    gate, up, weight, _ = (x.requires_grad_() for x in draw(2, 4))
    (d_gate,) = torch.autograd.grad(swiglu_linear(gate, up, weight).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match=r"backward through gdn2\W+swiglu_backward"):
        d_gate.sum().backward()
