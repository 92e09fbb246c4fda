"""The decode kernel, interpreted, against the token loop."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2 import gated_delta_step
from gdn2.ops import rule
from gdn2.ops.reference import token_loop
from gdn2.ops.step_op import step, step_inplace
from gdn2.ops.triton import step as kernel
from tests.closeness import assert_close
from tests.ops.cases import OPERANDS, Case, operands

EXACT = 1e-13
SINGLE = Case(T=1, d_k=20, d_v=12, B=1, heads=(1, 1, 1, 1))


def single(**changes: object) -> Case:
    """One token of one sequence of one head, with changes."""
    return replace(SINGLE, **changes)  # type: ignore[arg-type]


# Every length, width and group of heads occurs; gates are in a test of their own. A token of a program takes 30 ms.
CASES = [
    single(),
    single(T=2, d_k=1, d_v=1),
    single(T=5, d_k=48, d_v=20, heads=(1, 2, 2, 1)),
    single(T=16, d_k=16, d_v=5, erase_range=2.0),
    single(T=2, d_k=100, d_v=48, decay="mixed"),
    single(T=1, d_k=160, d_v=100),
    single(T=1, d_k=256, d_v=160, heads=(1, 2, 1, 2)),
    single(T=1, d_k=1, d_v=256, decay="spiky"),
    single(T=1, d_v=1, B=7, heads=(2, 6, 3, 1)),
    single(T=2, heads=(4, 4, 2, 1), contiguous=False, decay=-200.0),
    single(T=5, d_v=5, B=7, widths=("one", "none", "one"), contiguous=False),
    single(T=0, B=2, heads=(1, 2, 2, 1)),
    single(T=3, B=0),
]
SEVERAL = [
    single(T=16, d_k=48, d_v=5, decay="mixed"),
    single(T=5, B=2, d_v=5, widths=("one", "none", "one")),
    single(T=2, heads=(1, 2, 2, 1), contiguous=False),
]


def arguments(case: Case, scale: float = 0.3) -> tuple[Any, ...]:
    """Operands, scale and state."""
    x = operands(case)
    *given, state = (x.get(n) for n in OPERANDS)
    return *given, scale, state


def exact(given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The token loop in fp64, on operands of their own memory."""
    wide: list[Any] = [x.double().clone() if isinstance(x, Tensor) else x for x in given]
    return token_loop(*wide)


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.contiguous().view({4: torch.int32, 8: torch.int64}[x.itemsize])


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(bits(one), bits(other)), i


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the public function choose the kernel, as it does on a GPU."""
    monkeypatch.setattr(rule, "why_not", lambda *_: None)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_agrees_with_the_loop(case: Case) -> None:
    """And reads nothing that was not written: all memory starts as NaN."""
    given = arguments(case)
    for name, actual, expected in zip(("o", "S"), step(*given), exact(given), strict=True):
        assert_close(name, actual, expected, EXACT)


@pytest.mark.parametrize("widths", list(product(("full", "one"), *[("full", "one", "none")] * 2)))
def test_gates(widths: tuple[str, str, str]) -> None:
    given = arguments(single(T=2, d_v=5, heads=(1, 4, 2, 4), widths=widths, erase_range=2.0))
    for name, actual, expected in zip(("o", "S"), step(*given), exact(given), strict=True):
        assert_close(name, actual, expected, EXACT)


@pytest.mark.parametrize("decay", ["mild", "spiky", "mixed", 0.0, -1.0, -20.0, -200.0])
def test_fp32_holds_for_any_decay(decay: float | str) -> None:
    given = arguments(
        single(T=16, d_k=48, d_v=5, decay=decay, erase_range=2.0, dtype=torch.float32)
    )
    for name, actual, expected in zip(("o", "S"), step(*given), exact(given), strict=True):
        assert actual.dtype == torch.float32
        assert_close(name, actual, expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Output in the operands' dtype, state in fp32, gates in either."""
    given = arguments(single(T=5, dtype=dtype))
    exact_o, exact_state = exact(given)
    for gates in (given[4:6], tuple(x.float() for x in given[4:6])):
        o, state = step(*given[:4], *gates, *given[6:])
        assert (o.dtype, state.dtype) == (dtype, torch.float32)
        assert_close("o", o, exact_o, torch.finfo(dtype).eps / 2 + 1e-6)
        assert_close("state", state, exact_state, 1e-6)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_several_tokens_are_single_ones_bitwise(case: Case, dtype: torch.dtype) -> None:
    *x, scale, state = arguments(replace(case, dtype=dtype))
    whole = step(*x, scale, state)
    outputs = []
    for t in range(case.T):
        o, state = step(*(None if y is None else y[:, t : t + 1] for y in x), scale, state)
        outputs.append(o)
    assert_same_bits(whole, (torch.cat(outputs, 1), state))


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_in_place_gives_the_same_bits(case: Case) -> None:
    *x, scale, state = arguments(case)
    expected = step(*x, scale, state)
    version, address = state._version, state.data_ptr()
    o = step_inplace(*x, scale, state)
    assert_same_bits((o, state), expected)
    assert state._version > version  # autograd knows that it changed
    assert state.data_ptr() == address


