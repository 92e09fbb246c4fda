"""Decoding as one kernel: the state is read once, takes a token or a few in registers, and is written once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over, overlapping, wait_for_the_last


class Tile(NamedTuple):
    """Value channels of one program, and its warps."""

    value_block: int
    num_warps: int


# The tile from so many heads (sequences × value heads) on. Few heads are cut finely, so that every multiprocessor
# gets a program; many are cut into rows of whole cache lines. Best of 20 by `gdn2 bench decode --sweep` on one H200 at
# 16, 256, 2048 and 8192 heads of width 128: 3.0, 11.2, 72.6 and 273 µs.
TILES = (
    (1024, Tile(32, 4)),
    (64, Tile(16, 1)),
    (0, Tile(16, 2)),
)
# From so many heads on a step waits for the kernel before it to end: with batches of 64, 1024 heads a layer, generation
# took 2.42 ms a step, and 2.44 where all kernels started early.
MANY = 1024


@triton.jit
def load_channels(ptr, channels, stride, mask, dtype: tl.constexpr):
    """Channels of one token and head; zero beyond the width."""
    return tl.load(ptr + channels * stride, mask=mask, other=0.0).to(dtype)


@triton.jit
def step_kernel(
    q_ptr, q_n, q_t, q_h, q_d, k_ptr, k_n, k_t, k_h, k_d, v_ptr, v_n, v_t, v_h, v_d,
    g_ptr, g_n, g_t, g_h, g_d, b_ptr, b_n, b_t, b_h, b_d, w_ptr, w_n, w_t, w_h, w_d,
    state_ptr, state_n, state_h, state_k, state_v, final_ptr, final_n, final_h, final_k, final_v,
    o_ptr, scale, length,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    QK_GROUP: tl.constexpr, G_GROUP: tl.constexpr, B_GROUP: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Output and state of one sequence, for BV channels of one value head (Eqs. 9, 10).

    Grid: N · HV · DV / BV, the tiles of a head side by side. Every operand is walked by its own strides: sequence,
    token, head, channel. Rows and columns of S beyond the widths are zero and stay so.
    """
    tiles: tl.constexpr = (DV + BV - 1) // BV
    i_tile, i_head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i_sequence, i_value = i_head // HV, i_head % HV
    keys, values = tl.arange(0, BK), i_tile * BV + tl.arange(0, BV)
    key_mask, value_mask = keys < DK, values < DV
    state_mask = key_mask[:, None] & value_mask[None, :]
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    wait_for_the_last(PDL)

    state_ptr += i_sequence * state_n + i_value * state_h
    in_state = keys[:, None] * state_k + values[None, :] * state_v
    S = tl.load(state_ptr + in_state, mask=state_mask, other=0.0)

    q_ptr += i_sequence * q_n + i_value // QK_GROUP * q_h
    k_ptr += i_sequence * k_n + i_value // QK_GROUP * k_h
    v_ptr += i_sequence * v_n + i_value * v_h
    g_ptr += i_sequence * g_n + i_value // G_GROUP * g_h
    if b_ptr is not None:
        b_ptr += i_sequence * b_n + i_value // B_GROUP * b_h
    if w_ptr is not None:
        w_ptr += i_sequence * w_n + i_value * w_h
    o_ptr += (i_sequence * length * HV + i_value) * DV

    for _ in range(length):
        q = load_channels(q_ptr, keys, q_d, key_mask, dtype) * scale
        k = load_channels(k_ptr, keys, k_d, key_mask, dtype)
        g = load_channels(g_ptr, keys, g_d, key_mask, dtype)
        r = load_channels(v_ptr, values, v_d, value_mask, dtype)
        if w_ptr is not None:
            r *= load_channels(w_ptr, values, w_d, value_mask, dtype)  # z = w ⊙ v
            w_ptr += w_t
        S *= tl.exp(g)[:, None]
        if b_ptr is not None:
            e = load_channels(b_ptr, keys, b_d, key_mask, dtype) * k  # e = b ⊙ k
            r -= tl.sum(S * e[:, None], 0)
            b_ptr += b_t
        S += k[:, None] * r[None, :]
        o = tl.sum(S * q[:, None], 0)
        tl.store(o_ptr + values, o.to(o_ptr.dtype.element_ty), mask=value_mask)
        q_ptr += q_t
        k_ptr += k_t
        v_ptr += v_t
        g_ptr += g_t
        o_ptr += HV * DV

    final_ptr += i_sequence * final_n + i_value * final_h
    in_final = keys[:, None] * final_k + values[None, :] * final_v
    tl.store(final_ptr + in_final, S, mask=state_mask)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    scale: float,
    state: Tensor,
    final: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """Output [N, T, H_v, d_v] of a token or a few; the new state goes to `final`, which may be `state` itself."""
    N, T, HV, DV = v.shape
    DK = k.shape[3]
    o = v.new_empty(v.shape)
    most, num_warps = tile or choose_tile(N * HV)
    early = overlapping(state.device) if N * HV < MANY else {"PDL": False}
    BK, BV = (max(16, triton.next_power_of_2(width)) for width in (DK, DV))
    BV = min(most, BV)
    with torch.cuda.device_of(state):  # a launch goes to the current device
        over(step_kernel, N * HV * triton.cdiv(DV, BV))(
            q, *strides(q), k, *strides(k), v, *strides(v), g, *strides(g), b, *strides(b), w, *strides(w),
            state, *state.stride(), final, *final.stride(), o, scale, T,
            HV=HV, DK=DK, DV=DV,
            QK_GROUP=HV // k.shape[2], G_GROUP=HV // g.shape[2],
            B_GROUP=1 if b is None else HV // b.shape[2],
            BK=BK, BV=BV, num_warps=num_warps, **early,
        )  # fmt: skip
    return o


def choose_tile(heads: int) -> Tile:
    """The tile for so many heads of all sequences."""
    return next(tile for least, tile in TILES if heads >= least)


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of an operand; a gate of width one has its only channel everywhere."""
    if x is None:
        return 0, 0, 0, 0
    return x.stride() if x.shape[3] > 1 else (*x.stride()[:3], 0)
