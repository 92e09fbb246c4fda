"""Which operands the CUDA kernels take, and the kernels loaded for them."""

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor

from gdn2.ops.cuda.build import CudaError, Kernel, compiled
from gdn2.ops.operands import Operands
from gdn2.ops.trust import trusted

CHUNK = 64
HOPPER = (9, 0)
GROUPED = 128  # channels of a head that two groups of four warps share
PROGRAMS = {64: 3, 128: 2}  # that share a multiprocessor, as many as its shared memory has room for
INTRA, GRADIENT, GROUP_GRADIENT = "intra", "gradient", "group_gradient"
PLAIN, FORWARD, BACKWARD = "plain_scan", "forward_scan", "backward_scans"
GATES = (torch.bfloat16, torch.float32)  # what the write gate of `plain_scan` may be
ENOUGH = 96  # programs of `plain_scan`, which has a multiprocessor for each
Key = tuple[str, torch.device, tuple[tuple[str, int], ...]]
_kernels: dict[Key, Kernel | None] = {}
_tried: int | None = None  # programs that are to share a multiprocessor instead


def takes(kernel: str, x: Operands, chunk: int) -> bool:
    """Whether a kernel is for such operands, on such a device, and passes on what Triton's kernels read: rows.

    Theirs have value heads that share scores side by side.
    """
    return suits(x, chunk) and x.heads == x.v.shape[1] and ready(kernel, x, BLOCKS=0)


def in_blocks(x: Operands, chunk: int) -> bool:
    """Whether all is left to CUDA kernels: what passes from one to the next is in blocks then (`blocks.py`).

    The scans' products are Hopper's own.
    """
    if not suits(x, chunk) or capability(x.q.device) != HOPPER:
        return False
    needed = kernels_of_blocks(x)
    compile_together([key_of(kernel, x, also) for kernel, also in needed])
    return all(ready(kernel, x, **also) for kernel, also in needed)


def come_later(x: Operands, chunk: int) -> bool:
    """Whether those kernels cannot be loaded now, while a graph is captured, but may be in a later call."""
    if not suits(x, chunk) or capability(x.q.device) != HOPPER:
        return False
    if not torch.cuda.is_current_stream_capturing():
        return False
    return any(key_of(kernel, x, also) not in _kernels for kernel, also in kernels_of_blocks(x))


def kernels_of_blocks(x: Operands) -> list[tuple[str, dict[str, int]]]:
    """The kernels, and further macros."""
    blocks = {"BLOCKS": 1}
    return [(INTRA, blocks), (FORWARD, {}), (BACKWARD, {}), (gradient_of_blocks(x), blocks)]


def gradient_of_blocks(x: Operands) -> str:
    """The kernel that makes gradients of what lies in blocks."""
    return GROUP_GRADIENT if x.q.shape[2] == GROUPED else GRADIENT


def takes_plain(x: Operands, chunk: int, rows: int) -> bool:
    """Whether `plain_scan` is: no erase gate, one decay a head, and a write gate a head at most, that may be fp32."""
    if x.b is not None or not is_usual(x, chunk):
        return False
    heads, width = x.v.shape[1:]
    return (
        x.k.shape == x.q.shape
        and x.q.shape[2] == width
        and x.g.shape[2] == 1
        and all(heads % t.shape[1] == 0 for t in (x.q, x.g))
        and (x.w is None or (x.w.shape[1:] == (heads, 1) and x.w.dtype in GATES))
        and ready(PLAIN, x, VALUES=value_channels(width, rows))
    )


def suits(x: Operands, chunk: int) -> bool:
    """What kernels with an erase gate ask for: values as wide as keys, gates for each channel or for all.

    So are decays, but for each channel where erase gates are. Heads may share any of it.
    """
    if x.b is None or not is_usual(x, chunk):
        return False
    width = x.q.shape[2]
    gates = [t for t in (x.b, x.w) if t is not None]
    return (
        x.k.shape == x.q.shape
        and x.v.shape[2] == width
        and all(t.shape[2] in (1, width) for t in (x.g, *gates))
        and all(t.dtype == x.q.dtype for t in gates)
        and (x.g.shape[2] == width or x.b.shape[2] < width)
    )


def is_usual(x: Operands, chunk: int) -> bool:
    """What all kernels ask for: Hopper or newer, bf16, chunks of 64, a width they know."""
    if chunk != CHUNK or not x.q.is_cuda or capability(x.q.device) < HOPPER:
        return False
    return (
        x.q.shape[2] in PROGRAMS
        and all(t.dtype == torch.bfloat16 for t in (x.q, x.k, x.v))
        and x.g.dtype == torch.float32
    )


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; torch takes its time to tell."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; none where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def ready(kernel: str, x: Operands, **also: int) -> bool:
    """Whether a kernel is trusted and there."""
    return trusted(kernel, x.q.device) and loaded(kernel, x, **also) is not None


