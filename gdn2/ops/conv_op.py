"""The kernels of the short convolution as custom operators, so that autograd and `torch.compile` see through them."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gdn2.ops.backends import why_not
from gdn2.ops.norm_op import widest

MOST_TAPS = 4  # the backward holds a window of as many inputs
WIDEST_HEAD = 1024  # a tile holds whole heads


def kernels_take(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, l2_width: int | None
) -> bool:
    """Whether the kernels can run on these operands, and are to be trusted."""
    fits = weight.shape[1] <= MOST_TAPS and (l2_width or 0) <= WIDEST_HEAD
    return fits and why_not("triton", x.device, widest(x, weight, bias, state), ("conv",)) is None


def kernels() -> ModuleType:
    """The module that launches the kernels, imported when they first run."""
    from gdn2.ops.triton import conv_launch  # noqa: PLC0415 (optional dependency)

    return conv_launch


@torch.library.custom_op("gdn2::short_convolution", mutates_args=())
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    l2_width: int | None,
    eps: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and the final state or, where it is not wanted, nothing."""
    given = kernels().Inputs.of(x, weight, bias, initial_state, cu_seqlens)
    final = new_final_state(x, weight, initial_state, cu_seqlens, output_final_state)
    with torch.cuda.device_of(x):  # a launch goes to the current device
        if final.numel():
            kernels().fill_final_state(given, final)
        return kernels().forward(given, silu, l2_width, eps), final


@convolve.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    l2_width: int | None,
    eps: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    final = new_final_state(x, weight, initial_state, cu_seqlens, output_final_state)
    return x.new_empty(x.shape), final


def new_final_state(
    x: Tensor, weight: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, wanted: bool
) -> Tensor:
    """Allocate the final states in the dtype of the initial ones, or of x; without rows if not wanted."""
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    like = x if initial is None else initial
    return like.new_empty(count if wanted else 0, weight.shape[0], weight.shape[1] - 1)


@torch.library.custom_op("gdn2::short_convolution_backward", mutates_args=())
def convolve_backward(
    dy: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    l2_width: int | None,
    eps: float,
    needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and initial state; empty where absent or not needed."""
    given = kernels().Inputs.of(x, weight, bias, initial_state, cu_seqlens)
    dy = dy.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    d_state = x.new_empty(0)
    with torch.cuda.device_of(x):
        dx, d_weight, d_bias = kernels().backward(given, dy, d_final, silu, l2_width, eps)
        if needs_state and initial_state is not None:
            d_state = kernels().state_gradient(given, dy, d_final, silu, l2_width, eps)
    d_bias = x.new_empty(0) if bias is None else d_bias.to(bias.dtype)
    return dx, d_weight, d_bias, d_state


@convolve_backward.register_fake
def _(
    dy: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    l2_width: int | None,
    eps: float,
    needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(t: Tensor | None) -> Tensor:
        return x.new_empty(0) if t is None else t.new_empty(t.shape)

    return like(x), like(weight), like(bias), like(initial_state if needs_state else None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, silu, l2_width, eps, ctx.output_final_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = silu, l2_width, eps
    ctx.set_materialize_grads(False)  # a final state that was not wanted has no gradient


def _backward(ctx: Any, dy: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    d_final = d_final if ctx.output_final_state else None
    needs_state = ctx.needs_input_grad[3]
    found = convolve_backward(
        dy, d_final, x, weight, bias, state, cu_seqlens, *ctx.options, needs_state
    )
    present = (True, True, bias is not None, needs_state)
    grads = (d if p else None for d, p in zip(found, present, strict=True))
    return *grads, *[None] * 5


convolve.register_autograd(_backward, setup_context=_setup_context)


# Defined by its schema: so a call costs the host microseconds, which decoding feels, where `custom_op` takes tens.
torch.library.define(
    "gdn2::short_convolution_step",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, bool silu, int? l2_width, float eps) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
convolve_step = torch.ops.gdn2.short_convolution_step.default


@torch.library.impl("gdn2::short_convolution_step", ("cuda", "cpu"))  # a CPU interprets, for tests
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    silu: bool,
    l2_width: int | None,
    eps: float,
) -> Tensor:
    """Output of the next few tokens, whose inputs the state takes in; autograd hears of that by its version."""
    with torch.cuda.device_of(x):
        y: Tensor = kernels().step(x, weight, bias, state, silu, l2_width, eps)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)
    return y


torch.library.register_fake(
    "gdn2::short_convolution_step",
    lambda x, weight, bias, state, silu, l2_width, eps: x.new_empty(x.shape),
)
