"""One model over several processes is the model of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gdn2.layers import joint
from gdn2.layers.layout import Layout
from gdn2.models.language_model import LanguageModel
from gdn2.models.param_groups import group_of
from gdn2.models.presets import preset
from gdn2.ops.maps import maps, side_by_side
from gdn2.training.shard import (
    accumulate,
    build_model,
    full_weights,
    gradient_norm,
    synchronise,
    whole_model,
)
from gdn2.training.world import World
from tests.layers.cases import DELTA
from tests.models.cases import EVERYTHING, config, tokens
from tests.training.spawn import alone, in_processes
from tests.training.tiny import HYBRID, batch, build, losses, plain_losses

STEPS, MIXED_STEPS = 20, 5
Results = list[Any]  # what `scenario` returns, of each process
Single = tuple[list[float], dict[str, Tensor], list[float]]  # curve, weights, curve in bf16


def first_weights(world: World) -> dict[str, Tensor] | None:
    model = build_model(
        EVERYTHING,
        seed=3,
        world=world,
        weights=torch.float32,
        compute=torch.float32,
        compile=False,
        checkpoint_blocks=False,
    )
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == (group_of(name, parameter) != "vectors"), name
    return full_weights(model, world)


def vectors(model: LanguageModel) -> dict[str, list[float]]:
    return {
        name: x.tolist() for name, x in model.named_parameters() if group_of(name, x) == "vectors"
    }


def mixed(world: World, **choices: bool) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and final vectors where matrices are computed in bf16."""
    model, optimiser = build(world, torch.bfloat16, **choices)
    seen: list[torch.dtype] = []
    model.blocks[0].register_forward_hook(lambda block, _, out: seen.append(out[0].dtype))
    curve = losses(world, model, optimiser, 0, MIXED_STEPS)
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {x.dtype for state in optimiser.state.values() for x in state.values()} == {
        torch.float32
    }
    return curve, vectors(model)


def scenario(world: World) -> tuple[object, ...]:
    """Everything that is asked of several processes, for they take long to start."""
    model, optimiser = build(world)
    curve = losses(world, model, optimiser, 0, STEPS)
    rows = batch(99)
    with torch.no_grad():  # leaves whole weights behind, which must not be taken for the shards
        model(rows)
    final = full_weights(model, world)
    return curve, vectors(model), first_weights(world), final, mixed(world)


@pytest.fixture(scope="module", params=["2", "4", "2 × 2"])
def results(request: pytest.FixtureRequest) -> Results:
    size, replicate = {"2": (2, 1), "4": (4, 1), "2 × 2": (4, 2)}[request.param]
    return in_processes(size, scenario, replicate=replicate)


@pytest.fixture(scope="module")
def single() -> Single:
    with alone() as world:
        model, optimiser = build(world)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        curve = losses(world, model, optimiser, 0, STEPS)
        weights = full_weights(model, world)
        assert weights is not None
        return curve, weights, mixed(world)[0]


def test_one_process_is_plain_training(single: Single) -> None:
    assert single[0] == pytest.approx(plain_losses(STEPS), rel=1e-6)


def test_every_process_sees_the_curve_of_one(results: Results, single: Single) -> None:
    for curve, *_ in results:
        assert curve == pytest.approx(single[0], rel=1e-6)
    final = results[0][3]
    for name, weight in single[1].items():
        torch.testing.assert_close(final[name], weight, rtol=1e-3, atol=1e-5, msg=name)
    assert all(final is None for _, _, _, final, _ in results[1:])


