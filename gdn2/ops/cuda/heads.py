"""Operands that share heads, as the CUDA kernels take them."""

from typing import Any

from gdn2.ops.cuda.launch import in_blocks
from gdn2.ops.operands import Operands, spread

SHARED = ("q", "k", "g", "b", "w")


def repeated(x: Operands, chunk: int, apart: bool = False) -> Operands:
    """What is shared by heads or channels repeated for each, where CUDA kernels do it all then; else x as it is.

    Decays of a head stay so where its erase gate does. Value heads that share all else are taken apart for gradients
    only: for the rest Triton's kernels, which compute their scores once, are as fast.
    """
    heads, width = x.v.shape[1:]
    if x.b is None or (x.heads < heads and not apart):
        return x
    given: dict[str, Any] = {n: t for n, t in x._asdict().items() if n in SHARED and t is not None}
    shapes = {name: (heads, t.shape[2]) for name, t in given.items()}
    if x.b.shape[2] == width:
        shapes["g"] = heads, width
    if all(t.shape[1:] == shapes[name] for name, t in given.items()):
        return x
    alike: dict[str, Any] = {
        name: t[:, :1, :1].expand(-1, *shapes[name]) for name, t in given.items()
    }
    if not in_blocks(x._replace(**alike), chunk):
        return x
    made: dict[str, Any] = {
        n: spread(t, heads, 1).expand(-1, *shapes[n]).contiguous() for n, t in given.items()
    }
    return x._replace(**made)
