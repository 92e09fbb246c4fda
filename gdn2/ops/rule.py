"""Gated Delta Rule-2, the operator of the package (Eqs. 9, 10):

    S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(exp g_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ,     o_t = scale · S_tᵀ q_t.

`gated_delta_rule` runs whole sequences, `gated_delta_step` a token or a few from a state.
"""

import torch
from torch import Tensor

from gdn2.ops.arguments import (
    CHUNK_SIZES,
    SOLVE_PRECISIONS,
    check_decay,
    check_no_tangents,
    check_operands,
    check_state,
    exact_products,
    new_state,
    read_scale,
    require,
)
from gdn2.ops.backends import choose, why_not
from gdn2.ops.chunk_op import chunk_forward
from gdn2.ops.packing import check_cu_seqlens, sequence_lengths
from gdn2.ops.reference import packed_token_loop, token_loop
from gdn2.ops.step_op import step, step_inplace


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None = None,
    w: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    chunk_size: int = 64,
    recompute: bool = True,
    solve_precision: str = "ieee",
) -> tuple[Tensor, Tensor | None]:
    """Run Gated Delta Rule-2 over sequences; returns the output and, if asked, the final state.

    Args:
        q, k: queries and keys [B, T, H, d_k]; H divides v's heads, key head i serves value heads i·G … i·G + G − 1.
        v: values [B, T, H_v, d_v].
        g: log-decay ≤ 0 [B, T, heads, d_k or 1], kept in fp32; its heads divide v's. Positive entries raise, but not
            with the Triton kernels: they do not look at the values, since that would wait for the GPU.
        b: erase gate [B, T, heads, d_k or 1], heads dividing v's; None erases nothing and skips the triangular system.
        w: write gate [B, T, H_v, d_v or 1]; None writes the whole value.
        scale: factor of the output, d_k^-0.5 by default.
        initial_state: [N, H_v, d_k, d_v], fp32 (fp64 for fp64 operands); N is B, or the number of packed sequences.
        output_final_state: return the state after the last token, with gradients, instead of None.
        cu_seqlens: [N + 1] cumulative lengths of sequences packed in a batch of one; the state restarts at each.
        backend: "auto", "triton", "torch" or "reference" (the token loop).
        chunk_size: tokens per chunk: 16 (32 in the Triton kernels), 32, 64 or 128.
        recompute: compute again in the backward what each chunk can compute on its own, instead of keeping it. The
            torch backend keeps the same either way.
        solve_precision: "ieee" or "tf32" products in the triangular inverse. The torch backend is always "ieee"; the
            kernels take tf32, or two bf16 a number, for operands of half precision, whose own rounding is larger.
    """
    check_operands(q, k, v, g, b, w)
    fits = type(chunk_size) is int and chunk_size in CHUNK_SIZES  # 64.0 is in there, too
    require(fits, "chunk_size", chunk_size, f"one of {CHUNK_SIZES}")
    known = solve_precision in SOLVE_PRECISIONS
    require(known, "solve_precision", repr(solve_precision), f"one of {SOLVE_PRECISIONS}")
    backend = choose(backend, q.device, q.dtype)
    sequences = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1], q.device)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_state("initial_state", initial_state, sequences, q, v)
    scale = read_scale(scale, q)

    if backend == "reference":
        if not torch.compiler.is_compiling():  # which has no values
            check_decay(g)
        S = new_state(q, v, sequences) if initial_state is None else initial_state
        with exact_products(q.device):
            if cu_seqlens is None:
                o, final = token_loop(q, k, v, g, b, w, scale, S)
            else:
                lengths = sequence_lengths(cu_seqlens, 1, q.shape[1])
                o, final = packed_token_loop(q, k, v, g, b, w, scale, S, lengths)
        return o, final if output_final_state else None

    check_no_tangents(
        f"backend {backend!r}", "backend='reference'", q, k, v, g, b, w, initial_state
    )
    operands = [x for x in (q, k, v, g, b, w, initial_state) if x is not None]
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    keep = "nothing" if not differentiable else "states" if recompute else "factors"
    options = (scale, chunk_size, solve_precision, keep, backend)
    o, final, _ = chunk_forward(q, k, v, g, b, w, initial_state, cu_seqlens, *options)
    return o, final if output_final_state else None


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None = None,
    w: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode one token or a few [B, T, …] from `state`; returns output and new state.

    Operands as in `gated_delta_rule`. With `inplace` the given state, of which no operand may be a part, is overwritten
    and returned, which gradients do not survive. On a GPU it is one kernel, and nobody looks for positive log-decays;
    where gradients are needed, and elsewhere, it is the token loop.
    """
    check_operands(q, k, v, g, b, w)
    check_state("state", state, q.shape[0], q, v)
    sizes = zip(state.shape, state.stride(), strict=True)
    shared = inplace and any(size > 1 and stride == 0 for size, stride in sizes)
    require(not shared, "state", "an expanded tensor", "its own memory for each entry to overwrite")
    scale = read_scale(scale, q)
    recorded = torch.is_grad_enabled() and not inplace
    operands = [x for x in (q, k, v, g, b, w, state) if x is not None]
    differentiable = recorded and any(x.requires_grad for x in operands)
    with exact_products(q.device), torch.set_grad_enabled(recorded):
        if differentiable or why_not("triton", q.device, q.dtype, ("step",)) is not None:
            if q.device.type == "cpu" and not torch.compiler.is_compiling():  # no wait for a GPU
                check_decay(g)
            return token_loop(q, k, v, g, b, w, scale, state, inplace)
        if inplace:
            return step_inplace(q, k, v, g, b, w, scale, state), state
        return step(q, k, v, g, b, w, scale, state)
