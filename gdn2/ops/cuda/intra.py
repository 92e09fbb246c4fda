"""Everything a chunk can compute on its own as one CUDA kernel (`intra.cu`)."""

from collections.abc import Sequence

from torch import Tensor

from gdn2.ops.cuda.launch import INTRA, PROGRAMS, loaded, multiprocessors
from gdn2.ops.operands import Operands


def compute(
    x: Operands, start: Tensor, length: Tensor, factors: Sequence[Tensor], blocks: bool, run: bool
) -> None:
    """Fill Q_γ, K_tail, γ_C, A_qk, A, Y, U and which rows are deep; without `run` only make the kernel ready.

    What the scans read is in rows or in blocks.
    """
    kernel = loaded(INTRA, x, BLOCKS=int(blocks))
    programs = factors[0].shape[0] * factors[0].shape[1]
    assert kernel is not None and x.b is not None
    if run and programs:
        w = x.v if x.w is None else x.w  # not read
        ahead = PROGRAMS[x.q.shape[2]] * multiprocessors(x.q.device)
        kernel(programs, x.q, x.k, x.v, x.g, x.b, w, start, length, *factors, x.scale, ahead)
