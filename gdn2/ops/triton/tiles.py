"""What the kernels share: loads of packed tokens, decay factors, triangular products.

A chunk is handled as two halves of R = C/2 tokens. The readers of a half, its queries and its erase rows, are stacked
into one tile of C rows and measured from the half's start. Keys before it meet them there with decays at most one;
keys inside with inverse decays of at least one, exact as long as they are finite. Rows where some channel has decayed
to less than `DEEP` are left out inside their half and take the halving down to single tokens instead, in kernels of
their own (`deep.py`). That choice looks at tokens up to the row only, so nothing in the future moves a bit of the past.
"""

import triton
import triton.language as tl

DEEP = tl.constexpr(1.8e-35)  # about exp(-80), whose inverse is finite in fp32 and bf16
# about exp(40): moves factors between exp(-80) and 1, and between 1 and exp(80), to the middle of the range
LIFT = tl.constexpr(2.0**58)


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
def split(X):
    """The upper half of the bits of X as bf16, and what is left of X: no rounding, and no conversion unit."""
    bits = X.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, X - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(X, HALF: tl.constexpr):
    """X rounded to the bits that tf32 products take, where the operands are half precision."""
    if HALF:
        bits = X.to(tl.int32, bitcast=True) + 4096
        X = (bits & -8192).to(tl.float32, bitcast=True)
    return X


@triton.jit
def sums(signs, g, DOT: tl.constexpr, ACC: tl.constexpr):
    """Signs times log-decays, to all bits of fp32 with DOT bf16 (three times 8), to 22 otherwise."""
    if DOT == tl.bfloat16:
        high, rest = split(g)
        low, rest = split(rest)
        total = tl.dot(signs, high, tl.dot(signs, low, tl.dot(signs, split(rest)[0])))
    else:
        total = tl.dot(signs, g, input_precision="tf32x3", out_dtype=ACC)
    return total


@triton.jit
def precise(X, Y, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """X Y, where both have more bits than bf16 holds: to 16 bits with DOT bf16."""
    if DOT == tl.bfloat16:
        X_high, X_rest = split(X)
        Y_high, Y_rest = split(Y)
        total = tl.dot(X_high, split(Y_rest)[0], tl.dot(split(X_rest)[0], Y_high))
        total = tl.dot(X_high, Y_high, total)
    else:
        total = tl.dot(X.to(DOT), Y.to(DOT), input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def lifted(since):
    """What a key inside a half has more than at its start, lowered; zero where all rows that would meet it are deep."""
    known = since >= DEEP
    return tl.where(known, 1.0 / (tl.where(known, since, 1.0) * LIFT), 0.0)


@triton.jit
def load_readers(
    q_ptr, k_ptr, b_ptr, start, token, erase, length, i_k, i_b, scale,
    HK: tl.constexpr, HB: tl.constexpr, DK: tl.constexpr, B_WIDTH: tl.constexpr, cols,
    ACC: tl.constexpr,
):  # fmt: skip
    """Readers of one half stacked, queries above erase rows."""
    queries = tl.where(erase, length, token)  # rows past the end load as zero
    X = load_rows(q_ptr, start, queries, length, i_k, HK, DK, cols).to(ACC) * scale
    if B_WIDTH > 0:
        erased = tl.where(erase, token, length)
        E = load_rows(k_ptr, start, erased, length, i_k, HK, DK, cols).to(ACC)
        E *= load_rows(b_ptr, start, erased, length, i_b, HB, B_WIDTH, cols, True).to(ACC)
        X += E
    return X


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
