"""One step of the optimiser."""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.data.batch import IGNORED, Batch
from gdn2.layers.layout import Layout
from gdn2.models.language_model import LanguageModel
from gdn2.ops.packing import moved_offsets
from gdn2.training.optimiser import ClippingAdamW
from gdn2.training.shard import accumulate, gradient_norm, synchronise
from gdn2.training.world import World


class StepResult(NamedTuple):
    """What a step found, the same on every process."""

    loss: float  # mean over all targets of the step that count
    gradient_norm: float  # before clipping

    @property
    def is_finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.gradient_norm)


def train_step(
    model: LanguageModel,
    optimiser: ClippingAdamW,
    world: World,
    batches: Sequence[Batch],
    *,
    lr: float,
    clip: float,
) -> StepResult:
    """Move the weights by the mean gradient over all targets of this process's batches and of the others'.

    A loss or a norm that is no number moves nothing; its gradients are left for a diagnosis, until the next step.
    """
    optimiser.zero_grad()
    counts = [int((batch.targets != IGNORED).sum()) for batch in batches]
    # Gradients are averaged over processes, so a batch weighs by its part of a process's mean number of targets. It is
    # filled in, not copied: a copy would wait until the weights of the step before have moved.
    share = world.mean(torch.full((), float(sum(counts)), device=world.device)).clamp(min=1)
    total = torch.zeros((), device=world.device)
    for i, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        accumulate(model, last=i == len(batches) - 1)
        loss = loss_of(model, batch, world.device) * (count / share)
        loss.backward()
        total += loss.detach()
    synchronise(model, world)
    loss, norm = world.mean(total), gradient_norm(model, world).to(total)
    found = Reading(torch.stack([loss, norm]))
    optimiser.step_clipped(lr, norm, clip, loss.isfinite() & norm.isfinite())
    return StepResult(*found.wait())


class Reading:
    """Numbers on their way to the host, which may queue further work before it waits for them.

    So it waits for the gradients only, and prepares the next step while a GPU still moves the weights of this one.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.arrived = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrived = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> list[float]:
        """The numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.tolist()


def loss_of(model: LanguageModel, batch: Batch, device: torch.device) -> Tensor:
    """The mean loss over the batch's targets that count."""
    ids, layout = on_device(batch, device)
    loss = model(ids, layout=layout, targets=batch.targets.to(device, non_blocking=True)).loss
    assert loss is not None
    return loss


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Layout]:
    """The batch's tokens where the model is, and where they lie."""
    ids = batch.ids.to(device, non_blocking=True)
    if batch.cu_seqlens is None:
        return ids, Layout.dense(*ids.shape)
    cu_seqlens = moved_offsets(batch.cu_seqlens, ids.shape[1], device)
    return ids, Layout.packed(cu_seqlens, ids.shape[1])
