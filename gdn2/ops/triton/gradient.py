"""Stage three as two kernels: gradients of all operands of a chunk, by the short backward (Eqs. 53–82).

The first works along the value channels: dZ = Aᵀ dR, dV, dW and the score gradients dA_qk = dO Rᵀ, dT = −dZ Rᵀ. The
second works along the key channels and turns these into dQ, dK, dB and dg. Gradients of scores pass between them
through memory, since the second needs them transposed too and a product's result must not be transposed in registers (a
miscompile of Triton before 3.7.1 on Hopper).
"""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import (
    DEEP,
    column_factors,
    decay_sums,
    load_rows,
    masked_sum,
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
def through_state(
    X_ptr, S_ptr, i_head, start, length, chunk, rows, cols,
    PACKED: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """X Sᵀ [C, BK] over all value channels; X is packed tokens or [M, H, C, d_v], S a chunk's states [M, H, DK, d_v]."""
    G: tl.constexpr = HV // H
    C: tl.constexpr = rows.shape[0]
    total = tl.zeros((C, cols.shape[0]), ACC)
    for i_block in range(0, G * tl.cdiv(DV, BV)):
        i_group = i_block // tl.cdiv(DV, BV)
        values = (i_block % tl.cdiv(DV, BV)) * BV + tl.arange(0, BV)
        inside = (values < DV)[None, :]
        state = cols[:, None] * (G * DV) + i_group * DV + values[None, :]
        S = tl.load(S_ptr + chunk * (DK * G * DV) + state, mask=(cols < DK)[:, None] & inside, other=0.0)
        if PACKED:
            X = load_rows(X_ptr, start, rows, length, i_head * G + i_group, HV, DV, values)
        else:
            offset = rows[:, None] * (G * DV) + i_group * DV + values[None, :]
            X = tl.load(X_ptr + chunk * (C * G * DV) + offset, mask=inside, other=0.0)
        total += product(X, tl.trans(S), DTYPE, PRECISION, ACC)
    return total


@triton.jit
def through_decay(
    starts_ptr, ends_ptr, chunk, cols, DK: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr
):
    """rowsum(dS_C ⊙ S₀) for a block of key channels (Eq. 60); WIDE counts the columns of all value heads."""
    total = tl.zeros((cols.shape[0],), ACC)
    for first_col in range(0, WIDE, BV):
        values = first_col + tl.arange(0, BV)
        mask = (cols < DK)[:, None] & (values < WIDE)[None, :]
        state = chunk * (DK * WIDE) + cols[:, None] * WIDE + values[None, :]
        S = tl.load(starts_ptr + state, mask=mask, other=0.0).to(ACC)
        total += tl.sum(S * tl.load(ends_ptr + state, mask=mask, other=0.0).to(ACC), 1)
    return total


@triton.jit
def score_gradient(
    dK_own, dK_other, X, since, own, other, dM_ptr, R: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What flows through the scores of one kind of reader, diagonal and deep rows of a half left out.

    Returns the gradients of both kinds of column, of the decayed rows, and the rows' factors as rounded for the
    products: what rows and columns do to g cancels, so both sides use the same rounded factors.
    """
    C: tl.constexpr = 2 * R
    rows = tl.arange(0, C)
    deep = tl.min(since, 1) < -DEEP
    row, column = rows[:, None], rows[None, :]
    same_half = (row < R) == (column < R)
    factor = (X * tl.exp(since)).to(DOT)
    dM = tl.load(dM_ptr + row * C + column).to(DOT)
    dM_own = tl.where(same_half & (row > column) & (deep == 0)[:, None], dM, 0.0).to(DOT)
    dM_other = tl.where((row >= R) & (column < R), dM, 0.0).to(DOT)
    dK_own += product(tl.trans(dM_own), factor, DOT, PRECISION, ACC)
    dK_other += product(tl.trans(dM_other), factor, DOT, PRECISION, ACC)
    d_row = product(dM_own, own, DOT, PRECISION, ACC) + product(dM_other, other, DOT, PRECISION, ACC)
    return dK_own, dK_other, d_row, factor


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
    What a gradient does to g is summed back to the chunk's start (through γ), on to its end (through K_tail), or to the
    start or end of a half (through the scores). Keys, queries and erase rows come one after the other, since there are
    registers for one of them.
    """
    C: tl.constexpr = 2 * R
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    chunk = i_chunk * H + i_head
    dtype: tl.constexpr = R_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    first = (rows < R)[:, None]
    row, column = rows[:, None], rows[None, :]
    same_half = (row < R) == (column < R)
    dA_qk_ptr += chunk * (C * C)

    dK = through_state(
        R_ptr, ends_ptr, i_head, start, length, chunk, rows, cols,
        False, H, HV, DK, DV, BV, dtype, PRECISION, ACC)  # fmt: skip
    since, after, total_1, total_2 = decay_sums(g_ptr, start, length, i_g, HG, G_WIDTH, cols, R, ACC)
    K = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
    own, other = column_factors(K, since, after, first, DOT, DOT)
    dK *= tl.exp(after + tl.where(first, total_2[None, :], 0.0))
    dg = masked_sum(column < row, dK * K, DOT, ACC)
    d_chunk = through_decay(starts_ptr, ends_ptr, chunk, cols, DK, DV * (HV // H), BV, ACC)
    dg += (d_chunk * tl.exp(total_1 + total_2))[None, :]
    dK_own = tl.zeros((C, BK), ACC)
    dK_other = tl.zeros((C, BK), ACC)

    dX = through_state(
        do_ptr, starts_ptr, i_head, start, length, chunk, rows, cols,
        True, H, HV, DK, DV, BV, dtype, PRECISION, ACC)  # fmt: skip
    dX *= tl.exp(since + tl.where(first, 0.0, total_1[None, :]))
    X = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale
    dg += masked_sum(column >= row, dX * X, DOT, ACC)
    dK_own, dK_other, d_row, factor = score_gradient(
        dK_own, dK_other, X, since, own, other, dA_qk_ptr, R, DOT, PRECISION, ACC
    )
    dg += masked_sum(same_half & (column >= row), d_row * factor.to(ACC), DOT, ACC)
    d_diagonal = tl.load(dA_qk_ptr + rows * (C + 1)).to(ACC)[:, None]
    dK += d_diagonal * X
    dX += d_row * tl.exp(since) + d_diagonal * K
    store_rows(dq_ptr, dX * scale, start, rows, length, i_head, H, DK, cols)

    if B_WIDTH > 0:
        dX = -through_state(
            dZ_ptr, starts_ptr, i_head, start, length, chunk, rows, cols,
            False, H, HV, DK, DV, BV, dtype, PRECISION, ACC)  # fmt: skip
        dX *= tl.exp(since + tl.where(first, 0.0, total_1[None, :]))
        B = load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
        dg += masked_sum(column >= row, dX * B * K, DOT, ACC)
        dK_own, dK_other, d_row, factor = score_gradient(
            dK_own, dK_other, B * K, since, own, other, dT_ptr + chunk * (C * C), R, DOT, PRECISION, ACC
        )
        dg += masked_sum(same_half & (column >= row), d_row * factor.to(ACC), DOT, ACC)
        dX += d_row * tl.exp(since)
        store_gate(db_ptr, dX * K, start, rows, length, i_head, H, DK, B_WIDTH, cols)
        dK += dX * B

    dg -= masked_sum(same_half & (column >= row), dK_own * own.to(ACC), DOT, ACC)
    dK_other *= tl.exp(after)
    dg += masked_sum(same_half & (column < row) & (row < R), dK_other * K, DOT, ACC)
    dK += dK_own * tl.where(since < -DEEP, 0.0, tl.exp(-since)) + dK_other
    store_rows(dk_ptr, dK, start, rows, length, i_head, H, DK, cols)
    store_gate(dg_ptr, dg, start, rows, length, i_head, H, DK, G_WIDTH, cols)


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
