"""The models of the paper's Table 1, and two ancestors, as argument patterns of the one operator.

    model               g             b      w      equation
    linear attention    0             none   one    1
    GLA                 per channel   none   one
    Mamba-2             per head      none   Δ      4
    DeltaNet            0             β      β      5
    Gated DeltaNet      per head      β      β      6
    KDA                 per channel   β      β      7
    Gated DeltaNet-2    per channel   b      w      10

A pattern is what `gated_delta_rule` and `gated_delta_step` have in common, so one serves whole sequences, packed ones,
continuation and decoding:

    o, S = gated_delta_rule(**kda(q, k, v, g, beta), initial_state=S, output_final_state=True)
    o, S = gated_delta_step(**kda(q, k, v, g, beta), state=S)

Gates stay as narrow as the model has them, and the operator sums their gradients (Eq. 48). Mamba-3 writes two tokens
at a time and has a richer state: `gdn2/ops/mamba3.py`.
"""

from typing import TypedDict

from torch import Tensor

from gdn2.ops.arguments import require


class Pattern(TypedDict):
    """Operands of the operator, to be given to it with `**`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor | None
    w: Tensor | None
    scale: float | None


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Pattern:
    """S_t = S_{t−1} + k_t v_tᵀ (Eq. 1)."""
    return gla(q, k, v, _no_decay(v), scale=scale)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None) -> Pattern:
    """S_t = Diag(exp g_t) S_{t−1} + k_t v_tᵀ, g [B, T, heads, d_k]."""
    return Pattern(q=q, k=k, v=v, g=g, b=None, w=None, scale=scale)


def delta_net(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, scale: float | None = None
) -> Pattern:
    """S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ (Eq. 5), beta [B, T, H_v]."""
    return kda(q, k, v, _no_decay(v), beta, scale=scale)


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None
) -> Pattern:
    """S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ (Eq. 6), g and beta [B, T, H_v].

    A scalar decay commutes with the erasure, so the operator's decay may come first.
    """
    return kda(q, k, v, _per_head("g", g, v), beta, scale=scale)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None
) -> Pattern:
    """S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ (Eq. 7), beta [B, T, H_v].

    For negative eigenvalues β reaches 2, and the write grows with it; Gated DeltaNet-2 doubles b alone.
    """
    gate = _per_head("beta", beta, v)
    return gated_delta_net_2(q, k, v, g, gate, gate, scale=scale)


def gated_delta_net_2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, *, scale: float | None = None
) -> Pattern:
    """S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(exp g_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ (Eq. 10)."""
    return Pattern(q=q, k=k, v=v, g=g, b=b, w=w, scale=scale)


def mamba2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor) -> Pattern:
    """S_t = exp(g_t) S_{t−1} + Δ_t k_t v_tᵀ (Eq. 4), with g = A·Δ and dt = Δ, both [B, T, H_v].

    q and k, the C and B of Mamba-2, are [B, T, groups, d_k]: one group is one head for all. The skip D·v is added
    outside.
    """
    write = _per_head("dt", dt, v)
    return Pattern(q=q, k=k, v=v, g=_per_head("g", g, v), b=None, w=write, scale=1.0)


def _no_decay(v: Tensor) -> Tensor:
    _check_values(v)
    return v.new_zeros(*v.shape[:2], 1, 1)


def _per_head(name: str, gate: Tensor, v: Tensor) -> Tensor:
    """Check a gate [B, T, H_v] and give it width one."""
    _check_values(v)
    if gate.shape != v.shape[:3]:  # put into words here alone, for the reason that `require` gives
        require(False, name, ("shape", gate), f"v's {tuple(v.shape[:3])}")
    return gate.unsqueeze(-1)


def _check_values(v: Tensor) -> None:
    require(v.ndim == 4, "v", ("shape", v), "[batch, length, heads, width]")
