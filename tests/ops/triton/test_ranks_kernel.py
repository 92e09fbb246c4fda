"""The kernels of ranks that read each other, interpreted, against torch and autograd."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from gdn2.ops import ranks as op
from gdn2.ops.mamba3 import mamba3
from gdn2.ops.ranks import MOST_RANKS, kernels_take, rank_reads, ranks_by_kernel
from gdn2.ops.triton import ranks as kernels
from tests.closeness import assert_close
from tests.ops.test_mamba3 import draw as draw_mamba3


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads a program, of three: the last has one that is not there."""
    monkeypatch.setattr(kernels, "TILE", 32)


def draw(ranks: int, keys: int, values: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Q, k, v and weight, with several ranks old k, v and weight; and the gradient of o."""
    generator = torch.Generator().manual_seed(ranks)
    lead, heads = (2, 5), 3
    k, v = (*lead, ranks, heads, keys), (*lead, ranks, heads, values)
    old = [] if ranks == 1 else [k, v, (*lead, heads)]
    shapes = [k, k, v, (*lead, heads), *old, v]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    wide = torch.promote_types(dtype, torch.float32)
    return [t.to(wide if t.ndim == 3 else dtype) for t in drawn]


def run(drawn: list[Tensor], kernel: bool) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in drawn[:-1]]
    q, k, v, weight, *old = leaves
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(op, "kernels_take", lambda *_: kernel)
        o = rank_reads(q, k, v, weight, (old[0], old[1], old[2]) if old else None)
    return [o.detach(), *torch.autograd.grad(o, leaves, drawn[-1])]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
@pytest.mark.parametrize(("keys", "values"), [(16, 16), (12, 20), (1, 3)])
def test_fp64_equals_torch(ranks: int, keys: int, values: int) -> None:
    drawn = draw(ranks, keys, values)
    for i, (a, b) in enumerate(zip(run(drawn, True), run(drawn, False), strict=True)):
        assert_close(f"result {i}", a, b, 1e-13)


@pytest.mark.parametrize("ranks", [1, MOST_RANKS])
def test_half_operands_are_rounded_once(ranks: int) -> None:
    drawn = draw(ranks, 16, 16, torch.bfloat16)
    found, expected = run(drawn, True), run([t.double() for t in drawn], False)
    for a, given in zip(found[1:], drawn, strict=False):
        assert a.dtype == given.dtype
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"result {i}", a, b, 4e-3 if a.dtype == torch.bfloat16 else 1e-6)


def test_operands_may_lie_apart() -> None:
    drawn = draw(3, 16, 16)
    apart = [t.mT.contiguous().mT if t.ndim == 5 else t for t in drawn]
    for a, b in zip(run(apart, True), run(drawn, True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [1, 3])
def test_mamba3_is_the_same_by_kernels(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw_mamba3(ranks)
    expected, state = mamba3(*given)
    monkeypatch.setattr(op, "kernels_take", lambda *_: True)
    o, after = mamba3(*given)
    assert not torch.equal(o, expected)  # in another order
    assert_close("o", o, expected, 1e-12)
    assert torch.equal(after.S, state.S)
    assert torch.equal(mamba3(*given, backend="torch")[0], expected)


def test_compiles_to_one_graph() -> None:
    drawn = draw(2, 16, 16)
    leaves = [t.detach().requires_grad_() for t in drawn[:-1]]

    def call(*given: Tensor) -> Tensor:
        o: Tensor = ranks_by_kernel([*given])
        return o

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(compiled(*leaves), leaves, drawn[-1])
    for a, b in zip(grads, run(drawn, False)[1:], strict=True):
        assert_close("gradient", a, b, 1e-13)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_compiler_is_told_what_the_operators_return(ranks: int) -> None:
    *given, do = draw(ranks, 16, 16)
    apart = [t.mT.contiguous().mT if t.ndim == 5 else t for t in given]
    for operands in (given, apart):
        opcheck(torch.ops.gdn2.rank_reads.default, (operands,))
        opcheck(torch.ops.gdn2.rank_reads_backward.default, (do, operands))


def test_flops_are_those_of_torch() -> None:
    drawn = draw(3, 12, 20)
    counts = []
    for kernel in (False, True):
        with FlopCounterMode(display=False) as counter:
            run(drawn, kernel)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_old_operands_are_those_of_several_ranks() -> None:
    q, k, v, weight, *old = draw(3, 16, 16)[:-1]
    with pytest.raises(ValueError, match="old: got None, expected None for one rank alone"):
        rank_reads(q, k, v, weight, None)
    with pytest.raises(ValueError, match="old: got tensors, expected None for one rank alone"):
        rank_reads(q[:, :, :1], k[:, :, :1], v[:, :, :1], weight, (old[0], old[1], old[2]))


def test_what_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "why_not", lambda *_: None)
    for shape in ((1, 1, MOST_RANKS + 1, 1, 16), (1, 1, 1, 1, 257), (1, 0, 1, 1, 16)):
        assert not kernels_take(torch.zeros(shape), torch.zeros(shape))
    assert kernels_take(torch.zeros(1, 1, MOST_RANKS, 1, 16), torch.zeros(1, 1, MOST_RANKS, 1, 16))