def test_first_weights_have_the_bits_of_one_process(results: Results) -> None:
    found = results[0][2]
    expected = dict(LanguageModel(EVERYTHING, seed=3).named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_vectors_are_the_same_everywhere(results: Results) -> None:
    for _, after, _, _, (_, after_mixed) in results:
        assert after == results[0][1]
        assert after_mixed == results[0][4][1]


def test_bf16_compute_follows_the_curve(results: Results, single: Single) -> None:
    for *_, (curve, _) in results:
        assert curve == pytest.approx(single[2], rel=3e-3)
        assert curve == pytest.approx(single[0][:MIXED_STEPS], rel=2e-2)
        assert curve != pytest.approx(single[0][:MIXED_STEPS], rel=1e-6)


def test_checkpointed_blocks_change_nothing() -> None:
    with alone() as world:
        assert mixed(world, checkpoint_blocks=True) == mixed(world)


def test_gradients_that_products_add_follow_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    taken: list[int] = []

    def counted(x: Tensor, weights: list[Tensor], **how: bool) -> tuple[Tensor, ...]:
        taken.append(len(weights))
        return maps(x, weights, **how)

    with alone() as world:
        expected, _ = mixed(world)
        monkeypatch.setattr(joint, "_adds_gradients", lambda x: True)
        monkeypatch.setattr(joint, "together", counted)
        curve, _ = mixed(world, checkpoint_blocks=True)
    assert taken
    assert curve == pytest.approx(expected, rel=5e-3)


def test_kept_factors_change_nothing() -> None:
    with alone() as world:
        assert mixed(world, recompute=False) == mixed(world)


@pytest.mark.slow
def test_compiled_blocks_follow_the_curve() -> None:
    with alone() as world:
        expected, _ = mixed(world)
        for again in (False, True):
            curve, _ = mixed(world, compile=True, checkpoint_blocks=again)
            assert curve == pytest.approx(expected, rel=5e-3)


def test_equal_blocks_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them too, although nothing is to be added to its input."""
    chosen, graphs = config(DELTA, layers=3), []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend=count))
    with alone() as world:
        model = build_model(
            chosen,
            seed=0,
            world=world,
            weights=torch.float32,
            compute=torch.float32,
            compile=True,
        )
        loss = model(tokens(2, 9), targets=tokens(2, 9, seed=1)).loss
    assert len(graphs) == 1
    plain = LanguageModel(chosen, seed=0)
    assert loss == plain(tokens(2, 9), targets=tokens(2, 9, seed=1)).loss


def test_one_process_lays_the_weights_of_maps_side_by_side(tmp_path: Path) -> None:
    """Where they lie they stay, whatever is loaded."""
    chosen = preset("gdn2-1m-hybrid")

    def build(weights: torch.dtype) -> Any:
        made = build_model(
            chosen, seed=3, world=world, weights=weights, compute=torch.bfloat16, compile=False
        )
        return made, made.blocks[0].mixer

    def lies_together(mixer: Any) -> bool:
        return side_by_side([map_.weight for map_ in mixer.joint_maps], 0) is not None

    with alone() as world:
        model, mixer = build(torch.bfloat16)
        assert mixer.laid and lies_together(mixer)
        save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        expected = [x.clone() for x in model.parameters()]
        for parameter in model.parameters():
            parameter.data.zero_()
        load({"model": model.state_dict()}, checkpoint_id=tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
        assert lies_together(mixer)
        model, mixer = build(torch.float32)
        assert mixer.laid and not lies_together(mixer)
        model(tokens(1, 3))  # computed by narrow copies
        assert mixer.laid and lies_together(mixer)


def test_every_mixer_computes_in_bf16_beside_wide_vectors() -> None:
    ids = tokens(2, 9)
    with alone() as world:
        found = []
        for weights in (torch.bfloat16, torch.float32):
            model = build_model(
                EVERYTHING,
                seed=3,
                world=world,
                weights=weights,
                compute=torch.bfloat16,
                compile=False,
                checkpoint_blocks=False,
            )
            loss = model(ids, targets=ids).loss
            assert loss is not None
            loss.backward()
            synchronise(model, world)
            assert {x.dtype for x in model.parameters()} <= {weights, torch.float32}
            for name, x in model.named_parameters():
                assert x.grad is not None, name
                assert x.grad.dtype == (
                    torch.bfloat16 if group_of(name, x) != "vectors" else x.dtype
                )
            found.append(float(loss.detach()))
        assert found[0] == pytest.approx(found[1], rel=1e-2)


def gradients(model: LanguageModel) -> list[Tensor]:
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def sharded_by_others(world: World) -> list[Tensor]:
    """Logits of a model that FSDP2 shards block by block, with all its inputs cast, and of one that is bf16."""
    ids, packed = tokens(1, 330), Layout.packed(torch.tensor([0, 9, 330]), 330)
    model = LanguageModel(EVERYTHING, seed=3)
    plain = LanguageModel(EVERYTHING, seed=3).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # as accelerate's
    for module in (*model.blocks, model):
        fully_shard(module, mesh=world.mesh, mp_policy=policy)
    return [x(ids, None, layout).logits for layout in (None, packed) for x in (model, plain)]


def test_blocks_take_a_layout_whose_copies_fsdp_makes() -> None:
    """Positions past 256 show tables in bf16."""
    for dense, plain_dense, packed, plain_packed in in_processes(2, sharded_by_others):
        assert torch.equal(dense, plain_dense)
        assert torch.equal(packed, plain_packed)


def test_the_norm_of_all_gradients() -> None:
    with alone() as world:
        model, _ = build(world)
        accumulate(model, last=True)
        loss = model(batch(0), targets=batch(1)).loss
        assert loss is not None
        loss.backward()
        expected = torch.cat([x.flatten().double() for x in gradients(model)]).norm()
        norm = gradient_norm(model, world)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)


def test_a_whole_model_has_the_weights_it_was_given() -> None:
    with alone() as world:
        model, _ = build(world, torch.bfloat16)
        weights = full_weights(model, world)
        assert weights is not None
        expected = dict(LanguageModel(HYBRID, seed=5).named_parameters())
        for name, parameter in whole_model(HYBRID, weights).named_parameters():
            assert torch.equal(parameter, expected[name]), name
