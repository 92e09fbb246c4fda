"""Rotations against complex multiplication, token by token."""

import cmath
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.library import opcheck

from gdn2.ops.rotary import (
    apply_rotary,
    cosine_and_sine,
    cumulative_rotation,
    rotary_embedding,
    rotary_table,
    rotate_pairs,
)
from tests.closeness import assert_close

EXACT = 1e-12


def make(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def turn(row: list[float], pairs: list[tuple[int, int]], angles: list[float]) -> list[float]:
    """Multiply each pair of channels, read as a complex number, by exp(i angle)."""
    row = list(row)
    for (i, j), angle in zip(pairs, angles, strict=True):
        z = complex(row[i], row[j]) * cmath.exp(1j * angle)
        row[i], row[j] = z.real, z.imag
    return row


def literal_rotary(x: Tensor, positions: Tensor, base: float) -> Tensor:
    batch, length, heads, dim = x.shape
    half = dim // 2
    pairs = [(i, i + half) for i in range(half)]
    y = torch.empty_like(x)
    for n in range(batch):
        for t in range(length):
            position = int(positions[t] if positions.ndim == 1 else positions[n, t])
            angles = [position * base ** (-2 * i / dim) for i in range(half)]
            for h in range(heads):
                row = turn(x[n, t, h].tolist(), pairs, angles)
                y[n, t, h] = torch.tensor(row, dtype=torch.float64)
    return y


def on_the_circle(theta: Tensor) -> Tensor:
    return torch.stack([theta.double().cos(), theta.double().sin()])


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim"), [(1, 1, 1, 2), (2, 0, 1, 4), (2, 5, 3, 6), (1, 65, 1, 130)]
)
def test_rotary_equals_complex_rotation(
    batch: int, length: int, heads: int, dim: int, base: float
) -> None:
    x = make(batch, length, heads, dim)
    shared = torch.arange(length, dtype=torch.int32) + 3
    own = torch.stack([torch.arange(length) + 7 * n for n in range(batch)])
    for positions in (shared, own):
        y = rotary_embedding(x, positions, base=base)
        assert_close("y", y, literal_rotary(x, positions, base), EXACT)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = make(1, 1, 1, 8), make(1, 1, 1, 8, seed=1)

    def score(i: int, j: int) -> Tensor:
        a, b = (rotary_embedding(x, torch.tensor([p])) for x, p in ((q, i), (k, j)))
        return (a * b).sum()

    assert_close("score", score(100, 63), score(37, 0), EXACT)


