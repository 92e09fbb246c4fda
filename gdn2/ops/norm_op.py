"""The kernels of RMS normalisation as custom operators, so that autograd and `torch.compile` see through them."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gdn2.ops.backends import why_not

WIDEST_ROW = 1 << 15  # a program holds whole rows


def widest(*operands: Tensor | None) -> torch.dtype:
    """The dtype that all operands fit in."""
    return reduce(torch.promote_types, (t.dtype for t in operands if t is not None))


def kernels_take(x: Tensor, gate: Tensor | None, weight: Tensor | None) -> bool:
    """Whether the kernels can run on these operands, and are to be trusted."""
    fits = 0 < x.shape[-1] <= WIDEST_ROW
    return fits and why_not("triton", x.device, widest(x, gate, weight), ("norm",)) is None


@torch.library.custom_op("gdn2::rms_norm", mutates_args=())
def normalize(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, silu: bool, gate_first: bool
) -> tuple[Tensor, Tensor]:
    """Output, and the reciprocal of each row's root."""
    from gdn2.ops.triton import norm  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(x):  # a launch goes to the current device
        return norm.forward(x, gate, weight, eps, silu, gate_first)


@normalize.register_fake
def _(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, silu: bool, gate_first: bool
) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=dtype)


@torch.library.custom_op("gdn2::rms_norm_backward", mutates_args=())
def normalize_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    silu: bool,
    gate_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight; empty where absent."""
    from gdn2.ops.triton import norm  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(x):
        found = norm.backward(dy, x, gate, weight, rstd, silu, gate_first)
    dx, d_gate, d_weight = (x.new_empty(0) if d is None else d for d in found)
    return dx, d_gate, d_weight


@normalize_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    silu: bool,
    gate_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, gate, weight))
    dx, d_gate, d_weight = like
    return dx, d_gate, d_weight


@torch.library.custom_op("gdn2::add_rms_norm", mutates_args=())
def add_normalize(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum x + delta, its norm, and the reciprocal of each row's root."""
    from gdn2.ops.triton import norm  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(x):
        return norm.add(x, delta, weight, eps)


@add_normalize.register_fake
def _(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=dtype)
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


@torch.library.custom_op("gdn2::add_rms_norm_backward", mutates_args=())
def add_normalize_backward(
    dy: Tensor, passed: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum, with what it gets where it is passed on, and of the weight."""
    from gdn2.ops.triton import norm  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(total):
        dx, _, d_weight = norm.backward(dy, total, None, weight, rstd, False, False, passed)
    assert d_weight is not None
    return dx, d_weight


@add_normalize_backward.register_fake
def _(
    dy: Tensor, passed: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    total, _, rstd = output
    ctx.save_for_backward(total, inputs[2], rstd)
    ctx.set_materialize_grads(False)


def _backward_of_sum(
    ctx: Any, passed: Tensor | None, dy: Tensor | None, _d_rstd: None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return passed, passed, None, None
    d_total, d_weight = add_normalize_backward(dy, passed, *ctx.saved_tensors)
    return d_total, d_total, d_weight, None


add_normalize.register_autograd(_backward_of_sum, setup_context=_save_sum)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _eps, silu, gate_first = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = silu, gate_first
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor, _d_rstd: None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # may be read once only, under gradient checkpointing
    found = normalize_backward(dy, *kept, *ctx.options)
    grads = (None if t is None else d for d, t in zip(found, kept[:3], strict=True))
    return *grads, None, None, None


normalize.register_autograd(_backward, setup_context=_save)
