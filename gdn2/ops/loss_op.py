"""Products and sums of the loss, a few logits at a time (`gdn2.ops.loss`)."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops.backends import why_not


@torch.library.custom_op("gdn2::linear_cross_entropy", mutates_args=())
def losses_of(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk: int
) -> Tensor:
    """Return the loss of each token of hidden [tokens, d]."""
    _check_range(targets, weight.shape[0], ignore_index)
    head = weight.to(hidden.dtype).T
    losses = hidden.new_empty(hidden.shape[0], dtype=sum_dtype(hidden))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        losses[part] = cross_entropy(
            _product(hidden[part], head),
            targets[part],
            ignore_index=ignore_index,
            reduction="none",
        )
    return losses


@losses_of.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk: int) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=sum_dtype(hidden))


@torch.library.custom_op("gdn2::linear_cross_entropy_and_gradients", mutates_args=())
def losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each token, and the gradients of their sum, unrounded; one not needed has no rows."""
    _check_range(targets, weight.shape[0], ignore_index)
    head = weight.to(hidden.dtype)
    losses, d_hidden, d_weight = _new_results(hidden, weight, needs_hidden, needs_weight)
    d_weight.zero_()
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        losses[part], d_logits = _token_gradients(hidden[part], head, targets[part], ignore_index)
        if needs_hidden:
            d_hidden[part] = _product(d_logits, head)
        if needs_weight:
            _add_product(d_weight, d_logits.T, hidden[part])
    return losses, d_hidden, d_weight


@losses_and_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_results(hidden, weight, needs_hidden, needs_weight)


def _new_results(
    hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = hidden.shape[0] if needs_hidden else 0, weight.shape[0] if needs_weight else 0
    shapes = hidden.shape[:1], (rows[0], hidden.shape[1]), (rows[1], hidden.shape[1])
    losses, d_hidden, d_weight = (hidden.new_empty(s, dtype=sum_dtype(hidden)) for s in shapes)
    return losses, d_hidden, d_weight


@torch.library.custom_op("gdn2::linear_cross_entropy_backward", mutates_args=())
def _gradients(
    d_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight, each token with a weight of its own; one not needed has no rows."""
    head = weight.to(hidden.dtype)
    d_losses = d_losses.where(targets != ignore_index, 0)
    d_hidden = torch.empty_like(hidden if needs_hidden else hidden[:0])
    d_weight = torch.zeros_like(weight if needs_weight else weight[:0], dtype=sum_dtype(hidden))
    # In fp16 small weights of tokens would vanish: they enter relative to the largest of them.
    largest = pad(d_losses.abs(), (0, 1), value=torch.finfo(d_losses.dtype).tiny).amax()
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        d_logits = _token_gradients(hidden[part], head, targets[part], ignore_index)[1]
        if needs_hidden:
            d_hidden[part] = _product(d_logits, head) * d_losses[part, None]
        if needs_weight:
            weighed = d_logits * (d_losses[part, None] / largest)
            _add_product(d_weight, weighed.to(hidden.dtype).T, hidden[part])
    return d_hidden, d_weight.mul_(largest).to(weight.dtype)


@_gradients.register_fake
def _(
    d_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    d_hidden = torch.empty_like(hidden if needs_hidden else hidden[:0])
    return d_hidden, torch.empty_like(weight if needs_weight else weight[:0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, targets, ctx.ignore_index, ctx.chunk = inputs
    ctx.save_for_backward(hidden, weight, targets)


def _backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:2]
    found = _gradients(d_losses, *ctx.saved_tensors, ctx.ignore_index, ctx.chunk, *needed)
    d_hidden, d_weight = (x if needs else None for x, needs in zip(found, needed, strict=True))
    return d_hidden, d_weight, None, None, None


losses_of.register_autograd(_backward, setup_context=_save)


def _token_gradients(
    hidden: Tensor, head: Tensor, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and its gradient with respect to the logits in the dtype of hidden."""
    logits = _product(hidden, head.T)
    if kernel_takes(logits):
        from gdn2.ops.triton import cross_entropy as kernel  # noqa: PLC0415 (optional dependency)

        return kernel.cross_entropy(logits, targets, ignore_index, hidden.dtype)
    losses = cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")
    valid = targets != ignore_index
    d_logits = logits.softmax(-1)
    d_logits[torch.arange(len(logits), device=logits.device), targets.where(valid, 0)] -= 1
    return losses, d_logits.mul_(valid[:, None]).to(hidden.dtype)


def kernel_takes(x: Tensor) -> bool:
    """Whether kernels of the loss can run, and are to be trusted."""
    return why_not("triton", x.device, x.dtype, ("cross_entropy",)) is None


@torch.library.custom_op("gdn2::scaled", mutates_args=())
def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times a number, rounded once; torch takes three times as long as its bytes where the dtype changes."""
    if x.dtype == torch.float32 and x.dtype != dtype and kernel_takes(x):
        from gdn2.ops.triton import cross_entropy as kernel  # noqa: PLC0415 (optional dependency)

        return kernel.scaled(x.contiguous(), by, dtype)
    return torch.mul(x, by, out=x.new_empty(x.shape, dtype=dtype))


@scaled.register_fake
def _(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@register_flop_formula(torch.ops.gdn2.linear_cross_entropy)
def _losses_flops(hidden: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(hidden) * weight[0]


@register_flop_formula(torch.ops.gdn2.linear_cross_entropy_and_gradients)
def _both_flops(hidden: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any) -> int:
    return _flops(hidden, weight, rest)


@register_flop_formula(torch.ops.gdn2.linear_cross_entropy_backward)
def _gradients_flops(
    _d_losses: Sequence[int], hidden: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any
) -> int:
    return _flops(hidden, weight, rest)


def _flops(hidden: Sequence[int], weight: Sequence[int], rest: Sequence[Any]) -> int:
    """Of the logits and of the gradients that are needed, as the last two arguments say."""
    return 2 * prod(hidden) * weight[0] * (1 + sum(rest[-2:]))


def sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with the sums unrounded, as half dtypes would round them."""
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and a.dtype.itemsize == 2:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.to(sum_dtype(a)) @ b.to(sum_dtype(a))


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, unrounded."""
    if a.is_cuda and a.dtype.itemsize == 2:
        torch.addmm(to, a, b, out_dtype=torch.float32, out=to)
    else:
        with torch.autocast(a.device.type, enabled=False):
            to.addmm_(a.to(to.dtype), b.to(to.dtype))


def _check_range(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if targets.is_cuda:
        torch._assert_async(~wrong.any())
    elif wrong.any():
        raise ValueError(
            f"targets hold {int(targets[wrong][0])}, "
            f"expected 0 to {vocabulary - 1} or ignore_index {ignore_index}"
        )