def test_tables_are_exact_far_out() -> None:
    positions, dim = [0, 1, 4095, 123457, 999999, 1048576], 8
    with localcontext(prec=60):
        circle = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494")
        rates = [Decimal(10000) ** (Decimal(-2 * i) / dim) for i in range(dim // 2)]
        angles = [[float(p * rate % circle) for rate in rates] for p in positions]
    exact = on_the_circle(torch.tensor(angles, dtype=torch.float64))
    for dtype, tolerance in ((torch.float32, 6e-8), (torch.float64, 1e-9)):
        table = torch.stack(rotary_table(torch.tensor(positions), dim, dtype=dtype))
        assert table.dtype == dtype
        assert float((table - exact).abs().max()) < tolerance


def test_one_table_serves_several_layers() -> None:
    x, positions = make(2, 5, 3, 6), torch.tensor([[0, 1, 2, 0, 1], [9, 10, 11, 12, 13]])
    cos, sin = rotary_table(positions, 6, dtype=torch.float64)
    assert torch.equal(apply_rotary(x, cos, sin), rotary_embedding(x, positions))
    narrow = rotary_table(positions, 6)
    assert_close("fp32 tables", apply_rotary(x, *narrow), apply_rotary(x, cos, sin), 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_once(dtype: torch.dtype) -> None:
    x = make(2, 63, 2, 8).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    theta = make(2, 63, 1, 3).float()
    positions = torch.arange(63)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: rotary_embedding(x, positions),
        lambda x: rotate_pairs(x, theta),
    ]
    for call in calls:
        y, expected = call(x), call(wide)
        assert torch.equal(y, expected.to(dtype))
        dy = make(2, 63, 2, 8, seed=1).to(dtype)
        (dx,), (d_wide,) = (
            torch.autograd.grad(y, x, dy),
            torch.autograd.grad(expected, wide, dy.float()),
        )
        assert torch.equal(dx, d_wide.to(dtype))


def literal_rotation(angles: Tensor, dt: Tensor, initial: Tensor) -> Tensor:
    """One sequence: angles [length, A], dt [length, heads], initial [heads, A]; not reduced."""
    theta, rows = initial, [angles[:0, None] * dt[:0, :, None] + initial]
    for angle, step in zip(angles, dt, strict=True):
        theta = theta + math.pi * torch.tanh(angle) * step[:, None]
        rows.append(theta[None])
    return torch.cat(rows)


@pytest.mark.parametrize("lengths", [[0], [1], [65], [3, 1], [0, 2, 0, 0, 5, 1, 0], [63, 65, 2]])
@pytest.mark.parametrize("packed", [False, True])
def test_rotation_equals_the_recurrence(lengths: list[int], packed: bool) -> None:
    if not packed:
        lengths = lengths[-1:] * 2
    count, total = len(lengths), sum(lengths)
    angles, dt, initial = make(total, 3), make(total, 2, seed=1), 9 * make(count, 2, 3)
    leaves = [t.clone().requires_grad_() for t in (angles, dt, initial)]
    copies = [t.clone().requires_grad_() for t in (angles, dt, initial)]
    batch = 1 if packed else count
    theta = cumulative_rotation(
        leaves[0].reshape(batch, total // batch, 3),
        leaves[1].reshape(batch, total // batch, 2),
        initial_angle=leaves[2],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if packed else None,
    ).reshape(total, 2, 3)
    expected = torch.cat(
        [
            literal_rotation(*rows)
            for rows in zip(
                torch.split(copies[0], lengths),
                torch.split(copies[1], lengths),
                copies[2].unbind(),
                strict=True,
            )
        ]
    )
    assert bool(((theta >= 0) & (theta < 2 * math.pi)).all())
    assert_close("theta", on_the_circle(theta), on_the_circle(expected), EXACT)
    loss, twin = (on_the_circle(t).mul(make(2, total, 2, 3)).sum() for t in (theta, expected))
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    truth = torch.autograd.grad(twin, copies, materialize_grads=True)
    for name, a, b in zip(("angles", "dt", "initial_angle"), grads, truth, strict=True):
        assert_close(f"gradient of {name}", a, b, EXACT)


def test_packed_sequences_equal_separate_ones_bit_by_bit() -> None:
    angles, dt, initial = make(1, 130, 3).float(), make(1, 130, 2).float(), make(2, 2, 3).float()
    cu_seqlens = torch.tensor([0, 65, 130])
    packed = cumulative_rotation(angles, dt, initial_angle=initial, cu_seqlens=cu_seqlens)
    angles[:, :65] = torch.nan
    beside = cumulative_rotation(angles, dt, initial_angle=initial, cu_seqlens=cu_seqlens)
    alone = cumulative_rotation(angles[:, 65:], dt[:, 65:], initial_angle=initial[1:])
    assert torch.equal(packed[:, 65:], alone)
    assert torch.equal(beside[:, 65:], alone)


def test_rotation_continues_from_its_last_angle() -> None:
    angles, dt = make(2, 9, 3), make(2, 9, 4, seed=1)
    whole = cumulative_rotation(angles, dt)
    for split in range(1, 9):
        first = cumulative_rotation(angles[:, :split], dt[:, :split])
        second = cumulative_rotation(angles[:, split:], dt[:, split:], initial_angle=first[:, -1])
        both = torch.cat([first, second], dim=1)
        assert_close("theta", on_the_circle(both), on_the_circle(whole), EXACT)


def test_rotation_stays_exact_over_long_sequences() -> None:
    length = 100_000
    angles, dt = make(1, length, 1).float().abs(), make(1, length, 1, seed=1).float().abs()
    theta = cumulative_rotation(angles, dt)
    steps = [
        math.pi * math.tanh(a) * d
        for a, d in zip(angles.flatten().tolist(), dt.flatten().tolist(), strict=True)
    ]
    ends = [1, 1000, 50_000, 99_999, length]
    exact = torch.tensor([math.fsum(steps[:end]) for end in ends], dtype=torch.float64)
    assert theta.dtype == torch.float32
    assert float(exact[-1]) > 1e5
    actual = theta.flatten()[torch.tensor(ends) - 1]
    assert float((on_the_circle(actual) - on_the_circle(exact)).abs().max()) < 3e-7


@pytest.mark.parametrize(
    ("x_shape", "theta_shape"),
    [((4,), (2,)), ((5,), (2,)), ((6,), (0,)), ((2, 0, 3, 6), (2, 0, 3, 1))]
    + [((2, 5, 3, 7), shape) for shape in ((2, 5, 3, 2), (5, 1, 3), (1, 1, 3, 1), (3,))],
)
def test_pairs_equal_complex_rotation(
    x_shape: tuple[int, ...], theta_shape: tuple[int, ...]
) -> None:
    x, theta = make(*x_shape), 4 * make(*theta_shape, seed=1)
    A = theta_shape[-1]
    pairs = [(2 * i, 2 * i + 1) for i in range(A)]
    expected, angles = x.clone(), theta.expand(*x_shape[:-1], A)
    for place in product(*(range(size) for size in x_shape[:-1])):
        row = turn(x[place].tolist(), pairs, angles[place].tolist())
        expected[place] = torch.tensor(row, dtype=torch.float64)
    y = rotate_pairs(x, theta)
    assert_close("y", y, expected, EXACT)
    assert torch.equal(y[..., 2 * A :], x[..., 2 * A :])


def test_gradcheck() -> None:
    x, theta = make(1, 3, 2, 6).requires_grad_(), make(3, 1, 2).requires_grad_()
    assert gradcheck(rotate_pairs, (x, theta))
    assert gradcheck(lambda x: rotary_embedding(x, torch.arange(3)), (x,))
    angles, dt, initial = (make(1, 4, 2), make(1, 4, 2, seed=1), make(3, 2, 2))
    leaves = tuple(t.requires_grad_() for t in (angles, dt, initial))

    def packed(angles: Tensor, dt: Tensor, initial: Tensor) -> Tensor:
        cu_seqlens = torch.tensor([0, 3, 3, 4])
        return cumulative_rotation(angles, dt, initial_angle=initial, cu_seqlens=cu_seqlens)

    assert gradcheck(packed, leaves)


@pytest.mark.parametrize("cut", [1, 30, 62])
def test_the_future_changes_no_bit(cut: int) -> None:
    angles, dt, x = make(1, 63, 3).float(), make(1, 63, 2).float(), make(1, 63, 2, 8).float()
    results = []
    for future in (0.5, 1e5):
        angles[:, cut:], dt[:, cut:], x[:, cut:] = future, future, future
        theta = cumulative_rotation(angles, dt)
        results.append((theta, rotate_pairs(x, theta), rotary_embedding(x, torch.arange(63))))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:, :cut], after[:, :cut])


def test_operands_may_be_strided() -> None:
    x, angles, dt = make(2, 3, 5, 16)[..., ::2].transpose(1, 2), make(2, 3, 5).mT, make(2, 4, 5).mT
    positions = torch.arange(10)[::2]
    plain = x.contiguous()
    theta = cumulative_rotation(angles, dt)
    expected = cumulative_rotation(angles.contiguous(), dt.contiguous())
    assert_close("theta", theta, expected, EXACT)
    strided = theta[:, :, :3].transpose(2, 3).contiguous().transpose(2, 3)
    assert_close("pairs", rotate_pairs(x, strided), rotate_pairs(plain, theta[:, :, :3]), EXACT)
    expected = rotary_embedding(plain, positions.contiguous())
    assert_close("rotary", rotary_embedding(x, positions), expected, EXACT)


def test_compiles_to_one_graph() -> None:
    x, angles, dt = make(2, 5, 3, 6), make(2, 5, 2), make(2, 5, 3, seed=1)
    leaves = [t.requires_grad_() for t in (x, angles, dt)]
    positions = torch.arange(5)

    def loss(x: Tensor, angles: Tensor, dt: Tensor) -> Tensor:
        y = rotate_pairs(rotary_embedding(x, positions), cumulative_rotation(angles, dt))
        return y.pow(3).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(actual, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert_close("gradient", a, b, EXACT)


X, P, META = torch.zeros(2, 5, 3, 4), torch.arange(5), torch.device("meta")
COS, ANGLES, DT = torch.zeros(5, 2), torch.zeros(2, 5, 2), torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (rotary_embedding, (X[0], P), r"^x is .* \(5, 3, 4\), expected floating point \[batch"),
        (rotary_embedding, (X.long(), P), r"^x is torch\.int64"),
        (rotary_embedding, (X[..., :3], P), r"^x has 3 channels a head, expected a positive even"),
        (rotary_embedding, (X[..., :0], P), r"^x has 0 channels a head"),
        (rotary_embedding, (X, P[:4]), r"^positions has shape \(4,\), expected \(5,\) or \(2, 5\)"),
        (rotary_embedding, (X, P.to(META)), r"^positions is on meta, expected cpu"),
        (rotary_embedding, (X, P.float()), r"^positions is torch\.float32 \(5,\), expected int32"),
        (rotary_table, (P[0], 4), r"^positions is torch\.int64 \(\), expected int32 or int64"),
        (rotary_table, (P, 5), r"^dim is 5, expected a positive even number"),
        (rotary_table, (P, 0), r"^dim is 0, expected a positive even number"),
        (rotary_table, (P, 4, 0.0), r"^base is 0\.0, expected more than 0"),
        (
            rotary_table,
            (P, 4, 1e4, torch.bfloat16),
            r"^dtype is torch\.bfloat16, expected torch\.f",
        ),
        (apply_rotary, (X, COS[:4], COS[:4]), r"^cos is .* \(4, 2\) .* expected .* \(5, 2\)"),
        (apply_rotary, (X, COS, COS[:, :1]), r"^sin is .* \(5, 1\) .* expected .* \(5, 2\)"),
        (apply_rotary, (X, COS[None], COS[None]), r"^cos is .* expected .* \(2, 5, 2\)"),
        (apply_rotary, (X, COS.half(), COS.half()), r"^cos is torch\.float16, expected torch\.f"),
        (cumulative_rotation, (ANGLES[0], DT), r"^angles has shape \(5, 2\) and dt \(2, 5, 3\)"),
        (cumulative_rotation, (ANGLES.int(), DT), r"^angles is torch\.int32"),
        (cumulative_rotation, (ANGLES, DT[:, :4]), r"^dt is .* \(2, 4, 3\) .* \(2, 5, 3\)"),
        (cumulative_rotation, (ANGLES, DT.to(META)), r"^dt is .* on meta"),
        (rotate_pairs, (X.long(), X), r"^x is torch\.int64"),
        (rotate_pairs, (X, X[..., :2].bfloat16()), r"^theta is torch\.bfloat16, expected torch"),
        (rotate_pairs, (X, X[..., :2].to(META)), r"^theta is on meta, expected cpu"),
        (rotate_pairs, (X, X[:, :4, :, :2]), r"^theta has shape \(2, 4, 3, 2\), expected it to"),
        (rotate_pairs, (X, X[None, ..., :2]), r"^theta has shape \(1, 2, 5, 3, 2\), expected"),
        (rotate_pairs, (X, X[..., :3]), r"^theta has 3 angles, expected at most 2"),
    ],
)
def test_bad_operands_are_named(
    function: Callable[..., Tensor], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


def test_bad_starts_are_named() -> None:
    with pytest.raises(ValueError, match=r"^initial_angle is .* \(1, 3, 2\) .* \(2, 3, 2\)"):
        cumulative_rotation(ANGLES, DT, initial_angle=torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match=r"^cu_seqlens was given with a batch of 2"):
        cumulative_rotation(ANGLES, DT, cu_seqlens=torch.tensor([0, 5]))


def test_a_compiler_is_told_what_cosine_and_sine_are() -> None:
    theta = torch.rand(3, 4, dtype=torch.float64)
    for given in (theta, theta.t(), theta[:1].expand(3, 4)):
        opcheck(torch.ops.gdn2.cosine_and_sine, (given,))
    leaf = theta.requires_grad_()
    assert gradcheck(cosine_and_sine, (leaf,))


def test_tangents_of_angles_are_those_of_sine_and_cosine() -> None:
    x, theta = torch.rand(5, 6, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    found = torch.func.jvp(lambda angle: rotate_pairs(x, angle), (theta,), (theta,))[1]
    step = 1e-6
    ends = [rotate_pairs(x, theta * (1 + sign * step)) for sign in (1, -1)]
    assert_close("tangent", found, (ends[0] - ends[1]) / (2 * step), 1e-8)
