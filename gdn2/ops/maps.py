"""Linear maps of one input, whose gradients add to one another in the products."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops.arguments import exact_products
from gdn2.ops.products import linear, product, rows_of


def maps(
    x: Tensor, weights: Sequence[Tensor], *, one_output: bool = False, one_gradient: bool = False
) -> tuple[Tensor, ...]:
    """Return x Wᵀ for x [..., inputs] and each W [outputs, inputs].

    The gradient of x is a sum to which each product adds; autograd would hold as many gradients as maps, and add them
    afterwards. Where weights and gradients lie side by side in memory it is one product. It cannot be differentiated
    again.

    Args:
        x, weights: all of one dtype.
        one_output: results are parts of one tensor, not to be changed in place, made by one product if the weights lie
            side by side.
        one_gradient: gradients of the results become one tensor, and those of all weights one product.
    """
    ys: tuple[Tensor, ...] = _Maps.apply(one_output, one_gradient, x, *weights)  # type: ignore[no-untyped-call]
    return ys


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(
        one_output: bool, one_gradient: bool, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        if one_output:
            return joint_product(x, [*weights]).split([len(weight) for weight in weights], -1)
        return tuple(linear(x, weight) for weight in weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.one_gradient, x, *weights = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        ctx.set_materialize_grads(False)  # zeros would be multiplied like any gradient

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors  # may be read once only, under gradient checkpointing
        needs_x, *needs_weight = ctx.needs_input_grad[2:]
        d_rows = [None if dy is None else rows_of(dy) for dy in dys]
        used = [(dy, weight) for dy, weight in zip(d_rows, weights, strict=True) if dy is not None]
        joined = None
        if ctx.one_gradient and needs_x and all(needs_weight) and len(used) == len(weights):
            joined = torch.cat([dy for dy, _ in used], 1)
            widths = [len(weight) for weight in weights]
            used = [*zip(joined.split(widths, 1), weights, strict=True)]
        dx = None
        if needs_x and used:
            total: Tensor = input_gradient([dy for dy, _ in used], [weight for _, weight in used])
            dx = total.view(ctx.shape)
        if joined is not None:
            return None, None, dx, *product(joined.t(), rows_of(x)).split(widths)
        d_weights = [
            product(dy.t(), rows_of(x)) if needed and dy is not None else None
            for dy, needed in zip(d_rows, needs_weight, strict=True)
        ]
        return None, None, dx, *d_weights


# An operator of its own, since a compiler would take the sum apart. It takes any layout: unless told so, the compiler
# gives it copies of what it made for the products with x, laid out as in eager mode.
@torch.library.custom_op("gdn2::input_gradient", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def input_gradient(dys: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Return Σ dy W [rows, inputs] for dy [rows, outputs] and W [outputs, inputs], at least one of each."""
    joined, block = side_by_side(dys, 1), side_by_side(weights, 0)
    if joined is not None and block is not None:
        with exact_products(joined.device):
            return product(joined, block)
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


@torch.library.custom_op("gdn2::joint_product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def joint_product(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return x Wᵀ of all weights [outputs, inputs] side by side [..., all outputs]."""
    block = side_by_side(weights, 0)
    with exact_products(x.device):
        if block is not None:
            return linear(x, block)
        widths = [len(weight) for weight in weights]
        y = x.new_empty(*x.shape[:-1], sum(widths))
        for part, weight in zip(rows_of(y).split(widths, 1), weights, strict=True):
            torch.mm(rows_of(x), weight.t(), out=part)
    return y


@joint_product.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The matrix of which these are the parts along an axis, in this order and with nothing between them, if there is.

    Found by where they lie, so it is right whoever laid them there, and whoever gave one of them other memory since.
    """
    first, strides = parts[0], parts[0].stride()
    end, size = first.data_ptr(), 0
    for part in parts:
        alike = part.dtype == first.dtype and part.stride() == strides
        if part.data_ptr() != end or not alike or part.shape[1 - dim] != first.shape[1 - dim]:
            return None
        size += part.shape[dim]
        end = first.data_ptr() + size * strides[dim] * first.element_size()
    # neighbours in memory that was taken piece by piece are no matrix
    if parts[-1].untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    shape = [*first.shape]
    shape[dim] = size
    by_rows, by_columns = (strides[i] == 1 and shape[i] <= strides[1 - i] for i in (1, 0))
    return first.as_strided(shape, strides) if by_rows or by_columns else None


@register_flop_formula(torch.ops.gdn2.joint_product)
def _product_flops(x: Sequence[int], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    return sum(2 * prod(x) * weight[0] for weight in weights)


@register_flop_formula(torch.ops.gdn2.input_gradient)
def _flops(
    dys: Sequence[Sequence[int]], weights: Sequence[Sequence[int]], *_: Any, **__: Any
) -> int:
    return sum(2 * prod(dy) * weight[1] for dy, weight in zip(dys, weights, strict=True))
