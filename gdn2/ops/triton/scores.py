"""Stage one, first kernel: decays and scores of each chunk (Eqs. 18, 20, 25)."""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import DEEP, column_factors, decay_sums, load_rows, product


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr,
    Q_gamma_ptr, K_tail_ptr, E_bar_ptr, gamma_C_ptr, A_qk_ptr, T_ptr, deep_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
    OWN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Q_γ, K_tail, Ē, γ_C and the matrices A_qk and T of one chunk, deep rows left out inside each half.

    Grid: (M · H); heads vary fastest, so neighbouring programs read neighbouring bytes.
    In: packed tokens [L, heads, d]. Out: Q_γ, K_tail, Ē [M, H, C, DK], γ_C [M, H, DK], A_qk, T [M, H, C, C], and per
    chunk whether any row is deep. A gate's width is 0 where it is absent.
    Precision: decays and scores in ACC; products take operands in DOT, those inside a half, which strong decay leaves as
    the only ones, in OWN.
    """
    C: tl.constexpr = 2 * R
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    chunk = i_chunk * H + i_head
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    first = (rows < R)[:, None]
    same_half = (rows[:, None] < R) == (rows[None, :] < R)
    square = chunk * (C * C) + rows[:, None] * C + rows[None, :]

    A = tl.zeros((C, C), ACC)
    T = tl.zeros((C, C), ACC)
    any_deep = 0
    for first_col in range(0, DK, BK):
        cols = first_col + tl.arange(0, BK)
        inside = (cols < DK)[None, :]
        offset = rows[:, None] * DK + cols[None, :]
        since, after, total_1, total_2 = decay_sums(g_ptr, start, length, i_g, HG, G_WIDTH, cols, R, ACC)
        tl.store(gamma_C_ptr + chunk * DK + cols, tl.exp(total_1 + total_2), mask=cols < DK)
        deep = (tl.min(since, 1) < -DEEP)[:, None]
        any_deep = tl.maximum(any_deep, tl.max(tl.max(deep.to(tl.int32), 0), 0))

        K = load_rows(k_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC)
        K_tail = K * tl.exp(after + tl.where(first, total_2[None, :], 0.0))
        tl.store(K_tail_ptr + chunk * (C * DK) + offset, K_tail.to(dtype), mask=inside)
        own, other = column_factors(K, since, after, first, OWN, DOT)
        own, other = tl.trans(own), tl.trans(other)

        before = tl.where(first, 1.0, tl.exp(total_1)[None, :])  # from the half's start back to the chunk's
        row = load_rows(q_ptr, start, rows, length, i_k, HK, DK, cols).to(ACC) * scale * tl.exp(since)
        tl.store(Q_gamma_ptr + chunk * (C * DK) + offset, (row * before).to(dtype), mask=inside)
        met = tl.where(deep, 0.0, product(row, own, OWN, PRECISION, ACC))
        A += tl.where(same_half, met, product(row, other, DOT, PRECISION, ACC))
        if B_WIDTH > 0:
            row = load_rows(b_ptr, start, rows, length, i_b, HB, B_WIDTH, cols).to(ACC) * K * tl.exp(since)
            tl.store(E_bar_ptr + chunk * (C * DK) + offset, (row * before).to(dtype), mask=inside)
            met = tl.where(deep, 0.0, product(row, own, OWN, PRECISION, ACC))
            T += tl.where(same_half, met, product(row, other, DOT, PRECISION, ACC))

    tl.store(A_qk_ptr + square, tl.where(rows[:, None] >= rows[None, :], A, 0.0).to(dtype))
    if B_WIDTH > 0:
        tl.store(T_ptr + square, tl.where(rows[:, None] > rows[None, :], T, 0.0))
    tl.store(deep_ptr + tl.program_id(0), any_deep)
