"""The processes that train together: one by default, as many as torchrun starts."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from gdn2.ops.arguments import require

T = TypeVar("T")
_starts = count()  # of this process


class Parallel(Protocol):
    """Over how many processes a copy of the weights is spread (None: all there are), and how many copies there are."""

    @property
    def shard(self) -> int | None: ...
    @property
    def replicate(self) -> int: ...


@dataclass(frozen=True)
class World:
    """A process among all that train together. Its methods must be called by all of them, in the same order."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # (shard,) or (replicate, shard); None for a single process

    @classmethod
    def start(cls, parallel: Parallel, device: str | None = None) -> "World":
        """Join the processes of torchrun, whose variables it reads; alone where there are none.

        Args:
            parallel: how weights are spread.
            device: "cpu", or "cuda" for the GPU of this process; None is the GPU where there is one.
        """
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        shape = _mesh_shape(parallel, size)
        place = _place(kind, int(os.environ.get("LOCAL_RANK", "0")), size)
        if size == 1:
            return cls(0, 1, place, None)
        # Keys of its own for each start: those of the last would lead to addresses where nobody listens any more.
        place_of_keys = _store(*map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
        store = PrefixStore(f"gdn2/{next(_starts)}", place_of_keys)
        dist.init_process_group(_backend(place), store=store, rank=rank, world_size=size)
        names = ("replicate", "shard")[-len(shape) :]
        return cls(rank, size, place, init_device_mesh(place.type, shape, mesh_dim_names=names))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """The mean of every process's x."""
        if self.size == 1:
            return x
        total = x.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process; asked over the CPU, so that no GPU is waited for."""
        if self.size == 1:
            return flag
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)

    def agreed(self, action: Callable[[], T]) -> T:
        """What the action returns here; where it fails in some process, the first such error in all."""
        error: Exception | None = None
        try:
            result = action()
        except (ValueError, RuntimeError, OSError) as reason:
            error = reason
        errors = [error] * self.size
        if self.size > 1:
            dist.all_gather_object(errors, error)
        for error in errors:
            if error is not None:
                raise error
        return result

    def close(self) -> None:
        """Leave the others; nothing may be asked of them afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def _store(address: str | None, port: str | None) -> Store:
    """Where processes find each other; the main one may serve it, and another start needs it still."""
    found: Store = next(rendezvous("env://"))[0]
    return found


def _mesh_shape(parallel: Parallel, size: int) -> tuple[int, ...]:
    shard, replicate = parallel.shard, parallel.replicate
    if shard is None:
        fits = size % replicate == 0
        require(fits, "parallel.replicate", replicate, f"a divisor of the {size} processes")
        shard = size // replicate
    product = f"{replicate} × {shard} = {replicate * shard} processes"
    require(replicate * shard == size, "parallel.replicate × shard", product, f"the {size} started")
    return (shard,) if replicate == 1 else (replicate, shard)


def _place(kind: str, local_rank: int, size: int) -> torch.device:
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"engine.device: got {kind!r}, expected 'cpu' or 'cuda'") from None
    require(device.type in ("cpu", "cuda"), "engine.device", repr(kind), "'cpu' or 'cuda'")
    if device.type != "cuda":
        return device
    require(torch.cuda.is_available(), "engine.device", repr(kind), "'cpu', for torch finds no GPU")
    if size > 1 or device.index is None:
        device = torch.device("cuda", local_rank)
    found = torch.cuda.device_count()
    fits = device.index < found
    require(
        fits, "device", str(device), f"one of the {found} GPUs, one for each process of a machine"
    )
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device) -> str:
    """Flags and checkpoints travel over the CPU in any case."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
