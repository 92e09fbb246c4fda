"""The kernels as functions on tensors: allocation, dtypes and launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.arguments import state_dtype
from gdn2.ops.cuda import gradient as fused
from gdn2.ops.cuda import intra as fused_intra
from gdn2.ops.cuda.launch import GRADIENT, INTRA, in_blocks, takes
from gdn2.ops.operands import Operands, spread
from gdn2.ops.triton.ahead import compiling, over
from gdn2.ops.triton.decays import decays_kernel
from gdn2.ops.triton.deep import deep_gradient_kernel, deep_scores_kernel
from gdn2.ops.triton.gradient import (
    gradient_keys_kernel,
    gradient_states_kernel,
    gradient_values_kernel,
)
from gdn2.ops.triton.launch import Launch, Scan, launch
from gdn2.ops.triton.scan import scan_kernel, scan_reverse_kernel
from gdn2.ops.triton.scores import scores_kernel
from gdn2.ops.triton.solve import solve_kernel
from gdn2.ops.triton.sums import sum_to
from gdn2.ops.triton.table import Table


class Decays(NamedTuple):
    """Decays inside each half of a chunk [M, H_g, C, width of g]: since its start, and after a token until its end."""

    since: Tensor
    after: Tensor


class Factors(NamedTuple):
    """What the scans need of each chunk, in the operands' dtype."""

    Q_gamma: Tensor  # [M, H, C, d_k]
    K_tail: Tensor  # [M, H, C, d_k]
    gamma_C: Tensor  # [M, H, d_k], fp32
    A_qk: Tensor  # [M, H, C, C]
    A: Tensor | None  # [M, H, C, C]
    Y: Tensor | None  # [M, H, C, d_k]
    U: Tensor  # [M, H, C, d_v]; in blocks [M, H_v, C, d_v / G] with G value heads a head
    deep: Tensor  # [M, H, C] which rows `deep.py` looks after
    blocks: bool = False  # how Q_gamma, K_tail, A_qk, Y and U lie: in rows, or in blocks (`gdn2.ops.cuda.blocks`)

    def tensors(self) -> list[Tensor]:
        """All that are there."""
        return [t for t in self[:-1] if t is not None]


def precision(dtype: torch.dtype, solve: str) -> dict[str, object]:
    """Dtypes of operands and sums: products of fp16 operands with decays need the exponents of tf32."""
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    operand = {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.float16: tl.float32,
        torch.bfloat16: tl.bfloat16,
    }[dtype]
    half = dtype in (torch.float16, torch.bfloat16)
    products = "tf32" if half else "tf32x3"
    if half:
        solve = "tf32"  # A is rounded to less afterwards
    return {"DOT": operand, "PRECISION": products, "SOLVE": solve, "ACC": accumulate}


def block(width: int, most: int) -> int:
    """Power of two that covers a width, from 16 to `most`."""
    return max(16, min(most, triton.next_power_of_2(width)))


def sizes(x: Operands) -> dict[str, int]:
    """Head counts and widths, as the kernels call them."""
    return {
        "HK": x.k.shape[1],
        "HG": x.g.shape[1],
        "HB": 1 if x.b is None else x.b.shape[1],
        "H": x.heads,
        "DK": x.k.shape[2],
        "G_WIDTH": x.g.shape[2],
        "B_WIDTH": 0 if x.b is None else x.b.shape[2],
    }


def new_factors(x: Operands, chunks: int, size: int) -> Factors:
    """Allocate the factors."""
    return Factors(**new_scores(x, chunks, size), **new_solution(x, chunks, size))


def new_scores(x: Operands, chunks: int, size: int) -> dict[str, Any]:
    """Allocate those that `scores` makes."""
    H, DK = x.heads, x.k.shape[2]
    return {
        "Q_gamma": x.k.new_empty(chunks, H, size, DK),
        "K_tail": x.k.new_empty(chunks, H, size, DK),
        "gamma_C": x.k.new_empty(chunks, H, DK, dtype=state_dtype(x.q)),
        "A_qk": x.k.new_empty(chunks, H, size, size),
        "deep": x.k.new_empty(chunks, H, size, dtype=torch.int8),
    }


def new_solution(x: Operands, chunks: int, size: int) -> dict[str, Any]:
    """Allocate those that `solution` makes."""
    H, DK, width = x.heads, x.k.shape[2], x.v.shape[1] * x.v.shape[2] // x.heads
    return {
        "A": None if x.b is None else x.k.new_empty(chunks, H, size, size),
        "Y": None if x.b is None else x.k.new_empty(chunks, H, size, DK),
        "U": x.k.new_empty(chunks, H, size, width),
    }


