"""The gradient stage as one CUDA kernel (`gradient.cu`): which operands it takes, and how it is started."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn2.ops.cuda.build import CudaError, Kernel
from gdn2.ops.operands import Operands
from gdn2.ops.trust import trusted

NAME = "gradient"
WIDTHS = (64, 128)
CHUNK = 64
PROGRAMS = 2  # that share a multiprocessor: 128 registers a thread
_kernels: dict[tuple[int, int, torch.device], Kernel | None] = {}


def takes(x: Operands, chunk: int) -> bool:
    """Whether the kernel is for such operands, on such a device: bf16, all gates full, a width it is compiled for."""
    if x.b is None or x.w is None or chunk != CHUNK or not x.q.is_cuda:
        return False
    if torch.cuda.get_device_capability(x.q.device) < (9, 0):
        return False
    narrow = (x.q, x.k, x.v, x.b, x.w)
    return (
        x.q.shape[2] in WIDTHS
        and all(t.shape == x.q.shape for t in (*narrow, x.g))
        and all(t.dtype == torch.bfloat16 for t in narrow)
        and x.g.dtype == torch.float32
        and all(t.data_ptr() % 16 == 0 for t in (*narrow, x.g))
        and trusted(NAME, x.q.device)
        and loaded(x) is not None
    )


def loaded(x: Operands) -> Kernel | None:
    """The kernel for these head counts and widths; None where it cannot be compiled or loaded, or not now."""
    key = (x.q.shape[1], x.q.shape[2], x.q.device)
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing can be loaded meanwhile
        _kernels[key] = load(*key)
    return _kernels[key]


def load(heads: int, width: int, device: torch.device) -> Kernel | None:
    """Compile and load; a failure is said once, and the Triton kernels do the work."""
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    if shared_memory(width) > properties.shared_memory_per_block_optin:  # type: ignore[attr-defined]
        return None
    options = [
        f"--gpu-architecture=sm_{major}{minor}",
        f"-DD={width}",
        f"-DHEADS={heads}",
        f"-DPROGRAMS={PROGRAMS}",
        "--std=c++17",
    ]
    try:
        with torch.cuda.device(device):
            return Kernel(NAME, options, threads=2 * width, shared_memory=shared_memory(width))
    except CudaError as failure:
        warnings.warn(f"gdn2 uses Triton for gradients on {device}: {failure}", stacklevel=2)
        return None


def shared_memory(width: int) -> int:
    """MEMORY of `gradient.cu`: five tiles of values, three squares, a diagonal, and seven numbers for some channels."""
    warps = width // 16
    return 5 * 2 * CHUNK * width + 3 * 2 * CHUNK * CHUNK + 4 * CHUNK + warps * 7 * 8 * 4


def aligned(x: Tensor) -> Tensor:
    """The kernel loads up to 16 bytes at once; a part of another tensor may begin anywhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def gradients(
    x: Operands,
    A: Tensor,
    deep: Tensor,
    start: Tensor,
    length: Tensor,
    do: Tensor,
    between: Sequence[Tensor],
    run: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """dq, dk, dv, dg, db, dw without what flows through deep rows, and dA_qk and dT where there are such rows.

    Between the scans and this are states at chunk starts, residuals, and gradients of states at chunk ends and of
    residuals. Without `run` the kernel is made ready and not started.
    """
    starts, R, ends, dR = between
    found = [torch.empty_like(t) for t in (x.q, x.k, x.v, x.g, x.b, x.w) if t is not None]
    scores = [A.new_empty(A.shape, dtype=torch.float32) for _ in range(2)]
    do = aligned(do)
    kernel, programs = loaded(x), A.shape[0] * A.shape[1]
    assert kernel is not None and x.b is not None and x.w is not None
    if run and programs:
        kernel(
            programs, x.q, x.k, x.v, x.g, x.b, x.w, do, A, R, dR, starts, ends, deep, start, length,
            *scores, *found, x.scale,
        )  # fmt: skip
    return found, scores
