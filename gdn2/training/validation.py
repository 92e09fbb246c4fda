"""How well a model predicts rows it was not trained on."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gdn2.data.batch import IGNORED, Batch, Source
from gdn2.models.language_model import LanguageModel
from gdn2.training.shard import reshard
from gdn2.training.step import loss_of, on_device
from gdn2.training.world import World


@torch.no_grad()
def validate(
    model: LanguageModel,
    source: Source,
    world: World,
    *,
    rows: int,
    micro_rows: int,
    with_accuracy: bool,
) -> dict[str, float]:
    """The loss over the source's first rows and, where asked for, the part of targets that are likeliest.

    Every process makes as many calls as the others, for the model may be divided among them; calls past the last row
    count nothing.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # loss, right ones, targets
    stride = micro_rows * world.size
    for start in range(0, rows, stride):
        first = start + world.rank * micro_rows
        here = min(micro_rows, rows - first)
        batch = source.batch(first if here > 0 else 0, max(here, 1))
        loss, right = (_judged if with_accuracy else _measured)(model, batch, world.device)
        if here > 0:
            count = int((batch.targets != IGNORED).sum())
            sums[0] += loss.double() * count
            sums[1] += right
            sums[2] += count
    reshard(model)
    loss_sum, right_sum, targets = world.mean(sums).tolist()
    found = {"validation_loss": loss_sum / max(targets, 1)}
    if with_accuracy:
        found["validation_accuracy"] = right_sum / max(targets, 1)
    return found


def _measured(model: LanguageModel, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The mean loss, and no right answers, since logits of a large vocabulary are never held whole."""
    loss = loss_of(model, batch, device)
    return loss, torch.zeros_like(loss)


def _judged(model: LanguageModel, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The mean loss and how many targets are the likeliest token."""
    ids, layout = on_device(batch, device)
    logits = model(ids, layout=layout).logits
    assert logits is not None
    flat, targets = logits.flatten(0, 1).float(), batch.targets.flatten().to(device)
    right = ((flat.argmax(-1) == targets) & (targets != IGNORED)).sum()
    loss = cross_entropy(flat, targets, ignore_index=IGNORED)
    return loss.where((targets != IGNORED).any(), 0.0), right
