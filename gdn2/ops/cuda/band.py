"""Attention over a sliding window by cuDNN, which knows windows; torch does not tell it of them.

So it is asked through `nvidia-cudnn-frontend`, a package that is not required: without it a window is two triangles
(`gdn2.ops.window_attention`). Tensors are [batch, length, heads, d], logarithms of normalisers [batch, heads, length].
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn2.ops.trust import trusted
from gdn2.ops.versions import installed

NAME = "band"  # to be trusted or not
PACKAGE, LEAST = "nvidia-cudnn-frontend", (1, 14)  # others knew no such windows, or by other names
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}  # as the package names them
ALIGNMENT = 16  # bytes
MOST_PLANS = 256  # that are kept: sizes of calls may have no end


class Problem(NamedTuple):
    """What is prepared for: one call with operands of these sizes that lie like this."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, int, int, int]  # batch, length, heads, d
    strides: tuple[tuple[int, ...], ...]  # of each operand
    window: int
    scale: float
    deterministic: bool


class Plan(NamedTuple):
    """A graph that was built, its tensors by their names, and the bytes it needs beside them."""

    graph: Any
    tensors: Mapping[str, Any]
    workspace: int
    built_by: "Handle"  # which lives as long, whatever becomes of its thread

    def __call__(self, **given: Tensor) -> None:
        """Run it on torch's stream."""
        device = given["q"].device
        with torch.cuda.device(device):
            handle = handle_on(device).value
            stream = torch.cuda.current_stream().cuda_stream
            frontend().set_stream(handle=handle, stream=stream)
            room = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=device)
            named = {self.tensors[name]: x for name, x in given.items()}
            self.graph.execute(named, room, handle=handle)


Make = Callable[[Any, Any, Problem], dict[str, Any]]
_plans: dict[tuple[Make, Problem], Plan | None] = {}  # None where cuDNN cannot
# By their graphs: a CUDA graph that was captured may run their code for as long as the process does.
_captured: dict[int, Plan] = {}


def lack(device: torch.device) -> str | None:
    """Why cuDNN is not told of windows on a device; None if it is."""
    if device.type != "cuda":
        return f"cuDNN needs a CUDA GPU, not {device.type}"
    return lack_of_package() or (
        None if trusted(NAME, device) else "gdn2 doctor found its windows wrong here"
    )


@cache
def lack_of_package() -> str | None:
    """Why the package is of no use; where it is installed, that is said."""
    if find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    try:
        found, usual = frontend().backend_version(), torch.backends.cudnn.version()
        reason = f"it speaks with cuDNN {found}, and torch with {usual}" if found != usual else None
        version = installed(PACKAGE)
        if version is not None and tuple(map(int, version.split(".")[:2])) < LEAST:
            reason = f"it is version {version}, expected at least {'.'.join(map(str, LEAST))}"
    except Exception as failure:  # whatever an import may raise: it loads libraries, and asserts
        reason = f"{type(failure).__name__}: {failure}".strip().splitlines()[0]
    if reason is None:
        return None
    reason = f"nvidia-cudnn-frontend is of no use: {reason}"
    warnings.warn(f"gdn2 attends without cuDNN's windows: {reason}", stacklevel=2)
    return reason


