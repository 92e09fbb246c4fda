"""How the ranks of a token read each other, and all gradients, as a kernel each (`gdn2.ops.ranks`).

Tensors are [tokens, ranks, heads, width]. A program holds some heads of one token, and goes through pairs of ranks: its
tiles are few enough to stay in the first-level cache, where it finds them again for the next pair.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over

# Elements of a tile [heads, width], and its warps. On an H200, 16384 tokens of 4 ranks and 64 heads of width 64, µs of
# both ways: 782 and 1899; by 2 warps 756 and 2085; 256 elements by 1 warp 729 and 2043, by 4 warps 876 and 2757.
TILE = 512
WARPS = 4


@triton.jit
def gates(H: tl.constexpr, HB: tl.constexpr):
    """Where the numbers of the program's heads lie in [tokens, heads], and which heads there are."""
    heads = tl.program_id(1) * HB + tl.arange(0, HB)
    return tl.program_id(0).to(tl.int64) * H + heads, heads < H


@triton.jit
def tile(D: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, HB: tl.constexpr):
    """Where the program's heads lie in [heads, D], and what of the tile is there."""
    heads, cols = tl.program_id(1) * HB + tl.arange(0, HB), tl.arange(0, BLOCK)
    return heads[:, None] * D + cols[None, :], (heads < H)[:, None] & (cols < D)[None, :]


@triton.jit
def rank(
    ptr, i, place, inside, R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr
):
    """A tile of the program's token, of one rank."""
    token = tl.program_id(0).to(tl.int64) * (R * H * D)
    return tl.load(ptr + token + i * (H * D) + place, mask=inside, other=0.0).to(ACC)


