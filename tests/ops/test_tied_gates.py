"""One gate for both edits: its gradient, and why two channel-wise gates cannot be treated like one (B.6)."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2 import gated_delta_rule, gated_delta_step
from gdn2.ops import family
from tests.closeness import assert_close, relative_error
from tests.ops import literal

B, T, H, K, V = 2, 37, 3, 8, 6
EXACT, OFF = 1e-12, 1e-2


def normal(*shape: int, seed: int) -> Tensor:
    rand = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rand, dtype=torch.float64)


def operands(length: int = T) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, channel-wise log-decays and an initial state."""
    q, k = (F.normalize(normal(B, length, H, K, seed=n), dim=-1) for n in (0, 1))
    v, g = normal(B, length, H, V, seed=2), -F.softplus(normal(B, length, H, K, seed=3))
    return q, k, v, g, normal(B, H, K, V, seed=4)


BETA = normal(B, T, H, seed=5).sigmoid()


def by_rule(x: family.Pattern, S: Tensor) -> Tensor:
    return gated_delta_rule(**x, initial_state=S, chunk_size=16)[0]


def by_step(x: family.Pattern, S: Tensor) -> Tensor:
    return gated_delta_step(**x, state=S)[0]


@pytest.mark.parametrize("run", [by_rule, by_step])
def test_tied_gate_gets_both_gradients(run: Callable[[family.Pattern, Tensor], Tensor]) -> None:
    q, k, v, g, S = operands()
    weight = normal(B, T, H, V, seed=6)
    beta = BETA.clone().requires_grad_()
    tied = run(family.kda(q, k, v, g, beta), S)
    (d_beta,) = torch.autograd.grad((tied * weight).sum(), beta)

    b, w = (BETA[..., None].expand(-1, -1, -1, d).clone().requires_grad_() for d in (K, V))
    free = run(family.gated_delta_net_2(q, k, v, g, b, w), S)
    d_b, d_w = torch.autograd.grad((free * weight).sum(), [b, w])
    assert_close("o", tied, free, EXACT)
    assert_close("gradient of beta", d_beta, d_b.sum(-1) + d_w.sum(-1), EXACT)  # Eq. 48
    for alone in (d_b, d_w):
        assert relative_error(alone.sum(-1), d_beta) > OFF


def test_doubling_one_gate_is_not_doubling_beta() -> None:
    q, k, v, g, S = operands()
    beta = BETA[..., None]
    expected, _ = literal.kda(q * K**-0.5, k, v, g.exp(), 2 * BETA, S)
    both = by_rule(family.kda(q, k, v, g, 2 * BETA), S)
    assert_close("both doubled", both, expected, EXACT)
    erase_alone = by_rule(family.gated_delta_net_2(q, k, v, g, 2 * beta, beta), S)
    write_alone = by_rule(family.gated_delta_net_2(q, k, v, g, beta, 2 * beta), S)
    assert relative_error(erase_alone, expected) > OFF
    assert relative_error(write_alone, expected) > OFF


def test_channelwise_decay_comes_before_the_erasure() -> None:
    q, k, v, g, S = operands()
    actual = by_rule(family.kda(q, k, v, g, BETA, scale=1.0), S)
    wrong, _ = literal.kda_erasing_first(q, k, v, g.exp(), BETA, S)
    assert relative_error(wrong, actual) > OFF
    # One decay for all channels commutes, which is why Gated DeltaNet fits the operator.
    g = g[..., :1]
    actual = by_rule(family.gated_delta_net(q, k, v, g.squeeze(-1), BETA, scale=1.0), S)
    other, _ = literal.kda_erasing_first(q, k, v, g.exp().expand_as(k), BETA, S)
    assert_close("scalar decay", other, actual, EXACT)


class GateOutside(torch.autograd.Function):
    """A (gate ⊙ x) whose dA applies one factor per row after the product with x, as in KDA (Eq. 83)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        A, gate, x = inputs
        return A @ (gate * x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, ...]:
        A, gate, x = ctx.saved_tensors  # type: ignore[attr-defined]
        (dU,) = grads
        dA = (dU @ x.mT) * gate.mean(-1).unsqueeze(-2)
        d_product = A.mT @ dU
        return dA, d_product * x, d_product * gate


def gate_inside(A: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    return A @ (gate * x)


def one_chunk(
    product: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    S: Tensor,
) -> Tensor:
    """Eqs. 49–52 as printed, with the two gated products of Eq. 52 made by `product`."""
    q, k, v, g, b, w = (x.transpose(1, 2) for x in (q, k, v, g, b, w))
    gamma = g.cumsum(-2).exp()
    K_bar, E_bar, Q_gamma = k / gamma, gamma * b * k, gamma * q * K**-0.5
    eye = torch.eye(k.shape[-2], dtype=k.dtype)
    A = torch.linalg.inv(eye + (E_bar @ K_bar.mT).tril(-1))
    U, Y = product(A, w, v), product(A, b, gamma * k)
    return (Q_gamma @ S + (Q_gamma @ K_bar.mT).tril() @ (U - Y @ S)).transpose(1, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_gates_cannot_be_applied_after_the_product(tied: bool) -> None:
    q, k, v, g, S = operands(length=13)
    gates = [normal(B, 13, H, d, seed=7 + d).sigmoid() for d in (K, V)]
    if tied:
        gates = [BETA[:, :13, :, None].expand_as(gate) for gate in gates]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, *gates, S)]
    weight = normal(B, 13, H, V, seed=8)

    def gradients(o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((o * weight).sum(), leaves)

    *x, state = leaves
    actual = gradients(by_rule(family.gated_delta_net_2(*x), state))
    inside = gradients(one_chunk(gate_inside, *leaves))
    outside = gradients(one_chunk(GateOutside.apply, *leaves))
    for name, d, d_inside, d_outside in zip("qkvgbwS", actual, inside, outside, strict=True):
        assert_close(f"gradient of {name}", d, d_inside, EXACT)
        if tied:
            assert_close(f"gradient of {name}, gate outside", d_outside, d, EXACT)
        elif name in "kgb":  # what dA leads to
            assert relative_error(d_outside, d) > OFF, name