def test_views_of_a_projection() -> None:
    """Tokens and channels sliced from one tensor, and a slot of a pool of transposed states."""
    B, T, H, d_k, d_v = 2, 4, 2, 20, 5
    rand = torch.Generator().manual_seed(0)
    sizes = [d_k, d_k, d_v, d_k, d_k, d_v]
    projected = torch.rand(B, T, H * sum(sizes), generator=rand, dtype=torch.float64)
    parts = projected.split([H * size for size in sizes], -1)
    views = [x.unflatten(-1, (H, -1))[:, 1:3] for x in parts]
    views[3] = -views[3]
    assert not any(x.is_contiguous() for x in (*views[:3], *views[4:]))
    pool = torch.rand(B, 3, H, d_v, d_k, generator=rand, dtype=torch.float64)
    state = pool[:, 1].mT  # one layer of a pool, keys contiguous
    kept = pool.clone()
    expected_o, expected_state = exact((*views, 0.3, state))
    o = step_inplace(*views, 0.3, state)
    assert_close("o", o, expected_o, EXACT)
    assert_close("state", state, expected_state, EXACT)
    assert torch.equal(pool[:, [0, 2]], kept[:, [0, 2]])


def test_expanded_operands_are_read_in_one_place() -> None:
    *x, scale, state = arguments(single(T=2, d_k=16))
    given = (*(y.expand(3, -1, 2, -1) for y in x), scale, state.expand(3, 2, -1, -1))
    for name, actual, expected in zip(("o", "S"), step(*given), exact(given), strict=True):
        assert_close(name, actual, expected, EXACT)


def test_neighbours_move_no_bit() -> None:
    """What one sequence holds, even NaN, reaches no other."""
    given = arguments(single(T=2, B=3, heads=(1, 2, 1, 2), dtype=torch.float32))
    clean = step(*given)
    for x in given:
        if isinstance(x, Tensor):
            x[1] = float("nan")
    spoiled = step(*given)
    for one, other in zip(clean, spoiled, strict=True):
        assert torch.equal(bits(one[[0, 2]]), bits(other[[0, 2]]))
        assert bool(other[1].isnan().all())


@pytest.mark.parametrize("value_block", [4, 8, 16, 32, 64, 128])
def test_tiles_do_not_matter(value_block: int) -> None:
    """A channel is summed over keys alone, so its bits do not depend on its neighbours."""
    given = arguments(single(T=2, d_v=100, dtype=torch.float32))
    expected = step(*given)
    final = torch.full_like(given[-1], float("nan"))
    o = kernel.step(*(*given, final, kernel.Tile(value_block, 1)))
    assert_same_bits((o, final), expected)


def test_fewer_heads_get_smaller_tiles() -> None:
    heads = [0, 1, 16, 63, 64, 256, 1024, 8192, 10**6]
    tiles = [kernel.choose_tile(n).value_block for n in heads]
    assert tiles == sorted(tiles)
    assert tiles[:3] == [16, 16, 16]
    assert [least for least, _ in kernel.TILES] == sorted(
        (n for n, _ in kernel.TILES), reverse=True
    )


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("inplace", [False, True])
def test_the_public_function_runs_it(inplace: bool) -> None:
    x: dict[str, Any] = operands(single(T=2, heads=(1, 2, 2, 1), dtype=torch.float32))
    state = x.pop("initial_state")
    expected = step(*x.values(), 20**-0.5, state)
    kept = state.clone()
    o, after = gated_delta_step(**x, state=state, inplace=inplace)
    assert_same_bits((o, after), expected)
    assert (after is state) == inplace
    assert torch.equal(state, after if inplace else kept)
    torch._dynamo.reset()
    compiled = torch.compile(gated_delta_step, fullgraph=True, backend="aot_eager")
    state = kept.clone()
    assert_same_bits(compiled(**x, state=state, inplace=inplace), expected)
    assert torch.equal(state, expected[1] if inplace else kept)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", OPERANDS)
def test_gradients_take_the_loop(name: str) -> None:
    x: dict[str, Any] = operands(single(T=2))
    x[name].requires_grad_()
    given = x[name]
    state = x.pop("initial_state")
    o, after = gated_delta_step(**x, state=state)
    assert o.requires_grad
    (gradient,) = torch.autograd.grad(o.sum() + after.sum(), given)
    assert bool(gradient.isfinite().all())
    with torch.no_grad():
        assert_same_bits(gated_delta_step(**x, state=state), step(*x.values(), 20**-0.5, state))
    inplace_o, _ = gated_delta_step(**x, state=state.detach().clone(), inplace=True)
    assert not inplace_o.requires_grad


@pytest.mark.parametrize("case", [single(), single(T=2, widths=("one", "none", "none"))], ids=str)
def test_operators_are_as_torch_demands(case: Case) -> None:
    given = arguments(case)
    torch.library.opcheck(step, given)
    torch.library.opcheck(step_inplace, given)


def test_inference_tensors_are_taken() -> None:
    given = arguments(single(T=2))
    expected = step(*given)
    with torch.inference_mode():
        state = given[-1].clone()
        assert_same_bits((step_inplace(*given[:-1], state), state), expected)
