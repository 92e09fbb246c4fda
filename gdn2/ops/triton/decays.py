"""Before stage one: decays inside each half of a chunk, of which all other decay factors are products (Eq. 18)."""

import triton
import triton.language as tl


@triton.jit
def decays_kernel(
    g_ptr, since_ptr, after_ptr, start_ptr, length_ptr,
    HG: tl.constexpr, G_WIDTH: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Decays since a half's start, own token included, and after each token until the half's end [M, HG, C, G_WIDTH].

    Grid: (2 · M · HG, G_WIDTH / BK). The second is the exp of a sum of its own and not a quotient, so nothing cancels.
    A thread goes through the tokens of its channels one by one: no sum crosses threads, and no other kernel takes exps
    of tiles, which it would do once for every layout that it needs them in.
    """
    i_half, i_head = tl.program_id(0) % 2, tl.program_id(0) // 2 % HG
    i_chunk = (tl.program_id(0) // (2 * HG)).to(tl.int64)
    start, length = tl.load(start_ptr + i_chunk), tl.load(length_ptr + i_chunk)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = cols < G_WIDTH
    g_ptr += ((start + i_half * R).to(tl.int64) * HG + i_head) * G_WIDTH + cols
    here = ((i_chunk * HG + i_head) * 2 + i_half) * (R * G_WIDTH) + cols
    known = length - i_half * R  # tokens of this half

    total = tl.zeros((BK,), ACC)
    for row in range(0, R):
        g = tl.load(g_ptr + row * (HG * G_WIDTH), mask=inside & (row < known), other=0.0)
        # nothing times minus infinity is not a number
        total += tl.where(g < -1e30, -1e30, g.to(ACC))
        tl.store(since_ptr + here + row * G_WIDTH, tl.exp(total), mask=inside)
    total = tl.zeros((BK,), ACC)
    for n in range(0, R):
        row = R - 1 - n
        tl.store(after_ptr + here + row * G_WIDTH, tl.exp(total), mask=inside)
        g = tl.load(g_ptr + row * (HG * G_WIDTH), mask=inside & (row < known), other=0.0)
        total += tl.where(g < -1e30, -1e30, g.to(ACC))


@triton.jit
def load_decays(ptr, head, rows, C: tl.constexpr, WIDTH: tl.constexpr, cols):
    """Tile [rows, cols] of the decays of one chunk and head; a decay of width one fills all columns."""
    offset = (head * C + rows)[:, None] * WIDTH
    if WIDTH == 1:
        tile = tl.broadcast_to(tl.load(ptr + offset), (rows.shape[0], cols.shape[0]))
    else:
        tile = tl.load(ptr + offset + cols[None, :], mask=(cols < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def load_whole(ptr, head, row, C: tl.constexpr, WIDTH: tl.constexpr, cols):
    """The decay over the half that ends with a row [cols]."""
    offset = (head * C + row) * WIDTH
    if WIDTH == 1:
        line = tl.broadcast_to(tl.load(ptr + offset), (cols.shape[0],))
    else:
        line = tl.load(ptr + offset + cols, mask=cols < WIDTH, other=0.0)
    return line
