"""A tiny hybrid and its training, step by step, for any number of processes."""

from pathlib import Path

import torch
from torch import Tensor

from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.models.config import ModelConfig
from gdn2.models.folder import save_model
from gdn2.models.language_model import LanguageModel
from gdn2.training.config import OptimiserSection
from gdn2.training.optimiser import ClippingAdamW, build_optimiser
from gdn2.training.shard import (
    accumulate,
    build_model,
    gradient_norm,
    synchronise,
    whole_model,
)
from gdn2.training.world import World

ROWS, CLIP, LR = 4, 1.0, 1e-2
HYBRID = ModelConfig(
    hidden_size=18,
    intermediate_size=22,
    num_hidden_layers=2,
    cell=(
        DeltaConfig(num_heads=3, key_head_dim=5, value_head_dim=7, gate_rank=3),
        AttentionConfig(num_heads=3, head_dim=6, window=8),
    ),
    vocab_size=29,
)


def batch(step: int) -> Tensor:
    """The rows [ROWS, 34] that all processes together see at a step."""
    rand = torch.Generator().manual_seed(step)
    return torch.randint(HYBRID.vocab_size, (ROWS, 34), generator=rand).cumsum(1) % 29


def build(
    world: World,
    compute: torch.dtype = torch.float32,
    *,
    seed: int = 5,
    compile: bool = False,
    checkpoint_blocks: bool = False,
    recompute: bool = True,
) -> tuple[LanguageModel, ClippingAdamW]:
    model = build_model(
        HYBRID,
        seed=seed,
        world=world,
        weights=torch.float32,
        compute=compute,
        compile=compile,
        checkpoint_blocks=checkpoint_blocks,
        recompute=recompute,
    )
    return model, new_optimiser(model)


def new_optimiser(model: LanguageModel) -> ClippingAdamW:
    return build_optimiser(model, OptimiserSection(lr=LR))


def losses(
    world: World, model: LanguageModel, optimiser: ClippingAdamW, first: int, last: int
) -> list[float]:
    """Losses of steps first to last − 1; a micro-batch is one row."""
    micro = ROWS // world.size
    curve = []
    for step in range(first, last):
        total = torch.zeros(())
        for m in range(micro):
            row = m * world.size + world.rank
            rows = batch(step)[row : row + 1]
            accumulate(model, last=m == micro - 1)
            loss = model(rows[:, :-1], targets=rows[:, 1:]).loss
            assert loss is not None
            (loss / micro).backward()
            total += loss.detach() / micro
        synchronise(model, world)
        norm = gradient_norm(model, world)
        optimiser.step_clipped(LR, norm, CLIP, norm.isfinite())
        optimiser.zero_grad()
        curve.append(float(world.mean(total)))
    return curve


def plain_losses(steps: int) -> list[float]:
    """The same without anything of gdn2.training: a plain model, whole batches."""
    model = LanguageModel(HYBRID, seed=5)
    optimiser = new_optimiser(model)
    curve = []
    for step in range(steps):
        rows = batch(step)
        loss = model(rows[:, :-1], targets=rows[:, 1:]).loss
        assert loss is not None
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        curve.append(float(loss.detach()))
    return curve


def export(path: Path, weights: dict[str, Tensor]) -> None:
    save_model(whole_model(HYBRID, weights), path)
