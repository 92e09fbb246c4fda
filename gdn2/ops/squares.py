"""The sum of the squares of many tensors, such as all gradients of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn2.ops.backends import why_not

DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16  # bytes that the kernel reads at once


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """In fp32, on a device; nothing here waits for a GPU. Those of one dtype are looked at together."""
    total = torch.zeros((), device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        if x.numel():  # a process may have no row of a small matrix
            by_dtype.setdefault(x.dtype, []).append(x)
    for alike in by_dtype.values():
        if all(kernel_takes(x) for x in alike):
            from gdn2.ops.triton import squares  # noqa: PLC0415 (optional dependency)

            total += squares.sum_of_squares(alike)
        else:
            total += torch.stack(torch._foreach_norm(alike, 2, torch.float32)).square().sum()
    return total


def kernel_takes(x: Tensor) -> bool:
    """Whether the kernel can run on a tensor, and is to be trusted."""
    fits = x.dtype in DTYPES and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return fits and why_not("triton", x.device, kernels=("squares",)) is None
