"""The sum of the squares of many tensors, such as all gradients of a model."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn2.ops.backends import why_not

# What kernels over many tensors take, and the bytes they read at once.
DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16
_failed: set[torch.device] = set()  # where the kernel could not be compiled or started


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """In fp32, of tensors on one device; nothing here waits for a GPU. Those of one dtype are looked at together."""
    total = torch.zeros((), device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        if x.numel():  # a process may have no row of a small matrix
            by_dtype.setdefault(x.dtype, []).append(x)
    for alike in by_dtype.values():
        found = _by_kernel(alike) if kernel_takes(alike) else None
        if found is None:
            found = torch.stack(torch._foreach_norm(alike, 2, torch.float32)).square().sum()
        total += found
    return total


def kernel_takes(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can run on tensors of one dtype, and is to be trusted."""
    device = tensors[0].device
    if device in _failed or why_not("triton", device, kernels=("squares",)) is not None:
        return False
    return tensors[0].dtype in DTYPES and all(
        x.device == device and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 for x in tensors
    )


def _by_kernel(tensors: Sequence[Tensor]) -> Tensor | None:
    """The sum; None where the kernel fails, which is said once."""
    from gdn2.ops.triton import squares  # noqa: PLC0415 (optional dependency)

    try:
        found: Tensor = squares.sum_of_squares(tensors)
    except Exception as failure:  # whatever a compiler may raise
        _failed.add(tensors[0].device)
        warnings.warn(f"gdn2 leaves sums of squares to torch: {failure}", stacklevel=3)
        return None
    return found
