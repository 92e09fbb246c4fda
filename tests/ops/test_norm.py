"""The norms against literal arithmetic on one row at a time."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from gdn2.ops.norm import GateActivation, gated_rms_norm, l2_normalize, rms_norm
from tests.closeness import assert_close

EXACT = 1e-12
SHAPES = [(1,), (5,), (0, 3), (3, 1), (2, 63, 65), (1, 4, 2, 130)]


def make(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def by_rows(function: Callable[..., list[float]], *operands: Tensor) -> Tensor:
    """Call the function on each row of the operands as lists of floats."""
    shape = operands[0].shape
    rows = (t.reshape(-1, shape[-1]).tolist() for t in operands)
    values = [function(*row) for row in zip(*rows, strict=True)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def rms(x: list[float], weight: list[float], eps: float) -> list[float]:
    root = math.sqrt(math.fsum(value * value for value in x) / len(x) + eps)
    return [value / root * w for value, w in zip(x, weight, strict=True)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_the_definition(shape: tuple[int, ...], eps: float) -> None:
    x, weight = make(*shape), make(shape[-1], seed=1)
    plain = by_rows(lambda row: rms(row, [1.0] * len(row), eps), x)
    weighted = by_rows(lambda row: rms(row, weight.tolist(), eps), x)
    assert_close("without weight", rms_norm(x, eps=eps), plain, EXACT)
    assert_close("with weight", rms_norm(x, weight, eps), weighted, EXACT)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm_equals_the_definition(
    shape: tuple[int, ...], activation: GateActivation, gate_first: bool
) -> None:
    x, gate, weight = make(*shape), make(*shape, seed=1), make(shape[-1], seed=2)

    def literal(x: list[float], gate: list[float]) -> list[float]:
        gain = [sigmoid(z) * (z if activation == "silu" else 1) for z in gate]
        if gate_first:
            return rms([a * b for a, b in zip(x, gain, strict=True)], weight.tolist(), 1e-5)
        return [a * b for a, b in zip(rms(x, weight.tolist(), 1e-5), gain, strict=True)]

    actual = gated_rms_norm(x, gate, weight, activation=activation, gate_first=gate_first)
    assert_close("gated", actual, by_rows(literal, x, gate), EXACT)


@pytest.mark.parametrize("shape", SHAPES)
def test_l2_norm_equals_the_definition(shape: tuple[int, ...]) -> None:
    def literal(x: list[float]) -> list[float]:
        root = math.sqrt(math.fsum(value * value for value in x) + 1e-6)
        return [value / root for value in x]

    x = 1e-2 * make(*shape)
    assert_close("normalised", l2_normalize(x), by_rows(literal, x), EXACT)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gradcheck(activation: GateActivation, gate_first: bool) -> None:
    x, gate, weight = (t.requires_grad_() for t in (make(2, 3), make(2, 3, seed=1), make(3)))

    def gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, weight, activation=activation, gate_first=gate_first)

    assert gradcheck(gated, (x, gate, weight))
    assert gradcheck(rms_norm, (x, weight))
    assert gradcheck(rms_norm, (x,))
    assert gradcheck(l2_normalize, (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_rows_stay_zero_with_finite_gradients(dtype: torch.dtype) -> None:
    x = make(3, 4).to(dtype)
    x[1] = 0
    x.requires_grad_()
    dy = torch.full_like(x, 0.5)
    for norm, gain in ((l2_normalize, 1e3), (rms_norm, 1e5**0.5)):
        y = norm(x)
        assert torch.equal(y[1], torch.zeros_like(y[1]))
        (dx,) = torch.autograd.grad(y, x, dy)
        assert bool(torch.isfinite(dx).all())
        expected = 0.5 * gain * torch.ones(4)
        assert_close("gradient of the zero row", dx[1], expected, max(1e-7, torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2e4])
def test_half_types_round_once(dtype: torch.dtype, scale: float) -> None:
    # At the larger scale the squares exceed what fp16 holds.
    x, gate, weight = (scale * make(5, 65), make(5, 65, seed=1), make(65))
    halves = [t.to(dtype).requires_grad_() for t in (x, gate, weight)]
    floats = [t.detach().float().requires_grad_() for t in halves]
    dy = make(5, 65, seed=2).to(dtype)
    calls: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda x, gate, weight: rms_norm(x, weight),
        gated_rms_norm,
        lambda x, gate, weight: gated_rms_norm(x, gate, weight, gate_first=True),
        lambda x, gate, weight: l2_normalize(x),
    ]
    for call in calls:
        y, expected = call(*halves), call(*floats)
        assert torch.equal(y, expected.to(dtype))
        grads = torch.autograd.grad(y, halves, dy, materialize_grads=True)
        wide = torch.autograd.grad(expected, floats, dy.float(), materialize_grads=True)
        for name, a, b in zip(("x", "gate", "weight"), grads, wide, strict=True):
            assert torch.equal(a, b.to(dtype)), name


def test_a_wide_weight_is_not_rounded() -> None:
    x, weight = make(5, 65).bfloat16(), make(65).float()
    assert torch.equal(rms_norm(x, weight), rms_norm(x.float(), weight).bfloat16())
    gate = make(5, 65, seed=1).float()
    expected = gated_rms_norm(x.float(), gate, weight).bfloat16()
    assert torch.equal(gated_rms_norm(x, gate, weight), expected)


def test_other_rows_change_no_bit() -> None:
    x, gate = make(1, 9, 65).float(), make(1, 9, 65, seed=1).float()
    changed, other = x.clone(), gate.clone()
    changed[:, 4:], other[:, 4:] = torch.nan, torch.nan
    assert torch.equal(rms_norm(x)[:, :4], rms_norm(changed)[:, :4])
    assert torch.equal(l2_normalize(x)[:, :4], l2_normalize(changed)[:, :4])
    assert torch.equal(gated_rms_norm(x, gate)[:, :4], gated_rms_norm(changed, other)[:, :4])


def test_operands_may_be_strided() -> None:
    x, gate = make(65, 3).mT, make(3, 130, seed=1)[:, ::2]
    weight = make(130)[::2]
    expected = gated_rms_norm(x.contiguous(), gate.contiguous(), weight.contiguous())
    assert_close("gated", gated_rms_norm(x, gate, weight), expected, EXACT)
    assert_close("rms", rms_norm(x), rms_norm(x.contiguous()), EXACT)
    assert_close("l2", l2_normalize(gate), l2_normalize(gate.contiguous()), EXACT)


def test_compiles_to_one_graph() -> None:
    operands = [t.requires_grad_() for t in (make(3, 5), make(3, 5, seed=1), make(5))]

    def loss(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        y = gated_rms_norm(l2_normalize(x), gate, weight) + rms_norm(gate, weight)
        return y.pow(3).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*operands), operands)
    for a, b in zip(actual, torch.autograd.grad(loss(*operands), operands), strict=True):
        assert_close("gradient", a, b, EXACT)


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (rms_norm, (X.long(),), r"^x is torch\.int64 \(2, 3\), expected floating point"),
        (rms_norm, (torch.zeros(()),), r"^x is torch\.float32 \(\), expected"),
        (rms_norm, (X, torch.zeros(2)), r"^weight is .* \(2,\) on cpu, expected .* \(3,\) on cpu"),
        (rms_norm, (X, torch.zeros(3).int()), r"^weight is torch\.int32"),
        (rms_norm, (X, torch.zeros(3, device="meta")), r"^weight is .* on meta"),
        (rms_norm, (X, None, 0.0), r"^eps is 0\.0, expected more than 0"),
        (rms_norm, (X, None, math.nan), r"^eps is nan, expected more than 0"),
        (l2_normalize, (X.bool(),), r"^x is torch\.bool"),
        (l2_normalize, (X, -1.0), r"^eps is -1\.0, expected more than 0"),
        (gated_rms_norm, (X, X[:1]), r"^gate is .* \(1, 3\) .* expected .* \(2, 3\)"),
        (gated_rms_norm, (X, X.to("meta")), r"^gate is .* on meta"),
        (gated_rms_norm, (X, X, X), r"^weight is .* \(2, 3\) .* expected .* \(3,\)"),
    ],
)
def test_bad_operands_are_named(
    function: Callable[..., Tensor], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_activation_is_named() -> None:
    wrong: Any = "relu"
    with pytest.raises(ValueError, match=r"^activation is 'relu', expected one of \['silu', 's"):
        gated_rms_norm(X, X, activation=wrong)
