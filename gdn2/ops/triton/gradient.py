"""Stage three as two kernels: gradients of all operands of a chunk, by the short backward (Eqs. 53–82).

The first works along the value channels: dZ = Aᵀ dR, dV, dW and the score gradients dA_qk = dO Rᵀ, dT = −dZ Rᵀ. The
second works along the key channels and turns these into dQ, dK, dB and dg. Gradients of scores pass between them
through memory, since a product's result must not be transposed in registers (a miscompile of Triton before 3.7.1 on
Hopper); the second kernel loads them both ways.
"""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import (
    DEEP,
    decay_sums,
    half_factors,
    load_rows,
    product,
    store_rows,
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
                dV *= load_rows(w_ptr, start, rows, length, i_v, HV, W_WIDTH, cols).to(ACC)
            store_rows(dv_ptr, dV, start, rows, length, i_v, HV, DV, cols)
        if W_WIDTH == 1:
            store_rows(dw_ptr, dw[:, None], start, rows, length, i_v, HV, 1, tl.arange(0, 1))
    tl.store(dA_qk_ptr + square, dA_qk.to(dA_qk_ptr.dtype.element_ty))
    if ERASE:
        tl.store(dT_ptr + square, dT.to(dT_ptr.dtype.element_ty))


@triton.jit
def half_gradient(
    dX, dK, X, K, since, dM_ptr, square, rows,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what flows through the strictly lower scores of one half, deep rows left out, for one kind of reader.

    Also returns what is still to be summed from each token to the half's end for dg. That sum cancels between rows and
    columns, so both use the same rounded factors: the same products meet twice.
    """
    row, column, deep = half_factors(X, K, since, DOT)
    earlier = (rows[:, None] > rows[None, :]) & (deep == 0)[:, None]
    dM = tl.where(earlier, tl.load(dM_ptr + square), 0.0).to(DOT)
    d_row = product(dM, column, DOT, PRECISION, ACC)
    d_column = product(tl.trans(dM), row, DOT, PRECISION, ACC)
    dX += d_row * tl.exp(since)
    dK += d_column * tl.where(since < -DEEP, 0.0, tl.exp(-since))
    return dX, dK, d_row * row.to(ACC) - d_column * column.to(ACC)


@triton.jit
def state_gradients(
    do_ptr, R_ptr, dZ_ptr, starts_ptr, ends_ptr, start, length, chunk, first, rows, cols,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dQ_γ = dO S₀ᵀ, dĒ = −dZ S₀ᵀ, dK_tail = R dS_Cᵀ of one half, and rowsum(dS_C ⊙ S₀), for a block of channels."""
    dtype: tl.constexpr = R_ptr.dtype.element_ty
    R: tl.constexpr = rows.shape[0]
    BK: tl.constexpr = cols.shape[0]
    G: tl.constexpr = HV // H
    starts_ptr += chunk * (DK * G * DV)
    ends_ptr += chunk * (DK * G * DV)
    R_ptr += (chunk * 2 * R + first) * (G * DV)
    dZ_ptr += (chunk * 2 * R + first) * (G * DV)
    dQ = tl.zeros((R, BK), ACC)
    dE = tl.zeros((R, BK), ACC)
    dK = tl.zeros((R, BK), ACC)
    d_chunk = tl.zeros((BK,), ACC)
    for i_block in range(0, G * tl.cdiv(DV, BV)):
        i_group = i_block // tl.cdiv(DV, BV)
        i_v = (chunk % H).to(tl.int32) * G + i_group
        values = (i_block % tl.cdiv(DV, BV)) * BV + tl.arange(0, BV)
        inside = (values < DV)[None, :]
        state = cols[:, None] * (G * DV) + i_group * DV + values[None, :]
        state_mask = (cols < DK)[:, None] & inside
        offset = rows[:, None] * (G * DV) + i_group * DV + values[None, :]
        S = tl.load(starts_ptr + state, mask=state_mask, other=0.0)
        dS = tl.load(ends_ptr + state, mask=state_mask, other=0.0)
        d_chunk += tl.sum(S.to(ACC) * dS.to(ACC), 1)
        dK += product(
            tl.load(R_ptr + offset, mask=inside, other=0.0), tl.trans(dS), dtype, PRECISION, ACC
        )
        S = tl.trans(S)
        dO = load_rows(do_ptr, start, first + rows, length, i_v, HV, DV, values)
        dQ += product(dO, S, dtype, PRECISION, ACC)
        if ERASE:
            dE -= product(
                tl.load(dZ_ptr + offset, mask=inside, other=0.0), S, dtype, PRECISION, ACC
            )
    return dQ, dE, dK, d_chunk


@triton.jit
def gradient_keys_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr, do_ptr, R_ptr, dZ_ptr, starts_ptr, ends_ptr, dA_qk_ptr, dT_ptr,
    dq_ptr, dk_ptr, dg_ptr, db_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dQ, dK, dg and dB of one chunk, for BK key channels.

    Grid: (M · H, DK / BK). Gradients are per key-side head [L, H, DK]; those of gates of width one are per block of
    channels [L, H, DK / BK]. The host sums over what an operand was broadcast over.
    The halves come one after the other, so that one half's tiles fit into registers. What a gradient does to g is summed
    towards the chunk's start (through γ), towards its end (through K_tail), or towards the seam between.
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    rows = tl.arange(0, R)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    chunk = i_chunk * H + i_head
    dA_qk_ptr += chunk * (4 * R * R)
    if B_WIDTH > 0:
        dT_ptr += chunk * (4 * R * R)
    square = rows[:, None] * (2 * R) + rows[None, :]
    second: tl.constexpr = R * 2 * R  # from the first block of scores to the one below
    ERASE: tl.constexpr = B_WIDTH > 0
    diagonal = rows[:, None] == rows[None, :]
    strict = (rows[:, None] > rows[None, :]).to(ACC)

    # first half
    dQ, dE, dK, d_chunk = state_gradients(
        do_ptr, R_ptr, dZ_ptr, starts_ptr, ends_ptr, start, length, chunk, 0, rows, cols,
        H, HV, DK, DV, BV, ERASE, PRECISION, ACC)  # fmt: skip
    g_2, since_2, _ = decay_sums(g_ptr, start, rows, R, length, i_g, HG, G_WIDTH, cols, ACC)
    total_2 = tl.sum(g_2, 0)
    Q_2 = load_rows(q_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC) * scale
    row = Q_2 * tl.exp(since_2)
    d_column = product(tl.trans(tl.load(dA_qk_ptr + square + second)), row, DOT, PRECISION, ACC)
    if ERASE:
        E_2 = load_rows(k_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC)
        E_2 *= load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
        d_column += product(
            tl.trans(tl.load(dT_ptr + square + second)), E_2 * tl.exp(since_2), DOT, PRECISION, ACC
        )

    g_1, since, after = decay_sums(g_ptr, start, rows, 0, length, i_g, HG, G_WIDTH, cols, ACC)
    total_1 = tl.sum(g_1, 0)
    d_chunk *= tl.exp(total_1 + total_2)
    K = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
    Q = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale
    dK *= tl.exp(after + total_2[None, :])
    d_before = tl.sum(dK * K, 0)
    dK += d_column * tl.exp(after)
    dg_1 = tl.dot(strict, dK * K, input_precision=PRECISION, out_dtype=ACC) + d_chunk[None, :]
    dQ *= tl.exp(since)
    to_start = dQ * Q
    dQ, dK, more = half_gradient(dQ, dK, Q, K, since, dA_qk_ptr, square, rows, DOT, PRECISION, ACC)
    to_start += more
    d_diagonal = tl.sum(tl.where(diagonal, tl.load(dA_qk_ptr + square), 0.0), 1).to(ACC)[:, None]
    store_rows(dq_ptr, (dQ + d_diagonal * K) * scale, start, rows, length, i_head, H, DK, cols)
    dK += d_diagonal * Q
    if ERASE:
        B = load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
        dE *= tl.exp(since)
        to_start += dE * B * K
        dE, dK, more = half_gradient(
            dE, dK, B * K, K, since, dT_ptr, square, rows, DOT, PRECISION, ACC
        )
        to_start += more
        store_gate(db_ptr, dE * K, start, rows, length, i_head, H, DK, B_WIDTH, cols)
        dK += dE * B
    store_rows(dk_ptr, dK, start, rows, length, i_head, H, DK, cols)
    dg_1 += tl.cumsum(to_start, 0, reverse=True)

    # second half
    dQ, dE, dK, _ = state_gradients(
        do_ptr, R_ptr, dZ_ptr, starts_ptr, ends_ptr, start, length, chunk, R, rows, cols,
        H, HV, DK, DV, BV, ERASE, PRECISION, ACC)  # fmt: skip
    _, _, after = decay_sums(g_ptr, start, rows, 0, length, i_g, HG, G_WIDTH, cols, ACC)
    column = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * tl.exp(after)
    g_2, since, after = decay_sums(g_ptr, start, rows, R, length, i_g, HG, G_WIDTH, cols, ACC)
    K = load_rows(k_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC)
    Q = load_rows(q_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC) * scale
    dK *= tl.exp(after)
    dg_2 = (
        tl.dot(strict, dK * K, input_precision=PRECISION, out_dtype=ACC)
        + (d_chunk + d_before)[None, :]
    )
    square += second
    dQ *= tl.exp(since + total_1[None, :])
    d_after = tl.sum(dQ * Q, 0)
    dQ += product(tl.load(dA_qk_ptr + square), column, DOT, PRECISION, ACC) * tl.exp(since)
    to_start = dQ * Q
    dQ, dK, more = half_gradient(
        dQ, dK, Q, K, since, dA_qk_ptr, square + R, rows, DOT, PRECISION, ACC
    )
    to_start += more
    d_diagonal = tl.sum(tl.where(diagonal, tl.load(dA_qk_ptr + square + R), 0.0), 1).to(ACC)[
        :, None
    ]
    store_rows(dq_ptr, (dQ + d_diagonal * K) * scale, start, R + rows, length, i_head, H, DK, cols)
    dK += d_diagonal * Q
    if ERASE:
        B = load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
        dE *= tl.exp(since + total_1[None, :])
        d_after += tl.sum(dE * B * K, 0)
        dE += product(tl.load(dT_ptr + square), column, DOT, PRECISION, ACC) * tl.exp(since)
        to_start += dE * B * K
        dE, dK, more = half_gradient(
            dE, dK, B * K, K, since, dT_ptr, square + R, rows, DOT, PRECISION, ACC
        )
        to_start += more
        store_gate(db_ptr, dE * K, start, R + rows, length, i_head, H, DK, B_WIDTH, cols)
        dK += dE * B
    store_rows(dk_ptr, dK, start, R + rows, length, i_head, H, DK, cols)
    dg_2 += tl.cumsum(to_start, 0, reverse=True)
    store_gate(dg_ptr, dg_2, start, R + rows, length, i_head, H, DK, G_WIDTH, cols)
    store_gate(dg_ptr, dg_1 + d_after[None, :], start, rows, length, i_head, H, DK, G_WIDTH, cols)


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
