"""Which operands the CUDA kernels take, and the kernels loaded for them."""

import warnings
from functools import cache

import torch
from torch import Tensor

from gdn2.ops.cuda.build import CudaError, Kernel
from gdn2.ops.operands import Operands
from gdn2.ops.trust import trusted

CHUNK = 64
HOPPER = (9, 0)
PROGRAMS = {64: 3, 128: 2}  # that share a multiprocessor, as many as its shared memory has room for
INTRA, GRADIENT = "intra", "gradient"
PLAIN, FORWARD, REVERSE = "plain_scan", "forward_scan", "reverse_scan"
ENOUGH = 96  # programs of `plain_scan`, which has a multiprocessor for each
Key = tuple[str, torch.device, tuple[tuple[str, int], ...]]
_kernels: dict[Key, Kernel | None] = {}


def takes(kernel: str, x: Operands, chunk: int, **also: int) -> bool:
    """Whether a kernel is for such operands, on such a device; `also` are macros that operands do not tell."""
    return suits(x, chunk) and ready(kernel, x, **also)


def in_blocks(x: Operands, chunk: int) -> bool:
    """Whether all is left to CUDA kernels: what passes from one to the next is in blocks then (`blocks.py`).

    The scans' products are Hopper's own.
    """
    return (
        suits(x, chunk)
        and capability(x.q.device) == HOPPER
        and ready(INTRA, x, BLOCKS=1)
        and ready(FORWARD, x, STATES=0)
        and ready(FORWARD, x, STATES=1)
        and ready(REVERSE, x)
        and ready(GRADIENT, x, BLOCKS=1)
    )


def takes_plain(x: Operands, chunk: int, rows: int) -> bool:
    """Whether `plain_scan` is: no erase gate, one decay a head, and a write gate a head at most."""
    if x.b is not None or not is_usual(x, chunk):
        return False
    heads, width = x.v.shape[1:]
    return (
        x.k.shape == x.q.shape
        and x.q.shape[2] == width
        and x.g.shape[2] == 1
        and all(heads % t.shape[1] == 0 for t in (x.q, x.g))
        and (x.w is None or x.w.shape[1:] == (heads, 1))
        and ready(PLAIN, x, VALUES=value_channels(width, rows))
    )


def suits(x: Operands, chunk: int) -> bool:
    """What kernels with an erase gate ask for: as many heads of everything, gates for each channel or for all."""
    if x.b is None or not is_usual(x, chunk):
        return False
    gates = [t for t in (x.b, x.w) if t is not None]
    return all(t.shape == x.q.shape for t in (x.k, x.v, x.g)) and all(
        t.shape[1] == x.q.shape[1] and t.shape[2] in (1, x.q.shape[2]) for t in gates
    )


def is_usual(x: Operands, chunk: int) -> bool:
    """What all kernels ask for: Hopper or newer, bf16, chunks of 64, a width they know, aligned operands."""
    if chunk != CHUNK or not x.q.is_cuda or capability(x.q.device) < HOPPER:
        return False
    narrow = [t for t in (x.q, x.k, x.v, x.b, x.w) if t is not None]
    return (
        x.q.shape[2] in PROGRAMS
        and all(t.dtype == torch.bfloat16 for t in narrow)
        and x.g.dtype == torch.float32
        and all(t.data_ptr() % 16 == 0 for t in (*narrow, x.g))
    )


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; torch takes its time to tell."""
    return torch.cuda.get_device_capability(device)


def ready(kernel: str, x: Operands, **also: int) -> bool:
    """Whether a kernel is trusted and there."""
    return trusted(kernel, x.q.device) and loaded(kernel, x, **also) is not None


def aligned(x: Tensor) -> Tensor:
    """The kernels load up to 16 bytes at once; a part of another tensor may begin anywhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def loaded(kernel: str, x: Operands, **also: int) -> Kernel | None:
    """A kernel for these head counts and widths; None where it cannot be compiled or loaded, or not now."""
    key = (kernel, x.q.device, tuple((macros(kernel, x) | also).items()))
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing can be loaded meanwhile
        _kernels[key] = load(kernel, x.q.device, dict(key[2]))
    return _kernels[key]


def macros(kernel: str, x: Operands) -> dict[str, int]:
    """What a kernel is compiled for."""
    heads, width = x.q.shape[1:]
    if kernel in (FORWARD, REVERSE):
        return {"HEADS": heads, "D": width}
    gates = {"W_WIDTH": 0 if x.w is None else x.w.shape[2]}
    if kernel == PLAIN:
        shared = {"HEADS": x.v.shape[1], "K_HEADS": heads, "G_HEADS": x.g.shape[1]}
        return {**shared, **gates, "D": width, "PROGRAMS": 2 if width == 64 else 1}
    assert x.b is not None
    gates["B_WIDTH"] = x.b.shape[2]
    return {"HEADS": heads, "D": width, **gates, "PROGRAMS": PROGRAMS[width]}


def value_channels(width: int, rows: int) -> int:
    """How many a program of `plain_scan` has: many read less, few leave no multiprocessor idle."""
    return 64 if rows * width // 64 >= ENOUGH else 32


def load(kernel: str, device: torch.device, sizes: dict[str, int]) -> Kernel | None:
    """Compile and load; a failure is said once, and the Triton kernels do the work."""
    major, minor = capability(device)
    properties = torch.cuda.get_device_properties(device)
    needed = shared_memory(kernel, sizes)
    if needed > properties.shared_memory_per_block_optin:  # type: ignore[attr-defined]
        return None
    options = [
        f"--gpu-architecture=sm_{major}{minor}{'a' if (major, minor) == HOPPER else ''}",
        *(f"-D{name}={value}" for name, value in sizes.items()),
        "--std=c++17",
    ]
    threads = 256 if kernel in (FORWARD, REVERSE) else 4 * sizes.get("VALUES", sizes["D"] // 2)
    try:
        with torch.cuda.device(device):
            return Kernel(kernel, options, threads=threads, shared_memory=needed)
    except CudaError as failure:
        warnings.warn(f"gdn2 uses Triton instead of {kernel} on {device}: {failure}", stacklevel=2)
        return None


def shared_memory(kernel: str, sizes: dict[str, int]) -> int:
    """MEMORY of a kernel, as its source adds it up."""
    width = sizes["D"]
    tile, square, padded = 2 * CHUNK * width, 2 * CHUNK * CHUNK, 4 * CHUNK * (CHUNK + 8)
    if kernel == PLAIN:
        values = sizes["VALUES"]
        chunk = 2 * CHUNK * (2 * width + values) + 8 * CHUNK
        return 3 * chunk + 2 * square + values // 16 * 64 * width
    if kernel == FORWARD and sizes["STATES"]:
        return 3 * (2 * tile + square) + 2 * (tile + square) + 12 * width + 24
    if kernel == FORWARD:
        return 3 * (3 * tile + 2 * square) + 2 * square + 12 * width + 24
    if kernel == REVERSE:
        return 3 * (3 * tile + 2 * square) + tile + square + 12 * width + 24
    if kernel == GRADIENT:
        return 5 * tile + 3 * square + 4 * CHUNK + width // 16 * (7 * 8 + 2 * CHUNK) * 4
    return max(7 * tile, 3 * padded + 2 * CHUNK * (CHUNK + 8) + square) + 4 * CHUNK