def decays(x: Operands, table: Table) -> Decays:
    """What both passes need of the decays."""
    M, C, (_, HG, width) = table.start.numel(), table.size, x.g.shape
    how, shape = launch("decays", x.k.device), (M, HG, C, width)
    BK = block(width, how.key_block)
    found = Decays(*(x.g.new_empty(shape, dtype=state_dtype(x.q)) for _ in range(2)))
    over(decays_kernel, 2 * M * HG, triton.cdiv(width, BK))(
        x.g, *found, table.start, table.length, HG=HG, G_WIDTH=width, R=C // 2, BK=BK,
        ACC=precision(x.q.dtype, "ieee")["ACC"], num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    return found


def intra(x: Operands, table: Table, solve: str, sums: Decays | None = None) -> Factors:
    """Everything a chunk can compute on its own (Eqs. 18–22, 25); decays that are not given are not kept either.

    Without them CUDA kernels may do it, and leave the scans their factors in blocks (`in_blocks`).
    """
    blocks = sums is None and in_blocks(x, table.size)
    if blocks or (sums is None and takes(INTRA, x, table.size)):
        f = new_factors(x, table.start.numel(), table.size)._replace(blocks=blocks)
        fused_intra.compute(x, table.start, table.length, f.tensors(), blocks, run=not compiling())
        return f
    found, T, E_bar = scores(x, table, decays(x, table) if sums is None else sums)
    return Factors(**found, **solution(x, table, solve, T, E_bar))


def scores(
    x: Operands, table: Table, sums: Decays
) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
    """Factors of queries and keys, and T and Ē if something is erased."""
    M, H, C, DK = table.start.numel(), x.heads, table.size, x.k.shape[2]
    f = new_scores(x, M, C)
    erases = x.b is not None
    T = x.k.new_empty(M, H, C, C, dtype=state_dtype(x.q)) if erases else None
    E_bar = torch.empty_like(f["Q_gamma"]) if erases else None
    arithmetic = precision(x.q.dtype, "ieee")
    products = {n: arithmetic[n] for n in ("DOT", "PRECISION", "ACC")}
    how = launch("scores", x.k.device)
    BK = block(DK, how.key_block)
    over(scores_kernel, 2 * M * H)(
        x.q, x.k, x.b, *sums, f["Q_gamma"], f["K_tail"], E_bar, f["gamma_C"], f["A_qk"], T, f["deep"],
        table.start, table.length, x.scale,
        **sizes(x), R=C // 2, BK=BK, **products,
        num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    over(deep_scores_kernel, M * H, 2)(
        x.q, x.k, x.g, x.b, f["A_qk"], T, f["deep"], table.start, table.length, x.scale,
        **sizes(x), R=C // 2, BK=BK, **products, num_warps=4,
    )  # fmt: skip
    return f, T, E_bar


def solution(
    x: Operands, table: Table, solve: str, T: Tensor | None, E_bar: Tensor | None
) -> dict[str, Any]:
    """A, Y and U."""
    M, H, C, DK = table.start.numel(), x.heads, table.size, x.k.shape[2]
    found = new_solution(x, M, C)
    arithmetic = precision(x.q.dtype, solve)
    how = launch("solve", x.k.device)
    over(solve_kernel, M * H)(
        x.v, x.w, T, E_bar, *found.values(), table.start, table.length,
        H=H, HV=x.v.shape[1], DK=DK, DV=x.v.shape[2], W_WIDTH=0 if x.w is None else x.w.shape[2],
        R=C // 2, BK=block(DK, how.key_block), BV=block(x.v.shape[2], how.value_block),
        ERASE=x.b is not None,
        PRECISION=arithmetic["PRECISION"], SOLVE=arithmetic["SOLVE"], ACC=arithmetic["ACC"],
        num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    return found


def scan_launch(kernel: str, x: Operands, table: Table) -> Launch:
    """How to launch a scan, which depends on more than its kernel."""
    sequences = table.first.numel() - 1
    sizes = Scan(
        chunk=table.size,
        keys=x.k.shape[2],
        itemsize=x.k.element_size(),
        values=x.v.shape[2],
        heads=sequences * x.v.shape[1],
    )
    return launch(kernel, x.k.device, sizes)


def scan(
    x: Operands, f: Factors, table: Table, state: Tensor, outputs: bool, save: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Output and final state, if wanted; states at chunk starts and residuals, if they are to be saved."""
    N, HV, DK, DV = state.shape
    o = torch.empty_like(x.v) if outputs else None
    final = torch.empty_like(state) if outputs else None
    starts = x.k.new_empty(*f.A_qk.shape[:2], DK, f.U.shape[-1]) if save else None
    R = torch.empty_like(f.U) if save else None
    how = scan_launch("scan", x, table)
    BV = block(DV, how.value_block)
    arithmetic = precision(x.q.dtype, "ieee")
    over(scan_kernel, N * HV, triton.cdiv(DV, BV))(
        f.Q_gamma, f.K_tail, f.gamma_C, f.A_qk, f.Y, f.U, state, o, final, starts, R,
        table.start, table.length, table.first,
        H=x.heads, HV=HV, DK=DK, DV=DV, C=table.size, BK=block(DK, how.key_block), BV=BV,
        ERASE=f.Y is not None, WRITE_O=outputs, SAVE=save,
        PRECISION=arithmetic["PRECISION"], ACC=arithmetic["ACC"], STAGES=how.num_stages,
        num_warps=how.num_warps,
    )  # fmt: skip
    return o, final, starts, R


def scan_reverse(
    x: Operands, f: Factors, table: Table, do: Tensor, d_final: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the residuals, of the states at chunk ends and of the initial state."""
    N, HV, DK, DV = d_final.shape
    dR = torch.empty_like(f.U)
    ends = x.k.new_empty(*f.A_qk.shape[:2], DK, f.U.shape[-1])
    d_state = torch.empty_like(d_final)
    how = scan_launch("scan_reverse", x, table)
    BV = block(DV, how.value_block)
    arithmetic = precision(x.q.dtype, "ieee")
    over(scan_reverse_kernel, N * HV, triton.cdiv(DV, BV))(
        f.Q_gamma, f.K_tail, f.gamma_C, f.A_qk, f.Y, do, d_final, d_state, ends, dR,
        table.start, table.length, table.first,
        H=x.heads, HV=HV, DK=DK, DV=DV, C=table.size, BK=block(DK, how.key_block), BV=BV,
        ERASE=f.Y is not None,
        PRECISION=arithmetic["PRECISION"], ACC=arithmetic["ACC"], STAGES=how.num_stages,
        num_warps=how.num_warps,
    )  # fmt: skip
    return dR, ends, d_state


def gradient(
    x: Operands,
    A: Tensor | None,
    deep: Tensor,
    table: Table,
    sums: Decays | None,
    do: Tensor,
    between: list[Tensor],
    blocks: bool = False,
) -> list[Tensor]:
    """Gradients of q, k, v, g, b and w (empty where absent), summed over what they were broadcast over.

    Between the scans and this are states at chunk starts, residuals, and gradients of states at chunk ends and of
    residuals. The list is emptied: their memory is given back as soon as each was used. Without `sums` one kernel does
    it all, if it takes such operands (`at_once`), and those between may be in blocks.
    """
    if sums is None:
        return gradient_at_once(x, A, deep, table, do, between, blocks)
    starts, R, ends, dR = between
    between.clear()
    dZ, dv, dw, *scores = gradient_values(x, A, table, do, R, dR)
    del dR
    outside = gradient_states(x, table, sums, do, R, dZ, starts, ends, scores)
    del starts, R, ends, dZ
    dq, dk, dg, db = gradient_keys(x, deep, table, sums.since, outside, scores)
    del outside, scores
    return [
        sum_to(dq, x.q),
        sum_to(dk, x.k),
        dv,
        sum_to(dg, x.g),
        db if x.b is None else sum_to(db, x.b),
        dw,
    ]


def at_once(x: Operands, table: Table, blocks: bool) -> bool:
    """Whether one kernel makes all gradients, without the decays."""
    return blocks or takes(GRADIENT, x, table.size)


def gradient_at_once(
    x: Operands,
    A: Tensor | None,
    deep: Tensor,
    table: Table,
    do: Tensor,
    between: list[Tensor],
    blocks: bool,
) -> list[Tensor]:
    """The same by one kernel and one for deep rows, of each value head alone, and summed."""
    assert A is not None
    heads = x.v.shape[1]
    deep = spread(deep, heads, 1)
    found, scores = fused.gradients(
        x, A, deep, table.start, table.length, do, between, blocks, run=not compiling()
    )
    between.clear()
    dq, dk, _, dg, db, _ = found
    # all channels by one program: a gate for all of them has no room for several sums
    deep_gradient(x, deep, table, scores, (dq, dk, dg, db), x.k.shape[2], heads, whole=False)
    return [d if t is None else sum_to(d, t) for d, t in zip(found, x[:6], strict=True)]


def gradient_values(
    x: Operands, A: Tensor | None, table: Table, do: Tensor, R: Tensor, dR: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dZ, dv, dw, dA_qk and dT."""
    M, H, C, DV = table.start.numel(), x.heads, table.size, x.v.shape[2]
    arithmetic = precision(x.q.dtype, "ieee")
    dv = torch.empty_like(x.v)
    dw = x.v.new_empty(0) if x.w is None else torch.empty_like(x.w)
    dA_qk = x.k.new_empty(M, H, C, C, dtype=state_dtype(x.q))
    dT = torch.empty_like(dA_qk) if x.b is not None else None
    dZ = torch.empty_like(dR) if x.b is not None else dR
    how = launch("gradient_values", x.k.device)
    over(gradient_values_kernel, M * H)(
        x.v, x.w, do, A, R, dR, dZ, dv, dw, dA_qk, dT, table.start, table.length,
        H=H, HV=x.v.shape[1], DV=DV, W_WIDTH=0 if x.w is None else x.w.shape[2],
        C=C, BV=block(DV, how.value_block), ERASE=x.b is not None,
        PRECISION=arithmetic["PRECISION"], ACC=arithmetic["ACC"],
        num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    return dZ, dv, dw, dA_qk, dT


def gradient_states(
    x: Operands,
    table: Table,
    sums: Decays,
    do: Tensor,
    R: Tensor,
    dZ: Tensor,
    starts: Tensor,
    ends: Tensor,
    scores: Sequence[Tensor | None],
) -> list[Tensor]:
    """What reaches queries, erase rows and keys from outside of their half, and the decays over halves."""
    M, H, C, DK, wide = table.start.numel(), x.heads, table.size, x.k.shape[2], R.shape[-1]
    arithmetic = precision(x.q.dtype, "ieee")
    dtype = torch.float32 if x.q.dtype == torch.float16 else x.q.dtype
    dX = [x.k.new_empty(M, H, C, DK, dtype=dtype) for _ in range(3)]
    d_whole = x.k.new_empty(M, H, 2, DK, dtype=state_dtype(x.q))
    how = launch("gradient_states", x.k.device)
    BK = block(DK, how.key_block)
    over(gradient_states_kernel, M * H, triton.cdiv(DK, BK))(
        x.q, x.k, x.b, *sums, do, R, dZ, starts, ends, *scores, *dX, d_whole,
        table.start, table.length, x.scale, **sizes(x), WIDE=wide, C=C, BK=BK,
        BV=block(wide, how.value_block),
        PRECISION=arithmetic["PRECISION"], ACC=arithmetic["ACC"],
        num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    return [*dX, d_whole]


def gradient_keys(
    x: Operands,
    deep: Tensor,
    table: Table,
    since: Tensor,
    outside: Sequence[Tensor],
    scores: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dg and db, per key-side head, and per block of channels where a gate has width one."""
    M, H, C, (L, _, DK) = table.start.numel(), x.heads, table.size, x.k.shape
    arithmetic = precision(x.q.dtype, "ieee")
    products = {n: arithmetic[n] for n in ("DOT", "PRECISION", "ACC")}
    how = launch("gradient_keys", x.k.device)
    BK = block(DK, how.key_block)
    blocks = triton.cdiv(DK, BK)

    def new(like: Tensor) -> Tensor:
        partial = like.shape[2] == 1 < DK or like.shape[1] < H
        dtype = torch.float32 if partial and like.dtype != torch.float64 else like.dtype
        return like.new_empty(L, H, blocks if like.shape[2] == 1 else DK, dtype=dtype)

    dq, dk, dg = new(x.q), new(x.k), new(x.g)
    db = x.k.new_empty(0) if x.b is None else new(x.b)
    over(gradient_keys_kernel, 2 * M * H, blocks)(
        x.q, x.k, x.b, since, *outside, *scores, deep, dq, dk, dg, db,
        table.start, table.length, x.scale, **sizes(x), R=C // 2, BK=BK,
        HALF=x.q.dtype in (torch.float16, torch.bfloat16), **products,
        num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    deep_gradient(x, deep, table, scores, (dq, dk, dg, db), BK, H)
    return dq, dk, dg, db


def deep_gradient(
    x: Operands,
    deep: Tensor,
    table: Table,
    scores: Sequence[Tensor | None],
    found: Sequence[Tensor],
    BK: int,
    heads: int,
    whole: bool = True,
) -> None:
    """Add what flows through deep rows to dq, dk, dg and db of so many heads, by programs of so many channels.

    Score gradients are of whole chunks, or of their halves only.
    """
    M, DK = table.start.numel(), x.k.shape[2]
    arithmetic = precision(x.q.dtype, "ieee")
    products = {n: arithmetic[n] for n in ("PRECISION", "ACC")}
    over(deep_gradient_kernel, M * heads, triton.cdiv(DK, BK))(
        x.q, x.k, x.g, x.b, *scores, deep, *found, table.start, table.length, x.scale,
        **sizes(x) | {"H": heads}, R=table.size // 2, BK=BK, WHOLE=whole, **products, num_warps=4,
    )  # fmt: skip
