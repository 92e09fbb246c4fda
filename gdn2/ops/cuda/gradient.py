"""The gradient stage as one CUDA kernel (`gradient.cu`, `group_gradient.cu`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn2.ops.cuda.launch import (
    CHUNK,
    GRADIENT,
    GROUP_GRADIENT,
    aligned,
    gradient_of_blocks,
    loaded,
    multiprocessors,
)
from gdn2.ops.operands import Operands


def gradients(
    x: Operands,
    A: Tensor,
    deep: Tensor,
    start: Tensor,
    length: Tensor,
    do: Tensor,
    between: Sequence[Tensor],
    blocks: bool,
    run: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """dq, dk, dv, dg, db, dw without what flows through deep rows, and dA_qk and dT of halves that have such rows.

    All are per value head, and so is what `deep` says of rows.

    Between the scans and this are states at chunk starts, residuals, and gradients of states at chunk ends and of
    residuals, in rows or in blocks. Without `run` the kernel is made ready and not started.
    """
    starts, R, ends, dR = between
    tokens, heads, _ = x.v.shape
    found = [
        x.v.new_empty(0) if t is None else t.new_empty(tokens, heads, t.shape[2]) for t in x[:6]
    ]
    halves = (len(A), heads, CHUNK, CHUNK // 2)
    scores = [A.new_empty(halves, dtype=torch.float32) for _ in range(2)]
    do = aligned(do)
    chunks = len(A) * heads
    name = gradient_of_blocks(x) if blocks else GRADIENT
    kernel, programs = loaded(name, x, BLOCKS=int(blocks)), chunks
    numbers: list[int] = []
    if name == GROUP_GRADIENT:  # programs go through chunks, one on each multiprocessor
        programs, numbers = min(chunks, multiprocessors(A.device)), [chunks]
    assert kernel is not None and x.b is not None
    if run and chunks:
        w = x.v if x.w is None else x.w  # not read
        kernel(
            programs, x.q, x.k, x.v, x.g, x.b, w, do, A, R, dR, starts, ends, deep, start, length,
            *scores, *found, x.scale, *numbers,
        )  # fmt: skip
    return found, scores
