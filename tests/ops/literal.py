"""Each model's recurrence from its own definition, token by token, with every transition written out as a matrix.

Nothing of the package is used, so that a mistake there cannot hide here. All heads are given; decays are α, not log α.
Shapes: q, k, α [B, T, H, K]; v [B, T, H, V]; per-head gates [B, T, H]; S [B, H, K, V].
"""

import torch
from torch import Tensor

Run = tuple[Tensor, Tensor]


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def matrix(x: Tensor) -> Tensor:
    """Give a scalar of each head the axes of a matrix."""
    return x[..., None, None]


def identity(k: Tensor) -> Tensor:
    return torch.eye(k.shape[-1], dtype=k.dtype).expand(*k.shape, -1)


def recurrence(q: Tensor, transition: Tensor, write: Tensor, S: Tensor) -> Run:
    """S_t = transition_t S_{t−1} + write_t, o_t = S_tᵀ q_t."""
    outputs = [write.new_empty(write.shape[0], 0, *write.shape[2:3], write.shape[4])]
    for t in range(q.shape[1]):
        S = transition[:, t] @ S + write[:, t]
        outputs.append((S.mT @ q[:, t].unsqueeze(-1)).squeeze(-1).unsqueeze(1))
    return torch.cat(outputs, 1), S


def linear_attention(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> Run:
    return recurrence(q, identity(k), outer(k, v), S)


def gla(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, S: Tensor) -> Run:
    return recurrence(q, torch.diag_embed(alpha), outer(k, v), S)


def delta_net(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> Run:
    transition = identity(k) - matrix(beta) * outer(k, k)
    return recurrence(q, transition, matrix(beta) * outer(k, v), S)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, S: Tensor) -> Run:
    transition = matrix(alpha) * (identity(k) - matrix(beta) * outer(k, k))
    return recurrence(q, transition, matrix(beta) * outer(k, v), S)


def kda(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, S: Tensor) -> Run:
    transition = (identity(k) - matrix(beta) * outer(k, k)) @ torch.diag_embed(alpha)
    return recurrence(q, transition, matrix(beta) * outer(k, v), S)


def kda_erasing_first(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, S: Tensor
) -> Run:
    """A wrong one: it decays after it erases."""
    transition = torch.diag_embed(alpha) @ (identity(k) - matrix(beta) * outer(k, k))
    return recurrence(q, transition, matrix(beta) * outer(k, v), S)


def gated_delta_net_2(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, b: Tensor, w: Tensor, S: Tensor
) -> Run:
    transition = (identity(k) - outer(k, b * k)) @ torch.diag_embed(alpha)
    return recurrence(q, transition, outer(k, w * v), S)


def mamba2(x: Tensor, B: Tensor, C: Tensor, dt: Tensor, A: Tensor, D: Tensor, h: Tensor) -> Run:
    """h_t = exp(A Δ_t) h_{t−1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t.

    One B and one C [B, T, K] for all heads; A and D [H], A negative.
    """
    heads = x.shape[2]
    keys, queries = (m.unsqueeze(2).expand(-1, -1, heads, -1) for m in (B, C))
    transition = matrix((A * dt).exp()) * identity(keys)
    y, h = recurrence(queries, transition, matrix(dt) * outer(keys, x), h)
    return y + D[:, None] * x, h


Mamba3Start = tuple[Tensor, Tensor, Tensor, Tensor]


def rotate(x: Tensor, theta: Tensor) -> Tensor:
    """Turn channels (2i, 2i + 1) of x […, K] by theta […, A], as complex numbers; channels from 2A on stay."""
    turned, rest = x.split([2 * theta.shape[-1], x.shape[-1] - 2 * theta.shape[-1]], -1)
    z = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
    z = z * torch.polar(torch.ones_like(theta), theta)
    return torch.cat([torch.view_as_real(z).flatten(-2), rest], -1)


def rotate_state(h: Tensor, theta: Tensor) -> Tensor:
    """Turn the key axis of h [B, H, K, V] by theta [B, H, A]."""
    return rotate(h.mT, theta.unsqueeze(2)).mT


def mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A: Tensor,
    dt: Tensor,
    lam: Tensor,
    turn: Tensor,
    start: Mamba3Start,
) -> tuple[Tensor, Mamba3Start]:
    """Mamba-3 of rank R as the state that rotates by −turn_t at each token; nothing else is rotated.

        h_t = R_t (α_t h_{t−1} + (1 − λ_t) Δ_t α_t Σ_r k^r_{t−1} v^r_{t−1}ᵀ) + λ_t Δ_t Σ_r k^r_t v^r_tᵀ
        o^r_t = h_tᵀ q^r_t

    q, k [B, T, R, H, K] before rotation, v [B, T, R, H, V], A, dt, lam [B, T, H], turn [B, T, H, A]. A start is what
    an implementation with rotated keys carries: S, k and v of the last token, and the angle Θ turned so far.
    """
    S, k_last, v_last, theta = start
    h, k_last = rotate_state(S, -theta), rotate(k_last, -theta.unsqueeze(1))
    outputs = [v[:, :0]]
    for t in range(q.shape[1]):
        alpha, step = matrix((A[:, t] * dt[:, t]).exp()), matrix(dt[:, t])
        trapezoid = matrix(lam[:, t])
        h = alpha * h + (1 - trapezoid) * step * alpha * outer(k_last, v_last).sum(1)
        h = rotate_state(h, -turn[:, t])
        h = h + trapezoid * step * outer(k[:, t], v[:, t]).sum(1)
        outputs.append(torch.einsum("bhkv,brhk->brhv", h, q[:, t]).unsqueeze(1))
        k_last, v_last, theta = k[:, t], v[:, t], theta + turn[:, t]
    end = (rotate_state(h, theta), rotate(k_last, theta.unsqueeze(1)), v_last, theta)
    return torch.cat(outputs, 1), end
