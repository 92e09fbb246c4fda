"""Seeded operands of the operator, one run of it with its gradients, and a list of configurations."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn2 import gated_delta_rule
from gdn2.ops.blocks import BLOCK
from gdn2.ops.chunkwise import DEEPEST

OPERANDS = ("q", "k", "v", "g", "b", "w", "initial_state")
THRESHOLD = math.log(DEEPEST) / BLOCK  # log-decay a token beyond which a block's last row is deep
HALVES = (torch.bfloat16, torch.float16)


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
    recompute: bool = True
    contiguous: bool = True
    seed: int = 0
    dtype: torch.dtype = torch.float64  # operands are rounded to it; g and states never below fp32

    def __str__(self) -> str:
        default = Case()
        changed = {n: v for n, v in vars(self).items() if v != getattr(default, n)}
        return ",".join(f"{n}={v}" for n, v in changed.items()).replace(" ", "") or "default"

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor([0, *self.lengths]).cumsum(0) if self.lengths else None


class Result(NamedTuple):
    """Output, final state and the gradients of a fixed random loss."""

    o: Tensor
    state: Tensor
    grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        gradients = {f"d{name}": d for name, d in self.grads.items()}
        return {"o": self.o, "final_state": self.state, **gradients}


def log_decay(kind: float | str, shape: Sequence[int], rand: torch.Generator) -> Tensor:
    """Log-decays: one value for all, mild or uneven ones, spikes or ends among small ones, or every size at once.

    Of 32 uneven tokens the last few decay beyond the bound at which rows inside a block are met in another way.
    """
    noise = torch.rand(shape, generator=rand, dtype=torch.float64)
    if kind == "mild":
        return -F.softplus(4 * noise - 4)
    if kind == "uneven":
        return -4.5 * noise
    if kind == "spiky":
        return torch.where(noise < 0.1, -1000.0, -1e-3 * noise)
    if kind == "ends":
        return torch.where(noise < 0.1, -math.inf, -noise)
    if kind == "mixed":
        sizes = torch.tensor([0, -1e-6, -1e-2, -1, -20, -200, -1000], dtype=torch.float64)
        return sizes[(noise * len(sizes)).long()]
    return torch.full(tuple(shape), float(kind), dtype=torch.float64)


def operands(case: Case) -> dict[str, Tensor]:
    """Operands that are present, rounded to the case's dtype: unit keys and queries, gates in range."""
    rand = torch.Generator().manual_seed(case.seed)
    T, B = (sum(case.lengths), 1) if case.lengths else (case.T, case.B)
    sequences = len(case.lengths) or B
    qk, hv, hg, hb = case.heads
    g_kind, b_kind, w_kind = case.widths

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rand, dtype=torch.float64)

    def gate(heads: int, full: int, kind: str, top: float) -> Tensor | None:
        width = {"full": full, "one": 1, "none": 0}[kind]
        return top * normal(B, T, heads, width).sigmoid() if width else None

    made = {
        "q": F.normalize(normal(B, T, qk, case.d_k), dim=-1),
        "k": F.normalize(normal(B, T, qk, case.d_k), dim=-1),
        "v": normal(B, T, hv, case.d_v),
        "g": log_decay(case.decay, (B, T, hg, case.d_k if g_kind == "full" else 1), rand),
        "b": gate(hb, case.d_k, b_kind, case.erase_range),
        "w": gate(hv, case.d_v, w_kind, 1.0),
        "initial_state": normal(sequences, hv, case.d_k, case.d_v) if case.initial_state else None,
    }
    present = {n: x.to(stored_dtype(n, case.dtype)) for n, x in made.items() if x is not None}
    if case.contiguous:
        return present
    return {n: x.mT.contiguous().mT for n, x in present.items()}


