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
