"""All that a mixer makes of its input before the rule, or before attention, for training on a GPU, and its gradient.

The maps of one input have gradients that lie side by side, so that one product takes them all (`gdn2.ops.maps`). Those
of convolutions, gates and rotations are made where they are to lie; by themselves they would be made first and copied.
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
    return x.numel() > 0 and why_not("triton", x.device, x.dtype, ("gates", "rotary")) is None


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
        dx, *d_weights = map_gradients(joined, x, weights)
        return None, None, None, dx, *d_taps, *d_weights


def map_gradients(joined: Tensor, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of x and of the weights, from those of what they make, side by side."""
    widths = [len(weight) for weight in weights]
    dx = input_gradient([*joined.split(widths, 1)], [*weights]).view(x.shape)
    return [dx, *product(joined.t(), rows_of(x)).split(widths)]


def kernels_turn(x: Tensor, cos: Tensor) -> bool:
    """Whether the kernel can turn what is made of x, and is to be trusted."""
    known = x.numel() > 0 and cos.dtype == torch.promote_types(x.dtype, torch.float32)
    return known and why_not("triton", x.device, x.dtype, ("rotary",)) is None


def attention_inputs(
    x: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of x [batch, length, inputs], the first two turned by `rotary_table`'s cosines and sines.

    It cannot be differentiated again. All weights [outputs, inputs] have the dtype of x.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Turned.apply(x, cos, sin, *weights)  # type: ignore[no-untyped-call]
    return found


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, cos, sin, *weights)
        q, k, v = (linear(x, weight) for weight in weights)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *weights = ctx.saved_tensors
        joined = rotated_gradient(dq, dk, dv, cos, sin)
        dx, *d_weights = map_gradients(joined, x, weights)
        return dx, None, None, *d_weights


@torch.library.custom_op("gdn2::rotated", mutates_args=())
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, length, channels] turned."""
    from gdn2.ops.triton import rotary as kernels  # noqa: PLC0415 (optional dependency)

    y = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        kernels.turn(rows_of(x).contiguous(), *angles(cos, sin), rows_of(y), back=False)
    return y


@rotated.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("gdn2::rotated_gradient", mutates_args=())
def rotated_gradient(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return gradients of what maps made, side by side [tokens, channels]; those of q and k turned back."""
    from gdn2.ops.triton import rotary as kernels  # noqa: PLC0415 (optional dependency)

    grads = [rows_of(d).contiguous() for d in (dq, dk, dv)]
    widths = [d.shape[1] for d in grads]
    joined = grads[0].new_empty(len(grads[0]), sum(widths))
    q_part, k_part, v_part = joined.split(widths, 1)
    with torch.cuda.device_of(joined):
        for d, part in zip(grads[:2], (q_part, k_part), strict=True):
            kernels.turn(d, *angles(cos, sin), part, back=True)
        kernels.copy_rows(grads[2], v_part)
    return joined


@rotated_gradient.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens = dq.shape[0] * dq.shape[1]
    return dq.new_empty(tokens, sum(d.shape[-1] for d in (dq, dk, dv)))


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both as rows [length or tokens, d/2]."""
    return rows_of(cos).contiguous(), rows_of(sin).contiguous()


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
    from gdn2.ops.triton import conv_launch, rotary  # noqa: PLC0415 (optional dependency)
    from gdn2.ops.triton import gates as kernels  # noqa: PLC0415

    widths = [z.shape[-1] for z in (*inputs, *made, *others)]
    joined = inputs[0].new_empty(inputs[0].shape[:2].numel(), sum(widths))
    parts, at, d_taps = joined.split(widths, 1), CONVOLVED + GATED, []
    with torch.cuda.device_of(joined):
        heads = (l2_width, l2_width, None)
        for dy, x, weight, width, part in zip(
            grads, inputs, taps, heads, parts[:CONVOLVED], strict=True
        ):
            given = conv_launch.Inputs.of(x, weight, None, None, cu_seqlens)
            found = conv_launch.backward(given, dy.contiguous(), None, True, width, L2_EPS, part)
            d_taps.append(found[1])
        gate_part = joined.narrow(1, sum(widths[:CONVOLVED]), sum(widths[CONVOLVED:at]))
        db, dw = d_gates
        kernels.backward(db, made[0], dw, made[1], erase_range, gate_part)
        for part, dy in zip(parts[at:], others, strict=True):
            rotary.copy_rows(rows_of(dy).contiguous(), part)
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