@triton.jit
def put(ptr, i, place, inside, x, R: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * (R * H * D)
    tl.store(ptr + token + i * (H * D) + place, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def rank_reads_kernel(
    q_ptr, k_ptr, v_ptr, weight_ptr, k_old_ptr, v_old_ptr, weight_old_ptr, o_ptr,
    R: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HB: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Output of HB heads of one token."""
    gate, known = gates(H, HB)
    at_k, in_k = tile(K, BK, H, HB)
    at_v, in_v = tile(V, BV, H, HB)
    weight = tl.load(weight_ptr + gate, mask=known, other=0.0).to(ACC)
    if R > 1:
        old = tl.load(weight_old_ptr + gate, mask=known, other=0.0).to(ACC)
    for j in tl.static_range(R):
        q = rank(q_ptr, j, at_k, in_k, R, H, K, ACC)
        o = tl.zeros((HB, BV), ACC)
        for i in tl.static_range(R):
            score = weight * tl.sum(q * rank(k_ptr, i, at_k, in_k, R, H, K, ACC), 1)
            o += score[:, None] * rank(v_ptr, i, at_v, in_v, R, H, V, ACC)
            if i > j:
                score = old * tl.sum(q * rank(k_old_ptr, i, at_k, in_k, R, H, K, ACC), 1)
                o += score[:, None] * rank(v_old_ptr, i, at_v, in_v, R, H, V, ACC)
        put(o_ptr, j, at_v, in_v, o, R, H, V)


@triton.jit
def rank_reads_gradient_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, weight_ptr, k_old_ptr, v_old_ptr, weight_old_ptr,
    dq_ptr, dk_ptr, dv_ptr, d_weight_ptr, dk_old_ptr, dv_old_ptr, d_weight_old_ptr,
    R: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HB: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of HB heads of one token: of queries and weights row by row, then of keys and values by columns."""
    gate, known = gates(H, HB)
    at_k, in_k = tile(K, BK, H, HB)
    at_v, in_v = tile(V, BV, H, HB)
    weight = tl.load(weight_ptr + gate, mask=known, other=0.0).to(ACC)
    d_weight, d_old = tl.zeros((HB,), ACC), tl.zeros((HB,), ACC)
    if R > 1:
        old = tl.load(weight_old_ptr + gate, mask=known, other=0.0).to(ACC)
    for j in tl.static_range(R):
        q, do = rank(q_ptr, j, at_k, in_k, R, H, K, ACC), rank(do_ptr, j, at_v, in_v, R, H, V, ACC)
        dq = tl.zeros((HB, BK), ACC)
        for i in tl.static_range(R):
            k = rank(k_ptr, i, at_k, in_k, R, H, K, ACC)
            d_score = tl.sum(do * rank(v_ptr, i, at_v, in_v, R, H, V, ACC), 1)
            d_weight += d_score * tl.sum(q * k, 1)
            dq += (weight * d_score)[:, None] * k
            if i > j:
                k = rank(k_old_ptr, i, at_k, in_k, R, H, K, ACC)
                d_score = tl.sum(do * rank(v_old_ptr, i, at_v, in_v, R, H, V, ACC), 1)
                d_old += d_score * tl.sum(q * k, 1)
                dq += (old * d_score)[:, None] * k
        put(dq_ptr, j, at_k, in_k, dq, R, H, K)
    tl.store(d_weight_ptr + gate, d_weight.to(d_weight_ptr.dtype.element_ty), mask=known)
    if R > 1:
        tl.store(d_weight_old_ptr + gate, d_old.to(d_weight_old_ptr.dtype.element_ty), mask=known)
    for i in tl.static_range(R):
        k, v = rank(k_ptr, i, at_k, in_k, R, H, K, ACC), rank(v_ptr, i, at_v, in_v, R, H, V, ACC)
        dk, dv = tl.zeros((HB, BK), ACC), tl.zeros((HB, BV), ACC)
        for j in tl.static_range(R):
            q, do = (
                rank(q_ptr, j, at_k, in_k, R, H, K, ACC),
                rank(do_ptr, j, at_v, in_v, R, H, V, ACC),
            )
            dk += (weight * tl.sum(do * v, 1))[:, None] * q
            dv += (weight * tl.sum(q * k, 1))[:, None] * do
        put(dk_ptr, i, at_k, in_k, dk, R, H, K)
        put(dv_ptr, i, at_v, in_v, dv, R, H, V)
        if R > 1:
            k = rank(k_old_ptr, i, at_k, in_k, R, H, K, ACC)
            v = rank(v_old_ptr, i, at_v, in_v, R, H, V, ACC)
            dk, dv = tl.zeros((HB, BK), ACC), tl.zeros((HB, BV), ACC)
            for j in tl.static_range(R):
                if j < i:
                    q, do = (
                        rank(q_ptr, j, at_k, in_k, R, H, K, ACC),
                        rank(do_ptr, j, at_v, in_v, R, H, V, ACC),
                    )
                    dk += (old * tl.sum(do * v, 1))[:, None] * q
                    dv += (old * tl.sum(q * k, 1))[:, None] * do
            put(dk_old_ptr, i, at_k, in_k, dk, R, H, K)
            put(dv_old_ptr, i, at_v, in_v, dv, R, H, V)


def forward(given: Sequence[Tensor]) -> Tensor:
    """Output of queries, keys, values and weights, and with several ranks the last three of what is old."""
    q, _, v, *_ = given = [x.contiguous() for x in given]
    o = torch.empty_like(v)
    over(rank_reads_kernel, *_grid(q, v))(*_padded(given, 7), o, **_sizes(q, v), num_warps=WARPS)
    return o


def backward(do: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all that `forward` was given."""
    q, _, v, *_ = given = [x.contiguous() for x in given]
    grads = [torch.empty_like(x) for x in given]
    over(rank_reads_gradient_kernel, *_grid(q, v))(
        do.contiguous(), *_padded(given, 7), *_padded(grads, 7), **_sizes(q, v), num_warps=WARPS
    )
    return grads


def _padded(tensors: Sequence[Tensor], count: int) -> list[Tensor | None]:
    return [*tensors, *[None] * (count - len(tensors))]


def _heads(q: Tensor, v: Tensor) -> int:
    """Of a program."""
    widest = triton.next_power_of_2(max(q.shape[-1], v.shape[-1]))
    return max(1, min(TILE // widest, triton.next_power_of_2(q.shape[-2])))


def _grid(q: Tensor, v: Tensor) -> tuple[int, int]:
    return q[..., 0, 0, 0].numel(), triton.cdiv(q.shape[-2], _heads(q, v))


def _sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for."""
    ranks, heads, keys = q.shape[-3:]
    values = v.shape[-1]
    return {
        "R": ranks, "H": heads, "K": keys, "V": values, "HB": _heads(q, v),
        "BK": triton.next_power_of_2(keys), "BV": triton.next_power_of_2(values),
        "ACC": tl.float64 if q.dtype == torch.float64 else tl.float32,
    }  # fmt: skip
