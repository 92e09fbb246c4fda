"""Which implementation of the operator runs, and why."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from gdn2.ops.trust import TOGETHER, trusted

BACKENDS = ("auto", "triton", "torch", "reference")
# kernels of the chunkwise operator; the torch backend does the work of all of them if one is not to be trusted
STAGES = (
    "decays",
    "scores",
    "deep_scores",
    "solve",
    "scan",
    "scan_reverse",
    "gradient_values",
    "gradient_states",
    "gradient_keys",
    "deep_gradient",
)
RULE = (*STAGES, "table", TOGETHER)
_said: set[str] = set()


def why_not(
    backend: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kernels: Sequence[str] = RULE,
) -> str | None:
    """The reason why a backend cannot run on a device; None if it can.

    `kernels` are those that the caller would launch: one that `gdn2 doctor` found wrong on this GPU is a reason.
    """
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
    wrong = [name for name in kernels if not trusted(name, device)]
    return f"gdn2 doctor found wrong results here from {', '.join(wrong)}" if wrong else None


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


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=4)


# torch.compile calls these instead of tracing into them; its own decorator sets the same, at a second of imports
for _function in (why_not, _say_once):
    vars(_function)["_dynamo_marked_constant"] = True
