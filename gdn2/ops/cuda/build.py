"""CUDA C++ compiled by NVRTC, the library that torch brings along, kept on disk, and started on torch's stream."""

import ctypes
import hashlib
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gdn2.ops.trust import verdict_file, write_at_once

SOURCES = Path(__file__).parent
LOCAL_BYTES, REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NUM_REGS
MOST_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DIGEST_BYTES = 32  # SHA-256


_code: dict[str, bytes] = {}  # of kernels that this process has compiled or read


class CudaError(RuntimeError):
    """The compiler or the driver refused."""


@cache
def torch_library(name: str) -> ctypes.CDLL:
    """One of torch's CUDA version: loaded already, in the linker's path, or where its package puts it."""
    name = f"lib{name}.so.{str(torch.version.cuda).split('.')[0]}"
    packages = Path(torch.__file__).parent.parent / "nvidia"
    for place in (name, *sorted(map(str, packages.glob(f"*/lib/{name}")))):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CudaError(f"{name} is not to be found")


def compiler() -> ctypes.CDLL:
    """NVRTC."""
    return torch_library("nvrtc")


@cache
def driver() -> ctypes.CDLL:
    """The GPU's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as missing:
        raise CudaError(f"libcuda.so.1: {missing}") from None


def source(file: str, given: frozenset[str] = frozenset()) -> str:
    """A kernel's source with what it includes, each file once; none of those that are given already."""
    seen = set(given)

    def read(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (SOURCES / file).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "(.+)"\n', lambda found: read(found[1]), text)

    return read(file)


def compiled(name: str, options: Sequence[str]) -> bytes:
    """Machine code of a kernel for one GPU; compiled once for a machine, as long as nothing changes."""
    text, version = source(f"{name}.cu"), (ctypes.c_int * 2)()
    compiler().nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    key = hashlib.sha256("\0".join([text, *options, *map(str, version)]).encode()).hexdigest()
    if key in _code:
        return _code[key]
    file = verdict_file().parent / "cuda" / f"{name}-{key[:16]}.cubin"
    code = _kept(file)
    if code is None:
        code = compile_source(text, name, options)
        with suppress(OSError):  # compiled again next time
            write_at_once(file, hashlib.sha256(code).digest() + code)
    _code[key] = code
    return code


def _kept(file: Path) -> bytes | None:
    """Machine code behind its digest; None where a machine that stopped, or a disk, has left something else.

    The driver is told no length, and reads on where a part is missing.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def compile_source(text: str, name: str, options: Sequence[str]) -> bytes:
    """Machine code of a source; raises `CudaError` with the compiler's words."""
    nvrtc, program = compiler(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given) != 0:
            raise CudaError(f"{name}.cu does not compile: {_text(nvrtc, program, 'ProgramLog')}")
        return _bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(nvrtc, program, what).rstrip(b"\0").decode(errors="replace").strip()


class Kernel:
    """A kernel loaded on the current device."""

    def __init__(self, name: str, options: Sequence[str], threads: int, shared_memory: int) -> None:
        self.threads, self.shared_memory = threads, shared_memory
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # the driver needs torch's context
        self.device = torch.cuda.current_device()
        _require(driver().cuModuleLoadData(ctypes.byref(self.module), compiled(name, options)))
        _require(
            driver().cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode())
        )
        _require(driver().cuFuncSetAttribute(self.function, MOST_SHARED_MEMORY, shared_memory))

    def __call__(self, programs: int, *arguments: Tensor | float | int | None) -> None:
        """Start programs on the current stream; tensors are passed as pointers."""
        count = len(arguments)
        values = (ctypes.c_uint64 * count)(*map(_bits, arguments))
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.device))
        grid, block = (programs, 1, 1), (self.threads, 1, 1)
        _require(
            driver().cuLaunchKernel(
                self.function, *grid, *block, self.shared_memory, stream, pointers, None
            )
        )

    def of_threads(self) -> tuple[int, int]:
        """How many registers each has, and how many bytes of memory for what does not fit there."""
        registers, spilled = ctypes.c_int(), ctypes.c_int()
        for found, what in ((registers, REGISTERS), (spilled, LOCAL_BYTES)):
            _require(driver().cuFuncGetAttribute(ctypes.byref(found), what, self.function))
        return registers.value, spilled.value


def _bits(argument: Tensor | float | int | None) -> int:
    """What a kernel finds where an argument is: a pointer, or a number in the first four bytes."""
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<f", argument), "little")
    if isinstance(argument, int):
        return argument
    return 0 if argument is None else argument.data_ptr()


def _require(status: int) -> None:
    if status != 0:
        message = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(message))
        raise CudaError((message.value or b"unknown error").decode())
