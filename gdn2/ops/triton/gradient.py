"""Stage three as three kernels: gradients of all operands of a chunk, by the short backward (Eqs. 53–82).

The first works along the value channels: dZ = Aᵀ dR, dV, dW and the score gradients dA_qk = dO Rᵀ, dT = −dZ Rᵀ. The
second multiplies by the states at both ends of the chunk. The third works along the key channels and turns all of it
into dQ, dK, dB and dg. What passes between them goes through memory: together they need more registers than there are,
and a product's result must not be transposed in registers (a miscompile of Triton before 3.7.1 on Hopper).
"""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import (
    BOUND,
    LIFT,
    decay_sums,
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
def gradient_states_kernel(
    do_ptr, R_ptr, dZ_ptr, starts_ptr, ends_ptr, dQ_ptr, dE_ptr, dK_ptr, d_chunk_ptr,
    start_ptr, length_ptr,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dQ_γ = dO S₀ᵀ, dĒ = −dZ S₀ᵀ, dK_tail = R dS_Cᵀ [M, H, C, DK] and rowsum(dS_C ⊙ S₀) [M, H, DK] (Eqs. 55–60, 63).

    Grid: (M · H, DK / BK).
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    dtype: tl.constexpr = R_ptr.dtype.element_ty
    G: tl.constexpr = HV // H
    chunk = i_chunk * H + i_head
    rows = tl.arange(0, C)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    dQ = tl.zeros((C, BK), ACC)
    dE = tl.zeros((C, BK), ACC)
    dK = tl.zeros((C, BK), ACC)
    d_chunk = tl.zeros((BK,), ACC)
    for i_block in range(0, G * tl.cdiv(DV, BV)):
        i_group = i_block // tl.cdiv(DV, BV)
        values = (i_block % tl.cdiv(DV, BV)) * BV + tl.arange(0, BV)
        inside = (values < DV)[None, :]
        column = i_group * DV + values[None, :]
        state = (chunk * DK + cols[:, None]) * (G * DV) + column
        state_mask = (cols < DK)[:, None] & inside
        offset = (chunk * C + rows[:, None]) * (G * DV) + column
        S = tl.load(starts_ptr + state, mask=state_mask, other=0.0)
        dS = tl.load(ends_ptr + state, mask=state_mask, other=0.0)
        d_chunk += tl.sum(S.to(ACC) * dS.to(ACC), 1)
        residual = tl.load(R_ptr + offset, mask=inside, other=0.0)
        dK += product(residual, tl.trans(dS), dtype, PRECISION, ACC)
        dO = load_rows(do_ptr, start, rows, length, i_head * G + i_group, HV, DV, values)
        dQ += product(dO, tl.trans(S), dtype, PRECISION, ACC)
        if ERASE:
            dZ = tl.load(dZ_ptr + offset, mask=inside, other=0.0)
            dE -= product(dZ, tl.trans(S), dtype, PRECISION, ACC)
    offset = (chunk * C + rows[:, None]) * DK + cols[None, :]
    inside = (cols < DK)[None, :]
    tl.store(dQ_ptr + offset, dQ.to(dQ_ptr.dtype.element_ty), mask=inside)
    tl.store(dK_ptr + offset, dK.to(dK_ptr.dtype.element_ty), mask=inside)
    if ERASE:
        tl.store(dE_ptr + offset, dE.to(dE_ptr.dtype.element_ty), mask=inside)
    tl.store(d_chunk_ptr + chunk * DK + cols, d_chunk, mask=cols < DK)


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
    row_decay, key_decay = (
        tl.exp(since) * LIFT,
        tl.where(since < -BOUND, 0.0, tl.exp(-since) / LIFT),
    )
    row, column = rounded(X * row_decay, HALF), rounded(K * key_decay, HALF)
    d_row = product(dM, column, ACC, PRECISION, ACC)
    d_column = product(tl.trans(dM), row, ACC, PRECISION, ACC)
    return dX + d_row * row_decay, dK + d_column * key_decay, d_row * row - d_column * column


@triton.jit
def gradient_keys_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr, dQ_ptr, dE_ptr, dK_ptr, d_chunk_ptr, dA_qk_ptr, dT_ptr, deep_ptr,
    dq_ptr, dk_ptr, dg_ptr, db_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dQ, dK, dg and dB of one half of a chunk, for BK key channels.

    Grid: (2 · M · H, DK / BK). Gradients are per key-side head [L, H, DK]; those of gates of width one are per block of
    channels [L, H, DK / BK]. The host sums over what an operand was broadcast over.
    What a gradient does to g is summed from a token to the half's end (through its decay since the half's start), from
    the half's start to a token (through a key's decay until the half's end), or over the whole half.
    """
    i_half = tl.program_id(0) % 2
    i_chunk, i_head = (tl.program_id(0) // 2).to(tl.int64) // H, (tl.program_id(0) // 2) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    rows = tl.arange(0, R)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (cols < DK)[None, :]
    chunk = i_chunk * H + i_head
    here, there = i_half * R, (1 - i_half) * R  # this half and the other
    own = (chunk * 2 * R + here + rows[:, None]) * DK + cols[None, :]
    other = (chunk * 2 * R + there + rows[:, None]) * DK + cols[None, :]
    square = chunk * (4 * R * R) + rows[:, None] * (2 * R) + rows[None, :]
    seam = square + R * 2 * R
    square += here * (2 * R + 1)

    g, since, after = decay_sums(g_ptr, start, rows, here, length, i_g, HG, G_WIDTH, cols, DOT, ACC)
    g_o, since_o, after_o = decay_sums(
        g_ptr, start, rows, there, length, i_g, HG, G_WIDTH, cols, DOT, ACC
    )
    total, total_o = tl.sum(g, 0), tl.sum(g_o, 0)
    K = load_rows(k_ptr, start, here + rows, length, i_k, HK, DK, cols).to(ACC)
    K_o = load_rows(k_ptr, start, there + rows, length, i_k, HK, DK, cols).to(ACC)
    Q = load_rows(q_ptr, start, here + rows, length, i_k, HK, DK, cols).to(ACC) * scale
    dQ = tl.load(dQ_ptr + own, mask=inside, other=0.0).to(ACC)
    dK = tl.load(dK_ptr + own, mask=inside, other=0.0).to(ACC)
    d_whole = tl.load(d_chunk_ptr + chunk * DK + cols, mask=cols < DK, other=0.0)
    d_whole *= tl.exp(total + total_o)
    if B_WIDTH > 0:
        B = load_rows(b_ptr, start, here + rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
        dE = tl.load(dE_ptr + own, mask=inside, other=0.0).to(ACC)
    if i_half == 0:
        # readers of the second half pass this one on their way to the state, and meet its keys at the seam
        dK *= tl.exp(after + total_o[None, :])
        dQ *= tl.exp(since)
        row = load_rows(q_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC) * scale
        row *= tl.exp(since_o)
        d_past = tl.sum(tl.load(dQ_ptr + other, mask=inside, other=0.0).to(ACC) * row, 0)
        d_column = product(tl.trans(tl.load(dA_qk_ptr + seam)), row, ACC, PRECISION, ACC)
        if B_WIDTH > 0:
            dE *= tl.exp(since)
            row = load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
            row *= K_o * tl.exp(since_o)
            d_past += tl.sum(tl.load(dE_ptr + other, mask=inside, other=0.0).to(ACC) * row, 0)
            d_column += product(tl.trans(tl.load(dT_ptr + seam)), row, ACC, PRECISION, ACC)
        d_whole += d_past * tl.exp(total)
        dK += d_column * tl.exp(after)
    else:
        # keys of the first half pass this one on their way to the state, and meet its readers at the seam
        dK *= tl.exp(after)
        column = K_o * tl.exp(after_o)
        dK_o = tl.load(dK_ptr + other, mask=inside, other=0.0).to(ACC)
        d_whole += tl.sum(dK_o * column, 0) * tl.exp(total)
        d_row = product(tl.load(dA_qk_ptr + seam), column, ACC, PRECISION, ACC)
        dQ = (dQ * tl.exp(total_o)[None, :] + d_row) * tl.exp(since)
        if B_WIDTH > 0:
            d_row = product(tl.load(dT_ptr + seam), column, ACC, PRECISION, ACC)
            dE = (dE * tl.exp(total_o)[None, :] + d_row) * tl.exp(since)

    deep = tl.load(deep_ptr + chunk * (2 * R) + here + rows)
    strict = (rows[:, None] > rows[None, :]).to(ACC)
    until = tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0)
    signs: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else ACC
    dg = tl.dot(strict, dK * K, input_precision=PRECISION, out_dtype=ACC) + d_whole[None, :]
    to_start = dQ * Q
    dQ, dK, more = half_gradient(
        dQ, dK, Q, K, since, deep, dA_qk_ptr + square, rows, HALF, PRECISION, ACC
    )
    to_start += more
    diagonal = rows[:, None] == rows[None, :]
    d_own = tl.sum(tl.where(diagonal, tl.load(dA_qk_ptr + square), 0.0), 1).to(ACC)[:, None]
    dQ = (dQ + d_own * K) * scale
    store_rows(dq_ptr, dQ, start, here + rows, length, i_head, H, DK, cols)
    dK += d_own * Q
    if B_WIDTH > 0:
        to_start += dE * B * K
        dE, dK, more = half_gradient(
            dE, dK, B * K, K, since, deep, dT_ptr + square, rows, HALF, PRECISION, ACC
        )
        to_start += more
        store_gate(db_ptr, dE * K, start, here + rows, length, i_head, H, DK, B_WIDTH, cols)
        dK += dE * B
    store_rows(dk_ptr, dK, start, here + rows, length, i_head, H, DK, cols)
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
