"""The kernels of RMS normalisation, interpreted, against their torch twins and autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops import norm
from gdn2.ops.norm import GateActivation, add_rms_norm, gated_rms_norm, rms_norm
from gdn2.ops.norm_op import add_normalize, normalize
from gdn2.ops.triton import norm as kernels
from tests.closeness import assert_close

EXACT = 1e-12
SHAPES = [(1,), (5,), (0, 3), (3, 1), (2, 3, 63), (2, 1, 65), (1, 4, 2, 48), (3, 100), (9, 128)]
Gating = tuple[GateActivation, bool] | None
GATINGS: list[Gating] = [None, ("silu", False), ("sigmoid", False), ("silu", True)]
GATINGS += [("sigmoid", True)]
each_gating = pytest.mark.parametrize("gating", GATINGS, ids=str)


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, gate, weight and the gradient of the output."""
    sizes = (shape, shape, shape[-1:], shape)
    return [make(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


def run(drawn: list[Any], gating: Gating, eps: float = 1e-5, kernel: bool = True) -> list[Tensor]:
    """Output and gradients of x, weight and, where there is one, gate."""
    *operands, dy = drawn
    x, gate, weight = (None if t is None else t.detach().requires_grad_() for t in operands)
    assert x is not None and gate is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(norm, "kernels_take", lambda *_: kernel)
        if gating is None:
            y = rms_norm(x, weight, eps)
        else:
            activation, first = gating
            y = gated_rms_norm(x, gate, weight, eps, activation=activation, gate_first=first)
    leaves = [t for t in (x, weight, None if gating is None else gate) if t is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def compare(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(f"result {i}", a, b, tolerance)


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def small(monkeypatch: pytest.MonkeyPatch, tile: int, programs: int) -> None:
    names = {"TILE": tile, "BACKWARD_TILE": tile, "PROGRAMS": programs, "MORE_PROGRAMS": programs}
    for name, value in names.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, tiles in each, and rows in a tile, even for what an interpreter can do in time."""
    small(monkeypatch, 256, 2)


@pytest.mark.usefixtures("poison")
@each_gating
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp64_equals_the_twin(shape: tuple[int, ...], gating: Gating) -> None:
    """And reads nothing that was not written: all memory starts as NaN."""
    drawn = draw(
        shape
    )  # with the usual eps the gradient of a row of one cancels to its last digits
    compare(run(drawn, gating, 0.1), run(drawn, gating, 0.1, kernel=False), EXACT)


@pytest.mark.usefixtures("poison")
@each_gating
def test_weights_are_optional_and_eps_is_heard(gating: Gating) -> None:
    drawn = draw((5, 20))
    drawn[2] = None  # type: ignore[call-overload]
    compare(run(drawn, gating, 0.3), run(drawn, gating, 0.3, kernel=False), EXACT)


@each_gating
def test_fp32_sums(gating: Gating) -> None:
    drawn = draw((7, 100), torch.float32)
    expected = run([t.double() for t in drawn], gating, kernel=False)
    compare(run(drawn, gating), expected, 1e-6)


@each_gating
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_round_once(dtype: torch.dtype, gating: Gating) -> None:
    """Also where squares exceed what fp16 holds."""
    for scale in (1.0, 1e4):
        drawn = draw((7, 65), dtype)
        drawn[0] *= scale
        actual = run(drawn, gating)
        expected = run([t.double() for t in drawn], gating, kernel=False)
        assert all(t.dtype == dtype for t in actual)
        # As far as the dtype can hold it: fp16 has nothing below 6e-8. The interpreter cuts bf16 off.
        compare(actual, [t.to(dtype) for t in expected], torch.finfo(dtype).eps)


def test_wider_operands_stay_wide() -> None:
    x, gate, weight, dy = draw((5, 65), torch.float32)
    drawn = [x.bfloat16(), gate, weight, dy.bfloat16()]
    actual = run(drawn, ("silu", False))
    expected = run([t.double() for t in drawn], ("silu", False), kernel=False)
    assert [t.dtype for t in actual] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for a, b in zip(actual, expected, strict=True):
        assert_close("result", a, b, 5e-3 if a.dtype == torch.bfloat16 else 1e-6)


@each_gating
def test_zero_rows_stay_zero_with_finite_gradients(gating: Gating) -> None:
    drawn = draw((6, 20))
    drawn[0][2] = 0
    actual = run(drawn, gating)
    assert torch.equal(actual[0][2], torch.zeros(20, dtype=torch.float64))
    compare(actual, run(drawn, gating, kernel=False), EXACT)


def test_other_rows_move_no_bit() -> None:
    clean, spoiled = draw((9, 65), torch.float32), draw((9, 65), torch.float32)
    for i in (0, 1, 3):
        spoiled[i][4:] = torch.nan
    y, dx, _, d_gate = run(clean, ("silu", False))
    z, dz, _, d_other = run(spoiled, ("silu", False))
    for a, b in ((y, z), (dx, dz), (d_gate, d_other)):
        assert torch.equal(bits(a[:4]), bits(b[:4]))


@pytest.mark.parametrize("layout", ["merged", "heads", "transposed"])
def test_operands_may_be_strided(layout: str) -> None:
    """Rows that lie evenly apart are read as they lie, others are copied."""
    drawn = draw((2, 3, 2, 20))

    def strided(t: Tensor) -> Tensor:
        if t.ndim == 1:
            return torch.stack([t, t], -1)[:, 0]
        if layout == "transposed":
            return t.mT.contiguous().mT
        wide = torch.full((2, 3, 3, 32), torch.nan, dtype=t.dtype)
        return (wide[:, :, :2, 5:25] if layout == "heads" else wide[:, :, 0:2, :20]).copy_(t)

    views = [strided(t) for t in drawn]
    assert not any(t.is_contiguous() for t in views)
    for a, b in zip(run(views, ("silu", False)), run(drawn, ("silu", False)), strict=True):
        assert torch.equal(bits(a), bits(b))
    rows = torch.full((4, 3, 32), torch.nan, dtype=torch.float64)[..., 4:24]
    assert kernels.matrix(rows).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(("tile", "programs"), [(1, 1), (64, 3), (4096, 1024)])
def test_tiles_do_not_matter(tile: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, tile, programs)
    drawn = draw((3, 5, 20))
    compare(run(drawn, ("silu", False)), run(drawn, ("silu", False), kernel=False), EXACT)


def test_rows_as_wide_as_a_model() -> None:
    drawn = draw((3, 2304))
    compare(run(drawn, None), run(drawn, None, kernel=False), EXACT)


def test_two_runs_give_the_same_bits() -> None:
    drawn = draw((40, 20), torch.float32)
    pairs = zip(run(drawn, ("silu", True)), run(drawn, ("silu", True)), strict=True)
    assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)


@pytest.mark.parametrize("gate_first", [False, True])
def test_the_operator_is_as_torch_demands(gate_first: bool) -> None:
    x, gate, weight = (t.requires_grad_() for t in draw((2, 3, 5))[:3])
    for operands in ((x, gate, weight), (x, None, weight), (x, gate, None)):
        options = (*operands, 1e-5, True, gate_first)
        torch.library.opcheck(
            torch.ops.gdn2.rms_norm.default,
            options,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
    torch.library.opcheck(
        torch.ops.gdn2.rms_norm.default, (x, gate, weight, 1e-5, True, gate_first)
    )
    y, rstd = normalize(x, None, None, 1e-5, False, False)
    assert_close("rstd", rstd, (x.square().mean(-1) + 1e-5).rsqrt().flatten(), EXACT)
    assert_close("y", y, x * rstd.view(2, 3, 1), EXACT)


def test_compiles_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = [t.requires_grad_() for t in draw((3, 5))[:3]]

    def loss(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return (gated_rms_norm(rms_norm(x), gate, weight) + rms_norm(gate, weight)).pow(3).sum()

    monkeypatch.setattr(norm, "kernels_take", lambda *_: True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*operands), operands)
    monkeypatch.setattr(norm, "kernels_take", lambda *_: False)
    for a, b in zip(actual, torch.autograd.grad(loss(*operands), operands), strict=True):
        assert_close("gradient", a, b, EXACT)


def run_sum(operands: list[Tensor], used: str, kernel: bool = True) -> list[Tensor]:
    """A sum and its norm, and the gradients of what was added and of the weight where both are used, or one."""
    x, delta, weight = (t.detach().requires_grad_() for t in operands[:3])
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(norm, "kernels_take", lambda *_: kernel)
        found = dict(zip(("sum", "norm"), add_rms_norm(x, delta, weight, 0.1), strict=True))
    uses = {"both": ("sum", "norm")}.get(used, (used,))
    weights = dict(zip(("sum", "norm"), operands[3:], strict=True))
    leaves = [x, delta, weight] if used != "sum" else [x, delta]
    grads = torch.autograd.grad([found[n] for n in uses], leaves, [weights[n] for n in uses])
    return [*(t.detach() for t in found.values()), *grads]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("used", ["both", "sum", "norm"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 63), (9, 128), (0, 3)], ids=str)
def test_a_sum_and_its_norm(shape: tuple[int, ...], used: str) -> None:
    """What a sum gets where it is passed on is added to what its norm gives it."""
    sizes = (shape, shape, shape[-1:], shape, shape)
    drawn = [make(*size, seed=i) for i, size in enumerate(sizes)]
    compare(run_sum(drawn, used), run_sum(drawn, used, kernel=False), EXACT)


def test_what_is_passed_on_may_be_strided() -> None:
    drawn = [make(6, 20, seed=i) if i != 2 else make(20) for i in range(5)]
    views = [*drawn[:3], *(torch.stack([t, t], -1)[..., 0] for t in drawn[3:])]
    compare(run_sum(views, "both"), run_sum(drawn, "both"), 1e-300)


def test_sums_are_differentiated_when_compiled() -> None:
    drawn = [make(6, 20, seed=i) if i != 2 else make(20) for i in range(5)]
    leaves = [t.detach().requires_grad_() for t in drawn[:3]]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total, y, _ = add_normalize(x, delta, weight, 0.1)
        return total, y

    grads = torch.autograd.grad(compiled(*leaves), leaves, drawn[3:])
    compare(list(grads), run_sum(drawn, "both", kernel=False)[2:], EXACT)
