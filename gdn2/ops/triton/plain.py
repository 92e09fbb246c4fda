"""The backward without an erase gate and with one decay a head, as two kernels (Mamba-2, Mamba-3).

Without the triangular system nothing of a chunk waits for its start. With L_t the log-decays summed from the chunk's
start to token t, z_s = w_s v_s, and s ≤ t < C,

    o_t = scale (Σ_s exp(L_t − L_s) (q_t · k_s) z_s + exp(L_t) Sᵀ q_t),
    S′ = exp(L_C) S + Σ_s exp(L_C − L_s) k_s z_sᵀ.

The states at all chunk starts, and the gradients dS = exp(L_C) dS′ + scale Σ_t exp(L_t) q_t do_tᵀ of those at all chunk
ends, are made first. Each chunk of each value head then has all its gradients by one program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.arguments import state_dtype
from gdn2.ops.cuda.launch import multiprocessors
from gdn2.ops.operands import Operands
from gdn2.ops.triton.ahead import over
from gdn2.ops.triton.launch import Launch, Scan, capability, spread
from gdn2.ops.triton.stages import block, precision
from gdn2.ops.triton.sums import sum_to
from gdn2.ops.triton.table import Table
from gdn2.ops.triton.tiles import load_rows, product, store_rows
from gdn2.ops.trust import trusted

NAME = "plain_gradient"  # which is trusted or not
LARGEST_CHUNK = 64
WIDEST = 64
# Of the first kernel value channels, warps and stages of pipelined loads; of the second warps, and registers of a
# thread, so that three programs share a multiprocessor. On an H200, 65536 tokens, 64 heads of width 64, µs: 883, with 3
# stages 912, with 2 1164, with 8 warps 1118, with 32 channels 1336; and 2363, with 255 registers 2659, with 128 3760.
STATES = Launch(WIDEST, WIDEST, 4, 4)
WARPS = 4
REGISTERS = 168
# Log-decays below are as good as FLOOR, whose exponential is zero in fp64 too. Sums of 64 multiples of 1 / GRID down to
# it are exact in fp32.
FLOOR = tl.constexpr(-1024.0)
GRID = tl.constexpr(128.0)


@triton.jit
def load_gate(ptr, start, rows, length, i_head, HEADS: tl.constexpr, ACC: tl.constexpr):
    """One number a token [rows] of packed tokens [L, HEADS, 1]; zero past the chunk's end."""
    place = (start + rows).to(tl.int64) * HEADS + i_head
    return tl.load(ptr + place, mask=rows < length, other=0.0).to(ACC)


@triton.jit
def store_gate(ptr, x, start, rows, length, i_head, HEADS: tl.constexpr):
    """Store one number a token."""
    place = (start + rows).to(tl.int64) * HEADS + i_head
    tl.store(ptr + place, x.to(ptr.dtype.element_ty), mask=rows < length)


@triton.jit
def load_sums(g_ptr, start, rows, length, i_head, HEADS: tl.constexpr, ACC: tl.constexpr):
    """L as two summands: multiples of 1/128, whose sums over a chunk are exact in fp32, and what is left of each g.

    Differences of L then are as precise as they are small, whatever came before them in the chunk.
    """
    g = load_gate(g_ptr, start, rows, length, i_head, HEADS, ACC)
    g = tl.where(g < FLOOR, FLOOR, g)  # a maximum would hide what is no number
    coarse = tl.floor(g * GRID + 0.5) / GRID
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)


@triton.jit
def place_of_sums(chunk, rows):
    """Where the two summands of each L lie in [M, H_v, 2, C]."""
    C: tl.constexpr = rows.shape[0]
    return chunk * (2 * C) + rows, chunk * (2 * C) + C + rows


@triton.jit
def chunk_decays(coarse, fine, rows):
    """exp(L_t), exp(L_C − L_t) and exp(L_C)."""
    last = rows == rows.shape[0] - 1
    end, more = tl.sum(tl.where(last, coarse, 0.0), 0), tl.sum(tl.where(last, fine, 0.0), 0)
    return tl.exp(coarse + fine), tl.exp((end - coarse) + (more - fine)), tl.exp(end + more)


