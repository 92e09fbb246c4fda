"""What goes wrong in a run: requests to stop, and numbers that are none."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gdn2.data.batch import Batch
from gdn2.models.language_model import LanguageModel
from gdn2.training.shard import reshard
from gdn2.training.step import StepResult, loss_of
from gdn2.training.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 1.0  # seconds


class TrainingError(RuntimeError):
    """The run cannot go on; its checkpoints are as they were."""


def is_lack_of_memory(failure: RuntimeError) -> bool:
    """Whether an allocator has refused; the one of CPUs has no class of its own for it."""
    is_cpu = "DefaultCPUAllocator" in str(failure)
    return is_cpu or isinstance(failure, torch.OutOfMemoryError)


def is_lack_of_others(failure: RuntimeError) -> bool:
    """Whether a process that trains along has ended; gloo has no class of its own for it."""
    return "gloo/transport" in str(failure) and "by peer" in str(failure)


class StopRequest:
    """Set by the first SIGTERM or Ctrl-C inside a `with`; another, later one interrupts at once.

    torchrun passes on a signal that its processes have had already, so what comes right after the first is the same.
    """

    def __init__(self, *, said: bool = False) -> None:
        """With `said`, the first is answered at once: a step may take long."""
        self.by: str | None = None
        self._said = said
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.by is not None

    def __enter__(self) -> "StopRequest":
        if current_thread() is main_thread():  # no other may
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.by is None:
            self.by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._since = time.monotonic()
            if self._said:  # past Python's buffers, which may be in use
                line = f"\n{self.by}: saving after this step; again leaves at once\n"
                with suppress(OSError):  # Ctrl-C has ended whoever read it, such as `tee`, as well
                    os.write(2, line.encode())
        elif time.monotonic() - self._since > SAME_SIGNAL:
            raise KeyboardInterrupt


def diagnose(model: LanguageModel, batch: Batch, result: StepResult, world: World) -> str:
    """Where numbers that are none come from, in one line; every process takes part."""
    parameters = dict(model.named_parameters())
    broken = _first(parameters, lambda name: parameters[name], world)
    if broken is not None:
        return f"the parameter {broken} is not finite"
    block = _first_broken_block(model, batch, world)
    if block is not None:
        return f"the output of block {block} is the first that is not finite, all weights are"
    # Gradients flow from the last parameter to the first, so the last broken one is where it began.
    broken = _first(reversed(parameters), lambda name: parameters[name].grad, world)
    if broken is not None:
        return f"the gradient of {broken} is the first that is not finite, all weights are"
    return f"loss {result.loss:g}, norm of the gradient {result.gradient_norm:g}, every part finite"


def _first(names: Any, tensor: Callable[[str], Tensor | None], world: World) -> str | None:
    """The first name whose tensor is not finite on some process."""
    broken = (name for name in names if world.any(not _is_finite(tensor(name))))
    return next(broken, None)


def _first_broken_block(model: LanguageModel, batch: Batch, world: World) -> int | None:
    finite: list[bool] = []

    def look(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Any]) -> None:
        finite.append(_is_finite(output[0]) and _is_finite(output[1]))

    hooks = [block.register_forward_hook(look) for block in model.blocks]
    try:
        with torch.no_grad():
            loss_of(model, batch, world.device)
    finally:
        reshard(model)
        for hook in hooks:
            hook.remove()
    return next((i for i, whole in enumerate(finite) if world.any(not whole)), None)


def _is_finite(x: Tensor | None) -> bool:
    if x is None:
        return True
    local = x.to_local() if isinstance(x, DTensor) else x
    return bool(local.isfinite().all())
