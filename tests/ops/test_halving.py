"""Decays, their gradient and the triangular inverse, each against something computed directly."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2.ops.halving import (
    chunk_decays,
    exp_decay,
    first,
    halves,
    quarter,
    second,
    shrink_gradient,
    unit_lower_inverse,
)
from tests.closeness import assert_close
from tests.ops.cases import log_decay

DECAYS: list[float | str] = [
    0.0,
    -1e-6,
    -1e-2,
    -1.0,
    -1.5,
    -20.0,
    -88.0,
    -200.0,
    -1000.0,
    "mild",
    "spiky",
    "mixed",
]


def some_decays(kind: float | str, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rand = torch.Generator().manual_seed(size)
    return log_decay(kind, (2, 3, size, 4), rand).to(dtype)


def span(g: Tensor, start: int, stop: int) -> Tensor:
    """g_{start} + … + g_{stop−1} in fp64, by definition."""
    return g[..., start:stop, :].double().sum(-2)


def assert_decays(name: str, actual: Tensor, logs: Tensor) -> None:
    """Element by element: relative error of a few units, and one more per unit of log-decay."""
    eps, tiny = torch.finfo(actual.dtype).eps, torch.finfo(actual.dtype).tiny
    error = (actual.double() - logs.exp()).abs()
    allowed = eps * (8 + 2 * logs.abs()) * logs.exp() + tiny
    assert bool((error <= allowed).all()), name


@pytest.mark.parametrize("size", [2, 16, 64])
def test_levels_meet_every_pair_once(size: int) -> None:
    met = torch.zeros(size, 1, size)
    for h in halves(size):
        quarter(met, h).add_(1)
    assert torch.equal(met[:, 0], torch.ones(size, size).tril(-1))


def test_halves_and_quarters_are_views() -> None:
    X = torch.arange(8.0 * 3 * 8).view(8, 3, 8)
    for h in (1, 2, 4):
        assert first(X, h, -3).data_ptr() == X.data_ptr()
        for block in range(4 // h):
            rows = slice(2 * h * block + h, 2 * h * block + 2 * h)
            columns = slice(2 * h * block, 2 * h * block + h)
            assert torch.equal(second(X, h, -3)[block], X[rows])
            assert torch.equal(first(X, h, -3)[block], X[columns])
            assert torch.equal(quarter(X, h)[block], X[rows, :, columns])


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decays_are_direct_sums(kind: float | str, dtype: torch.dtype) -> None:
    """Eqs. 18, 41: every factor is the exponential of the log-decays it spans, to rounding."""
    size = 32
    g = some_decays(kind, size, dtype)
    decay = chunk_decays(g)
    for r in range(size):
        assert_decays("gamma", decay.gamma[..., r, :], span(g, 0, r + 1))
        assert_decays("tail", decay.tail[..., r, :], span(g, r + 1, size))
    assert_decays("gamma_C", decay.gamma_C[..., 0, :], span(g, 0, size))
    for h, (rows, columns) in zip(halves(size), decay.levels, strict=True):
        for block in range(size // (2 * h)):
            seam = 2 * h * block + h
            for i in range(h):
                assert_decays("since", rows[..., block, i, :], span(g, seam, seam + i + 1))
                assert_decays("after", columns[..., block, i, :], span(g, seam - h + i + 1, seam))


def factors(kind: float | str, dtype: torch.dtype) -> list[Tensor]:
    decay = chunk_decays(some_decays(kind, 128, dtype))
    return [decay.gamma, decay.tail, decay.gamma_C, *(x for level in decay.levels for x in level)]


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decays_stay_in_range(kind: float | str, dtype: torch.dtype) -> None:
    for x in factors(kind, dtype):
        assert bool(torch.isfinite(x).all())
        assert float(x.min()) >= 0
        assert float(x.max()) <= 1


@pytest.mark.xfail(reason="a product of two normal factors may be subnormal", strict=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decays_are_never_subnormal(dtype: torch.dtype) -> None:
    """Arithmetic on subnormals costs a CPU 35 times as much."""
    for x in (x for kind in DECAYS for x in factors(kind, dtype)):
        assert not bool(((x > 0) & (x < torch.finfo(dtype).tiny)).any())


def test_exp_decay_flushes_what_is_subnormal() -> None:
    g = torch.tensor([0.0, -1.0, -87.0, -87.4, -100.0, -1e4, -torch.inf])
    assert torch.equal(exp_decay(g), torch.tensor([*g[:3].exp(), 0.0, 0.0, 0.0, 0.0]))


def test_gradient_of_the_decays_is_autograds() -> None:
    """The adjoint in the log domain: Σ over all factors x of dx · x, gathered by shrinking."""
    size = 16
    g = some_decays("mild", size).requires_grad_()
    decay = chunk_decays(g.detach())
    rand = torch.Generator().manual_seed(0)

    def weight(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=rand, dtype=x.dtype)

    d_since, d_after = weight(decay.gamma), weight(decay.tail)
    d_levels = [(weight(rows), weight(columns)) for rows, columns in decay.levels]

    direct: list[Tensor] = []
    for r in range(size):
        direct.append((d_since[..., r, :] * span(g, 0, r + 1).exp()).sum())
        direct.append((d_after[..., r, :] * span(g, r + 1, size).exp()).sum())
    for h, (d_rows, d_columns) in zip(halves(size), d_levels, strict=True):
        for block in range(size // (2 * h)):
            seam = 2 * h * block + h
            for i in range(h):
                since, until = span(g, seam, seam + i + 1), span(g, seam - h + i + 1, seam)
                direct.append((d_rows[..., block, i, :] * since.exp()).sum())
                direct.append((d_columns[..., block, i, :] * until.exp()).sum())
    (expected,) = torch.autograd.grad(torch.stack(direct).sum(), g)

    d_since, d_after = d_since * decay.gamma, d_after * decay.tail
    for i, h in reversed(list(enumerate(halves(size)))):
        shrink_gradient(d_since, d_after, h)
        (rows, columns), (d_rows, d_columns) = decay.levels[i], d_levels[i]
        second(d_since, h).add_(d_rows * rows)
        first(d_after, h).add_(d_columns * columns)
    assert_close("dg", d_since, expected, 1e-13)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("correlation", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("erase", [0.5, 1.0, 2.0])
def test_inverse_is_the_inverse(size: int, correlation: float, erase: float) -> None:
    """Eq. 21 with unit keys, from independent to equal, and erase gates up to 2."""
    rand = torch.Generator().manual_seed(size)
    shared, own = (torch.randn(3, n, 16, generator=rand, dtype=torch.float64) for n in (1, size))
    K = F.normalize(correlation * shared + (1 - correlation) * own, dim=-1)
    b = erase * torch.rand(K.shape, generator=rand, dtype=torch.float64)
    eye = torch.eye(size, dtype=torch.float64)
    for gate in (b, torch.full_like(b, erase)):
        T = ((gate * K) @ K.mT).tril(-1)
        expected = torch.linalg.solve_triangular(eye + T, eye.expand_as(T), upper=False)
        assert_close("A", unit_lower_inverse(T), expected, 1e-13)
        assert_close("A in fp32", unit_lower_inverse(T.float()), expected, 1e-5)
        above = unit_lower_inverse(T).triu(1)
        assert not bool(above.any())


def test_inverse_stays_bounded_where_a_neumann_series_does_not() -> None:
    """Equal keys and b = 2: (I + T)⁻¹ has entries of ±2, powers of T reach 1e17 and more."""
    T = torch.full((64, 64), 2.0).tril(-1)
    A = unit_lower_inverse(T)
    assert float(A.abs().max()) == 2.0
    assert torch.equal(A @ (torch.eye(64) + T), torch.eye(64))
    assert float(torch.linalg.matrix_power(T.double(), 32).abs().max()) > 1e17
