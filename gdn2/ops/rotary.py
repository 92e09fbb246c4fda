"""Rotary position embedding of attention, and the cumulative rotation of Mamba-3.

Angles are computed in fp64 and only their sine and cosine, or the reduced angle, rounded: near 1e6
fp32 numbers are 0.06 apart.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gdn2.ops.arguments import has_tangent
from gdn2.ops.packing import FLOATS, check_cu_seqlens, check_operand, sequence_lengths

_INTEGERS = (torch.int32, torch.int64)


def rotary_embedding(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Return x [batch, length, heads, d], channels (i, i + d/2) turned by position · base^(-2i/d).

    positions are integers, [length] or [batch, length].
    """
    _check_heads(x)
    if tuple(positions.shape) not in (tuple(x.shape[:2]), tuple(x.shape[1:2])):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}, "
            f"expected {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
        )
    if positions.device != x.device:
        raise ValueError(f"positions is on {positions.device}, expected {x.device}")
    cos, sin = rotary_table(positions, x.shape[-1], base, _wide_enough(x.dtype))
    return apply_rotary(x, cos, sin)


def rotary_table(
    positions: Tensor, dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine [..., dim/2] of the angles at each position, for all layers."""
    if positions.dtype not in _INTEGERS or positions.ndim not in (1, 2):
        raise ValueError(
            f"positions is {positions.dtype} {tuple(positions.shape)}, "
            "expected int32 or int64 [length] or [batch, length]"
        )
    if dim < 2 or dim % 2:
        raise ValueError(f"dim is {dim}, expected a positive even number")
    if not base > 0:
        raise ValueError(f"base is {base}, expected more than 0")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype is {dtype}, expected torch.float32 or torch.float64")
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim
    angles = positions.unsqueeze(-1) * base**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, length, heads, d] turned by `rotary_table`'s cosines and sines."""
    _check_heads(x)
    batch, length, _, channels = x.shape
    shape = (length, channels // 2) if cos.ndim == 2 else (batch, length, channels // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        check_operand(name, table, shape, x.device)
        _check_precise(name, table)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def cumulative_rotation(
    angles: Tensor,
    dt: Tensor,
    *,
    initial_angle: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return Θ_t = Θ_{t-1} + π tanh(angles_t) dt_t [batch, length, heads, A], in [0, 2π].

    angles [batch, length, A] are shared by the heads of dt [batch, length, heads]. Θ_0 is
    initial_angle [N, heads, A] or zero, for each sequence of its own.
    """
    if angles.ndim != 3 or dt.ndim != 3:
        raise ValueError(
            f"angles has shape {tuple(angles.shape)} and dt {tuple(dt.shape)}, "
            "expected [batch, length, A] and [batch, length, heads]"
        )
    batch, length, pairs = angles.shape
    heads = dt.shape[2]
    check_operand("angles", angles, (batch, length, pairs), angles.device)
    check_operand("dt", dt, (batch, length, heads), angles.device)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length, angles.device)
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_angle is None:
        initial_angle = angles.new_zeros(count, heads, pairs)
    check_operand("initial_angle", initial_angle, (count, heads, pairs), angles.device)

    # All of it in fp64: the rounding of π to fp32 alone adds up to 9e-3 over 1e5 half turns.
    steps = (math.pi * angles.double().tanh()).unsqueeze(2) * dt.double().unsqueeze(3)
    total = _running_sum(steps, initial_angle.double(), cu_seqlens)
    dtype = _wide_enough(torch.promote_types(angles.dtype, dt.dtype))
    return total.remainder(2 * math.pi).to(dtype)


def _running_sum(steps: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the cumulative sum over the tokens of each sequence, from its row of `initial`.

    Lengths of packed ones must be known, which breaks a compiled graph.
    """
    if cu_seqlens is None:
        return initial.unsqueeze(1) + steps.cumsum(dim=1)
    # One sum per sequence: differences of a sum over all would carry rounding, and one sequence's
    # NaN, into the next.
    sequences = torch.split(steps, sequence_lengths(cu_seqlens, 1, steps.shape[1]), dim=1)
    sums = [row + s.cumsum(dim=1) for row, s in zip(initial.unbind(), sequences, strict=True)]
    return torch.cat(sums, dim=1)


def rotate_pairs(x: Tensor, theta: Tensor) -> Tensor:
    """Return x [..., d] with its first A pairs of channels (2i, 2i + 1) turned by theta [..., A].

    theta broadcasts over all axes of x but the last.
    """
    _check_pairs(x, theta)
    return turn_pairs(x, *cosine_and_sine(theta))


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_pairs`, given the cosines and sines of the angles."""
    turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    turned = turned.to(torch.promote_types(x.dtype, cos.dtype))
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def cosine_and_sine(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return both of each angle."""
    if has_tangent(theta):  # which an operator would drop
        return theta.cos(), theta.sin()
    cos, sin = _cosine_and_sine(theta)
    return cos, sin


# An operator of its own: in the open a compiler would compute both, and reduce the angle in fp64, again for every
# channel of every rank that they turn.
@torch.library.custom_op("gdn2::cosine_and_sine", mutates_args=())
def _cosine_and_sine(theta: Tensor) -> tuple[Tensor, Tensor]:
    theta = theta.contiguous()
    return theta.cos(), theta.sin()


@_cosine_and_sine.register_fake
def _(theta: Tensor) -> tuple[Tensor, Tensor]:
    return theta.new_empty(theta.shape), theta.new_empty(theta.shape)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)


def _backward(ctx: Any, d_cos: Tensor, d_sin: Tensor) -> Tensor:
    cos, sin = ctx.saved_tensors
    return d_sin * cos - d_cos * sin


_cosine_and_sine.register_autograd(_backward, setup_context=_save)


def _wide_enough(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_heads(x: Tensor) -> None:
    if x.ndim != 4 or x.dtype not in FLOATS:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, expected floating point [batch, length, heads, d]"
        )
    if x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} channels a head, expected a positive even number")


def _check_precise(name: str, angles: Tensor) -> None:
    if angles.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} is {angles.dtype}, expected torch.float32 or torch.float64")


def _check_pairs(x: Tensor, theta: Tensor) -> None:
    if x.ndim < 1 or x.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, expected floating point [..., d]")
    _check_precise("theta", theta)
    if theta.device != x.device:
        raise ValueError(f"theta is on {theta.device}, expected {x.device}")
    axes = zip(reversed(theta.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    if not 1 <= theta.ndim <= x.ndim or any(size not in (1, full) for size, full in axes):
        raise ValueError(
            f"theta has shape {tuple(theta.shape)}, expected it to broadcast to "
            f"{tuple(x.shape[:-1])} before its last axis"
        )
    if 2 * theta.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"theta has {theta.shape[-1]} angles, expected at most {x.shape[-1] // 2}, one a pair"
        )
