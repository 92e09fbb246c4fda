"""The token loop against the paper's formulas written out, one head and one token at a time."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gdn2.ops.reference import packed_token_loop, token_loop
from tests.closeness import assert_close
from tests.ops.cases import Case, operands

TOLERANCE = 1e-14
SCALE = 0.37


def written_out(x: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Eq. 10 with its matrices: every operand is spread to [B, T, H_v, d] by indexing."""
    B, T, H, d_v = x["v"].shape
    d_k = x["k"].shape[-1]
    o = torch.zeros_like(x["v"])
    final = torch.zeros(B, H, d_k, d_v, dtype=torch.float64)

    def of(name: str, n: int, t: int, head: int, width: int) -> Tensor:
        absent = {"b": torch.zeros, "w": torch.ones}
        if name not in x:
            return absent[name](width, dtype=torch.float64)
        operand = x[name]
        group = H // operand.shape[2]
        return operand[n, t, head // group].expand(width)

    for n in range(B):
        for i in range(H):
            S = x["initial_state"][n, i] if "initial_state" in x else final[n, i]
            for t in range(T):
                q, k, g, b = (of(name, n, t, i, d_k) for name in "qkgb")
                v, w = (of(name, n, t, i, d_v) for name in "vw")
                erase = torch.eye(d_k, dtype=torch.float64) - torch.outer(k, b * k)
                S = erase @ torch.diag(g.exp()) @ S + torch.outer(k, w * v)
                o[n, t, i] = scale * S.T @ q
            final[n, i] = S
    return o, final


def loop(x: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, g = (x[name] for name in "qkvg")
    empty = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=v.dtype)
    state = x.get("initial_state", empty)
    return token_loop(q, k, v, g, x.get("b"), x.get("w"), scale, state)


@pytest.mark.parametrize(
    "case",
    [
        Case(T=9, d_k=5, d_v=3),
        Case(T=1, d_k=1, d_v=1, B=1, heads=(1, 1, 1, 1)),
        Case(T=7, d_k=3, d_v=6, erase_range=2.0, decay="mixed"),
        Case(T=6, d_k=4, d_v=2, initial_state=False),
        Case(T=5, d_k=3, d_v=2, heads=(1, 4, 4, 2)),
        Case(T=5, d_k=3, d_v=2, heads=(2, 6, 3, 1), widths=("one", "full", "one")),
        Case(T=5, d_k=3, d_v=2, widths=("full", "one", "none"), contiguous=False),
        Case(T=5, d_k=3, d_v=2, widths=("one", "none", "full")),
        Case(T=5, d_k=3, d_v=2, widths=("full", "none", "none"), decay=0.0),
    ],
    ids=str,
)
def test_loop_is_the_recurrence(case: Case) -> None:
    x = operands(case)
    o, state = loop(x, SCALE)
    expected_o, expected_state = written_out(x, SCALE)
    assert_close("o", o, expected_o, TOLERANCE)
    assert_close("final_state", state, expected_state, TOLERANCE)


def test_packed_loop_restarts_at_each_sequence() -> None:
    x = operands(Case(lengths=(3, 0, 1, 5), d_k=3, d_v=2, heads=(1, 2, 2, 1)))
    S = x["initial_state"]
    q, k, v, g, b, w = (x[name] for name in "qkvgbw")
    o, state = packed_token_loop(q, k, v, g, b, w, SCALE, S, [3, 0, 1, 5])
    start = 0
    for n, length in enumerate((3, 0, 1, 5)):
        part = {name: x[name][:, start : start + length] for name in "qkvgbw"}
        own_o, own_state = written_out({**part, "initial_state": S[n : n + 1]}, SCALE)
        assert_close(f"o of {n}", o[:, start : start + length], own_o, TOLERANCE)
        assert_close(f"state of {n}", state[n : n + 1], own_state, TOLERANCE)
        start += length


def test_no_tokens_leave_a_copy_of_the_state() -> None:
    x = operands(Case(T=0))
    o, state = loop(x, SCALE)
    assert o.shape == x["v"].shape
    assert torch.equal(state, x["initial_state"])
    assert state.data_ptr() != x["initial_state"].data_ptr()


class Member(NamedTuple):
    """A rule of the family: its step S, α, β, k, v → S, and what it has."""

    step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    decay: str | None = None  # width of α
    erases: bool = True


def reflection(beta: Tensor, k: Tensor) -> Tensor:
    return torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)


