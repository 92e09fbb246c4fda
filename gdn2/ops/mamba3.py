"""Mamba-3 on the operator: SISO, and MIMO of rank R (Eq. 16, Table 1).

    S_t = α_t S_{t−1} + η_t Σ_r k^r_{t−1} v^r_{t−1}ᵀ + ζ_t Σ_r k^r_t v^r_tᵀ,     o^r_t = S_tᵀ q^r_t,

with α = exp g, η = (1 − λ) Δ α and ζ = λ Δ. Each token writes its predecessor again, so a state holds that one too.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2.ops.arguments import DTYPES, check_state, new_state, require
from gdn2.ops.family import Pattern
from gdn2.ops.packing import check_cu_seqlens, multiplied_offsets, sequence_ids
from gdn2.ops.ranks import rank_reads
from gdn2.ops.rule import gated_delta_rule, gated_delta_step


class Mamba3State(NamedTuple):
    """What Mamba-3 carries from token to token, for N sequences."""

    S: Tensor  # [N, H, d_k, d_v] memory, the last token's own write ζ k vᵀ included
    k: Tensor  # [N, R, H, d_k] rotated keys of the last token
    v: Tensor  # [N, R, H, d_v] its values


def mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    lam: Tensor,
    *,
    state: Mamba3State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    chunk_size: int = 64,
    recompute: bool = True,
) -> tuple[Tensor, Mamba3State]:
    """Run Mamba-3 over sequences; returns the output [B, T, R, H, d_v], without the skip D·v, and the final state.

    Args:
        q, k: queries and keys after rotation [B, T, R, H, d_k]; the rank R is 1 for SISO.
        v: values [B, T, R, H, d_v].
        g, dt, lam: log-decay A·Δ ≤ 0 with α = exp g, step size Δ and trapezoid λ, all [B, T, H].
        state: of B or of the packed sequences; None starts empty.
        cu_seqlens, backend, chunk_size, recompute: as in `gated_delta_rule`; a chunk of C holds C / R tokens.
    """
    _check_operands(q, k, v, g, dt, lam)
    sequences, rank = q.shape[0], q.shape[2]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1], q.device)
        sequences = cu_seqlens.shape[0] - 1
    if state is None:
        state = new_mamba3_state(q, v, sequences)
    else:
        _check_state(state, sequences, q, v)
    x = _shifted(q, k, v, g, dt, lam, state, cu_seqlens, backend)
    o, P = gated_delta_rule(
        **x.pattern,
        initial_state=state.S,
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else multiplied_offsets(cu_seqlens, rank, q.shape[1]),
        backend=backend,
        chunk_size=chunk_size,
        recompute=recompute,
    )
    assert P is not None
    return _completed(o, P, x)


def mamba3_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    lam: Tensor,
    *,
    state: Mamba3State,
    inplace: bool = False,
) -> tuple[Tensor, Mamba3State]:
    """Decode one token or a few from `state`; returns output and new state.

    Operands as in `mamba3`. With `inplace` the memory state.S is overwritten, which gradients do not survive.
    """
    _check_operands(q, k, v, g, dt, lam)
    _check_state(state, q.shape[0], q, v)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inplace):
        x = _shifted(q, k, v, g, dt, lam, state, None)
        o, P = gated_delta_step(**x.pattern, state=state.S, inplace=inplace)
        return _completed(o, P, x, inplace)


def new_mamba3_state(q: Tensor, v: Tensor, sequences: int) -> Mamba3State:
    """Empty state of `sequences` sequences, for operands as in `mamba3`."""
    S = new_state(q[:, :, 0], v[:, :, 0], sequences)
    return Mamba3State(S, *(x.new_zeros(sequences, *x.shape[2:]) for x in (q, v)))


class _Shifted(NamedTuple):
    pattern: Pattern  # run from S, it ends in P
    beside: Tensor  # [B, T, R, H, d_v] what its output lacks
    zeta: Tensor  # [N, H] of the last tokens, zero where a sequence is empty
    k: Tensor  # [N, R, H, d_k]
    v: Tensor  # [N, R, H, d_v]


def _shifted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    lam: Tensor,
    state: Mamba3State,
    cu_seqlens: Tensor | None,
    backend: str = "auto",
) -> _Shifted:
    """Mamba-3 as a pattern that writes the previous token.

    With ζ = λΔ, the state without its last write P_t = S_t − ζ_t k_t v_tᵀ obeys
    P_t = α_t P_{t−1} + α_t (ζ_{t−1} + (1 − λ_t) Δ_t) k_{t−1} v_{t−1}ᵀ. Writing the current token instead, with
    ζ_t + (1 − λ_{t+1}) Δ_{t+1}, takes a subtraction whose rounding lets o_t see token t + 1.
    A token of rank R is R sub-tokens, of which only the first decays.
    """
    rank = q.shape[2]
    index = None if cu_seqlens is None else _packed_history(cu_seqlens, q.shape[1])
    g, dt, lam = (x.to(state.S.dtype) for x in (g, dt, lam))
    zeta = lam * dt
    k_previous, k_last = _history(k, state.k, index)
    v_previous, v_last = _history(v, state.v, index)
    # A state holds its own write already, so ζ is zero before the first token.
    zeta_previous, zeta_last = _history(zeta, zeta.new_zeros(state.S.shape[:2]), index)
    write = g.exp() * (zeta_previous + (1 - lam) * dt)

    # sub-token j has met the previous token's ranks up to j, and lacks the others
    old = (k_previous, v_previous, write) if rank > 1 else None
    beside = rank_reads(q, k, v, zeta, old, backend)
    pattern = Pattern(
        q=q.flatten(1, 2),
        k=k_previous.flatten(1, 2),
        v=v_previous.flatten(1, 2),
        g=F.pad(g.unsqueeze(2), (0, 0, 0, rank - 1)).flatten(1, 2).unsqueeze(-1),
        b=None,
        w=write.repeat_interleave(rank, 1).unsqueeze(-1),
        scale=1.0,
    )
    return _Shifted(pattern, beside, zeta_last, k_last, v_last)


def _completed(
    o: Tensor, P: Tensor, x: _Shifted, inplace: bool = False
) -> tuple[Tensor, Mamba3State]:
    """Add what the operator's output lacks, and the last write to its state."""
    keys, values = x.k.to(P.dtype) * x.zeta[:, None, :, None], x.v.to(P.dtype)
    # Rank by rank: autocast would round a product of matrices to bf16.
    for k, v in zip(keys.unbind(1), values.unbind(1), strict=True):
        write = (k.unsqueeze(-1), v.unsqueeze(-2))
        P = P.addcmul_(*write) if inplace else torch.addcmul(P, *write)
    return o.unflatten(1, x.beside.shape[1:3]) + x.beside, Mamba3State(P, x.k, x.v)


