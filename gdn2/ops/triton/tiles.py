"""What the kernels share: loads of packed tokens, sums of log-decays, triangular products.

A chunk is handled as two halves of R = C/2 tokens, the top level of `gdn2.ops.halving`: rows of the second half meet
columns of the first at the seam, with both exponents at most zero. Inside a half, rows and columns are
measured from the half's start. A row's exponent is at most zero, a column's at least zero: exact as long as it is
finite. Rows where some channel has decayed by more than `DEEP` are left out there and take the halving down to single
tokens instead, in kernels of their own (`deep.py`). That choice looks at tokens up to the row only, so nothing in the
future moves a bit of the past.
"""

import triton
import triton.language as tl

DEEP = tl.constexpr(80.0)  # exp(80) times a key of up to 6000 is finite in fp32 and bf16


@triton.jit
def load_rows(ptr, start, rows, length, i_head, HEADS: tl.constexpr, WIDTH: tl.constexpr, cols):
    """Tile [rows, cols] of packed tokens [L, HEADS, WIDTH]; zero past the chunk's end and beyond the width.

    A gate of width one fills all columns with its only entry.
    """
    # 64 bits for the one base, 32 for the many offsets: registers are what the kernels are short of
    ptr += (start * HEADS + i_head) * WIDTH
    offset = rows * (HEADS * WIDTH)
    inside = (rows < length)[:, None]
    if WIDTH == 1:
        column = tl.load(ptr + offset[:, None], mask=inside, other=0.0)
        return tl.broadcast_to(column, (rows.shape[0], cols.shape[0]))
    return tl.load(
        ptr + offset[:, None] + cols[None, :], mask=inside & (cols < WIDTH)[None, :], other=0.0
    )


@triton.jit
def store_rows(ptr, X, start, rows, length, i_head, HEADS: tl.constexpr, WIDTH: tl.constexpr, cols):
    """Store a tile into packed tokens, leaving out what lies past the chunk's end."""
    ptr += (start * HEADS + i_head) * WIDTH
    offset = rows * (HEADS * WIDTH)
    inside = (rows < length)[:, None] & (cols < WIDTH)[None, :]
    tl.store(ptr + offset[:, None] + cols[None, :], X.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def product(X, Y, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """X Y with operands rounded to DOT and the sum kept in ACC."""
    return tl.dot(X.to(DOT), Y.to(DOT), input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def load_halves(
    ptr, start, shift, length, i_head, HEADS: tl.constexpr, WIDTH: tl.constexpr, cols, R: tl.constexpr
):
    """Tile [2, R, cols] of a chunk's two halves, moved up by `shift` rows inside each."""
    ptr += (start * HEADS + i_head) * WIDTH
    half, row = tl.arange(0, 2)[:, None, None], (tl.arange(0, R) + shift)[None, :, None]
    inside = (row < R) & (half * R + row < length)
    if WIDTH == 1:
        column = tl.load(ptr + (half * R + row) * HEADS, mask=inside, other=0.0)
        return tl.broadcast_to(column, (2, R, cols.shape[0]))
    offset = (half * R + row) * (HEADS * WIDTH) + cols[None, None, :]
    return tl.load(ptr + offset, mask=inside & (cols < WIDTH)[None, None, :], other=0.0)


@triton.jit
def decay_sums(
    g_ptr, start, length, i_head, HEADS: tl.constexpr, WIDTH: tl.constexpr, cols, R: tl.constexpr, ACC: tl.constexpr
):
    """Sums of log-decays [C, cols]: since the start of a token's half, own included, and after it until the half's end.

    The second is a reverse sum of the rows below, not a difference, so nothing cancels. Also the totals of both halves.
    """
    C: tl.constexpr = 2 * R
    g = load_halves(g_ptr, start, 0, length, i_head, HEADS, WIDTH, cols, R).to(ACC)
    below = load_halves(g_ptr, start, 1, length, i_head, HEADS, WIDTH, cols, R).to(ACC)
    since = tl.reshape(tl.cumsum(g, 1), (C, cols.shape[0]))
    after = tl.reshape(tl.cumsum(below, 1, reverse=True), (C, cols.shape[0]))
    totals, half = tl.sum(g, 1), tl.arange(0, 2)[:, None]
    total_1, total_2 = tl.sum(tl.where(half == 0, totals, 0.0), 0), tl.sum(tl.where(half == 1, totals, 0.0), 0)
    return since, after, total_1, total_2


@triton.jit
def column_factors(K, since, after, first, OWN: tl.constexpr, DOT: tl.constexpr):
    """Keys as columns, rounded: for rows of their own half, and for rows of the other (zero in the second half)."""
    own = K * tl.where(since < -DEEP, 0.0, tl.exp(-since))
    return own.to(OWN), tl.where(first, K * tl.exp(after), 0.0).to(DOT)


@triton.jit
def masked_sum(mask, X, DOT: tl.constexpr, ACC: tl.constexpr):
    """Sums of rows of X as the mask [C, C] says, by a product with ones that keeps at least 16 bits of X."""
    if DOT == tl.bfloat16:
        high = X.to(tl.bfloat16)
        low = (X - high.to(ACC)).to(tl.bfloat16)
        ones = mask.to(tl.bfloat16)
        return tl.dot(ones, high, out_dtype=ACC) + tl.dot(ones, low, out_dtype=ACC)
    return tl.dot(mask.to(ACC), X, input_precision="tf32x3", out_dtype=ACC)


@triton.jit
def level_sums(g, rows, h, ACC: tl.constexpr):
    """Sums of g within blocks of h tokens: since the block's start, and after each token until its end."""
    same = (rows[:, None] // h) == (rows[None, :] // h)
    since = (same & (rows[None, :] <= rows[:, None])).to(ACC)
    after = (same & (rows[None, :] > rows[:, None])).to(ACC)
    return tl.dot(since, g, input_precision="ieee", out_dtype=ACC), tl.dot(
        after, g, input_precision="ieee", out_dtype=ACC
    )


@triton.jit
def unit_lower_inverse(T, rows, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """(I + T)⁻¹ of strictly lower triangular tiles [n, R, R] by masked block merge A ← A − A T_h A (Eq. 21)."""
    R: tl.constexpr = T.shape[1]
    A = (rows[:, None] == rows[None, :]).to(ACC)[None, :, :] - tl.where(quarter(rows, 1)[None, :, :], T, 0.0)
    for level in tl.static_range(1, 10):
        if (1 << level) < R:
            A -= sandwich(A, tl.where(quarter(rows, 1 << level)[None, :, :], T, 0.0), A, ACC, PRECISION)
    return A


@triton.jit
def sandwich(X, Y, Z, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """X Y Z in full precision."""
    XY = tl.dot(X, Y, input_precision=PRECISION, out_dtype=ACC)
    return tl.dot(XY, Z, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def quarter(rows, h):
    """Where second halves of blocks of 2h rows meet their first halves."""
    row, column = rows[:, None] // h, rows[None, :] // h
    return (row == column + 1) & (row % 2 == 1)
