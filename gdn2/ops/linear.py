"""A linear map as inference calls it: a bias is added before the result is rounded."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gdn2.ops.backends import why_not


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return weight · x + bias for x [..., inputs]; on a GPU a kernel takes a single row that needs no gradients."""
    operands = [t for t in (x, weight, bias) if t is not None]
    alike = x.is_cuda and all(t.dtype == x.dtype for t in operands)
    alone = alike and not torch.is_grad_enabled() and x.numel() == x.shape[-1]
    if alone and not torch.compiler.is_compiling() and _kernel_takes(operands):
        from gdn2.ops.triton import matvec  # noqa: PLC0415 (optional dependency)

        return matvec.matvec(x, weight, bias)
    return F.linear(x, weight, bias)


def _kernel_takes(operands: list[Tensor]) -> bool:
    x, weight, *_ = operands
    meet = x.shape[-1] == weight.shape[1]  # of others torch says what is wrong
    fits = meet and x.element_size() == 2 and all(t.is_contiguous() for t in operands)
    return fits and why_not("triton", x.device, x.dtype, ("matvec",)) is None
