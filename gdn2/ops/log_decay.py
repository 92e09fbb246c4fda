"""Log-decays of learned speeds, where one kernel makes them and another all gradients; torch makes four passes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus as log_1_plus_exp

from gdn2.ops.backends import why_not
from gdn2.ops.packing import FLOATS, check_operand

NARROWEST = 16  # channels of a head that are worth a tile


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp x) to the last digits of fp64, too: torch's own is the line x from 20 on, where 2e-9 is missing."""
    return log_1_plus_exp(x, threshold=40)


def log_decay(x: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    """Return g = −exp(a) ⊙ softplus(x + δ) [..., heads, width] in fp32 at least (Eqs. 12, 86).

    Args:
        x: [..., channels], those of a head next to each other.
        bias: δ [channels].
        log_rate: a [heads].
    """
    if x.ndim < 1 or x.dtype not in FLOATS:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, expected floating point [..., channels]"
        )
    check_operand("bias", bias, (x.shape[-1],), x.device)
    check_operand("log_rate", log_rate, tuple(log_rate.shape[:1]), x.device)
    heads = log_rate.shape[0]
    if heads == 0 or x.shape[-1] % heads:
        raise ValueError(f"x has {x.shape[-1]} channels, expected a multiple of {heads} heads")
    if kernels_take(x, heads):
        return log_decay_by_kernel(x, bias, log_rate)
    wide = torch.promote_types(x.dtype, torch.float32)
    speed = softplus(x.to(wide) + bias.to(wide)).unflatten(-1, (heads, -1))
    return -log_rate.to(wide).exp().unsqueeze(-1) * speed


def kernels_take(x: Tensor, heads: int) -> bool:
    """Whether heads are wide enough for the kernels, and these are to be trusted."""
    wide = x.numel() > 0 and x.shape[-1] // heads >= NARROWEST
    return wide and why_not("triton", x.device, x.dtype, ("log_decay",)) is None


@torch.library.custom_op("gdn2::log_decay", mutates_args=())
def log_decay_by_kernel(x: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    from gdn2.ops.triton import log_decay as kernels  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(x):  # a launch goes to the current device
        return kernels.forward(x, bias, log_rate)


@log_decay_by_kernel.register_fake
def _(x: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    heads = log_rate.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(*x.shape[:-1], heads, x.shape[-1] // heads, dtype=wide)


@torch.library.custom_op("gdn2::log_decay_backward", mutates_args=())
def _gradients(
    dg: Tensor, x: Tensor, bias: Tensor, log_rate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from gdn2.ops.triton import log_decay as kernels  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(x):
        return kernels.backward(dg, x, bias, log_rate)


@_gradients.register_fake
def _(dg: Tensor, x: Tensor, bias: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_bias, d_log_rate = (t.new_empty(t.shape) for t in (x, bias, log_rate))
    return dx, d_bias, d_log_rate


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(dg, *ctx.saved_tensors)


log_decay_by_kernel.register_autograd(_backward, setup_context=_save)
