"""The scans as CUDA kernels (`forward_scan.cu`, `backward_scans.cu`, `plain_scan.cu`)."""

from collections.abc import Sequence

from torch import Tensor

from gdn2.ops.cuda.build import Kernel
from gdn2.ops.cuda.launch import BACKWARD, FORWARD, PLAIN, aligned, loaded, value_channels
from gdn2.ops.operands import Operands

VALUES = 64  # channels of a program of the scans


def forward(x: Operands, rows: int, tensors: Sequence[Tensor], run: bool) -> None:
    """Outputs and final states of so many heads of sequences.

    Without `run` the kernel is only made ready; so with the others.
    """
    start(loaded(FORWARD, x), rows * parts(x, VALUES), tensors, run)


def backward(x: Operands, rows: int, tensors: Sequence[Tensor], run: bool) -> None:
    """States at chunk starts and residuals; gradients of residuals, of states at chunk ends and of the initial ones."""
    start(loaded(BACKWARD, x), 2 * rows * parts(x, VALUES), tensors, run)


def plain(x: Operands, rows: int, tensors: Sequence[Tensor], run: bool) -> None:
    """The whole forward without an erase gate, given the state, where output and final state go, and the chunks."""
    values = value_channels(x.q.shape[2], rows)
    given = [x.q, x.k, x.v, x.g, x.w, *tensors]
    start(loaded(PLAIN, x, VALUES=values), rows * parts(x, values), given, run, x.scale)


def parts(x: Operands, channels: int) -> int:
    return x.q.shape[2] // channels


def start(
    kernel: Kernel | None,
    programs: int,
    tensors: Sequence[Tensor | None],
    run: bool,
    *numbers: float,
) -> None:
    assert kernel is not None
    if run and programs:
        kernel(programs, *(None if t is None else aligned(t) for t in tensors), *numbers)
