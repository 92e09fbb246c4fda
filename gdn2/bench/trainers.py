"""What training benchmarks time: models that take steps, ours and a twin made of other people's layers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch

from gdn2.bench.timing import DTYPES
from gdn2.bench.training_peer import Twin, build_twin, find_parts, why_no_twin
from gdn2.data.batch import Batch
from gdn2.layers.layout import Layout
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import preset as find_preset
from gdn2.training.config import OptimiserSection
from gdn2.training.optimiser import build_optimiser
from gdn2.training.shard import build_model
from gdn2.training.step import train_step
from gdn2.training.world import World

TWIN = "fla bf16"
RECIPE = OptimiserSection(lr=1e-4)  # small enough for steps from the first on


class Shape(NamedTuple):
    """Sizes of the batch of a step."""

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        sizes = text.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"shape: got {text!r}, expected BxT, such as 4x4096")
        return cls(*map(int, sizes))

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Plan:
    """What to time: each preset at every shape, with weights of each dtype."""

    presets: tuple[str, ...]
    shapes: tuple[Shape, ...]
    weights: tuple[str, ...]
    device: torch.device
    compile: bool
    peers: bool = False
    steps: int = 10  # of each, timed after a few others
    recompute: bool = True  # as `engine.recompute`; the peer has its own way


class Trainer:
    """A model and its optimiser, one step at a time."""

    def __init__(self, model: LanguageModel, world: World) -> None:
        self.model, self.world = model, world
        self.optimiser = build_optimiser(model, RECIPE)
        self.held_bytes = 0  # between two steps, on a GPU

    def step(self, batch: Batch) -> float:
        """The loss; an error where it is no number, for such a step moves nothing and is soon done."""
        result = train_step(
            self.model, self.optimiser, self.world, [batch], lr=RECIPE.lr, clip=RECIPE.clip
        )
        if not result.is_finite:
            raise ValueError(f"loss {result.loss}, gradient norm {result.gradient_norm}")
        return result.loss


class TwinTrainer:
    """A twin as its users would train it: torch's clipping and fused AdamW."""

    def __init__(self, twin: Twin) -> None:
        self.model = twin
        groups = twin.param_groups(RECIPE.weight_decay, decay_all=RECIPE.decay_all)
        beta1, beta2 = RECIPE.betas
        self.optimiser = torch.optim.AdamW(
            groups, lr=RECIPE.lr, betas=(beta1, beta2), eps=RECIPE.eps, fused=True
        )
        self.held_bytes = 0

    def step(self, batch: Batch) -> float:
        """As `Trainer.step`, but a step that finds no numbers has moved the weights."""
        device = self.model.embedding.weight.device
        ids, targets = (x.to(device, non_blocking=True) for x in (batch.ids, batch.targets))
        self.optimiser.zero_grad()
        loss = self.model(ids, layout=Layout.dense(*ids.shape), targets=targets).loss
        assert loss is not None
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), RECIPE.clip)
        self.optimiser.step()
        found, size = torch.stack([loss.detach().float(), norm.float()]).tolist()
        if not (isfinite(found) and isfinite(size)):
            raise ValueError(f"loss {found}, gradient norm {size}")
        return float(found)


def unseen_steps(trainer: Trainer | TwinTrainer, batches: Iterable[Batch]) -> Callable[[], float]:
    """A call that takes a step on the next batch: one that comes again and again is soon known by heart.

    Its gradients become small then, and a GPU may take less power to multiply them.
    """
    following = iter(batches)
    return lambda: trainer.step(next(following))


Build = Callable[[], Trainer | TwinTrainer]


def variants(name: str, plan: Plan, world: World) -> tuple[dict[str, Build], list[str]]:
    """What builds each variant of a preset, and why one that was asked for cannot be built."""
    config = find_preset(name)
    build: dict[str, Build] = {
        f"gdn2 {dtype}": partial(own_trainer, config, plan, world, dtype) for dtype in plan.weights
    }
    if not plan.peers:
        return build, []
    parts, lack = find_parts(plan.device), why_no_twin(config)
    if isinstance(parts, str) or lack is not None:
        return build, [parts if isinstance(parts, str) else f"no peer of {name}: {lack}"]
    return {**build, TWIN: lambda: TwinTrainer(build_twin(config, parts, plan.device, seed=0))}, []


def own_trainer(config: ModelConfig, plan: Plan, world: World, weights: str) -> Trainer:
    """Ours, in steps as training takes them."""
    return Trainer(build_own(config, plan, world, weights), world)


def build_own(config: ModelConfig, plan: Plan, world: World, weights: str) -> LanguageModel:
    """The model as training builds it; a GPU computes in bf16."""
    return build_model(
        config,
        seed=0,
        world=world,
        weights=DTYPES[weights],
        compute=torch.bfloat16 if plan.device.type == "cuda" else DTYPES[weights],
        compile=plan.compile,
        recompute=plan.recompute,
    )


def random_batches(
    shape: Shape, vocabulary: int, device: torch.device, seeds: Iterable[int]
) -> list[Batch]:
    """A batch of each seed, all drawn before anything is timed."""
    return [random_batch(shape, vocabulary, device, seed) for seed in seeds]


def random_batch(shape: Shape, vocabulary: int, device: torch.device, seed: int = 0) -> Batch:
    """Tokens without any order, on the CPU as a loader leaves them."""
    rand = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (shape.batch, shape.length + 1), generator=rand)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if device.type == "cuda":
        ids, targets = ids.pin_memory(), targets.pin_memory()
    return Batch(ids, targets)
