"""The scans as CUDA kernels (`forward_scan.cu`, `reverse_scan.cu`, `plain_scan.cu`)."""

from collections.abc import Sequence

from torch import Tensor

from gdn2.ops.cuda.build import Kernel
from gdn2.ops.cuda.launch import FORWARD, PLAIN, REVERSE, aligned, loaded, value_channels
from gdn2.ops.operands import Operands

VALUES = 64  # channels of a program of the scans


def forward(
    x: Operands, rows: int, tensors: Sequence[Tensor | None], states: bool, run: bool
) -> None:
    """Outputs and final states, or the states at chunk starts and the residuals, of so many heads of sequences.

    Without `run` the kernel is only made ready; so with the others.
    """
    start(loaded(FORWARD, x, STATES=int(states)), rows * parts(x, VALUES), tensors, run)


def reverse(x: Operands, rows: int, tensors: Sequence[Tensor | None], run: bool) -> None:
    """Gradients of residuals, of states at chunk ends and of the initial states."""
    start(loaded(REVERSE, x), rows * parts(x, VALUES), tensors, run)


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
