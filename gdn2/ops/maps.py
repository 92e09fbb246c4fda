"""Linear maps of one input, whose gradients add to one another in the products."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops.arguments import exact_products


def maps(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return x Wᵀ for x [..., inputs] and each W [outputs, inputs].

    The gradient of x is a sum to which each product adds; autograd would hold as many gradients as maps, and add them
    afterwards. It cannot be differentiated again.
    """
    ys: tuple[Tensor, ...] = _Maps.apply(x, *weights)  # type: ignore[no-untyped-call]
    return ys


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        x, *weights = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, *weights)
        ctx.set_materialize_grads(False)  # zeros would be multiplied like any gradient

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors  # may be read once only, under gradient checkpointing
        needs_x, *needs_weight = ctx.needs_input_grad
        d_rows = [None if dy is None else rows_of(dy) for dy in dys]
        used = [(dy, weight) for dy, weight in zip(d_rows, weights, strict=True) if dy is not None]
        dx = None
        if needs_x and used:
            total: Tensor = input_gradient([dy for dy, _ in used], [weight for _, weight in used])
            dx = total.view(ctx.shape)
        d_weights = [
            dy.t() @ rows_of(x) if needed and dy is not None else None
            for dy, needed in zip(d_rows, needs_weight, strict=True)
        ]
        return dx, *d_weights


def rows_of(x: Tensor) -> Tensor:
    """[rows, width] of [..., width]."""
    return x.reshape(-1, x.shape[-1])


# An operator of its own, since a compiler would take the sum apart. It takes any layout: unless told so, the compiler
# gives it copies of what it made for the products with x, laid out as in eager mode.
@torch.library.custom_op("gdn2::input_gradient", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def input_gradient(dys: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Return Σ dy W [rows, inputs] for dy [rows, outputs] and W [outputs, inputs], at least one of each."""
    # Narrow maps first: the sum is rounded with each product, and less of it while it is small.
    (dy, weight), *more = sorted(zip(dys, weights, strict=True), key=lambda pair: len(pair[1]))
    with exact_products(dy.device):  # autocast may be on where the backward is called
        dx = torch.mm(dy, weight)
        for dy, weight in more:
            dx.addmm_(dy, weight)
    return dx


@input_gradient.register_fake
def _(dys: list[Tensor], weights: list[Tensor]) -> Tensor:
    return dys[0].new_empty(dys[0].shape[0], weights[0].shape[1])


@register_flop_formula(torch.ops.gdn2.input_gradient)
def _flops(
    dys: Sequence[Sequence[int]], weights: Sequence[Sequence[int]], *_: Any, **__: Any
) -> int:
    return sum(2 * prod(dy) * weight[1] for dy, weight in zip(dys, weights, strict=True))
