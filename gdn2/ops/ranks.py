"""How the ranks of a token read what the token and the one before it write, beside the memory (`gdn2.ops.mamba3`)."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops.arguments import exact_products, require
from gdn2.ops.backends import why_not

MOST_RANKS = 4  # the kernels write out every pair of ranks
WIDEST = 256


def rank_reads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    old: tuple[Tensor, Tensor, Tensor] | None,
    backend: str = "auto",
) -> Tensor:
    """Return o^j = Σ_i weight (q^j · k^i) v^i, and to it added the sum over i > j of the same with `old`.

    Args:
        q, k: [batch, length, ranks, heads, key width].
        v: [batch, length, ranks, heads, value width].
        weight: [batch, length, heads].
        old: keys, values and weights that later ranks alone have met; None where there is one rank.
        backend: as in `gated_delta_rule`.
    """
    said = "None" if old is None else "tensors"
    require((old is None) == (q.shape[2] == 1), "old", said, "None for one rank alone")
    if backend in ("auto", "triton") and kernels_take(q, v):
        return ranks_by_kernel([q, k, v, weight, *(old or ())])
    o = _read(q, k, v, weight)
    return o if old is None else o + _read(q, *old, above_diagonal=True)


def kernels_take(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels are for such operands, and to be trusted."""
    fits = q.shape[2] <= MOST_RANKS and max(q.shape[4], v.shape[4]) <= WIDEST
    some = fits and q.numel() > 0 and v.numel() > 0
    return some and why_not("triton", q.device, q.dtype, ("ranks",)) is None


def _read(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, above_diagonal: bool = False) -> Tensor:
    """The sum over all i; above the diagonal, over i > j alone."""
    with exact_products(q.device):
        scores = torch.einsum("btjhk,btihk->bthji", q, k) * weight[..., None, None]
        scores = scores.triu(1) if above_diagonal else scores
        return torch.einsum("bthji,btihv->btjhv", scores.to(v.dtype), v)


# Lists: operands of the token before are there or not.
@torch.library.custom_op("gdn2::rank_reads", mutates_args=())
def ranks_by_kernel(given: list[Tensor]) -> Tensor:
    from gdn2.ops.triton import ranks as kernels  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(given[0]):  # a launch goes to the current device
        return kernels.forward(given)


@ranks_by_kernel.register_fake
def _(given: list[Tensor]) -> Tensor:
    return given[2].new_empty(given[2].shape)


@torch.library.custom_op("gdn2::rank_reads_backward", mutates_args=())
def _gradients(do: Tensor, given: list[Tensor]) -> list[Tensor]:
    from gdn2.ops.triton import ranks as kernels  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(do):
        return kernels.backward(do, given)


@_gradients.register_fake
def _(do: Tensor, given: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in given]


def _save(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0])


def _backward(ctx: Any, do: Tensor) -> list[Tensor]:
    return _gradients(do, [*ctx.saved_tensors])


ranks_by_kernel.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.gdn2.rank_reads)
def _flops(given: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """As torch counts the products of all ranks with all, once or twice."""
    (*_lead, ranks, _heads, keys), values = given[0], given[2][-1]
    return len(given) // 3 * 2 * prod(given[0][:-1]) * ranks * (keys + values)


@register_flop_formula(torch.ops.gdn2.rank_reads_backward)
def _gradient_flops(
    _do: Sequence[int], given: Sequence[Sequence[int]], *rest: Any, **options: Any
) -> int:
    return 2 * _flops(given)
