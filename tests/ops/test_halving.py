"""Decays, their gradient and the triangular inverse, each against something computed directly."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2.ops.blocks import BLOCK
from gdn2.ops.deep import deep_rows, deep_scores
from gdn2.ops.halving import (
    DecayTree,
    diagonal_blocks,
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

DECAYS: list[float | str] = [0.0, -1e-6, -1e-2, -1.0, -2.5, -5.5, -20.0, -45.0, -88.0, -200.0]
DECAYS += [-1000.0, "mild", "uneven", "spiky", "mixed"]
DTYPES = [torch.float64, torch.float32]


def some_decays(kind: float | str, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rand = torch.Generator().manual_seed(size)
    return log_decay(kind, (2, 3, size, 4), rand).to(dtype)


def grown(g: Tensor) -> tuple[DecayTree, dict[int, tuple[Tensor, Tensor]]]:
    """A tree with all its levels behind it, and copies of their factors."""
    tree = DecayTree(g)
    levels = {h: (rows.clone(), columns.clone()) for h, rows, columns in tree.levels()}
    return tree, levels


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
    met = torch.zeros(size, size)
    for h in halves(size):
        quarter(met, h).add_(1)
    assert torch.equal(met, torch.ones(size, size).tril(-1))


def test_halves_quarters_and_blocks_are_views() -> None:
    X = torch.arange(3 * 8.0 * 8).view(3, 8, 8)
    for h in (1, 2, 4):
        assert first(X, h).data_ptr() == X.data_ptr()
        assert diagonal_blocks(X, 2 * h).data_ptr() == X.data_ptr()
        for block in range(4 // h):
            rows = slice(2 * h * block + h, 2 * h * block + 2 * h)
            columns = slice(2 * h * block, 2 * h * block + h)
            both = slice(2 * h * block, 2 * h * block + 2 * h)
            assert torch.equal(second(X, h)[:, block], X[:, rows])
            assert torch.equal(first(X, h)[:, block], X[:, columns])
            assert torch.equal(quarter(X, h)[:, block], X[:, rows, columns])
            assert torch.equal(diagonal_blocks(X, 2 * h)[:, block], X[:, both, both])


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decays_are_direct_sums(kind: float | str, dtype: torch.dtype) -> None:
    """Eqs. 18, 41: every factor is the exponential of the log-decays it spans, to rounding."""
    size = 64
    g = some_decays(kind, size, dtype)
    tree, levels = grown(g)
    for r in range(size):
        assert_decays("gamma", tree.since[..., r, :], span(g, 0, r + 1))
        assert_decays("tail", tree.after[..., r, :], span(g, r + 1, size))
    assert_decays("gamma_C", tree.part[..., 0, :], span(g, 0, size))
    for h, (rows, columns) in levels.items():
        for block in range(size // (2 * h)):
            seam = 2 * h * block + h
            for i in range(h):
                assert_decays("since", rows[..., block, i, :], span(g, seam, seam + i + 1))
                assert_decays("after", columns[..., block, i, :], span(g, seam - h + i + 1, seam))


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decays_stay_in_range(kind: float | str, size: int, dtype: torch.dtype) -> None:
    tree, levels = grown(some_decays(kind, size, dtype))
    final = [tree.since, tree.after, tree.part]
    for x in (*final, *(x for level in levels.values() for x in level)):
        assert bool(torch.isfinite(x).all())
        assert float(x.min()) >= 0
        assert float(x.max()) <= 1


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_final_decays_are_never_subnormal(size: int, dtype: torch.dtype) -> None:
    """Arithmetic on subnormals costs a CPU 35 times as much."""
    for kind in (*DECAYS, -350.0, -710.0):
        tree, _ = grown(some_decays(kind, size, dtype))
        for x in (tree.since, tree.after, tree.part):
            assert not bool(((x > 0) & (x < torch.finfo(dtype).tiny)).any()), kind


def test_exp_decay_flushes_what_is_subnormal() -> None:
    g = torch.tensor([0.0, -1.0, -87.0, -87.4, -100.0, -1e4, -torch.inf])
    assert torch.equal(exp_decay(g), torch.tensor([*g[:3].exp(), 0.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("size", [16, BLOCK])
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_direct_sums(kind: float | str, size: int, dtype: torch.dtype) -> None:
    """Eqs. 21, 25: Σ_c x_rc exp(g_{s+1} + … + g_r)_c k_sc of every pair, by definition, each to its own precision."""
    rand = torch.Generator().manual_seed(1)
    g = some_decays(kind, size, dtype).flatten(0, 1)
    X = torch.randn(2, *g.shape, generator=rand, dtype=torch.float64).to(dtype)
    K = torch.randn(g.shape, generator=rand, dtype=torch.float64).to(dtype)
    f = deep_rows(X, K, g, torch.zeros(*g.shape[:-1], 1, dtype=torch.bool))
    r, s, t = (torch.arange(size).view(shape) for shape in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    spans = ((t > s) & (t <= r)).double()
    logs = torch.einsum("rst,ntd->nrsd", spans, g.double())
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for reader, mask in ((0, torch.ones(size, size).tril()), (1, torch.ones(size, size).tril(-1))):
        pairs = X[reader].double().unsqueeze(2) * K.double().unsqueeze(1)
        terms = pairs * logs.exp()
        allowed = (eps * (200 + 8 * logs.abs()) * terms.abs() + tiny * pairs.abs()).sum(-1)
        actual = deep_scores(f, reader)
        error = (actual.double() - terms.sum(-1) * mask).abs()
        assert bool((error <= allowed).all()), reader
        assert not bool(actual.triu(1).any()), reader


def test_gradient_of_the_decays_is_autograds() -> None:
    """The adjoint in the log domain: Σ over all factors x of dx · x, gathered by shrinking."""
    size = 32
    g = some_decays("uneven", size).requires_grad_()
    tree, levels = grown(g.detach())
    assert [*levels] == [*halves(size)]
    rand = torch.Generator().manual_seed(0)

    def weight(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=rand, dtype=x.dtype)

    d_since, d_after = weight(tree.since), weight(tree.after)
    d_levels = {h: (weight(rows), weight(columns)) for h, (rows, columns) in levels.items()}

    direct: list[Tensor] = []
    for r in range(size):
        direct.append((d_since[..., r, :] * span(g, 0, r + 1).exp()).sum())
        direct.append((d_after[..., r, :] * span(g, r + 1, size).exp()).sum())
    for h, (d_rows, d_columns) in d_levels.items():
        for block in range(size // (2 * h)):
            seam = 2 * h * block + h
            for i in range(h):
                since, until = span(g, seam, seam + i + 1), span(g, seam - h + i + 1, seam)
                direct.append((d_rows[..., block, i, :] * since.exp()).sum())
                direct.append((d_columns[..., block, i, :] * until.exp()).sum())
    (expected,) = torch.autograd.grad(torch.stack(direct).sum(), g)

    d_since, d_after = d_since * tree.since, d_after * tree.after
    for h in reversed([*halves(size)]):
        shrink_gradient(d_since, d_after, h)
        (rows, columns), (d_rows, d_columns) = levels[h], d_levels[h]
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