def _history(
    x: Tensor, before: Tensor, index: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return x [B, T, …] one token earlier, and each sequence's last token; `before` [N, …] precedes its first."""
    if index is None:
        rows = torch.cat([before.unsqueeze(1), x], 1)
        # contiguous, as all kernels that read it want it; a view of the last would keep the whole sequence alive
        return rows[:, :-1].contiguous(), rows[:, -1].clone()
    rows = torch.cat([x.squeeze(0), before])
    previous, last = (rows.index_select(0, i) for i in index)
    return previous.unsqueeze(0), last


def _packed_history(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Rows of each token's predecessor and of each sequence's last token; row `length` + n precedes sequence n."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    sequences = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device)
    ids = sequence_ids(cu_seqlens, length)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    previous = torch.where(tokens == starts[ids], length + ids, tokens - 1)
    last = torch.where(starts == ends, length + sequences, ends - 1)
    return previous, last


def _check_operands(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor, lam: Tensor) -> None:
    """Check what the operator, which sees the operands flattened, would call by another name."""
    require(q.dtype in DTYPES, "q", q.dtype, "fp64, fp32, bf16 or fp16")
    for name, x in {"q": q, "k": k, "v": v}.items():
        fits = x.ndim == 5 and x.shape[2] > 0
        require(fits, name, ("shape", x), "[batch, length, rank, heads, width]")
        require(x.dtype == q.dtype, name, x.dtype, f"q's dtype {q.dtype}")
        require(x.device == q.device, name, f"device {x.device}", f"q's device {q.device}")
    batch, length, _, heads, _ = q.shape
    require(k.shape == q.shape, "k", ("shape", k), ("q's", q))
    values, gates = (*q.shape[:4], v.shape[4]), (batch, length, heads)
    require(tuple(v.shape) == values, "v", ("shape", v), values)
    for name, x in {"g": g, "dt": dt, "lam": lam}.items():
        require(tuple(x.shape) == gates, name, ("shape", x), gates)
        require(x.dtype in (q.dtype, torch.float32), name, x.dtype, f"{q.dtype} or torch.float32")
        require(x.device == q.device, name, f"device {x.device}", f"q's device {q.device}")


def _check_state(state: Mamba3State, sequences: int, q: Tensor, v: Tensor) -> None:
    check_state("state.S", state.S, sequences, q[:, :, 0], v[:, :, 0])
    for name, last, like in (("state.k", state.k, q), ("state.v", state.v, v)):
        shape = (sequences, *like.shape[2:])
        require(tuple(last.shape) == shape, name, ("shape", last), shape)
        require(last.dtype == like.dtype, name, last.dtype, f"{like.dtype}")
        require(last.device == like.device, name, f"device {last.device}", f"{like.device}")
