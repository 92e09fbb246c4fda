"""The short convolution with its activation and L2 normalisation as kernels (`gdn2.ops.conv`).

A program holds a tile [rows, cols] of tokens and channels, the channels of one head where heads are normalised. Tokens
count through the whole batch, and each finds its own sequence, so that no table is made and nothing is read back.
"""

import triton
import triton.language as tl


@triton.jit
def locate(cu_ptr, tokens, length, count, steps):
    """Sequence of each token, its first token and its end: the last of `count` offsets not beyond the token.

    An empty sequence ends where it starts and is passed over.
    """
    if cu_ptr is not None:
        low = tl.zeros_like(tokens)
        high = low + count
        for _ in range(steps):
            middle = (low + high) // 2
            begun = tl.load(cu_ptr + middle) <= tokens
            low = tl.where(begun, middle, low)
            high = tl.where(begun, high, middle)
    else:
        low = tokens // length
    start, end = bounds(cu_ptr, low, length)
    return low, start, end


@triton.jit
def bounds(cu_ptr, sequence, length):
    """First token and end of a sequence."""
    if cu_ptr is not None:
        start = tl.load(cu_ptr + sequence).to(tl.int32)
        end = tl.load(cu_ptr + sequence + 1).to(tl.int32)
    else:
        start = sequence * length
        end = start + length
    return start, end


@triton.jit
def row_offsets(cu_ptr, tokens, sequence, start, batch_stride, token_stride):
    """Where the rows of tokens lie in x [batch, length, channels]; packed sequences share a batch of one."""
    if cu_ptr is not None:
        return tokens.to(tl.int64) * token_stride
    return sequence.to(tl.int64) * batch_stride + (tokens - start).to(tl.int64) * token_stride


