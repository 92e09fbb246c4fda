"""The kernels of log-decays, interpreted, against torch and autograd."""

import pytest
import torch
from torch import Tensor

from gdn2.ops import log_decay as op
from gdn2.ops.log_decay import log_decay, log_decay_by_kernel
from gdn2.ops.triton import log_decay as kernels
from tests.closeness import assert_close


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, and tiles in each."""
    for tile in ("TILE", "BACKWARD_TILE"):
        monkeypatch.setattr(kernels, tile, 64)
    monkeypatch.setattr(kernels, "PROGRAMS", 2)


def draw(*shape: int, heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, bias, log-rate and the gradient of g."""
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, shape[-1:], (heads,), (*shape[:-1], heads, shape[-1] // heads))
    drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    wide = torch.promote_types(dtype, torch.float32)
    return [t.to(wide if i == 3 else dtype) for i, t in enumerate(drawn)]


def test_large_speeds_keep_all_digits() -> None:
    x = torch.linspace(-60, 60, 241, dtype=torch.float64)[:, None].requires_grad_()
    g = log_decay(x, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    zero = x.detach().clamp(min=0) + torch.exp(-x.detach().abs()).log1p()
    assert_close("g", -g[..., 0], zero, 1e-15)
    (dx,) = torch.autograd.grad(-g.sum(), x)
    assert_close("dx", dx, x.detach().sigmoid(), 1e-15)


def run(drawn: list[Tensor], kernel: bool) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in drawn[:3]]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(op, "kernels_take", lambda *_: kernel)
        g = log_decay(*leaves)
    return [g.detach(), *torch.autograd.grad(g, leaves, drawn[3])]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("shape", "heads"), [((1, 16), 1), ((2, 3, 40), 2), ((9, 192), 2), ((33, 48), 3)]
)
def test_fp64_equals_torch(shape: tuple[int, ...], heads: int) -> None:
    drawn = draw(*shape, heads=heads)
    for i, (a, b) in enumerate(zip(run(drawn, True), run(drawn, False), strict=True)):
        assert_close(f"result {i}", a, b, 1e-13)


def test_small_and_large_speeds() -> None:
    """Where a logarithm of 1 + eˣ would be that of one, and where eˣ has no end."""
    x = torch.tensor([-80.0, -40.0, -17.0, -7.0, 0.0, 20.0, 90.0, 1e4]).repeat(2)[None]
    given = [x, torch.zeros(16), torch.zeros(1), torch.ones(1, 1, 16)]
    actual = run(given, True)
    expected = run([t.double() for t in given], False)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-6, atol=0.0)


def test_rows_may_lie_apart() -> None:
    drawn = draw(7, 48, heads=3)
    apart = torch.full((7, 64), torch.nan, dtype=torch.float64)[:, 8:56].copy_(drawn[0])
    for a, b in zip(run([apart, *drawn[1:]], True), run(drawn, True), strict=True):
        assert torch.equal(a, b)


def test_half_operands_give_wide_decays() -> None:
    drawn = draw(9, 64, heads=2, dtype=torch.bfloat16)
    found = run(drawn, True)
    assert [t.dtype for t in found] == [torch.float32, *[torch.bfloat16] * 3]
    expected = run([t.double() for t in drawn], False)
    for a, b in zip(found, expected, strict=True):
        assert_close("result", a, b, 1e-6 if a.dtype == torch.float32 else 8e-3)


def test_compiles_to_one_graph() -> None:
    drawn = draw(5, 32, heads=2)
    leaves = [t.detach().requires_grad_() for t in drawn[:3]]
    compiled = torch.compile(log_decay_by_kernel, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(compiled(*leaves), leaves, drawn[3])
    for a, b in zip(grads, run(drawn, False)[1:], strict=True):
        assert_close("gradient", a, b, 1e-13)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((2, 6), (5,), (2,)), r"bias .*\(5,\).*\(6,\)"),
        (((2, 6), (6,), (4,)), "6 channels, expected a multiple of 4 heads"),
        (((2, 6), (6,), (0,)), "6 channels, expected a multiple of 0 heads"),
        (((2, 6), (6,), (2, 1)), "log_rate"),
    ],
)
def test_what_does_not_fit_is_named(shapes: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        log_decay(*(torch.zeros(shape) for shape in shapes))
    with pytest.raises(ValueError, match=r"x is torch.int64 \(4,\), expected floating point"):
        log_decay(torch.zeros(4, dtype=torch.int64), torch.zeros(4), torch.zeros(2))
