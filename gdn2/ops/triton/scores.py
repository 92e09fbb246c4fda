"""Stage one, first kernel: decays and scores of each chunk (Eqs. 18, 20, 25)."""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import (
    DEEP,
    KEY,
    LATER,
    LIFT,
    PER_HALF,
    READER,
    key_decay,
    load_decays,
    load_readers,
    load_rows,
    load_signs,
    precise,
    sums,
)


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, g_ptr, b_ptr,
    Q_gamma_ptr, K_tail_ptr, E_bar_ptr, gamma_C_ptr, A_qk_ptr, T_ptr, deep_ptr,
    start_ptr, length_ptr, signs_ptr, scale,
    HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, H: tl.constexpr,
    DK: tl.constexpr, G_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Q_γ, K_tail, Ē, γ_C and rows of the matrices A_qk and T of one half of a chunk, deep rows left out inside it.

    Grid: (2 · M · H); halves, then heads vary fastest, so neighbouring programs read neighbouring bytes.
    In: packed tokens [L, heads, d]. Out: Q_γ, K_tail, Ē [M, H, C, DK], γ_C [M, H, DK], A_qk, T [M, H, C, C], and which
    rows are deep [M, H, C]. A gate's width is 0 where it is absent.
    Precision: decays and scores in ACC; with DOT bf16 factors are split into two, so scores keep 16 bits.
    """
    i_half, chunk = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    i_chunk, i_head = chunk // H, chunk % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    i_k, i_g, i_b = i_head // (H // HK), i_head // (H // HG), i_head // (H // HB)
    C: tl.constexpr = 2 * R
    READERS: tl.constexpr = C if B_WIDTH > 0 else R
    here = i_half * R
    rows, tokens = tl.arange(0, READERS), tl.arange(0, C)
    token, erase = here + rows % R, rows >= R
    signs = i_half * PER_HALF
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty

    P = tl.zeros((READERS, C), ACC)
    deepest = tl.zeros((READERS,), ACC)
    for first_col in range(0, DK, BK):
        cols = first_col + tl.arange(0, BK)
        inside = (cols < DK)[None, :]
        g = load_decays(g_ptr, start, tokens, length, i_g, HG, G_WIDTH, cols, ACC)
        K = load_rows(k_ptr, start, tokens, length, i_k, HK, DK, cols).to(ACC)
        if i_half == 0:
            later = load_signs(signs_ptr, LATER, tokens, tokens, C)
            tail = K * tl.exp(sums(later, g, DOT, ACC))
            offset = (chunk * C + tokens[:, None]) * DK + cols[None, :]
            tl.store(K_tail_ptr + offset, tail.to(dtype), mask=inside)
            gamma_C = tl.exp(tl.sum(g, 0))
            tl.store(gamma_C_ptr + chunk * DK + cols, gamma_C, mask=cols < DK)

        upto = load_signs(signs_ptr, signs + READER, rows, tokens, C)
        since = sums(upto, g, DOT, ACC)
        deepest = tl.minimum(deepest, tl.min(since, 1))
        X = load_readers(
            q_ptr, k_ptr, b_ptr, start, token, erase, length, i_k, i_b, scale,
            HK, HB, DK, B_WIDTH, cols, ACC,
        )  # fmt: skip
        X *= tl.exp(since)
        before = tl.exp(tl.sum(tl.where((tokens < here)[:, None], g, 0.0), 0))
        X_gamma = (X * before[None, :]).to(dtype)
        offset = (chunk * C + token[:, None]) * DK + cols[None, :]
        tl.store(Q_gamma_ptr + offset, X_gamma, mask=inside & (erase == 0)[:, None])
        if B_WIDTH > 0:
            tl.store(E_bar_ptr + offset, X_gamma, mask=inside & erase[:, None])

        X *= LIFT
        at_start = load_signs(signs_ptr, signs + KEY, tokens, tokens, C)
        K *= key_decay(sums(at_start, g, DOT, ACC), tokens, here, R)
        P += precise(X, tl.trans(K), DOT, PRECISION, ACC)

    deep = deepest < -DEEP
    causal = (tokens[None, :] < token[:, None]) | (
        (tokens[None, :] == token[:, None]) & (erase == 0)[:, None]
    )
    P = tl.where(causal & ((deep == 0)[:, None] | (tokens < here)[None, :]), P, 0.0)
    square = (chunk * C + token[:, None]) * C + tokens[None, :]
    tl.store(A_qk_ptr + square, P.to(dtype), mask=(erase == 0)[:, None])
    if B_WIDTH > 0:
        tl.store(T_ptr + square, P, mask=erase[:, None])
    tl.store(deep_ptr + chunk * C + token, deep.to(tl.int8), mask=erase == 0)
