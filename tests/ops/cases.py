"""Seeded operands of the operator, and the reference's results for them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2 import gated_delta_rule

OPERANDS = ("q", "k", "v", "g", "b", "w", "initial_state")


@dataclass(frozen=True)
class Case:
    """One configuration of the operator."""

    T: int = 65
    d_k: int = 16
    d_v: int = 16
    B: int = 2
    heads: tuple[int, int, int, int] = (2, 2, 2, 2)  # of q and k, v, g, b
    widths: tuple[str, str, str] = ("full", "full", "full")  # of g, b, w: full, one or none
    decay: float | str = "mild"
    erase_range: float = 1.0
    lengths: tuple[int, ...] = ()  # packed sequences, in a batch of one
    initial_state: bool = True
    loss: str = "both"  # output, final_state or both
    chunk_size: int = 16
    contiguous: bool = True
    seed: int = 0
    dtype: torch.dtype = field(default=torch.float64)

    def __str__(self) -> str:
        default = Case()
        changed = {n: v for n, v in vars(self).items() if v != getattr(default, n)}
        return ",".join(f"{n}={v}" for n, v in changed.items()).replace(" ", "")


class Result(NamedTuple):
    o: Tensor
    state: Tensor
    grads: dict[str, Tensor]


def log_decay(kind: float | str, like: Tensor, rand: torch.Generator) -> Tensor:
    """Log-decays: one value for all, a random mild one, or spikes of −1000 among small ones."""
    noise = torch.rand(like.shape, generator=rand, dtype=torch.float64)
    if kind == "mild":
        return -F.softplus(4 * noise - 4)
    if kind == "spiky":
        return torch.where(noise < 0.1, -1000.0, -1e-3 * noise)
    return torch.full(like.shape, float(kind), dtype=torch.float64)


def operands(case: Case) -> dict[str, Tensor | None]:
    """Operands in fp64: unit keys and queries, gates in their range."""
    rand = torch.Generator().manual_seed(case.seed)
    T, B = (sum(case.lengths), 1) if case.lengths else (case.T, case.B)
    qk, hv, hg, hb = case.heads

    def normal(*shape: int) -> Tensor:
        if case.contiguous:
            return torch.randn(shape, generator=rand, dtype=torch.float64)
        wide = torch.randn((*shape[:-1], 2 * shape[-1]), generator=rand, dtype=torch.float64)
        return wide[..., ::2]

    def gate(heads: int, full: int, kind: str, top: float) -> Tensor | None:
        width = {"full": full, "one": 1, "none": 0}[kind]
        return top * normal(B, T, heads, width).sigmoid() if width else None

    g_kind, b_kind, w_kind = case.widths
    sequences = len(case.lengths) or B
    return {
        "q": F.normalize(normal(B, T, qk, case.d_k), dim=-1),
        "k": F.normalize(normal(B, T, qk, case.d_k), dim=-1),
        "v": normal(B, T, hv, case.d_v),
        "g": log_decay(case.decay, torch.empty(B, T, hg, case.d_k if g_kind == "full" else 1), rand),
        "b": gate(hb, case.d_k, b_kind, case.erase_range),
        "w": gate(hv, case.d_v, w_kind, 1.0),
        "initial_state": normal(sequences, hv, case.d_k, case.d_v) if case.initial_state else None,
    }


def run(case: Case, backend: str, dtype: torch.dtype | None = None, **options: object) -> Result:
    """Outputs and the gradients of a fixed random loss of output, final state or both."""
    dtype = dtype or case.dtype
    leaves = {
        n: x.to(dtype).detach().requires_grad_() for n, x in operands(case).items() if x is not None
    }
    if not case.contiguous:
        leaves = {n: x.mT.contiguous().mT.detach().requires_grad_() for n, x in leaves.items()}
    cu_seqlens = None
    if case.lengths:
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
    o, state = gated_delta_rule(
        **leaves,  # type: ignore[arg-type]
        cu_seqlens=cu_seqlens,
        output_final_state=True,
        backend=backend,
        chunk_size=case.chunk_size,
        **options,  # type: ignore[arg-type]
    )
    assert state is not None
    rand = torch.Generator().manual_seed(case.seed + 1)
    weights = [torch.randn(x.shape, generator=rand, dtype=torch.float64) for x in (o, state)]
    parts = [(x * weight.to(x)).sum() for x, weight in zip((o, state), weights, strict=True)]
    loss = {"output": parts[0], "final_state": parts[1], "both": parts[0] + parts[1]}[case.loss]
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = {n: torch.zeros_like(x) for n, x in leaves.items()}
    return Result(o, state, {n: zeros[n] if d is None else d for n, d in zip(leaves, grads, strict=True)})