FAMILY = {
    "linear attention": Member(lambda S, a, beta, k, v: S + torch.outer(k, v), erases=False),
    "Mamba-2": Member(lambda S, a, beta, k, v: a * S + torch.outer(k, v), "one", erases=False),
    "DeltaNet": Member(lambda S, a, beta, k, v: S + beta * torch.outer(k, v - S.T @ k)),
    "Gated DeltaNet": Member(
        lambda S, a, beta, k, v: a * reflection(beta, k) @ S + beta * torch.outer(k, v), "one"
    ),
    "KDA": Member(
        lambda S, a, beta, k, v: reflection(beta, k) @ a.diag() @ S + beta * torch.outer(k, v),
        "full",
    ),
}


@pytest.mark.parametrize("name", FAMILY)
def test_loop_holds_the_family(name: str) -> None:
    """Eqs. 1, 4–7: absent and scalar gates give the rules that came before."""
    member = FAMILY[name]
    widths = (member.decay or "one", "one", "one")
    x = operands(Case(T=7, d_k=4, d_v=3, B=1, heads=(1, 1, 1, 1), widths=widths))
    g = x["g"] if member.decay else torch.zeros_like(x["g"])
    beta = x["b"]
    S = x["initial_state"]
    gate = beta if member.erases else None
    o, state = token_loop(x["q"], x["k"], x["v"], g, gate, gate, 1.0, S)
    S = S[0, 0]
    for t in range(7):
        alpha = g[0, t, 0].exp()
        S = member.step(S, alpha, beta[0, t, 0], x["k"][0, t, 0], x["v"][0, t, 0])
        assert_close(f"o of {t}", o[0, t, 0], S.T @ x["q"][0, t, 0], TOLERANCE)
    assert_close("final_state", state[0, 0], S, TOLERANCE)


def test_linear_attention_is_a_masked_product() -> None:
    """Eqs. 2, 3: without gates the output is (Q Kᵀ ⊙ M) V, plus Q S of the state before."""
    x = operands(Case(T=9, B=1, heads=(1, 1, 1, 1), widths=("one", "none", "none"), decay=0.0))
    o, state = loop(x, 1.0)
    Q, K, V = (x[name][0, :, 0] for name in "qkv")
    S = x["initial_state"][0, 0]
    assert_close("o", o[0, :, 0], Q @ S + (Q @ K.T).tril() @ V, TOLERANCE)
    assert_close("final_state", state[0, 0], S + K.T @ V, TOLERANCE)


def test_a_step_minimises_the_online_objective() -> None:
    """Eqs. 13–15, 17: the gradient of L_t vanishes at S_t, and L_t is strictly convex."""
    x = operands(Case(T=1, d_k=4, d_v=3, B=1, heads=(1, 1, 1, 1)))
    _, state = loop(x, 1.0)
    k, v, g, b, w = (x[name][0, 0, 0] for name in "kvgbw")
    S_bar = g.exp().diag() @ x["initial_state"][0, 0]

    def objective(S: Tensor) -> Tensor:
        residual = w * v - S_bar.T @ (b * k)
        return (S - S_bar).square().sum() - 2 * (S.T @ k) @ residual

    slope: Tensor = torch.func.grad(objective)(state[0, 0])
    assert float(slope.abs().max()) <= 1e-14
    away = torch.func.grad(objective)(S_bar)
    assert_close("gradient", away, -2 * (state[0, 0] - S_bar), TOLERANCE)
