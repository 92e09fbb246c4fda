"""Decoding from a state against the whole operator that continues it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2 import gated_delta_step
from tests.closeness import assert_close
from tests.ops.cases import Case, operands, rule

EXACT = 1e-13


def step(x: dict[str, Any], state: Tensor, inplace: bool = False) -> tuple[Tensor, Tensor]:
    return gated_delta_step(**x, state=state, inplace=inplace)


def tokens(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: y for n, y in x.items() if n != "initial_state"}


def stepped(x: dict[str, Tensor], sizes: list[int], inplace: bool = False) -> tuple[Tensor, Tensor]:
    """Feed the tokens in pieces of these sizes, from the initial state on."""
    state = x["initial_state"].clone() if inplace else x["initial_state"]
    outputs = []
    for pieces in zip(*(y.split(sizes, 1) for y in tokens(x).values()), strict=True):
        o, state = step(dict(zip(tokens(x), pieces, strict=True)), state, inplace)
        outputs.append(o)
    return torch.cat(outputs, 1), state


CASES = [
    Case(T=7),
    Case(T=7, d_k=5, d_v=3, heads=(2, 6, 3, 1), decay="mixed", erase_range=2.0),
    Case(T=7, heads=(1, 4, 4, 2), widths=("one", "one", "one")),
    Case(T=7, widths=("full", "none", "full")),
    Case(T=7, widths=("full", "full", "none"), contiguous=False),
    Case(T=7, widths=("one", "none", "none")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sizes", [[1] * 7, [7], [3, 1, 0, 3]], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_steps_continue_the_rule(case: Case, sizes: list[int], inplace: bool) -> None:
    x = operands(case)
    o, state = stepped(x, sizes, inplace)
    expected_o, expected_state = rule(x, backend="torch", chunk_size=16)
    assert_close("o", o, expected_o, EXACT)
    assert_close("state", state, expected_state, EXACT)


def test_decoding_goes_on_where_a_prefix_ended() -> None:
    x = operands(Case(T=70, heads=(1, 2, 2, 1)))
    whole, _ = rule(x, chunk_size=16)
    prefix = {n: y if n == "initial_state" else y[:, :65] for n, y in x.items()}
    _, state = rule(prefix, chunk_size=16)
    rest = {n: y[:, 65:] for n, y in tokens(x).items()}
    o, _ = stepped({**rest, "initial_state": state}, [1, 3, 1])
    assert_close("o", o, whole[:, 65:], EXACT)


def test_inplace_overwrites_the_given_state() -> None:
    x = operands(Case(T=2, heads=(1, 2, 2, 1), dtype=torch.float32))
    given, before = x["initial_state"], x["initial_state"].clone()
    address, others = given.data_ptr(), {n: y.clone() for n, y in tokens(x).items()}
    o, state = step(tokens(x), given)
    assert torch.equal(given, before)
    assert state.data_ptr() != address
    inplace_o, inplace_state = step(tokens(x), given, inplace=True)
    assert inplace_state is given
    assert given.data_ptr() == address
    assert not torch.equal(given, before)
    assert_close("o", inplace_o, o, 1e-6)
    assert_close("state", given, state, 1e-6)
    for name, y in tokens(x).items():
        assert torch.equal(y, others[name]), name


def test_inplace_writes_through_a_view() -> None:
    """A slot of a larger cache is a view; its neighbours keep their bits."""
    x = operands(Case(T=1, B=1))
    cache = torch.randn(3, *x["initial_state"].shape[1:], dtype=torch.float64)
    kept = cache.clone()
    cache[1:2] = x["initial_state"]
    step(tokens(x), cache[1:2], inplace=True)
    _, expected = step(tokens(x), x["initial_state"])
    assert_close("state", cache[1:2], expected, EXACT)
    assert torch.equal(cache[[0, 2]], kept[[0, 2]])


def test_gradients_flow_out_of_place() -> None:
    x = {n: y.requires_grad_() for n, y in operands(Case(T=5, heads=(1, 2, 2, 1))).items()}
    results = []
    forms: list[Callable[[], tuple[Tensor, Tensor]]] = [
        lambda: stepped(x, [1, 3, 1]),
        lambda: rule(x, chunk_size=16),
    ]
    for form in forms:
        o, state = form()
        loss = (o * o).sum() + state.sin().sum()
        results.append(torch.autograd.grad(loss, list(x.values())))
    for name, actual, expected in zip(x, *results, strict=True):
        assert_close(f"d{name}", actual, expected, EXACT)


def test_inplace_keeps_no_graph() -> None:
    x = {n: y.requires_grad_() for n, y in tokens(operands(Case(T=1))).items()}
    state = operands(Case(T=1))["initial_state"]
    o, after = step(x, state, inplace=True)
    assert not o.requires_grad
    assert not after.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_stays_fp32(dtype: torch.dtype) -> None:
    x = operands(Case(T=9, dtype=dtype))
    o, state = stepped(x, [1] * 9)
    assert o.dtype == dtype
    assert state.dtype == torch.float32
    exact_o, exact_state = stepped({n: y.double() for n, y in x.items()}, [9])
    assert_close("o", o, exact_o, torch.finfo(dtype).eps / 2 + 1e-6)
    assert_close("state", state, exact_state, 1e-6)


def test_autocast_moves_no_bit() -> None:
    x = operands(Case(T=3, dtype=torch.float32))
    expected = stepped(x, [3])
    with torch.autocast("cpu", torch.bfloat16):
        actual = stepped(x, [3])
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(1, 2, 16, 16), r"shape \(1, 2, 16, 16\), expected \(2, 2, 16, 16\)"),
        (torch.zeros(2, 2, 16, 16).half(), r"torch\.float16, expected torch\.float32"),
        (torch.zeros(2, 2, 16, 16, device="meta"), "device meta, expected q's device cpu"),
        (None, "NoneType, expected a tensor"),
    ],
)
def test_a_wrong_state_is_named(state: Tensor, message: str) -> None:
    x = tokens(operands(Case(T=1, dtype=torch.float32)))
    with pytest.raises(ValueError, match=f"^state: got {message}"):
        step(x, state)


def test_an_expanded_state_is_read_but_not_overwritten() -> None:
    """Its entries share memory."""
    x = operands(Case(T=1, dtype=torch.float32))
    one = x["initial_state"][:1]
    _, state = step(tokens(x), one.expand(2, -1, -1, -1))
    _, expected = step(tokens(x), one.repeat(2, 1, 1, 1))
    assert torch.equal(state, expected)
    kept = one.clone()
    with pytest.raises(
        ValueError, match=r"^state: got an expanded tensor, expected its own memory"
    ):
        step(tokens(x), one.expand(2, -1, -1, -1), inplace=True)
    assert torch.equal(one, kept)


def test_positive_decays_are_refused() -> None:
    x = operands(Case(T=1))
    with pytest.raises(ValueError, match=r"g: got largest entry 1, expected log-decays"):
        step(tokens(x) | {"g": torch.ones_like(x["g"])}, x["initial_state"])
