"""Stage one, first kernel: decays and scores of each chunk (Eqs. 18, 20, 25)."""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import decay_sums, half_factors, load_rows, product, store_blocks


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr,
    Q_gamma_ptr, K_tail_ptr, E_bar_ptr, gamma_C_ptr, A_qk_ptr, T_ptr, deep_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Q_γ, K_tail, Ē, γ_C and the matrices A_qk and T of one chunk, deep rows left out.

    Grid: (M · H); heads vary fastest, so neighbouring programs read neighbouring bytes.
    In: packed tokens [L, heads, d]. Out: Q_γ, K_tail, Ē [M, H, C, DK], γ_C [M, H, DK], A_qk, T [M, H, C, C], and per
    chunk whether any row is deep. A gate's width is 0 where it is absent.
    Precision: decays and scores in ACC; products take operands in DOT.
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    rows = tl.arange(0, R)
    tile = (i_chunk * H + i_head) * (2 * R)  # first row of this chunk in [M, H, C, …]
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty

    A_11 = tl.zeros((R, R), ACC)
    A_21 = tl.zeros((R, R), ACC)
    A_22 = tl.zeros((R, R), ACC)
    T_11 = tl.zeros((R, R), ACC)
    T_21 = tl.zeros((R, R), ACC)
    T_22 = tl.zeros((R, R), ACC)
    any_deep = 0
    for first_col in range(0, DK, BK):
        cols = first_col + tl.arange(0, BK)
        inside = (cols < DK)[None, :]
        offset = (tile + rows[:, None]) * DK + cols[None, :]
        below: tl.constexpr = R * DK
        g_2, since_2, after_2 = decay_sums(
            g_ptr, start, rows, R, length, i_g, HG, G_WIDTH, cols, ACC
        )
        g_1, since_1, after_1 = decay_sums(
            g_ptr, start, rows, 0, length, i_g, HG, G_WIDTH, cols, ACC
        )
        gamma_1, gamma_2 = tl.exp(tl.sum(g_1, 0)), tl.exp(tl.sum(g_2, 0))  # of each half as a whole
        gamma_C = tl.exp(tl.sum(g_1, 0) + tl.sum(g_2, 0))
        tl.store(gamma_C_ptr + (i_chunk * H + i_head) * DK + cols, gamma_C, mask=cols < DK)

        K_1 = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
        K_2 = load_rows(k_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC)
        K_seam = K_1 * tl.exp(after_1)
        tl.store(K_tail_ptr + offset, (K_seam * gamma_2[None, :]).to(dtype), mask=inside)
        tl.store(K_tail_ptr + offset + below, (K_2 * tl.exp(after_2)).to(dtype), mask=inside)
        seam = tl.trans(K_seam.to(DOT))

        Q_1 = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale
        Q_2 = load_rows(q_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC) * scale
        row_1, column_1, deep_1 = half_factors(Q_1, K_1, since_1, DOT)
        row_2, column_2, deep_2 = half_factors(Q_2, K_2, since_2, DOT)
        any_deep = tl.maximum(any_deep, tl.max((deep_1 | deep_2).to(tl.int32), 0))
        column_1, column_2 = tl.trans(column_1), tl.trans(column_2)
        tl.store(Q_gamma_ptr + offset, (Q_1 * tl.exp(since_1)).to(dtype), mask=inside)
        tl.store(
            Q_gamma_ptr + offset + below,
            (Q_2 * tl.exp(since_2) * gamma_1[None, :]).to(dtype),
            mask=inside,
        )
        A_11 += tl.where(deep_1[:, None], 0.0, product(row_1, column_1, DOT, PRECISION, ACC))
        A_22 += tl.where(deep_2[:, None], 0.0, product(row_2, column_2, DOT, PRECISION, ACC))
        A_21 += product(row_2, seam, DOT, PRECISION, ACC)
        if B_WIDTH > 0:
            E_1 = (
                K_1
                * load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
                * tl.exp(since_1)
            )
            E_2 = (
                K_2
                * load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
                * tl.exp(since_2)
            )
            tl.store(E_bar_ptr + offset, E_1.to(dtype), mask=inside)
            tl.store(E_bar_ptr + offset + below, (E_2 * gamma_1[None, :]).to(dtype), mask=inside)
            T_11 += tl.where(deep_1[:, None], 0.0, product(E_1, column_1, DOT, PRECISION, ACC))
            T_22 += tl.where(deep_2[:, None], 0.0, product(E_2, column_2, DOT, PRECISION, ACC))
            T_21 += product(E_2, seam, DOT, PRECISION, ACC)

    causal = rows[:, None] >= rows[None, :]
    earlier = rows[:, None] > rows[None, :]
    square = tile * (2 * R) + rows[:, None] * (2 * R) + rows[None, :]
    store_blocks(
        A_qk_ptr + square, tl.where(causal, A_11, 0.0), A_21, tl.where(causal, A_22, 0.0), R
    )
    tl.store(A_qk_ptr + square + R, tl.zeros((R, R), dtype))
    if B_WIDTH > 0:
        store_blocks(
            T_ptr + square, tl.where(earlier, T_11, 0.0), T_21, tl.where(earlier, T_22, 0.0), R
        )
    tl.store(deep_ptr + tl.program_id(0), any_deep)
