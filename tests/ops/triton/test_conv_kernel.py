"""The kernels of the short convolution, interpreted, against its torch twin and autograd."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops import conv
from gdn2.ops.conv import short_convolution, short_convolution_step
from gdn2.ops.conv_op import convolve, convolve_step
from gdn2.ops.triton import conv_launch as kernels
from tests.closeness import assert_close
from tests.ops.triton.conftest import VARIABLE

EXACT = 1e-12
NAMES = ("y", "final_state", "dx", "dweight", "dbias", "dinitial_state")


@dataclass(frozen=True)
class Case:
    """One call; `lengths` packs."""

    T: int = 9
    channels: int = 12
    width: int = 4
    B: int = 1
    lengths: tuple[int, ...] = ()
    bias: bool = False
    silu: bool = True
    l2_width: int | None = None
    state: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor([0, *self.lengths]).cumsum(0).int() if self.lengths else None

    def draw(self) -> list[Tensor | None]:
        """x, weight, bias and initial state; gradients of output and final state."""
        rand = torch.Generator().manual_seed(self.seed)

        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rand, dtype=torch.float64).to(self.dtype)

        B, T = (1, sum(self.lengths)) if self.lengths else (self.B, self.T)
        C, states = self.channels, (len(self.lengths) or B, self.channels, self.width - 1)
        x, weight, bias, state = new(B, T, C), new(C, self.width), new(C), new(*states)
        dy, d_final = new(B, T, C), new(*states)
        return [x, weight, bias if self.bias else None, state if self.state else None, dy, d_final]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs and segments even for what an interpreter can do in time."""
    changes = {"TILE": 256, "BLOCK": 16, "BACKWARD_TILE": 64, "SEGMENT": 8}
    for name, value in changes.items():
        monkeypatch.setattr(kernels, name, value)


def run(case: Case, drawn: list[Tensor | None] | None = None, kernel: bool = True) -> list[Tensor]:
    """Output, final state and the gradients of what the case has."""
    *operands, dy, d_final = case.draw() if drawn is None else drawn
    leaves = [None if t is None else t.detach().requires_grad_() for t in operands]
    x, weight, bias, state = leaves
    assert x is not None and weight is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(conv, "kernels_take", lambda *_: kernel)
        results = short_convolution(
            x,
            weight,
            bias,
            activation="silu" if case.silu else None,
            l2_width=case.l2_width,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=case.cu_seqlens,
        )
    y, final = results
    assert final is not None and dy is not None and d_final is not None
    present = [t for t in leaves if t is not None]
    outer = [dy.to(y.dtype), d_final.to(final.dtype)]
    grads = torch.autograd.grad([y, final], present, outer, materialize_grads=True)
    return [y.detach(), final.detach(), *grads]


def names(case: Case) -> list[str]:
    has = {"dbias": case.bias, "dinitial_state": case.state}
    return [name for name in NAMES if has.get(name, True)]


def check(case: Case, tolerance: float, exact: torch.dtype | None = None) -> None:
    drawn = case.draw()
    wide = drawn if exact is None else [None if t is None else t.to(exact) for t in drawn]
    actual, expected = run(case, drawn), run(case, wide, kernel=False)
    for name, a, b in zip(names(case), actual, expected, strict=True):
        assert a.dtype == case.dtype
        assert_close(name, a, b, tolerance)


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