@triton.jit
def past_input(
    x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride, LAG: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Inputs of LAG tokens before the rows `at`: from the state, or zero, where the sequence is younger than that."""
    old = (position >= LAG)[:, None]
    row = at - LAG * token_stride
    x = tl.load(x_ptr + row[:, None] + channels[None, :], mask=inside & old, other=0.0).to(ACC)
    if state_ptr is not None and LAG > 0:
        slot = sequence.to(tl.int64) * (CHANNELS * (TAPS - 1)) + (TAPS - 1 - LAG) + position
        place = state_ptr + slot[:, None] + channels[None, :] * (TAPS - 1)
        x += tl.load(place, mask=inside & ~old, other=0.0).to(ACC)
    return x


@triton.jit
def window(
    x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Inputs of the rows `at` and of up to three tokens before, zero beyond the taps."""
    x_0 = past_input(
        x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride, 0,
        CHANNELS, TAPS, ACC,
    )  # fmt: skip
    x_1, x_2, x_3 = tl.zeros_like(x_0), tl.zeros_like(x_0), tl.zeros_like(x_0)
    if TAPS > 1:
        x_1 = past_input(
            x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride, 1,
            CHANNELS, TAPS, ACC,
        )  # fmt: skip
    if TAPS > 2:
        x_2 = past_input(
            x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride, 2,
            CHANNELS, TAPS, ACC,
        )  # fmt: skip
    if TAPS > 3:
        x_3 = past_input(
            x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride, 3,
            CHANNELS, TAPS, ACC,
        )  # fmt: skip
    return x_0, x_1, x_2, x_3


@triton.jit
def load_tap(weight_ptr, channels, known, LAG: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr):
    """The tap [1, cols] that meets the input of LAG tokens ago, zero beyond the taps."""
    place = weight_ptr + channels * TAPS + (TAPS - 1 - LAG)
    return tl.load(place, mask=known & (LAG < TAPS), other=0.0).to(ACC)[None, :]


@triton.jit
def sum_taps(
    x_ptr, weight_ptr, bias_ptr, state_ptr, at, position, sequence, channels, known, inside,
    token_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Σ taps ⊙ past inputs + bias, for a tile."""
    z = tl.zeros(inside.shape, ACC)
    for lag in tl.static_range(TAPS):
        z += load_tap(weight_ptr, channels, known, lag, TAPS, ACC) * past_input(
            x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride, lag,
            CHANNELS, TAPS, ACC,
        )  # fmt: skip
    if bias_ptr is not None:
        z += tl.load(bias_ptr + channels, mask=known, other=0.0).to(ACC)[None, :]
    return z


@triton.jit
def finish(z, eps, SILU: tl.constexpr, L2: tl.constexpr):
    """The output of a tile of sums: activation, then each row divided by sqrt(Σ² + eps)."""
    a = z * tl.sigmoid(z) if SILU else z
    if L2:
        a *= tl.rsqrt(tl.sum(a * a, 1) + eps)[:, None]
    return a


@triton.jit
def finish_gradient(dy, z, eps, SILU: tl.constexpr, L2: tl.constexpr):
    """Gradient of the sums from that of the output; for y = a r it is r (dy − y (dy · y)) before the activation."""
    s = tl.sigmoid(z)
    if L2:
        a = z * s if SILU else z
        r = tl.rsqrt(tl.sum(a * a, 1) + eps)[:, None]
        y = a * r
        dy = r * (dy - y * tl.sum(dy * y, 1)[:, None])
    return dy * s * (1 + z * (1 - s)) if SILU else dy


@triton.jit(do_not_specialize=["tokens", "length", "count", "steps"])
def convolve_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, y_ptr,
    tokens, length, count, steps, batch_stride, token_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    SILU: tl.constexpr, L2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Outputs of ROWS tokens for WIDTH channels. Grid: row tiles × channel blocks, channels fastest."""
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    channels = (tl.program_id(0) % blocks) * WIDTH + cols
    known = (cols < WIDTH) & (channels < CHANNELS)
    inside = (rows < tokens)[:, None] & known[None, :]
    sequence, start, _ = locate(cu_ptr, rows, length, count, steps)
    at = row_offsets(cu_ptr, rows, sequence, start, batch_stride, token_stride)
    z = sum_taps(
        x_ptr, weight_ptr, bias_ptr, state_ptr, at, rows - start, sequence, channels, known, inside,
        token_stride, CHANNELS, TAPS, ACC,
    )  # fmt: skip
    place = y_ptr + rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(place, finish(z, eps, SILU, L2).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "length", "count", "steps"])
def convolve_gradient_kernel(
    dy_ptr, d_final_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, dx_ptr, partial_ptr,
    tokens, length, count, steps, batch_stride, token_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
    SILU: tl.constexpr, L2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of x for ROWS segments of tokens, and of taps and bias summed over them, for WIDTH channels.

    Each row of the tile walks its segment from the end, so that every sum is computed once: what it sends to earlier
    inputs waits in registers. Before its own tokens it walks the TAPS − 1 tokens after them, which send to them too.
    Grid: groups of segments × channel blocks. Partial sums are [groups, TAPS + 1, CHANNELS], the bias last.
    """
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    group = tl.program_id(0) // blocks
    first = (group * ROWS + tl.arange(0, ROWS)) * SEGMENT
    cols = tl.arange(0, COLS)
    channels = (tl.program_id(0) % blocks) * WIDTH + cols
    known = (cols < WIDTH) & (channels < CHANNELS)
    tap_0 = load_tap(weight_ptr, channels, known, 0, TAPS, ACC)
    tap_1 = load_tap(weight_ptr, channels, known, 1, TAPS, ACC)
    tap_2 = load_tap(weight_ptr, channels, known, 2, TAPS, ACC)
    tap_3 = load_tap(weight_ptr, channels, known, 3, TAPS, ACC)
    none = tl.zeros((ROWS, COLS), ACC)
    sum_0, sum_1, sum_2, sum_3, sum_bias = none, none, none, none, none
    sent_1, sent_2, sent_3 = none, none, none  # to the inputs one, two and three tokens ago

    for i in tl.range(SEGMENT + TAPS - 1, num_stages=STAGES):
        ahead = SEGMENT + TAPS - 2 - i
        rows = first + ahead
        inside = (rows < tokens)[:, None] & known[None, :]
        sequence, start, end = locate(cu_ptr, rows, length, count, steps)
        at = row_offsets(cu_ptr, rows, sequence, start, batch_stride, token_stride)
        position = rows - start
        x_0, x_1, x_2, x_3 = window(
            x_ptr, state_ptr, at, position, sequence, channels, inside, token_stride,
            CHANNELS, TAPS, ACC,
        )  # fmt: skip
        z = tap_0 * x_0 + tap_1 * x_1 + tap_2 * x_2 + tap_3 * x_3
        if bias_ptr is not None:
            z += tl.load(bias_ptr + channels, mask=known, other=0.0).to(ACC)[None, :]
        packed = rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        dy = tl.load(dy_ptr + packed, mask=inside, other=0.0).to(ACC)
        dz = finish_gradient(dy, z, eps, SILU, L2)

        dx = sent_1 + tap_0 * dz
        sent_1 = sent_2 + tl.where((position >= 1)[:, None], tap_1 * dz, 0.0)
        sent_2 = sent_3 + tl.where((position >= 2)[:, None], tap_2 * dz, 0.0)
        sent_3 = tl.where((position >= 3)[:, None], tap_3 * dz, 0.0)
        if ahead < SEGMENT:
            sum_0 += dz * x_0
            sum_1 += dz * x_1
            sum_2 += dz * x_2
            sum_3 += dz * x_3
            sum_bias += dz
            if d_final_ptr is not None:
                i_state = rows - end + (TAPS - 1)  # where the last tokens lie in the final state
                slot = sequence.to(tl.int64) * (CHANNELS * (TAPS - 1)) + i_state
                place = d_final_ptr + slot[:, None] + channels[None, :] * (TAPS - 1)
                dx += tl.load(place, mask=inside & (i_state >= 0)[:, None], other=0.0).to(ACC)
            tl.store(dx_ptr + packed, dx.to(dx_ptr.dtype.element_ty), mask=inside)

    partial_ptr += group.to(tl.int64) * ((TAPS + 1) * CHANNELS) + channels
    tl.store(partial_ptr + TAPS * CHANNELS, tl.sum(sum_bias, 0), mask=known)
    tl.store(partial_ptr + (TAPS - 1) * CHANNELS, tl.sum(sum_0, 0), mask=known)
    if TAPS > 1:
        tl.store(partial_ptr + (TAPS - 2) * CHANNELS, tl.sum(sum_1, 0), mask=known)
    if TAPS > 2:
        tl.store(partial_ptr + (TAPS - 3) * CHANNELS, tl.sum(sum_2, 0), mask=known)
    if TAPS > 3:
        tl.store(partial_ptr, tl.sum(sum_3, 0), mask=known)


@triton.jit(do_not_specialize=["length"])
def final_state_kernel(
    x_ptr, state_ptr, cu_ptr, final_ptr, length, batch_stride, token_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, COLS: tl.constexpr, PAST: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Last TAPS − 1 inputs of one sequence: those so many tokens before rows that follow its end."""
    blocks: tl.constexpr = (CHANNELS + COLS - 1) // COLS
    i_sequence = tl.program_id(0) // blocks
    channels = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)
    r = tl.arange(0, PAST)
    inside = (r < TAPS - 1)[:, None] & (channels < CHANNELS)[None, :]
    sequence = tl.zeros_like(r) + i_sequence
    start, end = bounds(cu_ptr, i_sequence, length)
    rows = end + r
    at = row_offsets(cu_ptr, rows, sequence, start, batch_stride, token_stride)
    last = past_input(
        x_ptr, state_ptr, at, rows - start, sequence, channels, inside, token_stride, TAPS - 1,
        CHANNELS, TAPS, ACC,
    )  # fmt: skip
    slot = sequence.to(tl.int64) * (CHANNELS * (TAPS - 1)) + r
    place = final_ptr + slot[:, None] + channels[None, :] * (TAPS - 1)
    tl.store(place, last.to(final_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def state_gradient_kernel(
    dy_ptr, d_final_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, d_state_ptr,
    length, batch_stride, token_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
    PAST: tl.constexpr, SILU: tl.constexpr, L2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradient of the initial state of one sequence, from its first TAPS − 1 sums and what it passes on whole."""
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    i_sequence = tl.program_id(0) // blocks
    cols, r = tl.arange(0, COLS), tl.arange(0, PAST)
    channels = (tl.program_id(0) % blocks) * WIDTH + cols
    known = (cols < WIDTH) & (channels < CHANNELS)
    sequence = tl.zeros_like(r) + i_sequence
    start, end = bounds(cu_ptr, i_sequence, length)
    rows = start + r
    inside = ((rows < end) & (r < TAPS - 1))[:, None] & known[None, :]
    at = row_offsets(cu_ptr, rows, sequence, start, batch_stride, token_stride)
    z = sum_taps(
        x_ptr, weight_ptr, bias_ptr, state_ptr, at, r, sequence, channels, known, inside,
        token_stride, CHANNELS, TAPS, ACC,
    )  # fmt: skip
    place = dy_ptr + rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    dz = finish_gradient(tl.load(place, mask=inside, other=0.0).to(ACC), z, eps, SILU, L2)
    base = i_sequence.to(tl.int64) * (CHANNELS * (TAPS - 1)) + channels * (TAPS - 1)
    for i in tl.static_range(TAPS - 1):
        met = inside & (r <= i)[:, None]  # sums that reach back to this input, by their tap i - r
        tap = tl.load(
            weight_ptr + (channels * TAPS)[None, :] + (i - r)[:, None], mask=met, other=0.0
        )
        d_state = tl.sum(tap.to(ACC) * dz, 0)
        if d_final_ptr is not None:
            kept = i - (end - start)
            d_state += tl.load(d_final_ptr + base + kept, mask=known & (kept >= 0), other=0.0).to(
                ACC
            )
        tl.store(d_state_ptr + base + i, d_state.to(d_state_ptr.dtype.element_ty), mask=known)


@triton.jit
def step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr,
    length, batch_stride, token_stride, state_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAST: tl.constexpr,
    SILU: tl.constexpr, L2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Outputs of the next few tokens of one sequence for WIDTH channels, whose state is updated in place."""
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    i_sequence = tl.program_id(0).to(tl.int64) // blocks
    cols, rows, r = tl.arange(0, COLS), tl.arange(0, ROWS), tl.arange(0, PAST)
    channels = (tl.program_id(0) % blocks) * WIDTH + cols
    known = (cols < WIDTH) & (channels < CHANNELS)
    inside = (rows < length)[:, None] & known[None, :]
    x_ptr += i_sequence * batch_stride
    state_ptr += i_sequence * state_stride
    z = sum_taps(
        x_ptr, weight_ptr, bias_ptr, state_ptr, rows * token_stride, rows, tl.zeros_like(rows),
        channels, known, inside, token_stride, CHANNELS, TAPS, ACC,
    )  # fmt: skip
    place = y_ptr + (i_sequence * length + rows)[:, None] * CHANNELS + channels[None, :]
    tl.store(place, finish(z, eps, SILU, L2).to(y_ptr.dtype.element_ty), mask=inside)
    if TAPS > 1:
        held = (r < TAPS - 1)[:, None] & known[None, :]
        after = length + r
        last = past_input(
            x_ptr, state_ptr, after * token_stride, after, tl.zeros_like(r), channels, held,
            token_stride, TAPS - 1, CHANNELS, TAPS, ACC,
        )  # fmt: skip
        tl.debug_barrier()  # one thread's new input may replace what another has yet to read
        place = state_ptr + r[:, None] + channels[None, :] * (TAPS - 1)
        tl.store(place, last.to(state_ptr.dtype.element_ty), mask=held)
