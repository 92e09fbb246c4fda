"""Cross entropy of a linear head whose logits are never held whole."""

from typing import Any

import torch
from torch import Tensor

from gdn2.ops.arguments import check_no_tangents
from gdn2.ops.loss_op import losses_and_gradients, losses_of, scaled, sum_dtype
from gdn2.ops.packing import FLOATS

REDUCTIONS = ("mean", "sum", "none")
# Logits per chunk: 64 MB of fp32 on a CPU, 256 MB elsewhere. When the backward still made all
# gradients, 16,384 tokens of width 2304 and a vocabulary of 32,000 in bf16 took 31 ms on an H200 in
# chunks of 64 MB, 22 ms in 256 MB and 21 ms in 1 GB.
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

    Logits are made `chunk_tokens` at a time. Of "mean" and "sum" the forward makes the gradients
    too, where there will be a backward; of "none" the backward makes the logits again. Products run
    in the dtype of hidden, which is autocast's where that is on, and sums in fp32; a wider weight
    gets its gradient unrounded. A target outside the vocabulary is a ValueError on the CPU, and on
    a GPU the device's own assertion, seen at the next synchronisation.
    """
    _check(hidden, weight, targets, reduction, chunk_tokens)
    check_no_tangents("linear_cross_entropy", "torch's cross_entropy", hidden, weight)
    device = hidden.device.type
    cast = not hidden.is_meta and torch.is_autocast_enabled(device)
    if cast and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    logits = CPU_CHUNK if device == "cpu" else CHUNK
    chunk = chunk_tokens or max(1, logits // weight.shape[0])
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).contiguous()
    if reduction == "none":
        losses: Tensor = losses_of(flat, weight, flat_targets, ignore_index, chunk)
        return losses.reshape(targets.shape)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (flat, weight)]
    factor = torch.ones((), dtype=sum_dtype(flat), device=hidden.device)
    if reduction == "mean":
        factor = factor / (targets != ignore_index).sum().clamp(min=1)
    if any(needed):
        options = (flat_targets, factor, ignore_index, chunk, needed)
        total: Tensor = _Reduced.apply(flat, weight, *options)  # type: ignore[no-untyped-call]
        return total
    return losses_of(flat, weight, flat_targets, ignore_index, chunk).sum() * factor


class _Reduced(torch.autograd.Function):
    """The sum of losses times a factor: all tokens count alike, so that the forward knows the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        factor: Tensor,
        ignore_index: int,
        chunk: int,
        needed: list[bool],
    ) -> Tensor:
        losses, *gradients = losses_and_gradients(
            hidden, weight, targets, ignore_index, chunk, *needed
        )
        ctx.save_for_backward(factor, *gradients)
        ctx.needed, ctx.dtypes = needed, (hidden.dtype, weight.dtype)
        return losses.sum() * factor

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # what the forward made has no history to differentiate
            raise RuntimeError(
                "linear_cross_entropy was asked for a gradient with create_graph=True, "
                "expected none: it can be differentiated once"
            )
        factor, *sums = ctx.saved_tensors
        by = factor * d_loss
        found = [
            scaled(x, by, dtype) if needs else None
            for x, needs, dtype in zip(sums, ctx.needed, ctx.dtypes, strict=True)
        ]
        return (*found, None, None, None, None, None)


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
