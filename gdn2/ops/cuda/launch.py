"""Which operands the CUDA kernels take, and the kernels loaded for them."""

import warnings

import torch

from gdn2.ops.cuda.build import CudaError, Kernel
from gdn2.ops.operands import Operands
from gdn2.ops.trust import trusted

CHUNK = 64
PROGRAMS = {64: 3, 128: 2}  # that share a multiprocessor, as many as its shared memory has room for
Key = tuple[str, int, int, tuple[int, int], torch.device]
_kernels: dict[Key, Kernel | None] = {}


def takes(kernel: str, x: Operands, chunk: int) -> bool:
    """Whether a kernel is for such operands, on such a device: bf16, heads alike, a width it is compiled for."""
    if x.b is None or chunk != CHUNK or not x.q.is_cuda:
        return False
    if torch.cuda.get_device_capability(x.q.device) < (9, 0):
        return False
    gates = [t for t in (x.b, x.w) if t is not None]
    narrow = (x.q, x.k, x.v, *gates)
    return (
        x.q.shape[2] in PROGRAMS
        and all(t.shape == x.q.shape for t in (x.k, x.v, x.g))
        and all(t.shape[1] == x.q.shape[1] and t.shape[2] in (1, x.q.shape[2]) for t in gates)
        and all(t.dtype == torch.bfloat16 for t in narrow)
        and x.g.dtype == torch.float32
        and all(t.data_ptr() % 16 == 0 for t in (*narrow, x.g))
        and trusted(kernel, x.q.device)
        and loaded(kernel, x) is not None
    )


def loaded(kernel: str, x: Operands) -> Kernel | None:
    """A kernel for these head counts and widths; None where it cannot be compiled or loaded, or not now."""
    assert x.b is not None
    gates = (x.b.shape[2], 0 if x.w is None else x.w.shape[2])
    key = (kernel, x.q.shape[1], x.q.shape[2], gates, x.q.device)
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing can be loaded meanwhile
        _kernels[key] = load(*key)
    return _kernels[key]


def load(
    kernel: str, heads: int, width: int, gates: tuple[int, int], device: torch.device
) -> Kernel | None:
    """Compile and load; a failure is said once, and the Triton kernels do the work."""
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    needed = shared_memory(kernel, width)
    if needed > properties.shared_memory_per_block_optin:  # type: ignore[attr-defined]
        return None
    options = [
        f"--gpu-architecture=sm_{major}{minor}",
        f"-DD={width}",
        f"-DHEADS={heads}",
        f"-DB_WIDTH={gates[0]}",
        f"-DW_WIDTH={gates[1]}",
        f"-DPROGRAMS={PROGRAMS[width]}",
        "--std=c++17",
    ]
    try:
        with torch.cuda.device(device):
            return Kernel(kernel, options, threads=2 * width, shared_memory=needed)
    except CudaError as failure:
        warnings.warn(f"gdn2 uses Triton instead of {kernel} on {device}: {failure}", stacklevel=2)
        return None


def shared_memory(kernel: str, width: int) -> int:
    """MEMORY of a kernel, as its source adds it up."""
    tile, square, padded = 2 * CHUNK * width, 2 * CHUNK * CHUNK, 4 * CHUNK * (CHUNK + 8)
    if kernel == "gradient":
        return 5 * tile + 3 * square + 4 * CHUNK + width // 16 * (7 * 8 + 2 * CHUNK) * 4
    return max(7 * tile, 3 * padded + 2 * CHUNK * (CHUNK + 8) + square) + 4 * CHUNK