def aligned(x: Tensor) -> Tensor:
    """The kernels load up to 16 bytes at once; a part of another tensor may begin anywhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def loaded(kernel: str, x: Operands, **also: int) -> Kernel | None:
    """A kernel for these head counts and widths; None where it cannot be compiled or loaded, or not now."""
    key = key_of(kernel, x, also)
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing can be loaded meanwhile
        _kernels[key] = load(kernel, x.q.device, dict(key[2]))
    return _kernels[key]


def key_of(kernel: str, x: Operands, also: dict[str, int]) -> Key:
    """What a kernel is loaded for."""
    return kernel, x.q.device, tuple((macros(kernel, x) | also).items())


def compile_together(keys: Sequence[Key]) -> None:
    """Compile kernels side by side that are not loaded yet, which NVRTC does outside of Python's lock."""
    missing = [key for key in keys if key not in _kernels]
    if len(missing) < 2 or torch.cuda.is_current_stream_capturing():
        return

    def attempt(key: Key) -> None:
        kernel, device, sizes = key
        with suppress(CudaError):  # said when it is loaded
            compiled(kernel, options(device, dict(sizes)))

    with ThreadPoolExecutor(len(missing)) as pool:
        list(pool.map(attempt, missing))


def macros(kernel: str, x: Operands) -> dict[str, int]:
    """What a kernel is compiled for."""
    heads, width = x.v.shape[1], x.q.shape[2]
    if kernel in (FORWARD, BACKWARD):
        return {"HEADS": heads, "F_HEADS": x.heads, "D": width}
    shared = {"K_HEADS": x.k.shape[1], "G_HEADS": x.g.shape[1], "D": width}
    if kernel == PLAIN:
        shared["W_BYTES"] = 0 if x.w is None else x.w.element_size()
        return {"HEADS": heads, **shared, "PROGRAMS": _tried or (2 if width == 64 else 1)}
    assert x.b is not None
    shared |= {"B_HEADS": x.b.shape[1], "PROGRAMS": _tried or PROGRAMS[width]}
    shared |= {"G_WIDTH": x.g.shape[2], "B_WIDTH": x.b.shape[2]}
    shared["W_WIDTH"] = 0 if x.w is None else x.w.shape[2]
    if kernel == INTRA:
        return {"HEADS": x.heads, "V_HEADS": heads, **shared}
    return {"HEADS": heads, "F_HEADS": x.heads, **shared}


@contextmanager
def trying(programs: int | None) -> Iterator[dict[Key, Kernel | None]]:
    """Let so many programs share a multiprocessor, or as many as usual; yields the kernels that are loaded meanwhile.

    With fewer programs each thread has more registers.
    """
    global _kernels, _tried
    before = _kernels, _tried
    _kernels, _tried = {}, programs
    try:
        yield _kernels
    finally:
        _kernels, _tried = before


def value_channels(width: int, rows: int) -> int:
    """How many a program of `plain_scan` has: many read less, few leave no multiprocessor idle."""
    return 64 if rows * width // 64 >= ENOUGH else 32


def load(kernel: str, device: torch.device, sizes: dict[str, int]) -> Kernel | None:
    """Compile and load; a failure is said once, and the Triton kernels do the work."""
    properties = torch.cuda.get_device_properties(device)
    needed = shared_memory(kernel, sizes)
    if needed > properties.shared_memory_per_block_optin:  # type: ignore[attr-defined]
        return None
    threads = 256 if kernel in (FORWARD, BACKWARD) else 4 * sizes.get("VALUES", sizes["D"] // 2)
    try:
        with torch.cuda.device(device):
            return Kernel(kernel, options(device, sizes), threads=threads, shared_memory=needed)
    except CudaError as failure:
        warnings.warn(f"gdn2 uses Triton instead of {kernel} on {device}: {failure}", stacklevel=2)
        return None


def options(device: torch.device, sizes: dict[str, int]) -> list[str]:
    """The compiler's."""
    major, minor = capability(device)
    architecture = f"sm_{major}{minor}{'a' if (major, minor) == HOPPER else ''}"
    named = [f"-D{name}={value}" for name, value in sizes.items()]
    return [f"--gpu-architecture={architecture}", *named, "--std=c++17"]


def shared_memory(kernel: str, sizes: dict[str, int]) -> int:
    """MEMORY of a kernel, as its source adds it up."""
    width, values = sizes["D"], sizes.get("VALUES", 0)
    tile, square, padded = 2 * CHUNK * width, 2 * CHUNK * CHUNK, 4 * CHUNK * (CHUNK + 8)
    state, sums = 2 * width * width, 4 * CHUNK * (3 + width // 16)
    decays = 12 * width + 24
    return {
        INTRA: max(7 * tile, 3 * padded + 2 * CHUNK * (CHUNK + 8) + square) + 4 * CHUNK,
        PLAIN: 6 * (tile + CHUNK * (values + 4)) + 2 * square + values // 16 * 64 * width,
        FORWARD: 9 * tile + 8 * square + decays,
        BACKWARD: 10 * tile + 7 * square + decays,
        GRADIENT: 5 * tile + 3 * square + 4 * CHUNK + width // 16 * (7 * 8 + 2 * CHUNK) * 4,
        GROUP_GRADIENT: 4 * square + 8 * tile + 2 * state + sums + 80,
    }[kernel]
