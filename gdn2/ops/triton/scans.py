"""Stage two by the CUDA kernels where they take such operands, else by the Triton ones (`stages`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.ops.cuda import scan as cuda
from gdn2.ops.cuda.launch import takes_plain
from gdn2.ops.operands import Operands
from gdn2.ops.triton import stages
from gdn2.ops.triton.ahead import compiling
from gdn2.ops.triton.stages import Factors
from gdn2.ops.triton.table import Table


def plain(x: Operands, table: Table, state: Tensor) -> tuple[Tensor, Tensor] | None:
    """Output and final state without an erase gate and with one decay a head; None where no kernel does it at once."""
    rows = state.shape[0] * state.shape[1]
    if not takes_plain(x, table.size, rows):
        return None
    o, final = torch.empty_like(x.v), torch.empty_like(state)
    cuda.plain(x, rows, [state, o, final, *table[1:]], run=not compiling())
    return o, final


def forward(x: Operands, f: Factors, table: Table, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and final state."""
    if f.blocks:
        o, final = torch.empty_like(x.v), torch.empty_like(state)
        given = [*scanned(f), state, o, final, *table[1:]]
        cuda.forward(x, state.shape[0] * state.shape[1], given, run=not compiling())
        return o, final
    found = stages.scan(x, f, table, state, outputs=True, save=False)
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


class Between(NamedTuple):
    """What the scans of the backward make: per chunk, but for the gradient of the initial state."""

    starts: Tensor
    R: Tensor
    ends: Tensor  # gradients of the states at chunk ends
    dR: Tensor
    d_state: Tensor


def backward(
    x: Operands, f: Factors, table: Table, state: Tensor, do: Tensor, d_final: Tensor
) -> Between:
    """States at chunk starts and residuals once more, and the gradients of residuals and states."""
    if f.blocks:
        width = x.q.shape[2]
        per_chunk = len(f.U), x.v.shape[1], width, width
        starts, ends = (x.k.new_empty(per_chunk) for _ in range(2))
        R, dR, d_state = torch.empty_like(f.U), torch.empty_like(f.U), torch.empty_like(d_final)
        given = [*scanned(f), state, starts, R, do, d_final, d_state, ends, dR, *table[1:]]
        cuda.backward(x, state.shape[0] * state.shape[1], given, run=not compiling())
        return Between(starts, R, ends, dR, d_state)
    _, _, found, residuals = stages.scan(x, f, table, state, outputs=False, save=True)
    assert found is not None and residuals is not None
    dR, ends, d_state = stages.scan_reverse(x, f, table, do, d_final)
    return Between(found, residuals, ends, dR, d_state)


def scanned(f: Factors) -> list[Tensor]:
    """The factors that scans read."""
    assert f.Y is not None
    return [f.Q_gamma, f.K_tail, f.gamma_C, f.A_qk, f.Y, f.U]