# Every length, width, head, bias, state and packing occurs; combinations are spread over them.
CASES = [
    Case(),
    Case(T=0),
    Case(T=3, B=0),
    Case(T=1, B=3, bias=True, l2_width=4),
    Case(T=1, width=2, state=False, l2_width=12),
    Case(T=2, B=2, channels=3, bias=True, l2_width=1),
    Case(T=3, width=1, bias=True),
    Case(T=3, B=2, width=1, l2_width=6, silu=False),
    Case(T=3, channels=1, width=3, silu=False),
    Case(T=63, channels=5, width=3, bias=True, state=False),
    Case(T=65, channels=10, width=4, l2_width=5),
    Case(T=65, channels=33, width=2, bias=True),
    Case(T=5, channels=96, l2_width=48, silu=False),
    Case(T=5, channels=200, l2_width=100, bias=True, width=3),
    Case(T=9, B=2, channels=256, l2_width=128, state=False),
    Case(lengths=(1,), l2_width=4),
    Case(lengths=(0, 0), bias=True),
    Case(lengths=(1, 1, 1, 0, 1), width=4, bias=True, l2_width=6),
    Case(lengths=(0, 5, 1, 0, 17, 2, 0), width=4),
    Case(lengths=(3, 30, 1), width=3, state=False, l2_width=3, bias=True),
    Case(lengths=(2, 63, 1, 4), width=2, channels=20, silu=False),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.usefixtures("poison")
@each_case
def test_fp64_equals_the_twin(case: Case) -> None:
    """And reads nothing that was not written: all memory starts as NaN."""
    check(case, EXACT)


@pytest.mark.parametrize("l2_width", [None, 6])
@pytest.mark.parametrize("lengths", [(), (1, 20, 0, 2)], ids=["dense", "packed"])
def test_fp32_sums(lengths: tuple[int, ...], l2_width: int | None) -> None:
    case = Case(T=40, lengths=lengths, bias=True, l2_width=l2_width, dtype=torch.float32)
    check(case, 2e-6, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_round_once(dtype: torch.dtype) -> None:
    case = Case(T=20, B=2, bias=True, l2_width=6, dtype=dtype)
    check(case, torch.finfo(dtype).eps, torch.float64)  # the interpreter cuts bf16 off


def test_wider_operands_stay_wide() -> None:
    """The state keeps its dtype, and gradients come in that of their operand."""
    x, weight, bias, state, dy, d_final = Case(bias=True, dtype=torch.float32).draw()
    assert x is not None and dy is not None
    drawn = [x.bfloat16(), weight, bias, state, dy.bfloat16(), d_final]
    actual, expected = run(Case(), drawn), run(Case(), drawn, kernel=False)
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert_close(name, a, b, 5e-3 if a.dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("lengths", [(), (4, 1, 14)], ids=["dense", "packed"])
@pytest.mark.parametrize("layout", ["merged", "transposed"])
def test_operands_may_be_strided(layout: str, lengths: tuple[int, ...]) -> None:
    """A slice of a merged projection is read as it lies; channels that are not neighbours are copied."""
    case = Case(T=19, B=2, lengths=lengths, l2_width=6)
    drawn = case.draw()
    x, weight, _, state, dy, d_final = drawn
    assert x is not None and weight is not None and state is not None
    assert dy is not None and d_final is not None
    if layout == "merged":
        strided = torch.full((*x.shape[:2], 40), torch.nan, dtype=x.dtype)[..., 20:32].copy_(x)
    else:
        strided = x.mT.contiguous().mT
    others = [weight.mT.contiguous().mT, None, state.mT.contiguous().mT]
    views = [strided, *others, dy.mT.contiguous().mT, d_final.mT.contiguous().mT]
    assert not strided.is_contiguous()
    for name, a, b in zip(names(case), run(case, views), run(case, drawn), strict=True):
        assert torch.equal(bits(a), bits(b)), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_zero_heads_stay_zero_with_finite_gradients(dtype: torch.dtype) -> None:
    case = Case(T=12, l2_width=6, state=False, dtype=dtype)
    drawn = case.draw()
    assert drawn[0] is not None
    drawn[0][:, 2:9, :6] = 0
    actual, expected = run(case, drawn), run(case, drawn, kernel=False)
    assert torch.equal(actual[0][:, 5:9, :6], torch.zeros(1, 4, 6, dtype=dtype))
    for name, a, b in zip(names(case), actual, expected, strict=True):
        assert_close(name, a, b, EXACT if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("cut", [0, 7, 8, 15])
def test_later_tokens_move_no_bit(cut: int) -> None:
    x, weight, *_ = Case(T=20, dtype=torch.float32).draw()
    assert x is not None and weight is not None
    changed = x.clone()
    changed[:, cut + 1 :] = torch.nan
    options = (None, None, None, True, 4, 1e-6, False)
    y, moved = (convolve(t, weight, *options)[0][:, : cut + 1] for t in (x, changed))
    assert torch.equal(bits(y), bits(moved))


def test_neighbours_move_no_bit() -> None:
    """What one packed sequence holds, even NaN, reaches no other in outputs, states or gradients."""
    case = Case(lengths=(1, 10, 9), l2_width=4, dtype=torch.float32)
    clean, spoiled = case.draw(), case.draw()
    for i, t in enumerate(spoiled):
        if t is not None and i in (0, 4):
            t[:, 1:11] = torch.nan
        elif t is not None and i in (3, 5):
            t[1] = torch.nan
    pairs = zip(run(case, clean), run(case, spoiled), strict=True)
    results = dict(zip(names(case), pairs, strict=True))
    for name in ("y", "dx"):
        a, b = results[name]
        assert torch.equal(bits(a[:, :1]), bits(b[:, :1])), name
        assert torch.equal(bits(a[:, 11:]), bits(b[:, 11:])), name
    for name in ("final_state", "dinitial_state"):
        a, b = results[name]
        assert torch.equal(bits(a[[0, 2]]), bits(b[[0, 2]])), name


def test_two_runs_give_the_same_bits() -> None:
    case = Case(T=40, B=2, bias=True, l2_width=6, dtype=torch.float32)
    for name, a, b in zip(names(case), run(case), run(case), strict=True):
        assert torch.equal(bits(a), bits(b)), name


@pytest.mark.parametrize(
    ("name", "value"),
    [("TILE", 32), ("BLOCK", 4), ("BACKWARD_TILE", 512), ("SEGMENT", 4), ("UNROLL", 8)],
)
@pytest.mark.parametrize("l2_width", [None, 5])
def test_tiles_do_not_matter(
    name: str, value: int, l2_width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, name, value)
    check(Case(lengths=(9, 0, 11), channels=10, bias=True, l2_width=l2_width), EXACT)


def test_tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, "1")
    assert kernels.BLOCK == 128
    check(Case(lengths=(3, 70), channels=130, bias=True), EXACT)


def leaves(case: Case) -> list[Any]:
    *operands, _, _ = case.draw()
    return [None if t is None else t.requires_grad_() for t in operands]


def test_only_what_is_asked_for_has_gradients() -> None:
    """Through the output alone or the final state alone, of all operands or of one."""
    case = Case(T=2, B=2, bias=True)
    *operands, dy, d_final = case.draw()
    options: dict[str, Any] = {"activation": "silu", "output_final_state": True}
    for i_result, outer in enumerate((dy, d_final)):
        for i_operand in range(4):
            grads = []
            for kernel in (True, False):
                given: list[Any] = [None if t is None else t.detach() for t in operands]
                given[i_operand].requires_grad_()
                with pytest.MonkeyPatch.context() as monkeypatch:
                    monkeypatch.setattr(conv, "kernels_take", lambda *_, kernel=kernel: kernel)
                    results = short_convolution(*given[:3], initial_state=given[3], **options)
                one = results[i_result]
                assert one is not None
                if not one.requires_grad:
                    grads.append(torch.zeros(()))
                    continue
                found = torch.autograd.grad(
                    one, given[i_operand], outer, allow_unused=True, materialize_grads=True
                )
                grads.append(found[0])
            zero = torch.zeros_like(operands[i_operand])  # type: ignore[arg-type]
            assert_close(f"{i_result} {i_operand}", grads[0] + zero, grads[1] + zero, EXACT)


@pytest.mark.parametrize(
    ("case", "final"),
    [(Case(T=3, channels=4, bias=True, l2_width=4), True), (Case(lengths=(2, 1)), False)],
    ids=str,
)
def test_the_operator_is_as_torch_demands(case: Case, final: bool) -> None:
    options = (case.cu_seqlens, case.silu, case.l2_width, 1e-6, final)
    torch.library.opcheck(
        torch.ops.gdn2.short_convolution.default, (*leaves(case), *options), rtol=1e-9, atol=1e-9
    )
    y, state = convolve(*leaves(case), *options)
    assert state.shape == (int(final), case.channels, 3)
    assert bool(y.isfinite().all())


def test_compiles_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "kernels_take", lambda *_: True)
    case = Case(T=5, B=2, bias=True, l2_width=6)

    def loss(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        y, final = short_convolution(
            x,
            weight,
            bias,
            activation="silu",
            l2_width=6,
            initial_state=state,
            output_final_state=True,
        )
        assert final is not None
        return y.pow(3).sum() + final.square().sum()

    operands = leaves(case)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*operands), operands)
    monkeypatch.setattr(conv, "kernels_take", lambda *_: False)
    for a, b in zip(actual, torch.autograd.grad(loss(*operands), operands), strict=True):
        assert_close("gradient", a, b, EXACT)


def step(case: Case, state: Tensor, kernel: bool) -> Tensor:
    """Output of a step in place."""
    x, weight, bias, *_ = case.draw()
    assert x is not None and weight is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(conv, "kernels_take", lambda *_: kernel)
        y, after = short_convolution_step(
            x,
            weight,
            bias,
            activation="silu" if case.silu else None,
            l2_width=case.l2_width,
            state=state,
            inplace=True,
        )
    assert after is state
    return y


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("T", [0, 1, 2, 16, 17])
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, bias=True, l2_width=6),
        Case(B=3, channels=33, width=2),
        Case(B=1, width=3, l2_width=4, silu=False),
        Case(B=2, width=1, l2_width=12),
        Case(B=0),
    ],
    ids=str,
)
def test_steps_equal_the_twin(case: Case, T: int) -> None:
    """Also more tokens than a program takes, and states in a pool, whose neighbours keep their bits."""
    case = replace(case, T=T)
    state = case.draw()[3]
    assert state is not None
    pool = torch.stack([state, state + 1], 1)
    expected_state, neighbours = state.clone(), pool[:, 1].clone()
    expected = step(case, expected_state, kernel=False)
    for given in (state, pool[:, 0]):
        version = given._version
        assert_close("y", step(case, given, kernel=True), expected, EXACT)
        assert torch.equal(given, expected_state)
        assert given._version > version
    assert torch.equal(pool[:, 1], neighbours)


