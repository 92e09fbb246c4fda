"""Stage one, first kernel: decays and scores of each chunk (Eqs. 18, 20, 25)."""

import triton
import triton.language as tl

from gdn2.ops.triton.decays import load_decays, load_whole
from gdn2.ops.triton.tiles import DEEP, LIFT, lifted, load_readers, load_rows, precise


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, b_ptr, since_ptr, after_ptr,
    Q_gamma_ptr, K_tail_ptr, E_bar_ptr, gamma_C_ptr, A_qk_ptr, T_ptr, deep_ptr,
    start_ptr, length_ptr, scale,
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
    decay = i_chunk * HG + i_g
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty

    P = tl.zeros((READERS, C), ACC)
    deepest = tl.full((READERS,), 1.0, ACC)
    for first_col in range(0, DK, BK):
        cols = first_col + tl.arange(0, BK)
        inside = (cols < DK)[None, :]
        first_half = load_whole(since_ptr, decay, R - 1, C, G_WIDTH, cols)
        since = load_decays(since_ptr, decay, tokens, C, G_WIDTH, cols)
        after = load_decays(after_ptr, decay, tokens, C, G_WIDTH, cols)
        K = load_rows(k_ptr, start, tokens, length, i_k, HK, DK, cols).to(ACC)
        if i_half == 0:
            second_half = load_whole(since_ptr, decay, C - 1, C, G_WIDTH, cols)
            later = after * tl.where((tokens < R)[:, None], second_half[None, :], 1.0)
            offset = (chunk * C + tokens[:, None]) * DK + cols[None, :]
            tl.store(K_tail_ptr + offset, (K * later).to(dtype), mask=inside)
            tl.store(gamma_C_ptr + chunk * DK + cols, first_half * second_half, mask=cols < DK)

        # before the half a key decays until its start; inside, readers have lost what the key had not met
        K *= tl.where((tokens < here)[:, None], after / LIFT, lifted(since))
        K = tl.where((tokens < here + R)[:, None], K, 0.0)
        since = load_decays(since_ptr, decay, token, C, G_WIDTH, cols)
        deepest = tl.minimum(deepest, tl.min(tl.where(inside, since, 1.0), 1))
        X = load_readers(
            q_ptr, k_ptr, b_ptr, start, token, erase, length, i_k, i_b, scale,
            HK, HB, DK, B_WIDTH, cols, ACC,
        )  # fmt: skip
        X *= since
        X_gamma = (X * tl.where(here > 0, first_half, 1.0)[None, :]).to(dtype)
        offset = (chunk * C + token[:, None]) * DK + cols[None, :]
        tl.store(Q_gamma_ptr + offset, X_gamma, mask=inside & (erase == 0)[:, None])
        if B_WIDTH > 0:
            tl.store(E_bar_ptr + offset, X_gamma, mask=inside & erase[:, None])

        X *= LIFT
        P += precise(X, tl.trans(K), DOT, PRECISION, ACC)

    deep = deepest < DEEP
    causal = (tokens[None, :] < token[:, None]) | (
        (tokens[None, :] == token[:, None]) & (erase == 0)[:, None]
    )
    P = tl.where(causal & ((deep == 0)[:, None] | (tokens < here)[None, :]), P, 0.0)
    square = (chunk * C + token[:, None]) * C + tokens[None, :]
    tl.store(A_qk_ptr + square, P.to(dtype), mask=(erase == 0)[:, None])
    if B_WIDTH > 0:
        tl.store(T_ptr + square, P, mask=erase[:, None])
    tl.store(deep_ptr + chunk * C + token, deep.to(tl.int8), mask=erase == 0)
