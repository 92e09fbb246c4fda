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
def load_rows(
    ptr,
    start,
    rows,
    length,
    i_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    cols,
    GATE: tl.constexpr = False,
):
    """Tile [rows, cols] of packed tokens [L, HEADS, WIDTH]; zero past the chunk's end and beyond the width.

    A gate of width one fills all columns with its only entry.
    """
    offset = ((start + rows).to(tl.int64) * HEADS + i_head) * WIDTH
    inside = (rows < length)[:, None]
    if GATE and WIDTH == 1:
        column = tl.load(ptr + offset[:, None], mask=inside, other=0.0)
        return tl.broadcast_to(column, (rows.shape[0], cols.shape[0]))
    return tl.load(
        ptr + offset[:, None] + cols[None, :], mask=inside & (cols < WIDTH)[None, :], other=0.0
    )


@triton.jit
def store_rows(ptr, X, start, rows, length, i_head, HEADS: tl.constexpr, WIDTH: tl.constexpr, cols):
    """Store a tile into packed tokens, leaving out what lies past the chunk's end."""
    offset = ((start + rows).to(tl.int64) * HEADS + i_head) * WIDTH
    inside = (rows < length)[:, None] & (cols < WIDTH)[None, :]
    tl.store(ptr + offset[:, None] + cols[None, :], X.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def product(X, Y, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """X Y with operands rounded to DOT and the sum kept in ACC."""
    return tl.dot(X.to(DOT), Y.to(DOT), input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def decay_sums(
    g_ptr,
    start,
    rows,
    first,
    length,
    i_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    cols,
    ACC: tl.constexpr,
):
    """Log-decays of a half and their sums since its start (own included) and after each token until its end.

    The second is a reverse sum of the rows below, not a difference, so nothing cancels.
    """
    R: tl.constexpr = rows.shape[0]
    g = load_rows(g_ptr, start, first + rows, length, i_head, HEADS, WIDTH, cols, True).to(ACC)
    # the row below, or nothing for the half's last row
    below = load_rows(
        g_ptr,
        start,
        first + rows + 1,
        tl.minimum(length, first + R),
        i_head,
        HEADS,
        WIDTH,
        cols,
        True,
    ).to(ACC)
    return g, tl.cumsum(g, 0), tl.cumsum(below, 0, reverse=True)


@triton.jit
def half_factors(X, K, since, DOT: tl.constexpr):
    """Rows and columns of one half measured from its start, rounded, and which rows are deep."""
    deep = tl.min(since, 1) < -DEEP
    column = tl.where(since < -DEEP, 0.0, tl.exp(-since)) * K
    return (X * tl.exp(since)).to(DOT), column.to(DOT), deep


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
    """(I + T)⁻¹ of a strictly lower triangular tile by masked block merge A ← A − A T_h A (Eq. 21)."""
    R: tl.constexpr = T.shape[0]
    A = (rows[:, None] == rows[None, :]).to(ACC) - tl.where(quarter(rows, 1), T, 0.0)
    for level in tl.static_range(1, 10):
        if (1 << level) < R:
            T_h = tl.where(quarter(rows, 1 << level), T, 0.0)
            A -= sandwich(A, T_h, A, ACC, PRECISION)
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


@triton.jit
def store_blocks(ptr, X_11, X_21, X_22, R: tl.constexpr):
    """Store the three lower blocks of a [2R, 2R] matrix."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(ptr, X_11.to(dtype))
    tl.store(ptr + R * 2 * R, X_21.to(dtype))
    tl.store(ptr + R * 2 * R + R, X_22.to(dtype))