def test_several_tokens_are_single_ones() -> None:
    """Decoding repeats the bits of the whole."""
    case = Case(T=7, B=2, bias=True, l2_width=6, dtype=torch.float32)
    x, weight, bias, state, *_ = case.draw()
    assert x is not None and weight is not None and state is not None
    whole, final = run(case)[:2]
    tokens = [convolve_step(t, weight, bias, state, True, 6, 1e-6) for t in x.split(1, 1)]
    assert torch.equal(bits(torch.cat(tokens, 1)), bits(whole))
    assert torch.equal(bits(state), bits(final))


def test_steps_that_need_gradients_or_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the kernel alone; memory that sequences share cannot be updated."""
    monkeypatch.setattr(conv, "kernels_take", lambda *_: True)
    monkeypatch.setattr(conv, "convolve_step", None)
    x, weight, _, state, *_ = Case(T=1, B=2).draw()
    assert x is not None and weight is not None and state is not None
    y, _ = short_convolution_step(x, weight.requires_grad_(), state=state.clone(), inplace=True)
    assert y.requires_grad
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        short_convolution_step(x, weight, state=state[:1].expand(2, -1, -1), inplace=True)


def test_the_step_operator_is_as_torch_demands() -> None:
    x, weight, bias, state, *_ = Case(T=2, B=2, bias=True).draw()
    options = (x, weight, bias, state, True, 4, 1e-6)
    torch.library.opcheck(torch.ops.gdn2.short_convolution_step.default, options)
