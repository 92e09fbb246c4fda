"""Normalisation over the last axis: RMS, gated RMS and L2.

Half types are computed in fp32 throughout and rounded once, at the end.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm
from torch.nn.functional import silu

from gdn2.ops.packing import FLOATS, check_operand

GateActivation = Literal["silu", "sigmoid"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid}


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return x / sqrt(mean x² + eps) ⊙ weight, shaped as x; weight is [channels]."""
    wide = _widen(x, weight, eps)
    return _normalize(wide, weight, eps).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: GateActivation = "silu",
    gate_first: bool = False,
) -> Tensor:
    """Return norm(x) ⊙ weight ⊙ act(gate), or norm(x ⊙ act(gate)) ⊙ weight with the gate first.

    The delta family normalises each head and then gates; Mamba-2 gates and then normalises.
    """
    wide = _widen(x, weight, eps)
    check_operand("gate", gate, tuple(x.shape), x.device)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {list(_ACTIVATIONS)}")
    gain = _ACTIVATIONS[activation](gate.to(wide.dtype))
    if gate_first:
        return _normalize(wide * gain, weight, eps).to(x.dtype)
    return (_normalize(wide, weight, eps) * gain).to(x.dtype)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(Σ x² + eps), shaped as x.

    With eps inside the root a row of zeros gives zeros and the finite gradient dy / sqrt(eps).
    """
    wide = _widen(x, None, eps)
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)).to(x.dtype)


def _normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def _widen(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Check the operands and return x in the dtype to compute in."""
    if x.ndim < 1 or x.dtype not in FLOATS:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, expected floating point [..., channels]"
        )
    if weight is not None:
        check_operand("weight", weight, (x.shape[-1],), x.device)
    if not eps > 0:
        raise ValueError(f"eps is {eps}, expected more than 0")
    return x.to(torch.promote_types(x.dtype, torch.float32))
