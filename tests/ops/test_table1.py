"""The paper's Table 1: each printed local objective is least at the state the operator moves to."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2 import gated_delta_rule
from gdn2.ops import family
from gdn2.ops.mamba3 import mamba3
from tests.closeness import assert_close

B, T, H, K, V, R = 2, 21, 3, 8, 6, 3

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]


class Row(NamedTuple):
    """The state after n tokens, and the objective of token t given the state before it.

    An objective returns its two terms: the distance to the kept memory, and the association with what is written.
    """

    state_after: Callable[[int], Tensor]
    objective: Callable[[int, Tensor], Objective]


def normal(*shape: int, seed: int) -> Tensor:
    rand = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rand, dtype=torch.float64)


Q, KEY = (F.normalize(normal(B, T, H, K, seed=n), dim=-1) for n in (0, 1))
VALUE, BETA = normal(B, T, H, V, seed=2), normal(B, T, H, seed=3).sigmoid()
G, G_HEAD = -F.softplus(normal(B, T, H, K, seed=4)), -F.softplus(normal(B, T, H, seed=5))
ERASE, WRITE = 2 * normal(B, T, H, K, seed=6).sigmoid(), normal(B, T, H, V, seed=7).sigmoid()
STEP, LAM = F.softplus(normal(B, T, H, seed=8)), normal(B, T, H, seed=9).sigmoid()
RANKED_Q, RANKED_KEY = normal(B, T, R, H, K, seed=10), normal(B, T, R, H, K, seed=11)
RANKED_VALUE = normal(B, T, R, H, V, seed=12)


def squared_distance(S: Tensor, memory: Tensor) -> Tensor:
    return (S - memory).square().sum()


def read(S: Tensor, k: Tensor) -> Tensor:
    """Sᵀ k."""
    return torch.einsum("bhkv,bhk->bhv", S, k)


def inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def pattern_row(
    pattern: Callable[..., family.Pattern],
    operands: tuple[Tensor, ...],
    memory: Callable[[int, Tensor], Tensor],
    target: Callable[[int, Tensor], Tensor],
) -> Row:
    """‖S − memory‖² − 2⟨Sᵀ k_t, target⟩, the form of all rows but Mamba-3's."""

    def state_after(n: int) -> Tensor:
        first = pattern(*(x[:, :n] for x in (Q, KEY, VALUE, *operands)))
        _, S = gated_delta_rule(**first, output_final_state=True, chunk_size=16)
        assert S is not None
        return S

    def objective(t: int, previous: Tensor) -> Objective:
        kept = memory(t, previous)
        return lambda S: (
            squared_distance(S, kept),
            -2 * inner(read(S, KEY[:, t]), target(t, kept)),
        )

    return Row(state_after, objective)


def mamba3_row(rank: int) -> Row:
    q, k, v = RANKED_Q[:, :, :rank], RANKED_KEY[:, :, :rank], RANKED_VALUE[:, :, :rank]
    alpha = G_HEAD.exp()
    eta, zeta = (1 - LAM) * STEP * alpha, LAM * STEP

    def state_after(n: int) -> Tensor:
        return mamba3(*(x[:, :n] for x in (q, k, v, G_HEAD, STEP, LAM)), chunk_size=16)[1].S

    def objective(t: int, previous: Tensor) -> Objective:
        def terms(S: Tensor) -> tuple[Tensor, Tensor]:
            association = S.new_zeros(())
            for r in range(rank):
                now = inner(read(S, k[:, t, r]), zeta[:, t, :, None] * v[:, t, r])
                association = association - 2 * now
                if t > 0:
                    before = inner(read(S, k[:, t - 1, r]), eta[:, t, :, None] * v[:, t - 1, r])
                    association = association - 2 * before
            return squared_distance(S, alpha[:, t, :, None, None] * previous), association

        return terms

    return Row(state_after, objective)


def same(t: int, S: Tensor) -> Tensor:
    return S


def decayed(t: int, S: Tensor) -> Tensor:
    return G_HEAD[:, t, :, None, None].exp() * S


def decayed_by_channel(t: int, S: Tensor) -> Tensor:
    return G[:, t].exp().unsqueeze(-1) * S


def residual(t: int, kept: Tensor) -> Tensor:
    return BETA[:, t, :, None] * (VALUE[:, t] - read(kept, KEY[:, t]))


def gated_residual(t: int, kept: Tensor) -> Tensor:
    return WRITE[:, t] * VALUE[:, t] - read(kept, ERASE[:, t] * KEY[:, t])


def scaled_value(t: int, kept: Tensor) -> Tensor:
    """The table's v_t has the step size in it."""
    return STEP[:, t, :, None] * VALUE[:, t]


ROWS = {
    "DeltaNet": pattern_row(family.delta_net, (BETA,), same, residual),
    "Mamba-2": pattern_row(family.mamba2, (G_HEAD, STEP), decayed, scaled_value),
    "Gated DeltaNet": pattern_row(family.gated_delta_net, (G_HEAD, BETA), decayed, residual),
    "KDA": pattern_row(family.kda, (G, BETA), decayed_by_channel, residual),
    "Mamba-3 SISO": mamba3_row(1),
    "Mamba-3 MIMO": mamba3_row(R),
    "Gated DeltaNet-2": pattern_row(
        family.gated_delta_net_2, (G, ERASE, WRITE), decayed_by_channel, gated_residual
    ),
}


def gradient(terms: Objective, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the objective's gradient at S, and that of its first term alone."""
    S = S.detach().requires_grad_()
    distance, association = terms(S)
    (whole,) = torch.autograd.grad(distance + association, S, retain_graph=True)
    (first,) = torch.autograd.grad(distance, S)
    return whole, first


@pytest.mark.parametrize("t", [0, 1, 15, 16, 20])
@pytest.mark.parametrize("name", ROWS)
def test_the_next_state_minimises_the_objective(name: str, t: int) -> None:
    row = ROWS[name]
    before, after = row.state_after(t), row.state_after(t + 1)
    terms = row.objective(t, before)
    total, distance = gradient(terms, after)
    assert float(total.norm()) < 1e-12 * float(distance.norm())
    # A quadratic of curvature 2: anywhere else the gradient is twice the way back, so the minimum is the only one.
    away = 0.1 * normal(*after.shape, seed=20)
    total, distance = gradient(terms, after + away)
    assert float(total.norm()) > 1e-2 * float(distance.norm())
    assert_close("gradient", total, 2 * away, 1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_the_previous_state_does_not(name: str) -> None:
    row = ROWS[name]
    before = row.state_after(16)
    total, distance = gradient(row.objective(16, before), before)
    assert float(total.norm()) > 1e-2 * float(distance.norm())
