"""Which implementation of the operator runs, and why."""

import warnings
from functools import cache
from importlib.util import find_spec

import torch

BACKENDS = ("auto", "triton", "torch", "reference")


def why_not(backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """The reason why a backend cannot run on a device; None if it can."""
    if backend != "triton":
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA GPU, not {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    if dtype == torch.float64:
        return "Triton kernels do not take fp64"
    return None


def choose(backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Resolve "auto" and refuse what cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        reason = why_not("triton", device, dtype)
        if reason is None:
            return "triton"
        if device.type == "cuda":
            _say_once(f"gdn2 runs its torch backend on {device}: {reason}")
        return "torch"
    reason = why_not(backend, device, dtype)
    if reason is not None:
        raise ValueError(f"backend: got {backend!r}, but {reason}; expected 'auto' or 'torch'")
    return backend


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
