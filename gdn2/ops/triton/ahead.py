"""Kernels ahead of their time: compiled side by side, and started while the one before them ends."""

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import _async_compile

from gdn2.ops.triton.launch import capability

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)
_done: set[Hashable] = set()


def over(kernel: Any, *grid: int) -> Callable[..., Any]:
    """The kernel over a grid of programs; inside `compile_together` it is compiled and not started."""
    return partial(kernel.warmup, grid=grid) if _compiling.get() else kernel[grid]


def compiling() -> bool:
    """Whether this is inside `compile_together`, where nothing is started."""
    return _compiling.get()


def overlapping(device: torch.device) -> dict[str, bool]:
    """Options of a launch for kernels that may start early, and the constant that tells them to wait.

    Such a kernel calls `wait_for_the_last` before it reads what another has made. Hopper and newer GPUs can do it: the
    time to start a kernel, and in decoding the first weights it reads, then pass while the one before it runs.
    """
    if device.type != "cuda" or capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_the_last(PDL: tl.constexpr):
    """Let the next kernel start, and wait until the last one has written all it writes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def compile_together(kind: Hashable, device: torch.device, work: Callable[[], object]) -> None:
    """Compile all kernels that `work` starts, the first time that this kind of work is seen on a device.

    Triton's compiler leaves Python's lock alone most of the time, so threads are enough. What is already in its cache
    on disk is only read. The results of `work` mean nothing; a kernel that does not compile says so when it is started.
    Where memory has no room for all of it, such as a backward that may never come, the rest is compiled when it is due.
    """
    if device.type != "cuda" or (kind, device) in _done:
        return
    if torch.cuda.is_current_stream_capturing() or _async_compile.active_mode.get() is not None:
        return
    _done.add((kind, device))
    token = _compiling.set(True)
    try:
        with (
            ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
            suppress(torch.OutOfMemoryError),
        ):
            work()
    finally:
        _compiling.reset(token)
