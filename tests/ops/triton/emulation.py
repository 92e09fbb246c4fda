"""CUDA kernels compiled for the CPU, their threads emulated (`emulated.h`)."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda import build
from gdn2.ops.cuda.launch import macros, shared_memory
from gdn2.ops.operands import Operands
from gdn2.ops.selfcheck import make_operands
from gdn2.ops.triton import checks

COMPILER = shutil.which("c++") or shutil.which("g++")
TYPES = {"v": "void*", "f": "float*", "c": "char*", "i": "const i64*"}  # and numbers
NUMBERS = {"s": "scale", "n": "count"}
INSTRUCTIONS = frozenset({"warp.cuh", "group.cuh"})  # that `emulated.h` has in their place
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class Emulated:
    """A kernel compiled with some macros; `arguments` has a letter for each that it takes (`TYPES`)."""

    schedules: Sequence[
        int
    ] = ()  # in which threads take turns besides the usual one (`emulated.h`)

    def __init__(self, folder: Path, kernel: str, arguments: str, **macros: int) -> None:
        given = ", ".join(
            NUMBERS.get(letter) or f"({TYPES[letter]})p[{n}]" for n, letter in enumerate(arguments)
        )
        text = f"""#include "emulated.h"
{build.source(f"{kernel}.cu", given=INSTRUCTIONS)}
extern "C" const char* run(int programs, void** p, float scale, int count, int order) {{
    gridDim.x = programs, schedule = order;
    for (int i = 0; i < programs; i++) {{
        const char* wrong = run_program(i, THREADS, [=] {{ {kernel}({given}); }});
        if (wrong != nullptr) return wrong;
    }}
    return nullptr;
}}
extern "C" int memory() {{ return MEMORY; }}
"""
        shutil.copy(Path(__file__).parent / "emulated.h", folder)
        library = folder / f"{kernel}-{'-'.join(map(str, macros.values()))}.so"
        source = library.with_suffix(".cpp")
        source.write_text(text)
        options = [f"-D{name}={value}" for name, value in ({"PROGRAMS": 1} | macros).items()]
        options += ["-std=c++17", "-O1", "-w"]
        assert COMPILER is not None
        command = [COMPILER, *options, "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.run.restype = ctypes.c_char_p
        self.kernel, self.macros = kernel, macros
        self.pointers = len(arguments.rstrip("sn"))

    def __call__(
        self, programs: int, tensors: Sequence[Tensor | None], scale: float = 1.0, count: int = 0
    ) -> None:
        """Run programs one after the other; if there are schedules, again by each of these, with the same result."""
        assert len(tensors) == self.pointers
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        pointers = (ctypes.c_void_p * len(tensors))(*addresses)
        given = [t for t in tensors if t is not None]
        before = [t.clone() for t in given] if self.schedules else []

        def run(schedule: int) -> None:
            wrong = self.library.run(programs, pointers, ctypes.c_float(scale), count, schedule)
            assert wrong is None, f"schedule {schedule}: {wrong.decode()}"

        run(0)
        after = [t.clone() for t in given] if self.schedules else []
        for schedule in self.schedules:
            for tensor, value in zip(given, before, strict=True):
                tensor.copy_(value)
            run(schedule)
            for i, (tensor, value) in enumerate(zip(given, after, strict=True)):
                assert torch.equal(bits(tensor), bits(value)), f"schedule {schedule}: tensor {i}"

    def has_said_memory(self) -> bool:
        """Whether Python knows how much shared memory the kernel takes."""
        return int(self.library.memory()) == shared_memory(self.kernel, self.macros)


def bits(x: Tensor) -> Tensor:
    """A result's, which may be no number."""
    return x.contiguous().view(torch.uint8)


Emulate = Callable[[Operands], Emulated]


def emulator(folder: Path, kernel: str, arguments: str, **also: int) -> Emulate:
    """Compile a kernel once for each number of heads and widths of operands, with further macros."""

    @cache
    def compiled(sizes: tuple[tuple[str, int], ...]) -> Emulated:
        return Emulated(folder, kernel, arguments, **dict(sizes))

    return lambda x: compiled(tuple((macros(kernel, x) | also | {"PROGRAMS": 1}).items()))


def change_operands(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Let `Exact` take operands that were changed."""
    monkeypatch.setattr(
        checks, "make_operands", lambda scenario, dtype: change(make_operands(scenario, dtype))
    )
