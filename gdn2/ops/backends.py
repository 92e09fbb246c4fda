"""Which implementation of the operator runs, and why."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from gdn2.ops.arguments import require
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


@dataclass(eq=False)
class _Word:
    """What somebody asked for, told from others who ask for the same."""

    backend: str


# For the whole process: backwards run in threads of their own. The last counts.
_in_force = [_Word("auto")]


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Let this backend be what "auto" means until the block ends, for models too.

    With "torch" or "reference" no kernel of this package runs meanwhile, of convolutions and norms either, so that a
    result can be compared with one in which none had a part. What was compiled before may stay as it was compiled.
    """
    require(backend in BACKENDS, "backend", repr(backend), f"one of {', '.join(BACKENDS)}")
    word = _Word(backend)
    _in_force.append(word)
    try:
        yield
    finally:
        _in_force.remove(word)  # others in other threads may have come later


def in_force() -> str:
    """The backend that "auto" means now, "auto" itself where nobody said."""
    return _in_force[-1].backend


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
    lack = _lack(device, dtype)
    if lack is not None:
        return lack
    wrong = [name for name in kernels if not trusted(name, device)]
    return f"gdn2 doctor found wrong results here from {', '.join(wrong)}" if wrong else None


def _lack(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel runs, whichever it is."""
    if in_force() in ("torch", "reference"):
        return f"gdn2.using({in_force()!r}) is in force"
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
    require(backend in BACKENDS, "backend", repr(backend), f"one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = in_force()
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
