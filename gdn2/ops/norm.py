"""Normalisation over the last axis: RMS, gated RMS and L2.

Half types are computed in fp32 throughout and rounded once, at the end.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm
from torch.nn.functional import silu

from gdn2.ops.norm_op import add_normalize, kernels_take, normalize
from gdn2.ops.packing import FLOATS, check_operand

GateActivation = Literal["silu", "sigmoid"]
L2_EPS = 1e-6

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid}


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return x / sqrt(mean x² + eps) ⊙ weight, shaped as x; weight is [channels]."""
    _check(x, weight, eps)
    if kernels_take(x, None, weight):
        return normalize(x, None, weight, eps, False, False)[0]
    return _normalize(_widen(x), weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm; one kernel makes both, and another the gradients of both."""
    if x.shape == delta.shape and x.dtype == delta.dtype:
        _check(x, weight, eps)
        if kernels_take(x, delta, weight):
            return _add_by_kernel(x, delta, weight, eps)
    total = x + delta
    return total, rms_norm(total, weight, eps)


def _add_by_kernel(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return add_normalize(x, delta, weight, eps)[:2]
    from gdn2.ops.triton import norm  # noqa: PLC0415 (optional dependency)

    with torch.cuda.device_of(x):  # an operator would take longer to call than the kernel to run
        return norm.add(x, delta, weight, eps)[:2]


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
    _check(x, weight, eps)
    check_operand("gate", gate, tuple(x.shape), x.device)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {list(_ACTIVATIONS)}")
    if kernels_take(x, gate, weight):
        return normalize(x, gate, weight, eps, activation == "silu", gate_first)[0]
    wide = _widen(x)
    gain = _ACTIVATIONS[activation](gate.to(wide.dtype))
    if gate_first:
        return _normalize(wide * gain, weight, eps).to(x.dtype)
    return (_normalize(wide, weight, eps) * gain).to(x.dtype)


def l2_normalize(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """Return x / sqrt(Σ x² + eps), shaped as x.

    With eps inside the root a row of zeros gives zeros and the finite gradient dy / sqrt(eps).
    """
    _check(x, None, eps)
    wide = _widen(x)
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)).to(x.dtype)


def _normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def _widen(x: Tensor) -> Tensor:
    """Return x in the dtype to compute in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(x: Tensor, weight: Tensor | None, eps: float) -> None:
    if x.ndim < 1 or x.dtype not in FLOATS:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, expected floating point [..., channels]"
        )
    if weight is not None:
        check_operand("weight", weight, (x.shape[-1],), x.device)
    if not eps > 0:
        raise ValueError(f"eps is {eps}, expected more than 0")
