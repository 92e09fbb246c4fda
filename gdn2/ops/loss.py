"""Cross entropy of a linear head whose logits are never held whole."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops.packing import FLOATS

REDUCTIONS = ("mean", "sum", "none")
# Logits per chunk: 64 MB of fp32 on a CPU, 256 MB elsewhere. For 16,384 tokens of width 2304 and a
# vocabulary of 32,000 in bf16, forward and backward take 31 ms on an H200 in chunks of 64 MB, 22 ms
# in 256 MB (1 GB at the peak) and 21 ms in 1 GB; logits held whole take 16 ms and 6 GB.
CPU_CHUNK, CHUNK = 1 << 24, 1 << 26


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the cross entropy of hidden @ weightᵀ with the targets, in fp32 (fp64 for fp64).

    hidden is [..., d], weight [vocabulary, d] and targets [...] int64. `reduction` "mean" divides
    by the number of targets that are not `ignore_index`, "none" returns a loss per token, zero
    where ignored. If all are ignored, mean and gradients are zero, unlike torch's NaN: a
    micro-batch of padding must not poison a training run.

    Logits are made `chunk_tokens` at a time, again in the backward. Products run in the dtype of
    hidden, which is autocast's where that is on, and sums in fp32; a wider weight gets its gradient
    unrounded. A target outside the vocabulary is a ValueError on the CPU, and on a GPU the device's
    own assertion, seen at the next synchronisation.
    """
    _check(hidden, weight, targets, reduction, chunk_tokens)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    logits = CPU_CHUNK if device == "cpu" else CHUNK
    chunk = chunk_tokens or max(1, logits // weight.shape[0])
    flat = hidden.reshape(-1, hidden.shape[-1])
    losses: Tensor = _losses(flat, weight, targets.reshape(-1), ignore_index, chunk)
    if reduction == "none":
        return losses.reshape(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (targets != ignore_index).sum().clamp(min=1)


@torch.library.custom_op("gdn2::linear_cross_entropy", mutates_args=())
def _losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk: int
) -> Tensor:
    """Return the loss of each token of hidden [tokens, d]."""
    if targets.device.type == "cpu":
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= weight.shape[0]))
        if wrong.any():
            raise ValueError(
                f"targets hold {int(targets[wrong][0])}, "
                f"expected 0 to {weight.shape[0] - 1} or ignore_index {ignore_index}"
            )
    head = weight.to(hidden.dtype).T
    losses = hidden.new_empty(hidden.shape[0], dtype=_sum_dtype(hidden))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        losses[part] = cross_entropy(
            _product(hidden[part], head),
            targets[part],
            ignore_index=ignore_index,
            reduction="none",
        )
    return losses


@_losses.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk: int) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=_sum_dtype(hidden))


# Only the backward knows the weight of each token, so it makes the logits anew rather than keep
# gradients from the forward: four products instead of three (5 of the 22 ms above, under 2 % of a
# training step), but one path for every reduction and nothing as large as weight kept in between.
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
    """Return the gradients of hidden and weight; one that is not needed has no rows."""
    valid = targets != ignore_index
    targets, d_losses = targets.where(valid, 0), d_losses.where(valid, 0)
    # In fp16 the small entries of a mean over many tokens would vanish: the weights of tokens enter
    # relative to the largest of them, which is put back after the products.
    largest = pad(d_losses.abs(), (0, 1), value=torch.finfo(d_losses.dtype).tiny).amax()
    weights = d_losses / largest
    head = weight.to(hidden.dtype)
    d_hidden = torch.empty_like(hidden if needs_hidden else hidden[:0])
    d_weight = torch.zeros_like(weight if needs_weight else weight[:0], dtype=_sum_dtype(hidden))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        d_logits = _product(hidden[part], head.T).softmax(-1)
        rows = torch.arange(len(d_logits), device=hidden.device)
        d_logits[rows, targets[part]] -= 1
        d_logits = d_logits.mul_(weights[part, None]).to(hidden.dtype)
        if needs_hidden:
            d_hidden[part] = largest * _product(d_logits, head)
        if needs_weight:
            d_weight += _product(d_logits.T, hidden[part])
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


_losses.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.gdn2.linear_cross_entropy)
def _losses_flops(hidden: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(hidden) * weight[0]


@register_flop_formula(torch.ops.gdn2.linear_cross_entropy_backward)
def _gradients_flops(
    _d_losses: Sequence[int],
    hidden: Sequence[int],
    weight: Sequence[int],
    _targets: Sequence[int],
    _ignore_index: int,
    _chunk: int,
    *needed: bool,
    **_: Any,
) -> int:
    return 2 * prod(hidden) * weight[0] * (1 + sum(needed))


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with the sums unrounded, as half dtypes would round them."""
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and a.dtype.itemsize == 2:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.to(_sum_dtype(a)) @ b.to(_sum_dtype(a))


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str, chunk_tokens: int | None
) -> None:
    if hidden.ndim < 1 or hidden.dtype not in FLOATS:
        raise ValueError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}, expected floating point [..., d]"
        )
    width = hidden.shape[-1]
    fits = weight.ndim == 2 and weight.shape[0] > 0 and weight.shape[1] == width
    if not fits or weight.dtype not in FLOATS:
        raise ValueError(
            f"weight is {weight.dtype} {tuple(weight.shape)}, "
            f"expected floating point [vocabulary, {width}]"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets are {targets.dtype} {tuple(targets.shape)}, "
            f"expected torch.int64 {tuple(hidden.shape[:-1])}"
        )
    for name, operand in (("weight", weight), ("targets", targets)):
        if operand.device != hidden.device:
            raise ValueError(f"{name} is on {operand.device}, expected {hidden.device} like hidden")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, expected None or at least 1")
