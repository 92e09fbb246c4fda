"""Stage two by the CUDA kernels where they take such operands, else by the Triton ones (`stages`)."""

import torch
from torch import Tensor

from gdn2.ops.cuda import scan as cuda
from gdn2.ops.cuda.launch import takes_plain
from gdn2.ops.operands import Operands
from gdn2.ops.triton import stages
from gdn2.ops.triton.ahead import compiling
from gdn2.ops.triton.stages import Factors, Table


def plain(x: Operands, table: Table, state: Tensor) -> tuple[Tensor, Tensor] | None:
    """Output and final state without an erase gate and with one decay a head; None where no kernel does it at once."""
    rows = state.shape[0] * state.shape[1]
    if not takes_plain(x, table.size, rows):
        return None
    o, final = torch.empty_like(x.v), torch.empty_like(state)
    cuda.plain(x, rows, [state, o, final, *table[1:]], run=not compiling())
    return o, final


def scan(
    x: Operands, f: Factors, table: Table, state: Tensor, outputs: bool, save: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Output and final state, if wanted; states at chunk starts and residuals, if they are to be saved."""
    rows, width = state.shape[0] * state.shape[1], x.q.shape[2]
    if not f.blocks:
        return stages.scan(x, f, table, state, outputs, save)
    assert outputs != save  # these are different kernels
    o = torch.empty_like(x.v) if outputs else None
    final = torch.empty_like(state) if outputs else None
    starts = x.k.new_empty(*f.A_qk.shape[:2], width, width) if save else None
    R = torch.empty_like(f.U) if save else None
    given = (*f[:4], f.Y, f.U, state, o, final, starts, R, *table[1:])
    cuda.forward(x, rows, given, save, run=not compiling())
    return o, final, starts, R


def scan_reverse(
    x: Operands, f: Factors, table: Table, do: Tensor, d_final: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the residuals, of the states at chunk ends and of the initial state."""
    rows, width = d_final.shape[0] * d_final.shape[1], x.q.shape[2]
    if not f.blocks:
        return stages.scan_reverse(x, f, table, do, d_final)
    dR, d_state = torch.empty_like(f.U), torch.empty_like(d_final)
    ends = x.k.new_empty(*f.A_qk.shape[:2], width, width)
    given = (*f[:4], f.Y, do, d_final, d_state, ends, dR, *table[1:])
    cuda.reverse(x, rows, given, run=not compiling())
    return dR, ends, d_state
