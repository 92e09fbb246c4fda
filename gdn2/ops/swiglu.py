"""The activation of the MLP, and the map that follows it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from gdn2.ops.backends import why_not
from gdn2.ops.products import linear, product, rows_of


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ⊙ up, rounded once where a kernel computes it, which has no gradients."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        spaced = gate.stride(-1) == up.stride(-1) == 1 and gate.numel() > 0
        if spaced and _kernels_take(gate):
            from gdn2.ops.triton import swiglu as kernels  # noqa: PLC0415 (optional dependency)

            return kernels.swiglu(gate, up)
    return silu(gate) * up


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(SiLU(gate) ⊙ up) weightᵀ for training: the product in brackets is not kept for the backward but made again.

    All three have one dtype.
    """
    y: Tensor = _SwigluLinear.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    return y


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(swiglu(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight = ctx.needs_input_grad
        d_gate = d_up = None
        if needs_gate or needs_up:
            dh = product(rows_of(dy), weight).view(gate.shape)
            both, h = swiglu_backward(gate, up, dh, needs_weight)
            d_gate, d_up = both.chunk(2, -1)
        else:
            h = swiglu(gate, up)
        d_weight = product(rows_of(dy).T, rows_of(h)) if needs_weight else None
        return d_gate, d_up, d_weight


# An operator of its own: in the open a compiler would find h equal to the forward's, and keep that.
@torch.library.custom_op("gdn2::swiglu_backward", mutates_args=())
def swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from that of h = SiLU(gate) ⊙ up, and h again or nothing; each is rounded once.

    The two gradients are one tensor [..., 2 width], so that one product can take them (`gdn2.ops.maps`).
    """
    if gate.numel() > 0 and _kernels_take(gate):
        from gdn2.ops.triton import swiglu as kernels  # noqa: PLC0415 (optional dependency)

        return kernels.swiglu_gradient(gate, up, dh, again=again)
    wide = torch.promote_types(gate.dtype, torch.float32)
    x, u, d = (t.to(wide) for t in (gate, up, dh))
    y = silu(x)
    both = torch.cat([torch.ops.aten.silu_backward(d * u, x), d * y], -1)
    both = both.to(gate.dtype).contiguous()
    h = (y * u).to(gate.dtype).contiguous() if again else gate.new_empty(0)
    return both, h


@swiglu_backward.register_fake
def _(gate: Tensor, up: Tensor, dh: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    shape = gate.shape
    both = gate.new_empty(*shape[:-1], 2 * shape[-1])
    return both, gate.new_empty(shape if again else 0)


def _kernels_take(x: Tensor) -> bool:
    return why_not("triton", x.device, x.dtype, ("swiglu",)) is None
