"""Gated Delta Rule-2 token by token: the definition everything else is measured against (Eqs. 8–10)."""

import torch
from torch import Tensor


def token_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    scale: float,
    state: Tensor,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs [N, T, H_v, d_v] and final state of N sequences of equal length; autograd does the backward.

    Per token: decay the state, read it along b ⊙ k, write what is missing along k, read the output along q.
    Everything is computed in the state's dtype; `inplace` overwrites the given state.
    """
    heads, dtype = v.shape[2], state.dtype

    def spread(x: Tensor) -> Tensor:
        """Repeat key-side heads over the value heads they serve."""
        x = x.to(dtype)
        return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)

    keys, values = spread(k), v.to(dtype)
    alpha = spread(g).exp().unsqueeze(-1)
    query = (spread(q) * scale).unsqueeze(-2)
    erase = None if b is None else (spread(b) * keys).unsqueeze(-2)  # e = b ⊙ k
    write = (values if w is None else w.to(dtype) * values).unsqueeze(-2)  # z = w ⊙ v
    key = keys.unsqueeze(-1)

    S, outputs = state, []
    # unbind, not indexing: the gradient of T separate slices would cost O(T²)
    tokens = (x.unbind(1) for x in (alpha, key, write, query))
    erasers = [None] * v.shape[1] if erase is None else erase.unbind(1)
    for a_t, k_t, z_t, q_t, e_t in zip(*tokens, erasers, strict=True):
        S = S.mul_(a_t) if inplace else S * a_t
        residual = z_t if e_t is None else z_t - e_t @ S
        S = S.addcmul_(k_t, residual) if inplace else torch.addcmul(S, k_t, residual)
        outputs.append(q_t @ S)
    if not outputs:
        return v.new_empty(v.shape), S if inplace else S.clone()
    return torch.cat(outputs, -2).transpose(1, 2).to(v.dtype), S


def packed_token_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    scale: float,
    state: Tensor,
    lengths: list[int],
) -> tuple[Tensor, Tensor]:
    """Run `token_loop` on each of the sequences packed in a batch of one."""

    def cut(x: Tensor | None) -> list[Tensor] | list[None]:
        return [None] * len(lengths) if x is None else list(x.split(lengths, 1))

    sequences = zip(*(cut(x) for x in (q, k, v, g, b, w)), state.split(1), strict=True)
    runs = [
        token_loop(q_i, k_i, v_i, g_i, b_i, w_i, scale, S_i)
        for q_i, k_i, v_i, g_i, b_i, w_i, S_i in sequences
    ]
    return torch.cat([o for o, _ in runs], 1), torch.cat([S for _, S in runs])
