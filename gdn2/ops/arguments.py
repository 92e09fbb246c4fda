"""Checks of the operator's arguments: each mistake is one line that names the argument, its value and what fits."""

import math
import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

CHUNK_SIZES = (16, 32, 64, 128)
SOLVE_PRECISIONS = ("ieee", "tf32")
MAX_WIDTH = 256
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def state_dtype(q: Tensor) -> torch.dtype:
    """Dtype of states and accumulators: fp64 for fp64 operands, else fp32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def new_state(q: Tensor, v: Tensor, sequences: int) -> Tensor:
    """Empty memories [sequences, value heads, key width, value width]."""
    shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
    return q.new_zeros(shape, dtype=state_dtype(q))


def exact_products(device: torch.device) -> AbstractContextManager[None]:
    """Switch autocast off, which reaches inside custom operators: the rule chooses its own precision."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, w: Tensor | None
) -> None:
    """Check shapes, dtypes and devices of the six operands."""
    for name, x in {"q": q, "k": k, "v": v, "g": g, "b": b, "w": w}.items():
        if x is None and name in ("b", "w"):
            continue
        require(isinstance(x, Tensor), name, type(x).__name__, "a tensor")
        assert x is not None
        require(x.ndim == 4, name, ("shape", x), "[batch, length, heads, width]")
        require(x.dtype in DTYPES, name, x.dtype, "fp64, fp32, bf16 or fp16")
        require(x.device == q.device, name, f"device {x.device}", f"q's device {q.device}")
        batch, length = q.shape[:2]
        require(
            x.shape[0] == batch and x.shape[1] == length,
            name,
            ("shape", x),
            ("q's batch and length, q has", q),
        )
    for name, x in {"k": k, "v": v}.items():
        require(x.dtype == q.dtype, name, x.dtype, f"q's dtype {q.dtype}")
    for name, gate in {"g": g, "b": b, "w": w}.items():
        fits = gate is None or gate.dtype in (q.dtype, torch.float32)
        also = "" if q.dtype == torch.float32 else " or torch.float32"
        require(fits, name, None if gate is None else gate.dtype, f"{q.dtype}{also}")
    check_widths(q, k, v, g, b, w)


def check_widths(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, w: Tensor | None
) -> None:
    """Check that heads divide and that gates are as wide as what they gate, or one."""
    key_width, value_heads, value_width = q.shape[3], v.shape[2], v.shape[3]
    for name, width in {"q": key_width, "v": value_width}.items():
        require(1 <= width <= MAX_WIDTH, name, f"width {width}", f"a width from 1 to {MAX_WIDTH}")
    require(k.shape == q.shape, "k", ("shape", k), ("q's shape", q))
    for name, x in {"q": q, "g": g, "b": b}.items():
        if x is not None:
            fits = x.shape[2] > 0 and value_heads % x.shape[2] == 0
            require(fits, name, f"{x.shape[2]} heads", f"a divisor of v's {value_heads} heads")
    if w is not None:
        require(w.shape[2] == value_heads, "w", f"{w.shape[2]} heads", f"v's {value_heads} heads")
    for name, gate, width in (("g", g, key_width), ("b", b, key_width), ("w", w, value_width)):
        if gate is not None:
            # `in` fails where a compiler has no numbers
            fits = gate.shape[3] == 1 or gate.shape[3] == width
            require(fits, name, f"width {gate.shape[3]}", f"width {width} or 1")


def check_state(name: str, state: Tensor, sequences: int, q: Tensor, v: Tensor) -> None:
    """Check a recurrent state [sequences, value heads, key width, value width]."""
    require(isinstance(state, Tensor), name, type(state).__name__, "a tensor")
    shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
    require(tuple(state.shape) == shape, name, ("shape", state), shape)
    require(state.dtype == state_dtype(q), name, state.dtype, f"{state_dtype(q)}")
    require(state.device == q.device, name, f"device {state.device}", f"q's device {q.device}")


def check_decay(g: Tensor) -> None:
    """Check that no log-decay is positive; reads the values, so it waits for a GPU."""
    if g.numel() and not g.is_meta and (largest := float(g.detach().max())) > 0:
        require(False, "g", f"largest entry {largest:g}", "log-decays of at most 0")


def check_no_tangents(name: str, instead: str, *operands: Tensor | None) -> None:
    """Refuse forward-mode differentiation, whose tangents operators of our own would drop without a word."""
    carried = any(x is not None and has_tangent(x) for x in operands)
    expected = f"none: {instead} has the forward-mode derivative"
    require(not carried, name, "operands with tangents", expected)


def has_tangent(x: Tensor) -> bool:
    """Whether x is differentiated in forward mode; a compiler does not ask."""
    return not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None


def whole(name: str, value: Any) -> int:
    """Return an integer of any library as Python's own."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: got {value!r}, expected an integer") from None


def read_scale(scale: Any, q: Tensor) -> float:
    """Return the factor of the output, by default K^-0.5 for keys of width K."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    try:
        number = math.nan if isinstance(scale, (str, bytes)) else float(scale)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's of complex numbers
        number = math.nan
    if not -math.inf < number < math.inf:  # compilers know no `isfinite` of a number that changes
        raise ValueError(f"scale: got {scale!r}, expected a finite number")
    return number


Said = object | tuple[str, Tensor]  # words, or words and the tensor whose shape ends them


def require(holds: bool, name: str, value: Said, expected: Said) -> None:
    """Raise the one-line error unless it holds.

    Shapes are put into words only here: under `torch.compile` a number in a string is a constant, and each length would
    compile anew.
    """
    if not holds:
        raise ValueError(f"{name}: got {_words(value)}, expected {_words(expected)}")


def _words(said: Said) -> str:
    match said:
        case (str(words), Tensor() as x):
            return f"{words} {tuple(x.shape)}"
    return str(said)