def frontend() -> Any:
    """The package."""
    import cudnn  # noqa: PLC0415 (optional dependency)

    return cudnn


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Output and logarithms of the normalisers; None where cuDNN is not to be asked."""
    if not is_there(q):
        return None
    given = {"q": lying(q), "k": lying(k), "v": lying(v)}
    plan = planned(_forward_graph, _problem([*given.values()], window, scale))
    if plan is None:
        return None
    batch, length, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    y, log = q.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=wide)
    plan(**given, y=y, log=log)
    return y, log


def differentiate(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of q, k and v; None where cuDNN is not to be asked."""
    if not is_there(q):
        return None
    operands = {"q": q, "k": k, "v": v, "y": y, "dy": dy}
    given = {name: lying(x) for name, x in operands.items()}
    exact = torch.are_deterministic_algorithms_enabled()
    plan = planned(_backward_graph, _problem([*given.values()], window, scale, exact))
    if plan is None:
        return None
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    plan(**given, log=log.contiguous(), dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


def is_there(q: Tensor) -> bool:
    """Whether cuDNN may be told of windows, on a device and in a dtype that it takes."""
    return q.dtype in DTYPES and lack(q.device) is None


def lying(x: Tensor) -> Tensor:
    """As cuDNN takes it: channels next to each other, everything at multiples of 16 bytes, nothing upon another."""
    *strides, along = x.stride()
    aligned = [x.data_ptr(), *(stride * x.element_size() for stride in strides)]
    fits = along == 1 and all(strides) and not any(place % ALIGNMENT for place in aligned)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _problem(
    operands: Sequence[Tensor], window: int, scale: float, deterministic: bool = False
) -> Problem:
    q, strides = operands[0], tuple(x.stride() for x in operands)
    batch, length, heads, width = q.shape
    shape = (batch, length, heads, width)
    return Problem(q.device, q.dtype, shape, strides, window, scale, deterministic)


def planned(make: Make, problem: Problem) -> Plan | None:
    """The plan of a problem; None where cuDNN has none, which is said once, or while a graph is captured."""
    key, capturing = (make, problem), torch.cuda.is_current_stream_capturing()
    if key not in _plans:
        if capturing:
            return None
        while len(_plans) >= MOST_PLANS:
            del _plans[next(iter(_plans))]  # the oldest
        try:
            _plans[key] = _build(make, problem)
        except (frontend().cudnnGraphNotSupportedError, RuntimeError) as failure:
            _plans[key] = None
            reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            warnings.warn(f"gdn2 attends without cuDNN's windows: {reason}", stacklevel=2)
    plan = _plans[key]
    if capturing and plan is not None:
        _captured[id(plan.graph)] = plan
    return plan


def _build(make: Make, problem: Problem) -> Plan:
    package = frontend()
    with torch.cuda.device(problem.device):
        handle = handle_on(problem.device)
        graph = package.pygraph(
            io_data_type=getattr(package.data_type, DTYPES[problem.dtype]),
            intermediate_data_type=package.data_type.FLOAT,
            compute_data_type=package.data_type.FLOAT,
            handle=handle.value,
        )
        tensors = make(package, graph, problem)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([package.heur_mode.A, package.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return Plan(graph, tensors, graph.get_workspace_size(), handle)


def _forward_graph(package: Any, graph: Any, problem: Problem) -> dict[str, Any]:
    tensors = _operands(graph, problem, ("q", "k", "v"))
    y, log = graph.sdpa(**tensors, generate_stats=True, **_band(package, problem))
    _rows(y, problem)
    log.set_output(True).set_data_type(package.data_type.FLOAT)
    return {**tensors, "y": y, "log": log}


def _backward_graph(package: Any, graph: Any, problem: Problem) -> dict[str, Any]:
    tensors = _operands(graph, problem, ("q", "k", "v", "y", "dy"))
    batch, length, heads, _ = problem.shape
    log = graph.tensor(
        name="log",
        dim=[batch, heads, length, 1],
        stride=[heads * length, length, 1, 1],
        data_type=package.data_type.FLOAT,
    )
    q, k, v, y, dy = tensors.values()
    found = graph.sdpa_backward(
        q=q, k=k, v=v, o=y, dO=dy, stats=log,
        use_deterministic_algorithm=problem.deterministic, **_band(package, problem),
    )  # fmt: skip
    for gradient in found:
        _rows(gradient, problem)
    return {**tensors, "log": log, **dict(zip(("dq", "dk", "dv"), found, strict=True))}


def _band(package: Any, problem: Problem) -> dict[str, Any]:
    """A token sees itself and the `window` − 1 tokens before it."""
    return {
        "attn_scale": problem.scale,
        "diagonal_alignment": package.diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": problem.window,
        "diagonal_band_right_bound": 0,
    }


def _operands(graph: Any, problem: Problem, names: Sequence[str]) -> dict[str, Any]:
    dims = _by_heads(problem.shape)
    return {
        name: graph.tensor(name=name, dim=dims, stride=_by_heads(strides))
        for name, strides in zip(names, problem.strides, strict=True)
    }


def _rows(result: Any, problem: Problem) -> None:
    """A result without gaps."""
    _, length, heads, width = problem.shape
    strides = (length * heads * width, heads * width, width, 1)
    result.set_output(True).set_dim(_by_heads(problem.shape)).set_stride(_by_heads(strides))


def _by_heads(sizes: Sequence[int]) -> list[int]:
    """From [batch, length, heads, d] to [batch, heads, length, d]."""
    batch, length, heads, width = sizes
    return [batch, heads, length, width]


class Handle:
    """What cuDNN is called with, given back with the thread that it is for."""

    def __init__(self) -> None:
        package = frontend()
        self.value = package.create_handle()
        # not when Python ends: the driver may have gone by then
        weakref.finalize(self, package.destroy_handle, self.value).atexit = False


class _Handles(threading.local):
    """Those of one thread, which no other may use."""

    def __init__(self) -> None:
        self.known: dict[torch.device, Handle] = {}


_handles = _Handles()


def handle_on(device: torch.device) -> Handle:
    """The one of this thread on a device, which is the current one."""
    if device not in _handles.known:
        _handles.known[device] = Handle()
    return _handles.known[device]
