"""A linear map as inference calls it: what is to be added is added before the result is rounded."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gdn2.ops.backends import why_not


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return weight · x + bias + residual for x [..., inputs].

    On a GPU, where gradients are not needed, a kernel takes a single row and cuBLAS adds the residual of several.
    """
    operands = [t for t in (x, weight, bias, residual) if t is not None]
    alike = x.is_cuda and all(t.dtype == x.dtype for t in operands)
    if alike and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if x.numel() == x.shape[-1] and _kernel_takes(operands):
            from gdn2.ops.triton import matvec  # noqa: PLC0415 (optional dependency)

            return matvec.matvec(x, weight, bias, residual)
        if residual is not None and bias is None:
            flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t())
            return flat.view_as(residual)
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def _kernel_takes(operands: list[Tensor]) -> bool:
    first = operands[0]
    fits = first.element_size() == 2 and all(t.is_contiguous() for t in operands)
    return fits and why_not("triton", first.device, first.dtype, ("matvec",)) is None
