"""The short convolution with its activation and L2 normalisation as kernels (`gdn2.ops.conv`).

A program holds a tile [rows, cols] of tokens and channels, the channels of one head where heads are normalised. Tokens
count through the whole batch, and each finds its own sequence, so that no table is made and nothing is read back. The
gradient has segments of a sequence for rows, and walks them; they find their sequence in the same way.
"""

import triton
import triton.language as tl


@triton.jit
def last_begun(cu_ptr, at, count, steps, SEGMENT: tl.constexpr):
    """Which of `count` sequences is the last to begin at or before a token, or a segment if tokens come in such.

    The first segment of sequence n has the number cu[n] // SEGMENT + n: before it lie at most so many whole segments,
    and one part of a segment for each sequence. Some numbers are left over and their segments empty, but it takes no
    table to find them.
    """
    low = tl.zeros_like(at)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        first = tl.load(cu_ptr + middle)
        if SEGMENT > 0:
            first = first // SEGMENT + middle
        low = tl.where(first <= at, middle, low)
        high = tl.where(first <= at, high, middle)
    return low


@triton.jit
def locate(cu_ptr, tokens, length, count, steps):
    """Sequence of each token and its first token. An empty sequence ends where it starts and is passed over."""
    found = last_begun(cu_ptr, tokens, count, steps, 0) if cu_ptr is not None else tokens // length
    start, _ = bounds(cu_ptr, found, length)
    return found, start


