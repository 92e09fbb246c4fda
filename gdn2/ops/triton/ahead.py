"""Kernels compiled side by side: a first call waits for the slowest of them, and not for all in turn."""

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime import _async_compile

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)
_done: set[Hashable] = set()


def over(kernel: Any, *grid: int) -> Callable[..., Any]:
    """The kernel over a grid of programs; inside `compile_together` it is compiled and not started."""
    return partial(kernel.warmup, grid=grid) if _compiling.get() else kernel[grid]


def compile_together(kind: Hashable, device: torch.device, work: Callable[[], object]) -> None:
    """Compile all kernels that `work` starts, the first time that this kind of work is seen on a device.

    Triton's compiler leaves Python's lock alone most of the time, so threads are enough. What is already in its cache
    on disk is only read. The results of `work` mean nothing; a kernel that does not compile says so when it is started.
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
        ):
            work()
    finally:
        _compiling.reset(token)
