"""The chunkwise form as a pair of custom operators, so that `torch.compile` and meta tensors see through it.

Lengths of packed sequences are values, which a compiler does not know. Everything the forward keeps for the backward is
therefore sized by a bound that depends on shapes alone: N sequences of L tokens have at most L // C + N chunks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdn2.ops import pipeline
from gdn2.ops.arguments import check_decay, new_state, state_dtype
from gdn2.ops.chunkwise import Operands, key_side_heads
from gdn2.ops.flops import rule_backward_flops, rule_flops
from gdn2.ops.packing import sequence_lengths

Shape = Sequence[int]


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
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output and final state; and, for the backward, states at chunk starts, A_qk and A.

    `keep` is "nothing", "states" or "matrices"; what is not kept comes back empty.
    """
    check_decay(g)
    lengths = sequence_lengths(cu_seqlens, q.shape[0], q.shape[1])
    x = pack(q, k, v, g, b, w, scale)
    state = new_state(q, v, len(lengths)) if initial_state is None else initial_state
    saved = kept_tensors(x, len(lengths), chunk_size, keep)
    o, final = pipeline.forward(x, lengths, chunk_size, state, saved if keep != "nothing" else None)
    return o.view_as(v), final, *saved


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
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    saved = kept_tensors(pack(q, k, v, g, b, w, scale), sequences, chunk_size, keep)
    return v.new_empty(v.shape), new_state(q, v, sequences), *saved


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
    cu_seqlens: Tensor | None,
    starts: Tensor,
    A_qk: Tensor,
    A: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, b, w (empty where absent) and of the initial state."""
    lengths = sequence_lengths(cu_seqlens, q.shape[0], q.shape[1])
    x = pack(q, k, v, g, b, w, scale)
    saved = pipeline.Saved(starts, A_qk, A)
    d = pipeline.backward(x, lengths, chunk_size, saved, do.flatten(0, 1), d_final)
    shapes = [x if x is None else x.shape for x in (q, k, v, g, b, w)]
    grads = [t if s is None else t.view(s) for t, s in zip(d[:6], shapes, strict=True)]
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
    cu_seqlens: Tensor | None,
    starts: Tensor,
    A_qk: Tensor,
    A: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, g, b, w)]
    return *grads, d_final.new_empty(d_final.shape)  # type: ignore[return-value]


@register_flop_formula(torch.ops.gdn2.chunk_forward)
def _forward_flops(
    q: Shape, k: Shape, v: Shape, g: Shape, b: Shape | None, *rest: Any, **_: Any
) -> int:
    heads, chunk_size = key_side_heads(k, g, b), rest[4]
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
    A_qk, chunk_size = rest[3], rest[6]
    heads = key_side_heads(k, g, b)
    width = v[2] * v[3] // heads
    recompute = 0 in A_qk
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


def kept_tensors(x: Operands, sequences: int, size: int, keep: str) -> pipeline.Saved:
    """Allocate what the forward keeps, sized by shapes alone."""
    heads, width = x.heads, x.v.shape[1] * x.v.shape[2] // x.heads
    chunks = x.k.shape[0] // size + sequences
    matrix = (chunks, heads, size, size)
    shapes = [
        (chunks, heads, x.k.shape[2], width) if keep != "nothing" else (0,),
        matrix if keep == "matrices" else (0,),
        matrix if keep == "matrices" and x.b is not None else (0,),
    ]
    return pipeline.Saved(*(x.k.new_empty(s, dtype=state_dtype(x.q)) for s in shapes))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, initial_state, cu_seqlens, scale, chunk_size, _ = inputs
    ctx.save_for_backward(*operands, cu_seqlens, *output[2:])
    ctx.scale, ctx.chunk_size = scale, chunk_size
    ctx.has_state = initial_state is not None


def _backward(ctx: Any, do: Tensor, d_final: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = chunk_backward(do, d_final, *tensors, ctx.scale, ctx.chunk_size)
    present = [x is not None for x in tensors[:6]] + [ctx.has_state]
    return *(d if p else None for d, p in zip(grads, present, strict=True)), *[None] * 4


chunk_forward.register_autograd(_backward, setup_context=_setup_context)