def at_the_threshold(heads: int, still: int, generator: torch.Generator) -> Tensor:
    """Log-decays [1, 64, heads, 1]: 32 − still tokens reach the bound but for a few ulps, then nearly nothing."""
    g = -torch.rand(1, 2 * BLOCK, heads, 1, generator=generator, dtype=torch.float64)
    for block in g.split(BLOCK, 1):
        moving, rest = block.split([BLOCK - still, still], 1)
        ulps = torch.randint(-8, 9, (1, 1, heads, 1), generator=generator) * 2.0**-24
        moving *= math.log(DEEPEST) * (1 + ulps) / moving.sum(1, keepdim=True)
        rest *= 1e-7
    return g.float()


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of an operand in a model of this dtype."""
    return torch.float32 if name in ("g", "initial_state") and dtype in HALVES else dtype


def rule(x: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Output and final state of the operator, from operands by name."""
    o, state = gated_delta_rule(**x, output_final_state=True, **options)
    assert state is not None
    return o, state


def run(case: Case, backend: str, dtype: torch.dtype | None = None) -> Result:
    """Run forward and backward in the case's dtype, or in another on the same rounded operands."""
    leaves = {n: (x if dtype is None else x.to(dtype)) for n, x in operands(case).items()}
    leaves = {n: x.detach().requires_grad_() for n, x in leaves.items()}
    o, state = rule(
        leaves,
        cu_seqlens=case.cu_seqlens,
        backend=backend,
        chunk_size=case.chunk_size,
        recompute=case.recompute,
    )
    rand = torch.Generator().manual_seed(case.seed + 1)
    results = {"output": [o], "final_state": [state], "both": [o, state]}[case.loss]
    weights = [torch.randn(x.shape, generator=rand, dtype=torch.float64) for x in results]
    rounded = [x.to(case.dtype).to(y.dtype) for x, y in zip(weights, results, strict=True)]
    grads = torch.autograd.grad(
        results, list(leaves.values()), rounded, allow_unused=True, materialize_grads=True
    )
    return Result(o.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))


LENGTHS = [1, 2, 15, 16, 63, 64, 65, 130, 257]
PACKED = [(1,), (1, 1, 1), (0, 5, 0, 1), (16, 1, 63, 0, 65), (3, 130, 64), (0, 0, 17)]
AXES: dict[str, list[object]] = {
    "sequences": [*LENGTHS, *PACKED],
    "d_k": [1, 16, 48, 64, 100, 128, 256],
    "d_v": [1, 16, 48, 64, 100, 128, 256],
    "B": [1, 2],
    "heads": [
        *((1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 2, 1), (1, 4, 4, 2)),
        *((2, 4, 1, 4), (1, 3, 3, 1), (2, 6, 3, 1), (4, 4, 2, 1)),
    ],
    "widths": list(product(("full", "one"), ("full", "one", "none"), ("full", "one", "none"))),
    "decay": ["mild", "uneven", "spiky", "mixed", 0.0, -1e-6, -1.0, -2.6, -4.0, -20.0],
    "erase_range": [1.0, 2.0],
    "initial_state": [True, False],
    "loss": ["both", "output", "final_state"],
    "chunk_size": [16, 32, 64, 128],
    "recompute": [True, False],
    "contiguous": [True, False],
}
MOST_STATE_ELEMENTS = 2**25  # of all tokens' states: autograd through the token loop keeps a few


def state_elements(case: Case) -> int:
    T = sum(case.lengths) or case.T
    return T * case.d_k * case.d_v * case.heads[1] * (1 if case.lengths else case.B)


def sampled_cases(count: int, seed: int = 0) -> list[Case]:
    """Random configurations in which every value of every axis occurs, small enough for the loop."""
    pick = random.Random(seed)
    while True:
        columns = {}
        for axis, values in AXES.items():
            column = (values * -(-count // len(values)))[:count]
            pick.shuffle(column)
            columns[axis] = column
        cases = []
        for i, row in enumerate(zip(*columns.values(), strict=True)):
            chosen: dict[str, Any] = dict(zip(columns, row, strict=True))
            sequences = chosen.pop("sequences")
            chosen["T" if isinstance(sequences, int) else "lengths"] = sequences
            cases.append(Case(**chosen, seed=i))
        if max(map(state_elements, cases)) <= MOST_STATE_ELEMENTS:
            return cases
