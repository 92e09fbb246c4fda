"""Stage one, last kernel: the triangular inverse and the WY factors of each chunk (Eqs. 21, 22)."""

import triton
import triton.language as tl

from gdn2.ops.triton.tiles import load_rows, product, sandwich, store_blocks, unit_lower_inverse


@triton.jit
def solve_kernel(
    v_ptr, w_ptr, T_ptr, E_bar_ptr, A_ptr, Y_ptr, U_ptr,
    start_ptr, length_ptr,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W_WIDTH: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A = (I + T)⁻¹, Y = A Ē and U = A Z of one chunk; without erase only U = Z.

    Grid: (M · H). In: T [M, H, C, C] in ACC, Ē [M, H, C, DK], packed v and w. Out: A, Y, U [M, H, C, …].
    Precision: the inverse in ACC with products as SOLVE says; A is rounded to the operands' dtype.
    """
    i_chunk, i_head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    rows = tl.arange(0, R)
    tile = (i_chunk * H + i_head) * (2 * R)
    dtype: tl.constexpr = U_ptr.dtype.element_ty
    G: tl.constexpr = HV // H

    if ERASE:
        square = tile * (2 * R) + rows[:, None] * (2 * R) + rows[None, :]
        A_11 = unit_lower_inverse(tl.load(T_ptr + square), rows, ACC, SOLVE)
        A_22 = unit_lower_inverse(tl.load(T_ptr + square + R * 2 * R + R), rows, ACC, SOLVE)
        A_21 = -sandwich(A_22, tl.load(T_ptr + square + R * 2 * R), A_11, ACC, SOLVE)
        store_blocks(A_ptr + square, A_11, A_21, A_22, R)
        tl.store(A_ptr + square + R, tl.zeros((R, R), dtype))
        A_11, A_21, A_22 = A_11.to(dtype), A_21.to(dtype), A_22.to(dtype)
        for first_col in range(0, DK, BK):
            cols = first_col + tl.arange(0, BK)
            inside = (cols < DK)[None, :]
            offset = (tile + rows[:, None]) * DK + cols[None, :]
            E_1 = tl.load(E_bar_ptr + offset, mask=inside, other=0.0)
            E_2 = tl.load(E_bar_ptr + offset + R * DK, mask=inside, other=0.0)
            Y_2 = product(A_21, E_1, dtype, PRECISION, ACC) + product(
                A_22, E_2, dtype, PRECISION, ACC
            )
            tl.store(
                Y_ptr + offset, product(A_11, E_1, dtype, PRECISION, ACC).to(dtype), mask=inside
            )
            tl.store(Y_ptr + offset + R * DK, Y_2.to(dtype), mask=inside)

    for i_block in range(0, G * tl.cdiv(DV, BV)):
        i_group = i_block // tl.cdiv(DV, BV)
        i_v = i_head * G + i_group
        cols = (i_block % tl.cdiv(DV, BV)) * BV + tl.arange(0, BV)
        inside = (cols < DV)[None, :]
        offset = (tile + rows[:, None]) * (G * DV) + i_group * DV + cols[None, :]
        Z_1 = load_rows(v_ptr, start, rows, length, i_v, HV, DV, cols)
        Z_2 = load_rows(v_ptr, start, R + rows, length, i_v, HV, DV, cols)
        if W_WIDTH > 0:
            Z_1 = Z_1.to(ACC) * load_rows(
                w_ptr, start, rows, length, i_v, HV, W_WIDTH, cols, True
            ).to(ACC)
            Z_2 = Z_2.to(ACC) * load_rows(
                w_ptr, start, R + rows, length, i_v, HV, W_WIDTH, cols, True
            ).to(ACC)
        if ERASE:
            U_1 = product(A_11, Z_1, dtype, PRECISION, ACC)
            U_2 = product(A_21, Z_1, dtype, PRECISION, ACC) + product(
                A_22, Z_2, dtype, PRECISION, ACC
            )
        else:
            U_1, U_2 = Z_1, Z_2
        tl.store(U_ptr + offset, U_1.to(dtype), mask=inside)
        tl.store(U_ptr + offset + R * G * DV, U_2.to(dtype), mask=inside)
