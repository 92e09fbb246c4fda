"""All that a decode step of Gated DeltaNet-2 does between its linear maps and the rule, as one kernel.

A token's convolutions, activations and gates are a dozen small operations, each of which takes longer to start than to
run. A program does those of one head: of a query, of a key with its erase gate and decay, or of a value with its write
gate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over, overlapping, wait_for_the_last


@triton.jit
def convolve_token(
    x_ptr, weight_ptr, state_ptr, channels, known, TAPS: tl.constexpr, WINDOW: tl.constexpr
):
    """SiLU of the causal convolution at a token, in fp32; its input enters the state [channels, TAPS − 1]."""
    tap = tl.arange(0, WINDOW)[None, :]
    inside = known[:, None] & (tap < TAPS)
    place = channels[:, None] * (TAPS - 1) + tap
    x = tl.load(x_ptr + channels, mask=known, other=0.0).to(tl.float32)
    past = tl.load(state_ptr + place, mask=inside & (tap < TAPS - 1), other=0.0).to(tl.float32)
    window = tl.where(tap == TAPS - 1, x[:, None], past)
    weight = tl.load(weight_ptr + channels[:, None] * TAPS + tap, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.debug_barrier()  # one thread's new input may replace what another has yet to read
    tl.store(state_ptr + place - 1, window.to(state_ptr.dtype.element_ty), mask=inside & (tap > 0))
    y = tl.sum(window * weight, 1)
    return y * tl.sigmoid(y)


@triton.jit
def unit(y, eps):
    """A head brought to unit length."""
    return y * tl.rsqrt(tl.sum(y * y, 0) + eps)


@triton.jit
def put(ptr, y, channels, known):
    tl.store(ptr + channels, y.to(ptr.dtype.element_ty), mask=known)


@triton.jit
def delta_inputs_kernel(
    q_ptr, k_ptr, v_ptr, erase_ptr, write_ptr, decay_ptr,
    q_row, k_row, v_row, erase_row, write_row, decay_row,
    q_weight_ptr, k_weight_ptr, v_weight_ptr, q_state_ptr, k_state_ptr, v_state_ptr,
    q_state_row, k_state_row, v_state_row, bias_ptr, log_rate_ptr,
    q_out, k_out, v_out, g_out, b_out, w_out, erase_range, eps,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: of the queries, of the keys, or of the values."""
    row = (tl.program_id(0) // (2 * H + HV)).to(tl.int64)
    part = tl.program_id(0) % (2 * H + HV)
    cols = tl.arange(0, COLS)
    wait_for_the_last(PDL)
    if part < H:
        channels, known = part * DK + cols, cols < DK
        y = convolve_token(
            q_ptr + row * q_row,
            q_weight_ptr,
            q_state_ptr + row * q_state_row,
            channels,
            known,
            TAPS,
            WINDOW,
        )
        put(q_out + row * H * DK, unit(y, eps), channels, known)
    elif part < 2 * H:
        channels, known = (part - H) * DK + cols, cols < DK
        y = convolve_token(
            k_ptr + row * k_row,
            k_weight_ptr,
            k_state_ptr + row * k_state_row,
            channels,
            known,
            TAPS,
            WINDOW,
        )
        put(k_out + row * H * DK, unit(y, eps), channels, known)
        erase = tl.load(erase_ptr + row * erase_row + channels, mask=known, other=0.0).to(
            tl.float32
        )
        put(b_out + row * H * DK, erase_range * tl.sigmoid(erase), channels, known)
        speed = tl.load(decay_ptr + row * decay_row + channels, mask=known, other=0.0).to(
            tl.float32
        )
        speed += tl.load(bias_ptr + channels, mask=known, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(log_rate_ptr + part - H).to(tl.float32))
        # softplus, whose logarithm loses nothing where its argument is large
        g = -rate * (tl.maximum(speed, 0.0) + tl.log(1 + tl.exp(-tl.abs(speed))))
        put(g_out + row * H * DK, g, channels, known)
    else:
        channels, known = (part - 2 * H) * DV + cols, cols < DV
        y = convolve_token(
            v_ptr + row * v_row,
            v_weight_ptr,
            v_state_ptr + row * v_state_row,
            channels,
            known,
            TAPS,
            WINDOW,
        )
        put(v_out + row * HV * DV, y, channels, known)
        write = tl.load(write_ptr + row * write_row + channels, mask=known, other=0.0).to(
            tl.float32
        )
        put(w_out + row * HV * DV, tl.sigmoid(write), channels, known)


def delta_inputs(
    maps: list[Tensor],
    weights: list[Tensor],
    states: list[Tensor],
    bias: Tensor,
    log_rate: Tensor,
    value_heads: int,
    erase_range: float,
    eps: float,
) -> list[Tensor]:
    """See `gdn2.ops.delta_inputs`."""
    q, _, v, *_ = maps
    rows, H, taps = q.shape[0], log_rate.shape[0], weights[0].shape[1]
    DK, DV = q.shape[2] // H, v.shape[2] // value_heads

    def new(heads: int, width: int, dtype: torch.dtype) -> Tensor:
        return q.new_empty(rows, 1, heads, width, dtype=dtype)

    keys = [new(H, DK, dtype) for dtype in (q.dtype, q.dtype, torch.float32, q.dtype)]
    values = [new(value_heads, DV, q.dtype) for _ in range(2)]
    outputs = [keys[0], keys[1], values[0], keys[2], keys[3], values[1]]
    with torch.cuda.device_of(q):
        over(delta_inputs_kernel, rows * (2 * H + value_heads))(
            *maps, *(x.stride(0) for x in maps), *(x.contiguous() for x in weights),
            *states, *(x.stride(0) for x in states), bias, log_rate, *outputs, erase_range, eps,
            H=H, HV=value_heads, DK=DK, DV=DV, TAPS=taps, WINDOW=triton.next_power_of_2(taps),
            COLS=triton.next_power_of_2(max(DK, DV)), num_warps=1, **overlapping(q.device),
        )  # fmt: skip
    return outputs
