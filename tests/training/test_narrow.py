"""One process computes with narrow copies what FSDP2 computes with gathered ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gdn2.models.language_model import LanguageModel
from gdn2.models.param_groups import group_of
from gdn2.training.shard import build_model, full_weights, reshard, synchronise
from gdn2.training.world import World
from tests.closeness import assert_close
from tests.training.spawn import alone, alone_on_a_mesh
from tests.training.tiny import HYBRID, batch, build, losses, new_optimiser

TIED = replace(HYBRID, tie_word_embeddings=True)


def trained(world: World) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps of four micro-batches each, and the weights after them."""
    model, optimiser = build(world, torch.bfloat16)
    curve = losses(world, model, optimiser, 0, 3)
    weights = full_weights(model, world)
    assert weights is not None
    return curve, weights


def narrow_model(world: World, tied: bool = False) -> LanguageModel:
    return build_model(
        TIED if tied else HYBRID,
        seed=5,
        world=world,
        weights=torch.float32,
        compute=torch.bfloat16,
        compile=False,
    )


def loss_of(model: LanguageModel, step: int) -> Tensor:
    rows = batch(step)
    loss = model(rows[:, :-1], targets=rows[:, 1:]).loss
    assert loss is not None
    return loss


def test_steps_are_those_of_fsdp() -> None:
    with alone_on_a_mesh() as world:
        expected, expected_weights = trained(world)
    with alone() as world:
        curve, weights = trained(world)
    assert curve == expected
    for name, weight in expected_weights.items():  # the norm adds shards and vectors one by one
        assert_close(name, weights[name], weight, 1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_as_computed_and_sums_of_them_wide(tied: bool) -> None:
    with alone() as world:
        model = narrow_model(world, tied)
        parts: list[dict[str, Tensor]] = []
        for step in (0, 1, 2):
            loss_of(model, step).backward()
            synchronise(model, world)
            parts.append({n: x.grad for n, x in model.named_parameters() if x.grad is not None})
            for name, x in model.named_parameters():
                is_vector = group_of(name, x) == "vectors"
                assert x.dtype == torch.float32
                assert parts[-1][name].dtype == (torch.float32 if is_vector else torch.bfloat16), (
                    name
                )
                x.grad = None
        for step in (0, 1, 2):
            loss_of(model, step).backward()
        synchronise(model, world)
        for name, x in model.named_parameters():
            first, second, third = (part[name].float() for part in parts)
            assert x.grad is not None and x.grad.dtype == torch.float32
            assert torch.equal(x.grad, first + second + third), name


def test_copies_follow_the_weights_and_stay_out_of_sight() -> None:
    with alone() as world:
        model = narrow_model(world)
        wide = dict(model.named_parameters())
        with torch.no_grad():
            before = loss_of(model, 0)
        inside = dict(model.named_parameters())
        for name, x in inside.items():
            if group_of(name, x) != "vectors":
                assert torch.equal(x, wide[name].bfloat16()), name
        reshard(model)
        assert all(x is wide[name] for name, x in model.named_parameters())
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(1.5)
            assert loss_of(model, 0) != before
            expected = narrow_model(world)
            for x, y in zip(expected.parameters(), wide.values(), strict=True):
                x.copy_(y)
            assert loss_of(model, 0) == loss_of(expected, 0)


@pytest.mark.parametrize("when", ["before a step", "between steps"])
def test_what_is_frozen_gets_no_gradient(when: str) -> None:
    with alone() as world:
        model = narrow_model(world)
        if when == "between steps":
            loss_of(model, 0).backward()
            synchronise(model, world)
            model.zero_grad()
        model.blocks[0].requires_grad_(False)
        loss_of(model, 1).backward()
        synchronise(model, world)
        frozen = {id(x) for x in model.blocks[0].parameters()}
        for name, x in model.named_parameters():
            assert (x.grad is None) == (id(x) in frozen), name


def test_an_optimiser_widens_narrow_gradients() -> None:
    with alone() as world:
        found = []
        for widened in (False, True):
            model = narrow_model(world)
            optimiser = new_optimiser(model)
            loss_of(model, 0).backward()
            synchronise(model, world)
            for x in model.parameters():
                assert x.grad is not None
                x.grad = x.grad.float() if widened else x.grad
            norm = torch.tensor(2.0)
            optimiser.step_clipped(1e-2, norm, 1.0, norm.isfinite())
            found.append([x.detach().clone() for x in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