@triton.jit
def locate_segment(cu_ptr, segments, length, count, steps, SEGMENT: tl.constexpr):
    """Sequence of each segment, its first token, the segment's place in it, and the tokens from there to its end."""
    if cu_ptr is not None:
        sequence = last_begun(cu_ptr, segments, count, steps, SEGMENT)
        start, end = bounds(cu_ptr, sequence, length)
        place = (segments - start // SEGMENT - sequence) * SEGMENT
    else:
        each = tl.cdiv(length, SEGMENT)
        sequence = segments // each
        start, end = bounds(cu_ptr, sequence, length)
        place = (segments % each) * SEGMENT
    left = tl.where(sequence < count, end - start - place, -SEGMENT)
    return sequence, start, place, left


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
def load_tap(weight_ptr, channels, known, LAG: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr):
    """The tap [1, cols] that meets the input of LAG tokens ago."""
    place = weight_ptr + channels * TAPS + (TAPS - 1 - LAG)
    return tl.load(place, mask=known, other=0.0).to(ACC)[None, :]


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
def sigmoid(z):
    """1 / (1 + e⁻ᶻ) as a squared root: both functions are one instruction each, a quotient is six."""
    root = tl.rsqrt(1 + tl.exp2(z * -1.4426950408889634))  # log2(e)
    return root * root


@triton.jit
def finish(z, eps, SILU: tl.constexpr, L2: tl.constexpr):
    """The output of a tile of sums: activation, then each row divided by sqrt(Σ² + eps)."""
    a = z * sigmoid(z) if SILU else z
    if L2:
        a *= tl.rsqrt(tl.sum(a * a, 1) + eps)[:, None]
    return a


@triton.jit
def finish_gradient(dy, z, eps, SILU: tl.constexpr, L2: tl.constexpr):
    """Gradient of the sums from that of the output; for y = a r it is r dy − a r³ (dy · a) before the activation."""
    s = sigmoid(z)
    a = z * s if SILU else z
    if L2:
        r = tl.rsqrt(tl.sum(a * a, 1) + eps)
        back = tl.sum(dy * a, 1) * r * r * r
        dy = r[:, None] * dy - back[:, None] * a
    return dy * (s + a * (1 - s)) if SILU else dy


@triton.jit
def add_scaled(sums, scale, terms, COUNT: tl.constexpr):
    """Each of COUNT sums and scale ⊙ its term."""
    more = ()
    for i in tl.static_range(COUNT):
        more += (sums[i] + scale * terms[i],)
    return more


@triton.jit
def segment_input(x_ptr, token, place, left, token_stride, ACC: tl.constexpr):
    """Inputs so many tokens after the first of each segment, to which x_ptr points; zero beyond the sequence."""
    inside = (token < left) & (place + token >= 0)
    return tl.load(x_ptr + token * token_stride, mask=inside, other=0.0).to(ACC)


@triton.jit
def step_back(
    inputs, grads, taps, bias, x_ptr, dy_ptr, state_ptr, token, place, left, token_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, L2: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Inputs of a token's window, latest first, what their gradients are so far, and the gradient of its sum.

    Inputs and gradients come without those of the oldest, which is loaded: from the state if it precedes the sequence.
    Beyond the end of a sequence gradients of outputs are zero, so that nothing is sent from there.
    """
    oldest = segment_input(x_ptr, token - (TAPS - 1), place, left, token_stride, ACC)
    if state_ptr is not None and token < TAPS - 1:
        slot = place + token
        before = (slot < TAPS - 1) & (left > 0)
        oldest += tl.load(state_ptr + slot, mask=before, other=0.0).to(ACC)
    inputs += (oldest,)
    z = bias
    for i in tl.static_range(TAPS):
        z += taps[i] * inputs[i]
    dy = tl.load(dy_ptr + token * CHANNELS, mask=token < left, other=0.0).to(ACC)
    dz = finish_gradient(dy, z, eps, SILU, L2)
    grads += (tl.zeros_like(dz),)
    return inputs, add_scaled(grads, dz, taps, TAPS), dz


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
    sequence, start = locate(cu_ptr, rows, length, count, steps)
    at = row_offsets(cu_ptr, rows, sequence, start, batch_stride, token_stride)
    z = sum_taps(
        x_ptr, weight_ptr, bias_ptr, state_ptr, at, rows - start, sequence, channels, known, inside,
        token_stride, CHANNELS, TAPS, ACC,
    )  # fmt: skip
    place = y_ptr + rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(place, finish(z, eps, SILU, L2).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "count", "steps"])
def convolve_gradient_kernel(
    dy_ptr, d_final_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, dx_ptr, partial_ptr,
    length, count, steps, batch_stride, token_stride, dx_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, SILU: tl.constexpr, L2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of x for ROWS segments of tokens, and of taps and bias summed over them, for WIDTH channels.

    Each row of the tile walks its segment from the end. The window of TAPS inputs and their gradients so far move along
    in registers: a step loads the oldest input and stores the gradient of the latest. Before its own tokens a row walks
    the TAPS − 1 tokens after them, which send to them too. UNROLL steps, no fewer than a value stays in the window, are
    one round of the loop: only what rounds hand on to the very next keeps Triton's loads ahead of their use.
    Grid: groups of segments × channel blocks. Partial sums are [groups, TAPS (+ 1), CHANNELS], that of the bias last.
    """
    PAST: tl.constexpr = TAPS - 1
    tl.static_assert((SEGMENT % UNROLL == 0) & (UNROLL >= PAST))
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    group = tl.program_id(0) // blocks
    cols = tl.arange(0, COLS)
    channels = (tl.program_id(0) % blocks) * WIDTH + cols
    known = (cols < WIDTH) & (channels < CHANNELS)
    segments = group * ROWS + tl.arange(0, ROWS)
    sequence, start, place, left = locate_segment(cu_ptr, segments, length, count, steps, SEGMENT)
    longest = tl.minimum(tl.max(left, 0), SEGMENT)
    rounds = tl.maximum(tl.cdiv(longest, UNROLL), 0)

    at = row_offsets(cu_ptr, start + place, sequence, start, batch_stride, token_stride)
    x_ptr += at[:, None] + channels[None, :]
    first = (start + place).to(tl.int64)[:, None]
    dy_ptr += first * CHANNELS + channels[None, :]
    dx_ptr += first * dx_stride + channels[None, :]
    state = sequence.to(tl.int64)[:, None] * (CHANNELS * PAST) + channels[None, :] * PAST
    if state_ptr is not None:
        state_ptr += state
    if d_final_ptr is not None:
        d_final_ptr += state
    # Spread over the tile here: the loop would pass each mask of rows from thread to thread.
    place = tl.broadcast_to(place[:, None], (ROWS, COLS))
    left = tl.where(known[None, :], left[:, None], -SEGMENT)

    none = tl.zeros((ROWS, COLS), ACC)
    bias, sum_bias = none, none
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channels, mask=known, other=0.0).to(ACC)[None, :]
    taps, sums, inputs, grads = (), (), (), ()  # by the tokens between input and sum
    for i in tl.static_range(TAPS):
        taps += (load_tap(weight_ptr, channels, known, i, TAPS, ACC),)
        sums += (none,)
    for i in tl.static_range(PAST):
        token = rounds * UNROLL + PAST - 1 - i
        inputs += (segment_input(x_ptr, token, place, left, token_stride, ACC),)
        grads += (none,)

    for i in tl.static_range(PAST):
        token = rounds * UNROLL + PAST - 1 - i
        inputs, grads, dz = step_back(
            inputs, grads, taps, bias, x_ptr, dy_ptr, state_ptr, token, place, left, token_stride,
            eps, CHANNELS, TAPS, SILU, L2, ACC,
        )  # fmt: skip
        inputs, grads = inputs[1:], grads[1:]
    for i in tl.range(rounds, num_stages=STAGES):
        for j in tl.static_range(UNROLL):
            token = (rounds - i) * UNROLL - 1 - j
            inputs, grads, dz = step_back(
                inputs, grads, taps, bias, x_ptr, dy_ptr, state_ptr, token, place, left, token_stride,
                eps, CHANNELS, TAPS, SILU, L2, ACC,
            )  # fmt: skip
            sums = add_scaled(sums, dz, inputs, TAPS)
            if bias_ptr is not None:
                sum_bias += dz
            dx = grads[0]
            if d_final_ptr is not None:
                slot = token - left + PAST  # where the last tokens lie in the final state
                last = (token < left) & (slot >= 0)
                dx += tl.load(d_final_ptr + slot, mask=last, other=0.0).to(ACC)
            tl.store(dx_ptr + token * dx_stride, dx.to(dx_ptr.dtype.element_ty), mask=token < left)
            inputs, grads = inputs[1:], grads[1:]

    partial_ptr += group.to(tl.int64) * ((TAPS + (bias_ptr is not None)) * CHANNELS) + channels
    for i in tl.static_range(TAPS):
        tl.store(partial_ptr + (PAST - i) * CHANNELS, tl.sum(sums[i], 0), mask=known)
    if bias_ptr is not None:
        tl.store(partial_ptr + TAPS * CHANNELS, tl.sum(sum_bias, 0), mask=known)


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
    """Gradient of the initial state of one sequence, from its first TAPS − 1 sums and what it passes on whole.

    Held input i meets tap j in the sum of token i − j; a row's tokens are computed for each tap anew, so that no row
    waits for another.
    """
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    i_sequence = tl.program_id(0) // blocks
    cols, i = tl.arange(0, COLS), tl.arange(0, PAST)
    channels = (tl.program_id(0) % blocks) * WIDTH + cols
    known = (cols < WIDTH) & (channels < CHANNELS)
    held = (i < TAPS - 1)[:, None] & known[None, :]
    sequence = tl.zeros_like(i) + i_sequence
    start, end = bounds(cu_ptr, i_sequence, length)
    d_state = tl.zeros([PAST, COLS], ACC)
    for j in tl.static_range(TAPS - 1):
        rows = start + i - j
        inside = ((rows >= start) & (rows < end))[:, None] & held
        at = row_offsets(cu_ptr, rows, sequence, start, batch_stride, token_stride)
        z = sum_taps(
            x_ptr, weight_ptr, bias_ptr, state_ptr, at, i - j, sequence, channels, known, inside,
            token_stride, CHANNELS, TAPS, ACC,
        )  # fmt: skip
        place = dy_ptr + rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        dy = tl.load(place, mask=inside, other=0.0).to(ACC)
        tap = load_tap(weight_ptr, channels, known, TAPS - 1 - j, TAPS, ACC)
        d_state += tap * finish_gradient(dy, z, eps, SILU, L2)
    base = i_sequence.to(tl.int64) * (CHANNELS * (TAPS - 1)) + channels * (TAPS - 1)
    place = base[None, :] + i[:, None]
    if d_final_ptr is not None:
        count = end - start
        passed = held & (i >= count)[:, None]
        d_state += tl.load(d_final_ptr + place - count, mask=passed, other=0.0).to(ACC)
    tl.store(d_state_ptr + place, d_state.to(d_state_ptr.dtype.element_ty), mask=held)


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
