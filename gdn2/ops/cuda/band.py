"""Attention over a sliding window by cuDNN, which knows windows; torch does not tell it of them.

So it is asked through `nvidia-cudnn-frontend`, a package that is not required: without it a window is two triangles
(`gdn2.ops.window_attention`). Tensors are [batch, length, heads, d], logarithms of normalisers [batch, heads, length].
"""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}  # as the package names them
ALIGNMENT = 16  # bytes


class _Handles(threading.local):
    """Those of one thread, which no other may use."""

    def __init__(self) -> None:
        self.known: dict[torch.device, Any] = {}


_handles = _Handles()


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

    def __call__(self, **given: Tensor) -> None:
        """Run it on torch's stream."""
        package, device = frontend(), given["q"].device
        assert package is not None
        with torch.cuda.device(device):
            handle = _handle(device)
            package.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            room = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=device)
            named = {self.tensors[name]: x for name, x in given.items()}
            self.graph.execute(named, room, handle=handle)


@cache
def frontend() -> Any | None:
    """The package, where it is installed and speaks with the cuDNN that torch uses."""
    try:
        import cudnn  # noqa: PLC0415 (optional dependency)

        found = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    return cudnn if found == torch.backends.cudnn.version() else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Output and logarithms of the normalisers; None where cuDNN is not to be asked."""
    if not is_there(q):
        return None
    given = {"q": lying(q), "k": lying(k), "v": lying(v)}
    plan = forward_plan(_problem(q, [*given.values()], window, scale))
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
    plan = backward_plan(_problem(q, [*given.values()], window, scale))
    if plan is None:
        return None
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    plan(**given, log=log.contiguous(), dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


def is_there(q: Tensor) -> bool:
    """Whether the package is, for a GPU and a dtype that it takes."""
    return q.is_cuda and q.dtype in DTYPES and frontend() is not None


def lying(x: Tensor) -> Tensor:
    """As cuDNN takes it: channels next to each other, everything at multiples of 16 bytes, nothing upon another."""
    *strides, along = x.stride()
    aligned = [x.data_ptr(), *(stride * x.element_size() for stride in strides)]
    fits = along == 1 and all(strides) and not any(place % ALIGNMENT for place in aligned)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _problem(q: Tensor, operands: Sequence[Tensor], window: int, scale: float) -> Problem:
    batch, length, heads, width = q.shape
    strides = tuple(x.stride() for x in operands)
    exact = torch.are_deterministic_algorithms_enabled()
    shape = (batch, length, heads, width)
    return Problem(q.device, q.dtype, shape, strides, window, scale, exact)


@lru_cache(maxsize=64)
def forward_plan(problem: Problem) -> Plan | None:
    """Prepare for the output; None, said once, where cuDNN cannot."""
    return _built(problem, _forward_graph)


@lru_cache(maxsize=64)
def backward_plan(problem: Problem) -> Plan | None:
    """Prepare for the gradients."""
    return _built(problem, _backward_graph)


def _built(problem: Problem, make: Callable[[Any, Any, Problem], dict[str, Any]]) -> Plan | None:
    package = frontend()
    assert package is not None
    modes = [package.heur_mode.A, package.heur_mode.FALLBACK]
    try:
        with torch.cuda.device(problem.device):
            graph = package.pygraph(
                io_data_type=getattr(package.data_type, DTYPES[problem.dtype]),
                intermediate_data_type=package.data_type.FLOAT,
                compute_data_type=package.data_type.FLOAT,
                handle=_handle(problem.device),
            )
            tensors = make(package, graph, problem)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans(modes)
            graph.check_support()
            graph.build_plans()
            return Plan(graph, tensors, graph.get_workspace_size())
    except Exception as failure:  # its errors have no class of their own
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        warnings.warn(f"gdn2 attends without cuDNN's windows: {reason}", stacklevel=2)
        return None


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


def _handle(device: torch.device) -> Any:
    """The one of this thread on a device, which is the current one."""
    if device not in _handles.known:
        package = frontend()
        assert package is not None
        _handles.known[device] = package.create_handle()
    return _handles.known[device]