@triton.jit
def pair_decays(coarse, fine, rows, FLIPPED: tl.constexpr):
    """exp(L_t − L_s) for s ≤ t, else zero: [t, s], or [s, t] if flipped."""
    if FLIPPED:
        met = rows[None, :] >= rows[:, None]
        L = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
    else:
        met = rows[:, None] >= rows[None, :]
        L = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp(tl.where(met, L, float("-inf")))


@triton.jit
def walk(
    x_ptr, y_ptr, g_ptr, w_ptr, from_ptr, kept_ptr, to_ptr, sums_ptr, start_ptr, length_ptr, first_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    GATED: tl.constexpr, REVERSE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S ← exp(L_C) S + Σ_t f_t x_t y_tᵀ over the chunks of one sequence, S before each chunk being kept.

    Forward x and y are keys and values with f_t = w_t exp(L_C − L_t), and L is kept too; in reverse queries and
    gradients of the output with f_t = scale · exp(L_t).
    """
    i_sequence, i_value = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0) % HV
    i_key, i_decay = i_value // (HV // HK), i_value // (HV // HG)
    rows, keys = tl.arange(0, C), tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (keys < DK)[:, None] & (cols < DV)[None, :]
    own = keys[:, None] * DV + cols[None, :]  # in [M or N, HV, DK, DV]
    sequence = (i_sequence * HV + i_value) * (DK * DV)
    S = tl.load(from_ptr + sequence + own, mask=inside, other=0.0).to(ACC)

    # Places of chunks are computed: loads whose addresses are loaded too start late.
    first, last = tl.load(first_ptr + i_sequence), tl.load(first_ptr + i_sequence + 1)
    begin = tl.load(start_ptr + first, mask=first < last, other=0)
    end = tl.load(start_ptr + last - 1, mask=first < last, other=0)
    end += tl.load(length_ptr + last - 1, mask=first < last, other=0)
    for n in tl.range(0, last - first, num_stages=STAGES):
        i = last - first - 1 - n if REVERSE else n
        start = begin + i * C
        length = tl.minimum(end - start, C)
        chunk = (first + i) * HV + i_value
        tl.store(kept_ptr + chunk * (DK * DV) + own, S.to(kept_ptr.dtype.element_ty), mask=inside)
        coarse, fine = load_sums(g_ptr, start, rows, length, i_decay, HG, ACC)
        since, after, whole = chunk_decays(coarse, fine, rows)
        if REVERSE:
            factor = since * scale
        else:
            at_coarse, at_fine = place_of_sums(chunk, rows)
            tl.store(sums_ptr + at_coarse, coarse, mask=tl.program_id(1) == 0)
            tl.store(sums_ptr + at_fine, fine, mask=tl.program_id(1) == 0)
            factor = after
            if GATED:
                factor *= load_gate(w_ptr, start, rows, length, i_value, HV, ACC)
        tokens = ((start + rows).to(tl.int64) * HK + i_key) * DK
        X = tl.load(  # [BK, C]
            x_ptr + tokens[None, :] + keys[:, None],
            mask=(keys < DK)[:, None] & (rows < length)[None, :],
            other=0.0,
        )
        Y = load_rows(y_ptr, start, rows, length, i_value, HV, DV, cols)
        S = S * whole + product(X.to(ACC) * factor[None, :], Y, DOT, PRECISION, ACC)
    if REVERSE:
        tl.store(to_ptr + sequence + own, S, mask=inside)


@triton.jit
def states_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, w_ptr, do_ptr, state_ptr, d_final_ptr,
    starts_ptr, ends_ptr, d_state_ptr, sums_ptr, start_ptr, length_ptr, first_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    GATED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """States at chunk starts, or gradients of states at chunk ends and of the initial one, of one sequence and head.

    Grid: (N · HV, DV / BV, 2). Neither needs the other: half of the programs walk forward, half in reverse.
    """
    if tl.program_id(2) == 0:
        walk(
            k_ptr, v_ptr, g_ptr, w_ptr, state_ptr, starts_ptr, None, sums_ptr,
            start_ptr, length_ptr, first_ptr, scale, HK, HG, HV, DK, DV, GATED, False,
            C, BK, BV, DOT, PRECISION, ACC, STAGES,
        )  # fmt: skip
    else:
        walk(
            q_ptr, do_ptr, g_ptr, None, d_final_ptr, ends_ptr, d_state_ptr, None,
            start_ptr, length_ptr, first_ptr, scale, HK, HG, HV, DK, DV, GATED, True,
            C, BK, BV, DOT, PRECISION, ACC, STAGES,
        )  # fmt: skip


@triton.jit
def plain_gradient_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, do_ptr, starts_ptr, ends_ptr, sums_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dw_ptr, start_ptr, length_ptr, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    GATED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk and value head; those of shared queries, keys and decays are per value head.

    Grid: (M · HV). With D_ts = exp(L_t − L_s), A = Q Kᵀ ⊙ D and G = dO Vᵀ,

        dQ = scale ((w ⊙ G ⊙ D) K + exp(L) dO Sᵀ),
        dK = w (scale (G ⊙ D)ᵀ Q + exp(L_C − L) V dS′ᵀ),
        dZ = scale Aᵀ dO + exp(L_C − L) K dS′,     dV = w dZ,     dw_s = v_s · dZ_s.

    A log-decay g_t gets what passes from before t to t or later: scores of queries u ≥ t and keys s < t, queries u ≥ t
    of S, keys s < t in S′, and S in S′. The first is Σ_{u ≥ t} (Σ_s W_us − Σ_s W_su) with W the strictly lower part of
    scale w A ⊙ G. Scores are made in both orientations, as products must not be transposed in registers
    (`gradient.py`).
    """
    chunk = tl.program_id(0).to(tl.int64)
    i_chunk, i_value = chunk // HV, tl.program_id(0) % HV
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_key = i_value // (HV // HK)
    rows, keys, cols = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    own = chunk * (DK * DV) + keys[:, None] * DV + cols[None, :]
    inside = (keys < DK)[:, None] & (cols < DV)[None, :]
    S = tl.load(starts_ptr + own, mask=inside, other=0.0)
    dS = tl.load(ends_ptr + own, mask=inside, other=0.0)
    carried = tl.sum(tl.sum(S.to(ACC) * dS.to(ACC), 1), 0)
    Q = load_rows(q_ptr, start, rows, length, i_key, HK, DK, keys)
    K = load_rows(k_ptr, start, rows, length, i_key, HK, DK, keys)
    V = load_rows(v_ptr, start, rows, length, i_value, HV, DV, cols)
    dO = load_rows(do_ptr, start, rows, length, i_value, HV, DV, cols)
    at_coarse, at_fine = place_of_sums(chunk, rows)
    coarse, fine = tl.load(sums_ptr + at_coarse), tl.load(sums_ptr + at_fine)
    since, after, whole = chunk_decays(coarse, fine, rows)
    w = tl.full((C,), 1.0, ACC)
    if GATED:
        w = load_gate(w_ptr, start, rows, length, i_value, HV, ACC)

    dQ = product(dO, tl.trans(S), DOT, PRECISION, ACC) * (since * scale)[:, None]
    read = tl.sum(dQ * Q.to(ACC), 1)
    D = pair_decays(coarse, fine, rows, False) * (w * scale)[None, :]  # [t, s]
    G = product(dO, tl.trans(V), DOT, PRECISION, ACC)
    dQ += product(G * D, K, DOT, PRECISION, ACC)
    store_rows(dq_ptr, dQ, start, rows, length, i_value, HV, DK, keys)

    dK = product(V, tl.trans(dS), DOT, PRECISION, ACC) * after[:, None]
    written = tl.sum(dK * K.to(ACC), 1)
    D = pair_decays(coarse, fine, rows, True) * scale  # [s, t]
    G = product(V, tl.trans(dO), DOT, PRECISION, ACC)
    dK += product(G * D, Q, DOT, PRECISION, ACC)
    store_rows(dk_ptr, dK * w[:, None], start, rows, length, i_value, HV, DK, keys)

    A = product(K, tl.trans(Q), DOT, PRECISION, ACC) * D
    dZ = product(K, dS, DOT, PRECISION, ACC) * after[:, None]
    dZ += product(A, dO, DOT, PRECISION, ACC)
    store_rows(dv_ptr, dZ * w[:, None], start, rows, length, i_value, HV, DV, cols)

    A *= G
    if GATED:
        dw = tl.sum(A, 1) + written
        store_gate(dw_ptr, dw, start, rows, length, i_value, HV)
    earlier = rows[:, None] < rows[None, :]
    W = tl.where(earlier, A * w[:, None], 0.0)
    read += tl.sum(W, 0) - tl.sum(W, 1)
    dg = tl.sum(tl.where(earlier, (written * w)[:, None], read[:, None]), 0) + whole * carried
    store_gate(dg_ptr, dg, start, rows, length, i_value, HV)


def takes(x: Operands, chunk: int) -> bool:
    """Whether these kernels are for such operands, and trusted; no values decide.

    Of GPUs' dtypes it is bf16 alone: products of others are of fp32, whose operands need more registers than there are.
    """
    if x.k.device.type == "cuda" and not (
        x.k.dtype == torch.bfloat16 and trusted(NAME, x.k.device)
    ):
        return False
    return (
        x.b is None
        and x.g.shape[2] == 1
        and (x.w is None or x.w.shape[2] == 1)
        and max(x.k.shape[2], x.v.shape[2]) <= WIDEST
        and chunk <= LARGEST_CHUNK
    )


def states_launch(x: Operands, sequences: int) -> Launch:
    """How to launch the first kernel: in both directions, and with fewer value channels where programs are few."""
    width, heads = x.v.shape[2], 2 * sequences * x.v.shape[1]
    sizes = Scan(LARGEST_CHUNK, x.k.shape[2], x.k.element_size(), width, heads)
    how = STATES._replace(value_block=block(width, STATES.value_block))
    return spread(how, sizes, multiprocessors(x.k.device))


def registers(device: torch.device) -> int | None:
    """Of a thread of the second kernel at most; elsewhere shared memory has no room for three, or nobody measured."""
    return REGISTERS if capability(device)[0] == 9 else None


def sizes(x: Operands, table: Table) -> dict[str, Any]:
    """What both kernels are compiled for."""
    (_, HK, DK), (_, HV, DV), arithmetic = x.k.shape, x.v.shape, precision(x.q.dtype, "ieee")
    return {
        **{"HK": HK, "HG": x.g.shape[1], "HV": HV, "DK": DK, "DV": DV},
        **{"GATED": x.w is not None, "C": table.size, "BK": block(DK, WIDEST)},
        **{name: arithmetic[name] for name in ("DOT", "PRECISION", "ACC")},
    }


def backward(
    x: Operands, table: Table, state: Tensor, do: Tensor, d_final: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Gradients of q, k, v, g, b and w (empty where absent), and that of the initial state."""
    *between, d_state = states(x, table, state, do, d_final)
    return gradients(x, table, do, between), d_state


def states(
    x: Operands, table: Table, state: Tensor, do: Tensor, d_final: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States at chunk starts, gradients of those at chunk ends, summed log-decays, and the initial state's gradient."""
    N, HV, DK, DV = state.shape
    starts, ends = (x.k.new_empty(table.start.numel(), HV, DK, DV) for _ in range(2))
    sums = state.new_empty(table.start.numel(), HV, 2, table.size)
    d_state = torch.empty_like(d_final)
    how = states_launch(x, N)
    over(states_kernel, N * HV, triton.cdiv(DV, how.value_block), 2)(
        x.q, x.k, x.v, x.g, x.w, do, state, d_final, starts, ends, d_state, sums, *table[1:], x.scale,
        **sizes(x, table), BV=how.value_block, STAGES=how.num_stages, num_warps=how.num_warps,
    )  # fmt: skip
    return starts, ends, sums, d_state


def gradients(x: Operands, table: Table, do: Tensor, between: list[Tensor]) -> list[Tensor]:
    """Gradients of all operands, summed over the value heads that shared them."""
    HV = x.v.shape[1]

    def new(like: Tensor) -> Tensor:
        dtype = like.dtype if like.shape[1] == HV else state_dtype(x.q)
        return like.new_empty(like.shape[0], HV, like.shape[2], dtype=dtype)

    dq, dk, dv, dg = (new(t) for t in (x.q, x.k, x.v, x.g))
    db, dw = x.k.new_empty(0), x.k.new_empty(0) if x.w is None else new(x.w)
    constants = sizes(x, table)
    del constants["HG"]  # in the sums each value head has its own
    over(plain_gradient_kernel, table.start.numel() * HV)(
        x.q, x.k, x.v, x.w, do, *between, dq, dk, dv, dg, dw, table.start, table.length, x.scale,
        **constants, BV=block(x.v.shape[2], WIDEST), num_warps=WARPS, maxnreg=registers(x.k.device),
    )  # fmt: skip
    return [sum_to(dq, x.q), sum_to(dk, x.k), dv, sum_to(dg, x.g), db, dw]
