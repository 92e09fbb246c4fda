"""Stage three as three kernels: gradients of all operands of a chunk, by the short backward (Eqs. 53–82).

The first works along the value channels: dZ = Aᵀ dR, dV, dW and the score gradients dA_qk = dO Rᵀ, dT = −dZ Rᵀ. The
second multiplies by the states at both ends of the chunk and joins its halves. The third works inside each half along
the key channels and turns all of it into dQ, dK, dB and dg. What passes between them goes through memory: together they
need more registers than there are, and a product's result must not be transposed in registers (a miscompile of Triton
before 3.7.1 on Hopper).
"""

import triton
import triton.language as tl

from gdn2.ops.triton.decays import load_decays, load_whole
from gdn2.ops.triton.tiles import (
    LIFT,
    lifted,
    load_rows,
    product,
    rounded,
    store_rows,
    sums,
)


@triton.jit
def gradient_values_kernel(
    v_ptr, w_ptr, do_ptr, A_ptr, R_ptr, dR_ptr, dZ_ptr, dv_ptr, dw_ptr, dA_qk_ptr, dT_ptr,
    start_ptr, length_ptr,
    H: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr, W_WIDTH: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dZ, dV, dW and the gradients of both score matrices of one chunk.

    Grid: (M · H). Entries of dA_qk and dT [M, H, C, C] above the diagonal mean nothing. Without erase dZ is dR and not
    stored.
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    dtype: tl.constexpr = R_ptr.dtype.element_ty
    G: tl.constexpr = HV // H
    chunk = i_chunk * H + i_head
    rows = tl.arange(0, C)
    square = chunk * (C * C) + rows[:, None] * C + rows[None, :]
    if ERASE:
        A_flipped = tl.trans(tl.load(A_ptr + square))
    dA_qk = tl.zeros((C, C), ACC)
    dT = tl.zeros((C, C), ACC)
    for i_group in range(0, G):
        i_v = i_head * G + i_group
        dw = tl.zeros((C,), ACC)
        for first_col in range(0, DV, BV):
            cols = first_col + tl.arange(0, BV)
            inside = (cols < DV)[None, :]
            offset = chunk * (C * G * DV) + rows[:, None] * (G * DV) + i_group * DV + cols[None, :]
            residual = tl.trans(tl.load(R_ptr + offset, mask=inside, other=0.0))
            dZ = tl.load(dR_ptr + offset, mask=inside, other=0.0)
            if ERASE:
                dZ = product(A_flipped, dZ, dtype, PRECISION, ACC)
                tl.store(dZ_ptr + offset, dZ.to(dtype), mask=inside)
                dT -= product(dZ, residual, dtype, PRECISION, ACC)
            dO = load_rows(do_ptr, start, rows, length, i_v, HV, DV, cols)
            dA_qk += product(dO, residual, dtype, PRECISION, ACC)
            dV = dZ.to(ACC)
            if W_WIDTH > 0:
                V = load_rows(v_ptr, start, rows, length, i_v, HV, DV, cols).to(ACC)
                if W_WIDTH == 1:
                    dw += tl.sum(dV * V, 1)
                else:
                    store_rows(dw_ptr, dV * V, start, rows, length, i_v, HV, DV, cols)
                dV *= load_rows(w_ptr, start, rows, length, i_v, HV, W_WIDTH, cols, True).to(ACC)
            store_rows(dv_ptr, dV, start, rows, length, i_v, HV, DV, cols)
        if W_WIDTH == 1:
            store_rows(dw_ptr, dw[:, None], start, rows, length, i_v, HV, 1, tl.arange(0, 1))
    tl.store(dA_qk_ptr + square, dA_qk.to(dA_qk_ptr.dtype.element_ty))
    if ERASE:
        tl.store(dT_ptr + square, dT.to(dT_ptr.dtype.element_ty))


@triton.jit
def cross_halves(
    dX, X, column, dM_ptr, since, whole, d_first, d_column, C: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what flows through the scores of second-half readers and first-half keys, for one kind of reader.

    dX is the gradient of readers decayed since the chunk's start and becomes theirs without decay; X are the readers
    decayed since their half's start. On their way to the state those of the second half pass the first (d_first).
    """
    rows = tl.arange(0, C)
    second = (rows >= C // 2)[:, None]
    d_first += tl.sum(tl.where(second, dX * X, 0.0), 0)
    square = rows[:, None] * C + rows[None, :]
    dM = tl.load(dM_ptr + square, mask=second & (rows < C // 2)[None, :], other=0.0)
    dX *= tl.where(second, whole[None, :], 1.0)
    dX += product(dM, column, ACC, PRECISION, ACC)
    d_column += product(tl.trans(dM), X, ACC, PRECISION, ACC)
    return dX * since, d_first, d_column


@triton.jit
def gradient_states_kernel(
    q_ptr, k_ptr, b_ptr, since_ptr, after_ptr,
    do_ptr, R_ptr, dZ_ptr, starts_ptr, ends_ptr, dA_qk_ptr, dT_ptr,
    dQ_ptr, dE_ptr, dK_ptr, d_whole_ptr, start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr, WIDE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dQ, dE and dK [M, H, C, DK] from outside of a token's half: through the states and from the other half.

    Grid: (M · H, DK / BK). dQ_γ = dO S₀ᵀ, dĒ = −dZ S₀ᵀ, dK_tail = R dS_Cᵀ and rowsum(dS_C ⊙ S₀) (Eqs. 55–60, 63), then
    the scores between the halves. Also what the decay over each half gets for what passes it [M, H, 2, DK]: the state,
    readers of the second half, keys of the first. WIDE value channels belong to a key-side head.
    """
    chunk = tl.program_id(0).to(tl.int64)
    i_chunk, i_head = chunk // H, chunk % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    dtype: tl.constexpr = R_ptr.dtype.element_ty
    rows, cols = tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (cols < DK)[None, :]
    own = (chunk * C + rows[:, None]) * DK + cols[None, :]
    valued, stated = (chunk * C + rows[:, None]) * WIDE, (chunk * DK + cols[:, None]) * WIDE
    decay = i_chunk * HG + i_g
    since = load_decays(since_ptr, decay, rows, C, G_WIDTH, cols)
    after = load_decays(after_ptr, decay, rows, C, G_WIDTH, cols)
    whole_0 = load_whole(since_ptr, decay, C // 2 - 1, C, G_WIDTH, cols)
    whole_1 = load_whole(since_ptr, decay, C - 1, C, G_WIDTH, cols)
    K = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
    column = K * after
    d_first = tl.zeros((BK,), ACC)
    d_column = tl.zeros((C, BK), ACC)

    dX = tl.zeros((C, BK), ACC)
    for first in range(0, WIDE, BV):
        values = first + tl.arange(0, BV)[None, :]
        S = tl.load(
            starts_ptr + stated + values, mask=(cols < DK)[:, None] & (values < WIDE), other=0.0
        )
        dO = load_rows(do_ptr, start, rows, length, i_head, H, WIDE, first + tl.arange(0, BV))
        dX += product(dO, tl.trans(S), dtype, PRECISION, ACC)
    Q = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale
    dX, d_first, d_column = cross_halves(
        dX, Q * since, column, dA_qk_ptr + chunk * (C * C), since, whole_0, d_first, d_column,
        C, PRECISION, ACC,
    )  # fmt: skip
    tl.store(dQ_ptr + own, dX.to(dQ_ptr.dtype.element_ty), mask=inside)

    if B_WIDTH > 0:
        dX = tl.zeros((C, BK), ACC)
        for first in range(0, WIDE, BV):
            values = first + tl.arange(0, BV)[None, :]
            S = tl.load(
                starts_ptr + stated + values, mask=(cols < DK)[:, None] & (values < WIDE), other=0.0
            )
            dZ = tl.load(dZ_ptr + valued + values, mask=values < WIDE, other=0.0)
            dX -= product(dZ, tl.trans(S), dtype, PRECISION, ACC)
        E = load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC) * K
        dX, d_first, d_column = cross_halves(
            dX, E * since, column, dT_ptr + chunk * (C * C), since, whole_0, d_first, d_column,
            C, PRECISION, ACC,
        )  # fmt: skip
        tl.store(dE_ptr + own, dX.to(dE_ptr.dtype.element_ty), mask=inside)

    dX = tl.zeros((C, BK), ACC)
    d_state = tl.zeros((BK,), ACC)
    for first in range(0, WIDE, BV):
        values = first + tl.arange(0, BV)[None, :]
        mask = (cols < DK)[:, None] & (values < WIDE)
        S = tl.load(starts_ptr + stated + values, mask=mask, other=0.0)
        dS = tl.load(ends_ptr + stated + values, mask=mask, other=0.0)
        residual = tl.load(R_ptr + valued + values, mask=values < WIDE, other=0.0)
        d_state += tl.sum(S.to(ACC) * dS.to(ACC), 1)
        dX += product(residual, tl.trans(dS), dtype, PRECISION, ACC)
    second = (rows >= C // 2)[:, None]
    d_second = d_state * whole_0 + tl.sum(tl.where(second, 0.0, dX * column), 0)
    dX = (dX * tl.where(second, 1.0, whole_1[None, :]) + d_column) * after
    tl.store(dK_ptr + own, dX.to(dK_ptr.dtype.element_ty), mask=inside)
    d_first = (d_first + d_state * whole_1) * whole_0
    tl.store(d_whole_ptr + 2 * chunk * DK + cols, d_first, mask=cols < DK)
    tl.store(d_whole_ptr + (2 * chunk + 1) * DK + cols, d_second * whole_1, mask=cols < DK)


@triton.jit
def half_gradient(
    dX, dK, X, K, since, deep, dM_ptr, rows,
    HALF: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what flows through the strictly lower scores of one half, deep rows left out, for one kind of reader.

    Also returns what is still to be summed from each token to the half's end for dg. That sum cancels between rows and
    columns, so both use the same rounded factors: the same products meet twice.
    """
    earlier = (rows[:, None] > rows[None, :]) & (deep == 0)[:, None]
    dM = tl.where(earlier, tl.load(dM_ptr), 0.0)
    row_decay, key_decay = since * LIFT, lifted(since)
    row, column = rounded(X * row_decay, HALF), rounded(K * key_decay, HALF)
    d_row = product(dM, column, ACC, PRECISION, ACC)
    d_column = product(tl.trans(dM), row, ACC, PRECISION, ACC)
    return dX + d_row * row_decay, dK + d_column * key_decay, d_row * row - d_column * column


@triton.jit
def gradient_keys_kernel(
    q_ptr, k_ptr, b_ptr, since_ptr, dQ_ptr, dE_ptr, dK_ptr, d_whole_ptr, dA_qk_ptr, dT_ptr, deep_ptr,
    dq_ptr, dk_ptr, dg_ptr, db_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dQ, dK, dg and dB of one half of a chunk, for BK key channels: what flows inside it joins what came from outside.

    Grid: (2 · M · H, DK / BK). Gradients are per key-side head [L, H, DK]; those of gates of width one are per block of
    channels [L, H, DK / BK]. The host sums over what an operand was broadcast over.
    What a gradient does to g is summed from a token to the half's end (through its decay since the half's start), from
    the half's start to a token (through a key's decay until the half's end), or over the whole half.
    """
    half = tl.program_id(0).to(tl.int64)
    chunk, here = half // 2, tl.program_id(0) % 2 * R
    i_chunk, i_head = chunk // H, chunk % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    rows = tl.arange(0, R)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (cols < DK)[None, :]
    own = (half * R + rows[:, None]) * DK + cols[None, :]
    square = (half * R + rows[:, None]) * (2 * R) + here + rows[None, :]
    deep = tl.load(deep_ptr + half * R + rows)
    since = load_decays(since_ptr, i_chunk * HG + i_g, here + rows, 2 * R, G_WIDTH, cols)
    K = load_rows(k_ptr, start, here + rows, length, i_k, HK, DK, cols).to(ACC)

    Q = load_rows(q_ptr, start, here + rows, length, i_k, HK, DK, cols).to(ACC) * scale
    dQ = tl.load(dQ_ptr + own, mask=inside, other=0.0).to(ACC)
    to_start = dQ * Q
    diagonal = rows[:, None] == rows[None, :]
    d_own = tl.sum(tl.where(diagonal, tl.load(dA_qk_ptr + square), 0.0), 1).to(ACC)[:, None]
    dQ, dK, more = half_gradient(
        dQ + d_own * K, d_own * Q, Q, K, since, deep, dA_qk_ptr + square, rows, HALF, PRECISION, ACC
    )
    to_start += more
    store_rows(dq_ptr, dQ * scale, start, here + rows, length, i_head, H, DK, cols)

    if B_WIDTH > 0:
        B = load_rows(b_ptr, start, here + rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
        dE = tl.load(dE_ptr + own, mask=inside, other=0.0).to(ACC)
        to_start += dE * B * K
        dE, dK, more = half_gradient(
            dE, dK, B * K, K, since, deep, dT_ptr + square, rows, HALF, PRECISION, ACC
        )
        to_start += more
        store_gate(db_ptr, dE * K, start, here + rows, length, i_head, H, DK, B_WIDTH, cols)
        dK += dE * B

    dK_outside = tl.load(dK_ptr + own, mask=inside, other=0.0).to(ACC)
    store_rows(dk_ptr, dK + dK_outside, start, here + rows, length, i_head, H, DK, cols)
    strict = (rows[:, None] > rows[None, :]).to(ACC)
    until = tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0)
    signs: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else ACC
    dg = tl.dot(strict, dK_outside * K, input_precision=PRECISION, out_dtype=ACC)
    dg += tl.load(d_whole_ptr + half * DK + cols, mask=cols < DK, other=0.0)[None, :]
    dg += sums(until.to(signs), to_start, DOT, ACC)
    store_gate(dg_ptr, dg, start, here + rows, length, i_head, H, DK, G_WIDTH, cols)


@triton.jit
def store_gate(
    ptr,
    X,
    start,
    rows,
    length,
    i_head,
    H: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    cols,
):
    """Store a gate's gradient, or for a gate of width one its sum over this block of channels."""
    if WIDTH == 1:
        tokens = (start + rows).to(tl.int64) * H + i_head
        total = tl.sum(tl.where((cols < DK)[None, :], X, 0.0), 1)
        # the blocks' partial sums lie side by side: [L, H, blocks]
        blocks = tl.num_programs(1)
        tl.store(
            ptr + tokens * blocks + tl.program_id(1),
            total.to(ptr.dtype.element_ty),
            mask=rows < length,
        )
    else:
        store_rows(ptr, X, start, rows, length, i_head, H, DK, cols)
