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
                dV *= load_rows(w_ptr, start, rows, length, i_v, HV, W_WIDTH, cols, True).to(ACC)
            store_rows(dv_ptr, dV, start, rows, length, i_v, HV, DV, cols)
        if W_WIDTH == 1:
            store_rows(dw_ptr, dw[:, None], start, rows, length, i_v, HV, 1, tl.arange(0, 1))
    tl.store(dA_qk_ptr + square, dA_qk.to(dA_qk_ptr.dtype.element_ty))
    if ERASE:
        tl.store(dT_ptr + square, dT.to(dT_ptr.dtype.element_ty))


@triton.jit
def half_gradient(
    dX, dK, X, K, since, dM_ptr, square, flipped, rows,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what flows through the strictly lower scores of one half, deep rows left out, for one kind of reader.

    Also returns what is still to be summed from each token to the half's end for dg. That sum cancels between rows and
    columns, so both use the same rounded factors: the same products meet twice.
    """
    row, column, deep = half_factors(X, K, since, DOT)
    earlier = (rows[:, None] > rows[None, :]) & (deep == 0)[:, None]
    later = (rows[:, None] < rows[None, :]) & (deep == 0)[None, :]
    d_row = product(tl.where(earlier, tl.load(dM_ptr + square), 0.0), column, DOT, PRECISION, ACC)
    d_column = product(tl.where(later, tl.load(dM_ptr + flipped), 0.0), row, DOT, PRECISION, ACC)
    dX += d_row * tl.exp(since)
    dK += d_column * tl.where(since < -DEEP, 0.0, tl.exp(-since))
    return dX, dK, d_row * row.to(ACC) - d_column * column.to(ACC)


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
    channels [DK / BK, L, H]. The host sums over what an operand was broadcast over.
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    dtype: tl.constexpr = R_ptr.dtype.element_ty
    G: tl.constexpr = HV // H
    rows = tl.arange(0, R)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    tile = (i_chunk * H + i_head) * (2 * R)

    dQ_1 = tl.zeros((R, BK), ACC)
    dQ_2 = tl.zeros((R, BK), ACC)
    dK_1 = tl.zeros((R, BK), ACC)
    dK_2 = tl.zeros((R, BK), ACC)
    dE_1 = tl.zeros((R, BK), ACC)
    dE_2 = tl.zeros((R, BK), ACC)
    d_chunk = tl.zeros((BK,), ACC)
    for i_block in range(0, G * tl.cdiv(DV, BV)):
        i_group = i_block // tl.cdiv(DV, BV)
        i_v = i_head * G + i_group
        values = (i_block % tl.cdiv(DV, BV)) * BV + tl.arange(0, BV)
        inside = (values < DV)[None, :]
        state = (
            ((i_chunk * H + i_head) * DK + cols[:, None]) * (G * DV)
            + i_group * DV
            + values[None, :]
        )
        state_mask = (cols < DK)[:, None] & inside
        S = tl.load(starts_ptr + state, mask=state_mask, other=0.0)
        dS = tl.load(ends_ptr + state, mask=state_mask, other=0.0)
        d_chunk += tl.sum(S.to(ACC) * dS.to(ACC), 1)
        S, dS = tl.trans(S), tl.trans(dS)
        dO_1 = load_rows(do_ptr, start, rows, length, i_v, HV, DV, values)
        dO_2 = load_rows(do_ptr, start, R + rows, length, i_v, HV, DV, values)
        dQ_1 += product(dO_1, S, dtype, PRECISION, ACC)
        dQ_2 += product(dO_2, S, dtype, PRECISION, ACC)
        offset = (tile + rows[:, None]) * (G * DV) + i_group * DV + values[None, :]
        below: tl.constexpr = R * G * DV
        dK_1 += product(tl.load(R_ptr + offset, mask=inside, other=0.0), dS, dtype, PRECISION, ACC)
        dK_2 += product(
            tl.load(R_ptr + offset + below, mask=inside, other=0.0), dS, dtype, PRECISION, ACC
        )
        if B_WIDTH > 0:
            dE_1 -= product(
                tl.load(dZ_ptr + offset, mask=inside, other=0.0), S, dtype, PRECISION, ACC
            )
            dE_2 -= product(
                tl.load(dZ_ptr + offset + below, mask=inside, other=0.0), S, dtype, PRECISION, ACC
            )

    g_1, since_1, after_1 = decay_sums(g_ptr, start, rows, 0, length, i_g, HG, G_WIDTH, cols, ACC)
    g_2, since_2, after_2 = decay_sums(g_ptr, start, rows, R, length, i_g, HG, G_WIDTH, cols, ACC)
    total_1, total_2 = tl.sum(g_1, 0), tl.sum(g_2, 0)
    d_chunk *= tl.exp(total_1 + total_2)
    K_1 = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
    K_2 = load_rows(k_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC)
    Q_1 = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale
    Q_2 = load_rows(q_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC) * scale

    # through γ: summed from each token back to the chunk's start; through K_tail: from the token to the chunk's end
    dQ_1 *= tl.exp(since_1)
    dQ_2 *= tl.exp(since_2 + total_1[None, :])
    dK_1 *= tl.exp(after_1 + total_2[None, :])
    dK_2 *= tl.exp(after_2)
    to_start_1, to_start_2 = dQ_1 * Q_1, dQ_2 * Q_2
    to_end_1, to_end_2 = dK_1 * K_1, dK_2 * K_2
    d_before = tl.sum(to_end_1, 0)

    square = tile * (2 * R) + rows[:, None] * (2 * R) + rows[None, :]
    flipped = tile * (2 * R) + rows[None, :] * (2 * R) + rows[:, None]
    second: tl.constexpr = R * 2 * R
    diagonal = rows[:, None] == rows[None, :]
    d_diagonal_1 = tl.sum(tl.where(diagonal, tl.load(dA_qk_ptr + square), 0.0), 1).to(ACC)[:, None]
    d_diagonal_2 = tl.sum(tl.where(diagonal, tl.load(dA_qk_ptr + square + second + R), 0.0), 1).to(
        ACC
    )[:, None]

    # through the seam: rows of the second half, columns of the first
    column = K_1 * tl.exp(after_1)
    row_decay = tl.exp(since_2)
    d_row = product(tl.load(dA_qk_ptr + square + second), column, DOT, PRECISION, ACC) * row_decay
    d_column = product(tl.load(dA_qk_ptr + flipped + second), Q_2 * row_decay, DOT, PRECISION, ACC)
    dQ_2 += d_row
    to_seam_2 = d_row * Q_2
    if B_WIDTH > 0:
        B_1 = load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
        B_2 = load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
        E_1, E_2 = B_1 * K_1, B_2 * K_2
        dE_1 *= tl.exp(since_1)
        dE_2 *= tl.exp(since_2 + total_1[None, :])
        to_start_1 += dE_1 * E_1
        to_start_2 += dE_2 * E_2
        d_row = product(tl.load(dT_ptr + square + second), column, DOT, PRECISION, ACC) * row_decay
        d_column += product(
            tl.load(dT_ptr + flipped + second), E_2 * row_decay, DOT, PRECISION, ACC
        )
        dE_2 += d_row
        to_seam_2 += d_row * E_2
    d_column *= tl.exp(after_1)
    dK_1 += d_column
    to_end_1 += d_column * K_1

    d_after = tl.sum(to_start_2, 0)
    strict = (rows[:, None] > rows[None, :]).to(ACC)
    dg_1 = (
        tl.dot(strict, to_end_1, input_precision=PRECISION, out_dtype=ACC)
        + (d_chunk + d_after)[None, :]
    )
    dg_2 = (
        tl.dot(strict, to_end_2, input_precision=PRECISION, out_dtype=ACC)
        + (d_chunk + d_before)[None, :]
    )

    # inside each half
    square_2, flipped_2 = square + second + R, flipped + second + R
    dQ_1, dK_1, back_1 = half_gradient(
        dQ_1, dK_1, Q_1, K_1, since_1, dA_qk_ptr, square, flipped, rows, DOT, PRECISION, ACC
    )
    dQ_2, dK_2, back_2 = half_gradient(
        dQ_2, dK_2, Q_2, K_2, since_2, dA_qk_ptr, square_2, flipped_2, rows, DOT, PRECISION, ACC
    )
    if B_WIDTH > 0:
        dE_1, dK_1, more = half_gradient(
            dE_1, dK_1, E_1, K_1, since_1, dT_ptr, square, flipped, rows, DOT, PRECISION, ACC
        )
        back_1 += more
        dE_2, dK_2, more = half_gradient(
            dE_2, dK_2, E_2, K_2, since_2, dT_ptr, square_2, flipped_2, rows, DOT, PRECISION, ACC
        )
        back_2 += more
        dK_1 += dE_1 * B_1
        dK_2 += dE_2 * B_2
        store_gate(db_ptr, dE_1 * K_1, start, rows, length, i_head, H, DK, B_WIDTH, cols)
        store_gate(db_ptr, dE_2 * K_2, start, R + rows, length, i_head, H, DK, B_WIDTH, cols)
    dg_1 += tl.cumsum(to_start_1 + back_1, 0, reverse=True)
    dg_2 += tl.cumsum(to_start_2 + to_seam_2 + back_2, 0, reverse=True)
    dQ_1, dQ_2 = (dQ_1 + d_diagonal_1 * K_1) * scale, (dQ_2 + d_diagonal_2 * K_2) * scale
    store_rows(dq_ptr, dQ_1, start, rows, length, i_head, H, DK, cols)
    store_rows(dq_ptr, dQ_2, start, R + rows, length, i_head, H, DK, cols)
    store_rows(dk_ptr, dK_1 + d_diagonal_1 * Q_1, start, rows, length, i_head, H, DK, cols)
    store_rows(dk_ptr, dK_2 + d_diagonal_2 * Q_2, start, R + rows, length, i_head, H, DK, cols)
    store_gate(dg_ptr, dg_1, start, rows, length, i_head, H, DK, G_WIDTH, cols)
    store_gate(dg_ptr, dg_2, start, R + rows, length, i_head, H, DK, G_WIDTH, cols)


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
