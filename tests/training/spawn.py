"""Run a function in several processes that talk over gloo, as torchrun would start them."""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gdn2.training.world import World

LIMIT = 240.0  # seconds; the machine may be busy


class Spread:
    """How weights are spread, in place of the section of a run's config."""

    def __init__(self, shard: int | None = None, replicate: int = 1) -> None:
        self.shard, self.replicate = shard, replicate


def start_process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that runs a function of a module; its interpreter is forked from one that has imported it all."""
    context = multiprocessing.get_context("forkserver")
    # FSDP imports the compiler, which takes seconds.
    context.set_forkserver_preload(["gdn2.training.checkpoints", "torch._dynamo"])
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def in_processes(
    size: int, function: Callable[..., Any], *arguments: Any, replicate: int = 1
) -> list[Any]:
    """What function(world, *arguments) returns in each of `size` processes; the first error of any is raised."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        start_process(_run, writer, rank, size, port, replicate, function, arguments)
        for rank, (_, writer) in enumerate(pipes)
    ]
    try:
        return _collect([reader for reader, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def alone(device: str = "cpu") -> Iterator[World]:
    """The world of this process by itself."""
    world = World.start(Spread(), device)
    try:
        yield world
    finally:
        world.close()


@contextmanager
def alone_on_a_mesh() -> Iterator[World]:
    """A single process whose matrices are spread as if it were one of many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        yield World(0, 1, torch.device("cpu"), mesh)
    finally:
        dist.destroy_process_group()


def be_one_of(size: int, rank: int, port: int) -> None:
    """Make this process one of those that torchrun starts."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _collect(readers: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + LIMIT
    while len(results) < len(readers):
        waiting = [reader for i, reader in enumerate(readers) if i not in results]
        ready = wait(waiting, deadline - time.monotonic())
        assert ready, f"processes {sorted(results)} of {len(readers)} answered in {LIMIT:g} s"
        for reader in ready:
            assert isinstance(reader, Connection)
            result, error = pickle.loads(reader.recv_bytes())
            assert error is None, error
            results[readers.index(reader)] = result
    return [results[i] for i in range(len(readers))]


def _run(
    writer: Connection,
    rank: int,
    size: int,
    port: int,
    replicate: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    be_one_of(size, rank, port)
    try:
        world = World.start(Spread(replicate=replicate), "cpu")
        result = function(world, *arguments)
        world.any(False)  # waits for all
        writer.send_bytes(pickle.dumps((result, None)))  # `send` would share tensors' memory
        world.close()
    except BaseException:
        writer.send_bytes(pickle.dumps((None, f"in process {rank}\n{traceback.format_exc()}")))


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
