"""Rows whose decay inside a half is too deep to be measured from its start: halving down to single tokens.

Such rows are rare. Both kernels look at the flags that `scores_kernel`, or the CUDA kernel in its place, left and leave
at once where there are none, so the kernels that do the usual work need neither the registers nor the branches of this
one.
"""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import level_sums, load_rows, product, quarter


@triton.jit
def deep_half_scores(
    A,
    T,
    Q,
    E,
    K,
    g,
    deep,
    rows,
    ERASE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """Add the scores of one half's deep rows for one block of channels."""
    R: tl.constexpr = rows.shape[0]
    A += tl.where((rows[:, None] == rows[None, :]) & deep, tl.sum(Q * K, 1)[:, None], 0.0)
    h = 1
    while h < R:
        row_sum, column_sum = level_sums(g, rows, h, ACC)
        met = quarter(rows, h) & deep
        column = tl.trans((K * tl.exp(column_sum)).to(DOT))
        A += tl.where(met, product(Q * tl.exp(row_sum), column, DOT, PRECISION, ACC), 0.0)
        if ERASE:
            T += tl.where(met, product(E * tl.exp(row_sum), column, DOT, PRECISION, ACC), 0.0)
        h *= 2
    return A, T


@triton.jit
def deep_scores_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr, A_qk_ptr, T_ptr, deep_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add to A_qk and T what `scores_kernel` left out. Grid: (M · H, 2), one program per half."""
    chunk, first, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * R, tl.arange(0, R)
    deep = tl.load(deep_ptr + chunk * (2 * R) + first + rows)
    if tl.max(deep, 0) > 0:
        i_chunk, i_head = chunk // H, chunk % H
        start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
        i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
        square = chunk * (4 * R * R) + (first + rows[:, None]) * (2 * R) + first + rows[None, :]
        A = tl.load(A_qk_ptr + square).to(ACC)
        T = tl.zeros((R, R), ACC)
        if B_WIDTH > 0:
            T += tl.load(T_ptr + square)
        for first_col in range(0, DK, BK):
            cols = first_col + tl.arange(0, BK)
            g = load_rows(g_ptr, start, first + rows, length, i_g, HG, G_WIDTH, cols, True).to(ACC)
            g = tl.where(g < -1e30, -1e30, g)  # nothing times minus infinity is not a number
            K = load_rows(k_ptr, start, first + rows, length, i_k, HK, DK, cols).to(ACC)
            Q = load_rows(q_ptr, start, first + rows, length, i_k, HK, DK, cols).to(ACC) * scale
            E = K
            if B_WIDTH > 0:
                E *= load_rows(b_ptr, start, first + rows, length, i_b, HB, B_WIDTH, cols, True).to(
                    ACC
                )
            A, T = deep_half_scores(
                A, T, Q, E, K, g, (deep > 0)[:, None], rows, B_WIDTH > 0, DOT, PRECISION, ACC
            )
        tl.store(A_qk_ptr + square, A.to(A_qk_ptr.dtype.element_ty))
        if B_WIDTH > 0:
            tl.store(T_ptr + square, T)


@triton.jit
def deep_half_gradient(
    dX, dK, dg, X, K, g, deep, dM_ptr, square, flipped, rows,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what flows through the scores of one half's deep rows for one kind of reader, level by level.

    Nothing is rounded to bf16: where much is forgotten, little but these scores is left of a log-decay's gradient.
    """
    R: tl.constexpr = rows.shape[0]
    dM = tl.where(deep[:, None], tl.load(dM_ptr + square), 0.0)
    dM_flipped = tl.where(deep[None, :], tl.load(dM_ptr + flipped), 0.0)
    h = 1
    while h < R:
        row_sum, column_sum = level_sums(g, rows, h, ACC)
        row_decay, column_decay = tl.exp(row_sum), tl.exp(column_sum)
        row, column = rows[:, None] // h, rows[None, :] // h
        flipped_quarter = (column == row + 1) & (column % 2 == 1)
        d_row = (
            product(tl.where(quarter(rows, h), dM, 0.0), K * column_decay, ACC, PRECISION, ACC)
            * row_decay
        )
        d_column = product(
            tl.where(flipped_quarter, dM_flipped, 0.0), X * row_decay, ACC, PRECISION, ACC
        )
        d_column *= column_decay
        dX += d_row
        dK += d_column
        # the adjoints of `level_sums`
        to_start = ((row == column) & (rows[:, None] <= rows[None, :])).to(ACC)
        to_end = ((row == column) & (rows[:, None] > rows[None, :])).to(ACC)
        dg += tl.dot(to_start, d_row * X, input_precision="ieee", out_dtype=ACC)
        dg += tl.dot(to_end, d_column * K, input_precision="ieee", out_dtype=ACC)
        h *= 2
    return dX, dK, dg


@triton.jit
def deep_gradient_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr, dA_qk_ptr, dT_ptr, deep_ptr, dq_ptr, dk_ptr, dg_ptr, db_ptr,
    start_ptr, length_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add to dq, dk, dg and db what `gradient_keys_kernel`, or the CUDA kernel, left out. Grid: (M · H, DK / BK).

    dA_qk and dT are whole squares of a chunk's tokens, or those of its halves only.
    """
    chunk, rows = tl.program_id(0).to(tl.int64), tl.arange(0, R)
    if tl.max(tl.load(deep_ptr + chunk * (2 * R) + tl.arange(0, 2 * R)), 0) > 0:
        i_chunk, i_head = chunk // H, chunk % H
        start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
        i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
        cols = tl.program_id(1) * BK + tl.arange(0, BK)
        for first in range(0, 2 * R, R):
            deep = tl.load(deep_ptr + chunk * (2 * R) + first + rows) > 0
            wide: tl.constexpr = 2 * R if WHOLE else R
            square = chunk * (2 * R * wide) + first * (wide + 1 if WHOLE else wide)
            flipped = square + rows[None, :] * wide + rows[:, None]
            square = square + rows[:, None] * wide + rows[None, :]
            g = load_rows(g_ptr, start, first + rows, length, i_g, HG, G_WIDTH, cols, True).to(ACC)
            g = tl.where(g < -1e30, -1e30, g)  # nothing times minus infinity is not a number
            K = load_rows(k_ptr, start, first + rows, length, i_k, HK, DK, cols).to(ACC)
            Q = load_rows(q_ptr, start, first + rows, length, i_k, HK, DK, cols).to(ACC) * scale
            dQ = tl.zeros((R, BK), ACC)
            dK = tl.zeros((R, BK), ACC)
            dg = tl.zeros((R, BK), ACC)
            dQ, dK, dg = deep_half_gradient(
                dQ, dK, dg, Q, K, g, deep, dA_qk_ptr, square, flipped, rows, PRECISION, ACC
            )
            if B_WIDTH > 0:
                B = load_rows(b_ptr, start, first + rows, length, i_b, HB, B_WIDTH, cols, True).to(
                    ACC
                )
                dE = tl.zeros((R, BK), ACC)
                dE, dK, dg = deep_half_gradient(
                    dE,
                    dK,
                    dg,
                    B * K,
                    K,
                    g,
                    deep,
                    dT_ptr,
                    square,
                    flipped,
                    rows,
                    PRECISION,
                    ACC,
                )
                dK += dE * B
                add_gate(db_ptr, dE * K, start, first + rows, length, i_head, H, DK, B_WIDTH, cols)
            add_gate(dq_ptr, dQ * scale, start, first + rows, length, i_head, H, DK, DK, cols)
            add_gate(dk_ptr, dK, start, first + rows, length, i_head, H, DK, DK, cols)
            add_gate(dg_ptr, dg, start, first + rows, length, i_head, H, DK, G_WIDTH, cols)


@triton.jit
def add_gate(
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
    """Add to what `store_gate` stored."""
    tokens = (start + rows).to(tl.int64) * H + i_head
    dtype: tl.constexpr = ptr.dtype.element_ty
    if WIDTH == 1:
        total = tl.sum(tl.where((cols < DK)[None, :], X, 0.0), 1)
        place = ptr + tokens * tl.num_programs(1) + tl.program_id(1)
        tl.store(
            place,
            (tl.load(place, mask=rows < length, other=0.0) + total).to(dtype),
            mask=rows < length,
        )
    else:
        inside = (rows < length)[:, None] & (cols < DK)[None, :]
        place = ptr + tokens[:, None] * DK + cols[None, :]
        tl.store(place, (tl.load(place, mask=inside, other=0.0) + X).to(dtype), mask=inside)
