"""Stage one as a kernel: scores, triangular inverse and WY factors of each chunk (Eqs. 18–22, 25)."""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import (
    DEEP,
    decay_sums,
    level_sums,
    load_rows,
    product,
    quarter,
    unit_lower_inverse,
)


@triton.jit
def half_scores(
    X, K, g, since, rows, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr
):
    """Products of the rows of one half with its own keys, decay included; entries above the diagonal are undefined."""
    R: tl.constexpr = rows.shape[0]
    deep = tl.min(since, 1) < -DEEP
    columns = tl.where(since < -DEEP, 0.0, tl.exp(-since)) * K
    P = product(X * tl.exp(since), tl.trans(columns.to(DOT)), DOT, PRECISION, ACC)
    levels = 0
    if tl.max(deep.to(tl.int32), 0) > 0:
        levels = R
        diagonal = (rows[:, None] == rows[None, :]) & deep[:, None]
        P = tl.where(deep[:, None], 0.0, P) + tl.where(diagonal, tl.sum(X * K, 1)[:, None], 0.0)
    h = 1
    while h < levels:
        row_sum, column_sum = level_sums(g, rows, h, ACC)
        met = product(X * tl.exp(row_sum), tl.trans((K * tl.exp(column_sum)).to(DOT)), DOT, PRECISION, ACC)
        P += tl.where(quarter(rows, h) & deep[:, None], met, 0.0)
        h *= 2
    return P


