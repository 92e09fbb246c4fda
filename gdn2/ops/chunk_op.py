"""The chunkwise form as a pair of custom operators, so that `torch.compile` and meta tensors see through it.

Lengths of packed sequences are values, which a compiler does not know. Everything the forward keeps for the backward is
therefore sized by a bound that depends on shapes alone (`Batch.chunks`).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops import pipeline
from gdn2.ops.arguments import exact_products, new_state
from gdn2.ops.flops import rule_backward_flops, rule_flops
from gdn2.ops.operands import Operands, key_side_heads
from gdn2.ops.pipeline import Batch, Gradients

Shape = Sequence[int]


class Pipeline(Protocol):
    """What a backend offers."""

    def kept(self, x: Operands, batch: Batch, keep: str) -> list[Tensor]:
        """Allocate what the forward keeps for the backward, by shapes alone."""

    def forward(
        self, x: Operands, batch: Batch, state: Tensor, keep: str
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output [L, H_v, d_v], final state and what is kept."""

    def backward(
        self,
        x: Operands,
        batch: Batch,
        state: Tensor,
        saved: list[Tensor],
        do: Tensor,
        d_final: Tensor,
    ) -> Gradients:
        """Gradients of operands and initial state."""


@torch.library.custom_op("gdn2::chunk_forward", mutates_args=())
def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    solve_precision: str,
    keep: str,
    backend: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final state and what the backward keeps, which is more or less as `keep` says.

    `keep` is "nothing", "states" (what cannot be recomputed in parallel) or "factors".
    """
    x = pack(q, k, v, g, b, w, scale)
    batch = Batch(q.shape[0], q.shape[1], cu_seqlens, chunk_size, solve_precision)
    state = new_state(q, v, batch.sequences) if initial_state is None else initial_state
    with exact_products(q.device):
        o, final, saved = pipeline_of(backend).forward(x, batch, state, keep)
    return o.view_as(v), final, saved


@chunk_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    solve_precision: str,
    keep: str,
    backend: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    x = pack(q, k, v, g, b, w, scale)
    batch = Batch(q.shape[0], q.shape[1], cu_seqlens, chunk_size, solve_precision)
    saved = pipeline_of(backend).kept(x, batch, keep)
    return v.new_empty(v.shape), new_state(q, v, batch.sequences), saved


@torch.library.custom_op("gdn2::chunk_backward", mutates_args=())
def chunk_backward(
    do: Tensor,
    d_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    scale: float,
    chunk_size: int,
    solve_precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, b, w (empty where absent) and of the initial state."""
    x = pack(q, k, v, g, b, w, scale)
    batch = Batch(q.shape[0], q.shape[1], cu_seqlens, chunk_size, solve_precision)
    state = new_state(q, v, batch.sequences) if initial_state is None else initial_state
    with exact_products(q.device):
        do = do.contiguous().flatten(0, 1)
        d = pipeline_of(backend).backward(x, batch, state, saved, do, d_final)
    operands = (q, k, v, g, b, w)
    grads = [t if y is None else t.view(y.shape) for t, y in zip(d[:6], operands, strict=True)]
    return *grads, d.state  # type: ignore[return-value]


@chunk_backward.register_fake
def _(
    do: Tensor,
    d_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    scale: float,
    chunk_size: int,
    solve_precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, g, b, w)]
    return *grads, d_final.new_empty(d_final.shape)  # type: ignore[return-value]


def pipeline_of(backend: str) -> Pipeline:
    """The module that composes a backend's stages."""
    if backend == "triton":
        from gdn2.ops.triton import pipeline as triton_pipeline  # noqa: PLC0415 (optional dependency)

        return triton_pipeline
    return pipeline


@register_flop_formula(torch.ops.gdn2.chunk_forward)
def _forward_flops(
    q: Shape, k: Shape, v: Shape, g: Shape, b: Shape | None, *rest: Any, **_: Any
) -> int:
    heads, chunk_size = key_side_heads(k, g, b), rest[4]  # after w, state, cu_seqlens and scale
    width = v[2] * v[3] // heads
    return int(q[0] * q[1] * heads * rule_flops(k[3], width, chunk_size, b is not None))


@register_flop_formula(torch.ops.gdn2.chunk_backward)
def _backward_flops(
    do: Shape,
    final: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    g: Shape,
    b: Shape | None,
    *rest: Any,
    **_: Any,
) -> int:
    saved, chunk_size = rest[3], rest[5]  # after w, state and cu_seqlens; after scale
    heads = key_side_heads(k, g, b)
    width = v[2] * v[3] // heads
    recompute = len(saved) == 0
    per_token = rule_backward_flops(k[3], width, chunk_size, b is not None, recompute)
    return int(q[0] * q[1] * heads * per_token)


def pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    scale: float,
) -> Operands:
    """Lay batch and length on one axis of packed tokens."""
    flat = [None if x is None else x.flatten(0, 1) for x in (q, k, v, g, b, w)]
    return Operands(*flat, scale)  # type: ignore[call-arg, arg-type]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, scale, chunk_size, solve_precision, _keep, backend = inputs
    ctx.save_for_backward(*tensors, *output[2])
    ctx.options = scale, chunk_size, solve_precision, backend
    ctx.set_materialize_grads(False)  # what is kept gets no gradient, so none should be made up


def _backward(
    ctx: Any, do: Tensor | None, d_final: Tensor | None, _saved: Any
) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # may be read once only, under gradient checkpointing
    tensors, saved = kept[:8], list(kept[8:])
    q, v, cu_seqlens = tensors[0], tensors[2], tensors[7]
    if do is None:
        do = torch.zeros_like(v)
    if d_final is None:
        d_final = new_state(q, v, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    grads = chunk_backward(do, d_final, *tensors, saved, *ctx.options)
    present = [x is not None for x in tensors[:7]]
    return *(d if p else None for d, p in zip(grads, present, strict=True)), *[None] * 6


chunk_forward.register_autograd(_backward, setup_context=_setup_context)
