"""Which implementation of the operator runs, and why."""

import warnings
from functools import cache

import torch

BACKENDS = ("auto", "triton", "torch", "reference")


def why_not(backend: str, device: torch.device) -> str | None:
    """The reason why a backend cannot run on a device; None if it can."""
    if backend == "triton":
        return "this version has no Triton kernels"
    return None


def choose(backend: str, device: torch.device) -> str:
    """Resolve "auto" and refuse what cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        reason = why_not("triton", device)
        if reason is None:
            return "triton"
        if device.type == "cuda":
            _say_once(f"gdn2 runs its torch backend on {device}: {reason}")
        return "torch"
    reason = why_not(backend, device)
    if reason is not None:
        raise ValueError(f"backend: got {backend!r}, but {reason}; expected 'auto' or 'torch'")
    return backend


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