@triton.jit
def intra_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, b_ptr, w_ptr,
    Q_gamma_ptr, K_tail_ptr, gamma_C_ptr, A_qk_ptr, A_ptr, Y_ptr, U_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr, W_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Scores, inverse and WY factors of one chunk.

    Grid: (M · H); heads vary fastest, so neighbouring programs read neighbouring bytes.
    In: packed tokens [L, heads, d]. Out: Q_γ, K_tail, Y [M, H, C, DK], U [M, H, C, DV·HV/H], A_qk, A [M, H, C, C],
    γ_C [M, H, DK]. A gate's width is 0 where it is absent.
    Precision: decay, scores and inverse in ACC; products take operands in DOT.
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    rows = tl.arange(0, R)
    tile = (i_chunk * H + i_head) * (2 * R)  # first row of this chunk in [M, H, C, …]
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty

    A_qk_11 = tl.zeros((R, R), ACC)
    A_qk_21 = tl.zeros((R, R), ACC)
    A_qk_22 = tl.zeros((R, R), ACC)
    T_11 = tl.zeros((R, R), ACC)
    T_21 = tl.zeros((R, R), ACC)
    T_22 = tl.zeros((R, R), ACC)
    for first_col in range(0, DK, BK):
        cols = first_col + tl.arange(0, BK)
        inside = (cols < DK)[None, :]
        offset = (tile + rows[:, None]) * DK + cols[None, :]
        g_1, since_1, after_1 = decay_sums(g_ptr, start, rows, 0, length, i_g, HG, G_WIDTH, cols, ACC)
        g_2, since_2, after_2 = decay_sums(g_ptr, start, rows, R, length, i_g, HG, G_WIDTH, cols, ACC)
        total_1, total_2 = tl.sum(g_1, 0), tl.sum(g_2, 0)
        tl.store(gamma_C_ptr + (i_chunk * H + i_head) * DK + cols, tl.exp(total_1 + total_2), mask=cols < DK)

        K_1 = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
        K_2 = load_rows(k_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC)
        K_seam = tl.trans((K_1 * tl.exp(after_1)).to(DOT))
        tl.store(K_tail_ptr + offset, (K_1 * tl.exp(after_1 + total_2[None, :])).to(dtype), mask=inside)
        tl.store(K_tail_ptr + offset + R * DK, (K_2 * tl.exp(after_2)).to(dtype), mask=inside)

        Q_1 = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale
        Q_2 = load_rows(q_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC) * scale
        tl.store(Q_gamma_ptr + offset, (Q_1 * tl.exp(since_1)).to(dtype), mask=inside)
        tl.store(
            Q_gamma_ptr + offset + R * DK, (Q_2 * tl.exp(since_2 + total_1[None, :])).to(dtype), mask=inside
        )
        A_qk_11 += half_scores(Q_1, K_1, g_1, since_1, rows, DOT, PRECISION, ACC)
        A_qk_22 += half_scores(Q_2, K_2, g_2, since_2, rows, DOT, PRECISION, ACC)
        A_qk_21 += product(Q_2 * tl.exp(since_2), K_seam, DOT, PRECISION, ACC)
        if B_WIDTH > 0:
            E_1 = K_1 * load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
            E_2 = K_2 * load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
            T_11 += half_scores(E_1, K_1, g_1, since_1, rows, DOT, PRECISION, ACC)
            T_22 += half_scores(E_2, K_2, g_2, since_2, rows, DOT, PRECISION, ACC)
            T_21 += product(E_2 * tl.exp(since_2), K_seam, DOT, PRECISION, ACC)

    causal = rows[:, None] >= rows[None, :]
    square = tile * (2 * R) + rows[:, None] * (2 * R) + rows[None, :]
    store_triangle(A_qk_ptr + square, tl.where(causal, A_qk_11, 0.0), A_qk_21, tl.where(causal, A_qk_22, 0.0), R)

    if B_WIDTH > 0:
        earlier = rows[:, None] > rows[None, :]
        A_11 = unit_lower_inverse(tl.where(earlier, T_11, 0.0), rows, ACC, SOLVE)
        A_22 = unit_lower_inverse(tl.where(earlier, T_22, 0.0), rows, ACC, SOLVE)
        A_21 = -tl.dot(
            tl.dot(A_22, T_21, input_precision=SOLVE, out_dtype=ACC), A_11, input_precision=SOLVE, out_dtype=ACC
        )
        store_triangle(A_ptr + square, A_11, A_21, A_22, R)
        A_11, A_21, A_22 = A_11.to(dtype), A_21.to(dtype), A_22.to(dtype)
        for first_col in range(0, DK, BK):
            cols = first_col + tl.arange(0, BK)
            g_1, since_1, _ = decay_sums(g_ptr, start, rows, 0, length, i_g, HG, G_WIDTH, cols, ACC)
            g_2, since_2, _ = decay_sums(g_ptr, start, rows, R, length, i_g, HG, G_WIDTH, cols, ACC)
            K_1 = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
            K_2 = load_rows(k_ptr, start, R + rows, length, i_k, HK, DK, cols).to(ACC)
            E_1 = K_1 * load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
            E_2 = K_2 * load_rows(b_ptr, start, R + rows, length, i_b, HB, B_WIDTH, cols).to(ACC)
            E_1 = (E_1 * tl.exp(since_1)).to(dtype)
            E_2 = (E_2 * tl.exp(since_2 + tl.sum(g_1, 0)[None, :])).to(dtype)
            offset = (tile + rows[:, None]) * DK + cols[None, :]
            store_triangular_product(
                Y_ptr + offset, R * DK, (cols < DK)[None, :], A_11, A_21, A_22, E_1, E_2, dtype, PRECISION, ACC
            )

    G: tl.constexpr = HV // H
    for i_value in range(0, G * tl.cdiv(DV, BV)):
        i_v = i_head * G + i_value // tl.cdiv(DV, BV)
        cols = (i_value % tl.cdiv(DV, BV)) * BV + tl.arange(0, BV)
        Z_1 = load_rows(v_ptr, start, rows, length, i_v, HV, DV, cols).to(ACC)
        Z_2 = load_rows(v_ptr, start, R + rows, length, i_v, HV, DV, cols).to(ACC)
        if W_WIDTH > 0:
            Z_1 *= load_rows(w_ptr, start, rows, length, i_v, HV, W_WIDTH, cols).to(ACC)
            Z_2 *= load_rows(w_ptr, start, R + rows, length, i_v, HV, W_WIDTH, cols).to(ACC)
        inside = (cols < DV)[None, :]
        offset = (tile + rows[:, None]) * (G * DV) + (i_v % G) * DV + cols[None, :]
        if B_WIDTH > 0:
            store_triangular_product(
                U_ptr + offset, R * G * DV, inside, A_11, A_21, A_22, Z_1.to(dtype), Z_2.to(dtype), dtype, PRECISION, ACC
            )
        else:
            tl.store(U_ptr + offset, Z_1.to(dtype), mask=inside)
            tl.store(U_ptr + offset + R * G * DV, Z_2.to(dtype), mask=inside)


@triton.jit
def store_triangle(ptr, X_11, X_21, X_22, R: tl.constexpr):
    """Store a lower triangular [2R, 2R] matrix from its blocks, zeros above the diagonal included."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(ptr, X_11.to(dtype))
    tl.store(ptr + R, tl.zeros((R, R), dtype))
    tl.store(ptr + R * 2 * R, X_21.to(dtype))
    tl.store(ptr + R * 2 * R + R, X_22.to(dtype))


@triton.jit
def store_triangular_product(
    ptr, below, inside, A_11, A_21, A_22, X_1, X_2, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr
):
    """Store [A_11 X_1; A_21 X_1 + A_22 X_2]; `below` is the distance of the two halves in memory."""
    tl.store(ptr, product(A_11, X_1, DTYPE, PRECISION, ACC).to(DTYPE), mask=inside)
    second = product(A_21, X_1, DTYPE, PRECISION, ACC) + product(A_22, X_2, DTYPE, PRECISION, ACC)
    tl.store(ptr + below, second.to(DTYPE), mask=inside)
