"""Processes that find each other, and agree."""

import pytest
import torch

from gdn2.training.world import World
from tests.training.spawn import Spread, alone, in_processes


def ask(world: World) -> tuple[object, ...]:
    assert world.mesh is not None
    x = torch.tensor([float(world.rank), 3.0], requires_grad=True)
    mean = world.mean(x)
    assert not mean.requires_grad
    assert x.tolist() == [world.rank, 3]
    return (
        world.rank,
        world.is_main,
        mean.tolist(),
        world.any(world.rank == 1),
        world.any(False),
        world.mesh.mesh_dim_names,
        tuple(world.mesh.shape),
    )


@pytest.mark.parametrize(
    ("size", "replicate", "names", "shape"),
    [(2, 1, ("shard",), (2,)), (4, 2, ("replicate", "shard"), (2, 2))],
)
def test_processes_agree(
    size: int, replicate: int, names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    expected = [
        (rank, rank == 0, [(size - 1) / 2, 3], True, False, names, shape) for rank in range(size)
    ]
    assert in_processes(size, ask, replicate=replicate) == expected


def start_again(world: World) -> float:
    found = 0.0
    for turn in range(4):
        world.close()
        world = World.start(Spread(), "cpu")
        found += float(world.mean(torch.tensor(float(world.rank + turn))))
    return found


def test_processes_may_start_again() -> None:
    assert in_processes(2, start_again) == [8.0, 8.0]


def fail_in_one(world: World) -> list[str]:
    said = []
    for kind in (ValueError, OSError):

        def act(kind: type[Exception] = kind) -> int:
            if world.rank == 1:
                raise kind("a reason")
            return 3

        try:
            world.agreed(act)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return [*said, str(world.agreed(lambda: world.rank))]


def test_what_fails_in_one_process_fails_in_all() -> None:
    said = ["ValueError: a reason", "OSError: a reason"]
    assert in_processes(2, fail_in_one) == [[*said, "0"], [*said, "1"]]


def test_alone_there_is_no_process_group() -> None:
    with alone() as world:
        assert (world.rank, world.size, world.is_main, world.mesh) == (0, 1, True, None)
        assert world.device == torch.device("cpu")
        assert not torch.distributed.is_initialized()
        assert world.mean(torch.tensor(2.5)) == 2.5
        assert [world.any(True), world.any(False)] == [True, False]
        world.any(False)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("size", "spread", "line"),
    [
        (4, Spread(replicate=3), "replicate: got 3, expected a divisor of the 4 processes"),
        (4, Spread(shard=3), "got 1 × 3 = 3 processes, expected the 4 started"),
        (1, Spread(shard=2, replicate=2), "got 2 × 2 = 4 processes, expected the 1 started"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    size: int, spread: Spread, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(ValueError, match=line):
        World.start(spread, "cpu")
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device: got 'cuda', expected 'cpu'"):
        World.start(Spread(), "cuda")


def test_a_device_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="device: got 'abacus', expected 'cpu' or 'cuda'"):
        World.start(Spread(), "abacus")
