"""All that a mixer of Gated DeltaNet-2 makes of its input before the rule, for training on a GPU, and its gradient.

The maps of one input have gradients that lie side by side, so that one product takes them all (`gdn2.ops.maps`). Those
of convolutions and gates are made where they are to lie; by themselves they would be made first and copied there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn2.ops.backends import why_not
from gdn2.ops.conv_op import convolve, kernels_take
from gdn2.ops.maps import input_gradient
from gdn2.ops.norm import L2_EPS
from gdn2.ops.products import linear, product, rows_of

CONVOLVED, GATED = 3, 2  # of the maps: those of q, k and v; those of the erase and write gates


def kernels_enter(x: Tensor, taps: Sequence[Tensor], l2_width: int) -> bool:
    """Whether all kernels can run on these operands, and are to be trusted."""
    if not all(kernels_take(x, weight, None, None, l2_width) for weight in taps):
        return False
    return x.numel() > 0 and why_not("triton", x.device, x.dtype, ("gates",)) is None


def mixer_inputs(
    x: Tensor,
    weights: Sequence[Tensor],
    taps: Sequence[Tensor],
    *,
    l2_width: int,
    erase_range: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return q, k, v, b and w, and what further maps make of x [batch, length, inputs].

    q, k and v go through a short convolution and SiLU, heads of q and k are brought to unit length; b and w are
    sigmoids, b times a range (Eqs. 11, 85). It cannot be differentiated again.

    Args:
        x, weights, taps: all of one dtype.
        weights: [outputs, inputs] of q, k, v, the erase and the write gate, and of further maps.
        taps: [channels, width] of the convolutions of q, k and v.
        l2_width: channels of a head of q and k.
        erase_range: the largest erase gate.
        cu_seqlens: where packed sequences begin.
    """
    made: tuple[Tensor, ...] = _Entry.apply(  # type: ignore[no-untyped-call]
        cu_seqlens, l2_width, erase_range, x, *taps, *weights
    )
    return made


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cu_seqlens: Tensor | None,
        l2_width: int,
        erase_range: float,
        x: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        taps, weights = weights[:CONVOLVED], weights[CONVOLVED:]
        made = [linear(x, weight) for weight in weights]
        inputs, (erase, write, *others) = made[:CONVOLVED], made[CONVOLVED:]
        heads = (l2_width, l2_width, None)
        q, k, v = (
            convolve(z, weight, None, None, cu_seqlens, True, width, L2_EPS, False)[0]
            for z, weight, width in zip(inputs, taps, heads, strict=True)
        )
        b, w = gates(erase, write, erase_range)
        ctx.save_for_backward(cu_seqlens, x, b, w, *inputs, *taps, *weights)
        ctx.options = l2_width, erase_range
        return q, k, v, b, w, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cu_seqlens, x, b, w, *rest = ctx.saved_tensors
        inputs, taps, weights = rest[:3], rest[3:6], rest[6:]
        dq, dk, dv, db, dw, *others = grads
        joined, *d_taps = entry_gradient(
            [dq, dk, dv], inputs, taps, cu_seqlens, [db, dw], [b, w], others, *ctx.options
        )
        widths = [len(weight) for weight in weights]
        dx = input_gradient([*joined.split(widths, 1)], weights).view(x.shape)
        d_weights = product(joined.t(), rows_of(x)).split(widths)
        return None, None, None, dx, *d_taps, *d_weights


@torch.library.custom_op("gdn2::gates", mutates_args=())
def gates(erase: Tensor, write: Tensor, erase_range: float) -> tuple[Tensor, Tensor]:
    """Return both gates of their logits."""
    from gdn2.ops.triton import gates as kernels  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(erase):  # a launch goes to the current device
        return kernels.forward(erase, write, erase_range)


@gates.register_fake
def _(erase: Tensor, write: Tensor, erase_range: float) -> tuple[Tensor, Tensor]:
    return erase.new_empty(erase.shape), write.new_empty(write.shape)


@torch.library.custom_op("gdn2::entry_gradient", mutates_args=())
def entry_gradient(
    grads: list[Tensor],
    inputs: list[Tensor],
    taps: list[Tensor],
    cu_seqlens: Tensor | None,
    d_gates: list[Tensor],
    made: list[Tensor],
    others: list[Tensor],
    l2_width: int,
    erase_range: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all that maps made, side by side [tokens, outputs], and of the taps of q, k and v.

    Args:
        grads: of q, k and v.
        inputs, taps: of their convolutions.
        d_gates, made: gradients of b and w, and these.
        others: gradients of what further maps made.
    """
    from gdn2.ops.triton import conv_launch  # noqa: PLC0415 (optional dependency)
    from gdn2.ops.triton import gates as kernels  # noqa: PLC0415

    batch, length = inputs[0].shape[:2]
    widths = [z.shape[-1] for z in (*inputs, *made, *others)]
    joined = inputs[0].new_empty(batch * length, sum(widths))
    parts, at, d_taps = joined.split(widths, 1), CONVOLVED + GATED, []
    with torch.cuda.device_of(joined):
        heads = (l2_width, l2_width, None)
        for dy, x, weight, width, part in zip(
            grads, inputs, taps, heads, parts[:CONVOLVED], strict=True
        ):
            given = conv_launch.Inputs.of(x, weight, None, None, cu_seqlens)
            to = part.unflatten(0, (batch, length))
            found = conv_launch.backward(given, dy.contiguous(), None, True, width, L2_EPS, to)
            d_taps.append(found[1])
        gate_part = joined.narrow(1, sum(widths[:CONVOLVED]), sum(widths[CONVOLVED:at]))
        db, dw = d_gates
        kernels.backward(db, made[0], dw, made[1], erase_range, gate_part)
    for part, dy in zip(parts[at:], others, strict=True):
        part.copy_(rows_of(dy))
    return joined, *d_taps  # type: ignore[return-value]


@entry_gradient.register_fake
def _(
    grads: list[Tensor],
    inputs: list[Tensor],
    taps: list[Tensor],
    cu_seqlens: Tensor | None,
    d_gates: list[Tensor],
    made: list[Tensor],
    others: list[Tensor],
    l2_width: int,
    erase_range: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = inputs[0].shape[0] * inputs[0].shape[1]
    joined = inputs[0].new_empty(tokens, sum(z.shape[-1] for z in (*inputs, *made, *others)))
    d_q, d_k, d_v = (weight.new_empty(weight.shape) for weight in taps)
    return joined, d_q, d_k, d_v
