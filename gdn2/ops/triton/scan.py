"""Stage two as kernels: the state through the chunks of a sequence, forward and in reverse (Eqs. 23, 24, 53–63)."""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import product


@triton.jit
def scan_kernel(
    Q_gamma_ptr, K_tail_ptr, gamma_C_ptr, A_qk_ptr, Y_ptr, U_ptr, state_ptr,
    o_ptr, final_ptr, starts_ptr, R_ptr,
    start_ptr, length_ptr, first_ptr,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, WRITE_O: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs and states of one sequence, for BV channels of one value head.

    Grid: (N · HV, DV / BV). The state is held as Sᵀ [BV, BK] in registers, so that every left operand of a product is a
    register tile and every right one is a tile as loaded.
    """
    i_sequence, i_value = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0) % HV
    G: tl.constexpr = HV // H
    i_head = i_value // G
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty
    rows, keys = tl.arange(0, C), tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = (i_value % G) * DV + cols  # column in [M, H, …, G · DV]
    value_mask, key_mask = cols < DV, keys < DK

    # element [v, k] of S in [N, HV, DK, DV] and of a chunk's start in [M, H, DK, G · DV]
    sequence = (i_sequence * HV + i_value) * (DK * DV)
    in_state = keys[None, :] * DV + cols[:, None]
    in_start = keys[None, :] * (G * DV) + wide[:, None]
    state_mask = value_mask[:, None] & key_mask[None, :]
    tile = rows[:, None] * DK + keys[None, :]
    value_tile = rows[None, :] * (G * DV) + wide[:, None]
    tokens = rows[None, :] * (HV * DV) + cols[:, None]
    S = tl.load(state_ptr + sequence + in_state, mask=state_mask, other=0.0).to(ACC)

    for i_chunk in tl.range(
        tl.load(first_ptr + i_sequence), tl.load(first_ptr + i_sequence + 1), num_stages=STAGES
    ):
        chunk = i_chunk * H + i_head
        keyed, valued = chunk * (C * DK), chunk * (C * G * DV)  # where this chunk begins
        if SAVE:
            tl.store(starts_ptr + chunk * (DK * G * DV) + in_start, S.to(dtype), mask=state_mask)
        R = tl.load(U_ptr + valued + value_tile, mask=value_mask[:, None], other=0.0).to(
            ACC
        )  # Rᵀ [BV, C]
        if ERASE:
            Y = tl.load(Y_ptr + keyed + tile, mask=key_mask[None, :], other=0.0)
            R -= product(S, tl.trans(Y), dtype, PRECISION, ACC)
        if SAVE:
            tl.store(R_ptr + valued + value_tile, R.to(dtype), mask=value_mask[:, None])
        if WRITE_O:
            Q_gamma = tl.load(Q_gamma_ptr + keyed + tile, mask=key_mask[None, :], other=0.0)
            A_qk = tl.load(A_qk_ptr + chunk * (C * C) + rows[:, None] * C + rows[None, :])
            O = product(S, tl.trans(Q_gamma), dtype, PRECISION, ACC)
            O += product(R, tl.trans(A_qk), dtype, PRECISION, ACC)
            start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
            mask = value_mask[:, None] & (rows < length)[None, :]
            tl.store(o_ptr + (start * HV + i_value) * DV + tokens, O.to(dtype), mask=mask)
        gamma_C = tl.load(gamma_C_ptr + chunk * DK + keys, mask=key_mask, other=0.0)
        K_tail = tl.load(K_tail_ptr + keyed + tile, mask=key_mask[None, :], other=0.0)
        S = S * gamma_C[None, :] + product(R, K_tail, dtype, PRECISION, ACC)
    if WRITE_O:
        tl.store(final_ptr + sequence + in_state, S, mask=state_mask)


@triton.jit
def scan_reverse_kernel(
    Q_gamma_ptr, K_tail_ptr, gamma_C_ptr, A_qk_ptr, Y_ptr, do_ptr, d_final_ptr,
    d_state_ptr, ends_ptr, dR_ptr,
    start_ptr, length_ptr, first_ptr,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of residuals and states of one sequence, for BV channels of one value head: `scan_kernel` mirrored.

    dRᵀ = dS_Cᵀ K_tailᵀ + dOᵀ A_qk and dS₀ᵀ = dS_Cᵀ ⊙ γ_C + dOᵀ Q_γ − dRᵀ Y.
    """
    i_sequence, i_value = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0) % HV
    G: tl.constexpr = HV // H
    i_head = i_value // G
    dtype: tl.constexpr = Q_gamma_ptr.dtype.element_ty
    rows, keys = tl.arange(0, C), tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = (i_value % G) * DV + cols
    value_mask, key_mask = cols < DV, keys < DK
    sequence = (i_sequence * HV + i_value) * (DK * DV)
    in_state = keys[None, :] * DV + cols[:, None]
    in_end = keys[None, :] * (G * DV) + wide[:, None]
    state_mask = value_mask[:, None] & key_mask[None, :]
    tile = rows[:, None] * DK + keys[None, :]
    value_tile = rows[None, :] * (G * DV) + wide[:, None]
    tokens = rows[None, :] * (HV * DV) + cols[:, None]
    dS = tl.load(d_final_ptr + sequence + in_state, mask=state_mask, other=0.0).to(ACC)

    first, last = tl.load(first_ptr + i_sequence), tl.load(first_ptr + i_sequence + 1)
    for n in tl.range(0, last - first, num_stages=STAGES):
        i_chunk = last - 1 - n
        chunk = i_chunk * H + i_head
        keyed, valued = chunk * (C * DK), chunk * (C * G * DV)
        tl.store(ends_ptr + chunk * (DK * G * DV) + in_end, dS.to(dtype), mask=state_mask)
        start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
        mask = value_mask[:, None] & (rows < length)[None, :]
        dO = tl.load(
            do_ptr + (start * HV + i_value) * DV + tokens, mask=mask, other=0.0
        )  # dOᵀ [BV, C]
        A_qk = tl.load(A_qk_ptr + chunk * (C * C) + rows[:, None] * C + rows[None, :])
        K_tail = tl.load(K_tail_ptr + keyed + tile, mask=key_mask[None, :], other=0.0)
        dR = product(dS, tl.trans(K_tail), dtype, PRECISION, ACC) + product(
            dO, A_qk, dtype, PRECISION, ACC
        )
        tl.store(dR_ptr + valued + value_tile, dR.to(dtype), mask=value_mask[:, None])
        gamma_C = tl.load(gamma_C_ptr + chunk * DK + keys, mask=key_mask, other=0.0)
        Q_gamma = tl.load(Q_gamma_ptr + keyed + tile, mask=key_mask[None, :], other=0.0)
        dS = dS * gamma_C[None, :] + product(dO, Q_gamma, dtype, PRECISION, ACC)
        if ERASE:
            Y = tl.load(Y_ptr + keyed + tile, mask=key_mask[None, :], other=0.0)
            dS -= product(dR, Y, dtype, PRECISION, ACC)
    tl.store(d_state_ptr + sequence + in_state, dS, mask=state_mask)
