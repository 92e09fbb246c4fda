"""The activation of the MLP."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from gdn2.ops.backends import why_not


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ⊙ up, rounded once where a kernel computes it, which has no gradients."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        spaced = gate.stride(-1) == up.stride(-1) == 1 and gate.numel() > 0
        if spaced and why_not("triton", gate.device, gate.dtype, ("swiglu",)) is None:
            from gdn2.ops.triton import swiglu as kernel  # noqa: PLC0415 (optional dependency)

            return kernel.swiglu(gate, up)
    return silu(gate) * up
