"""CUDA kernels compiled for the CPU, their threads emulated (`emulated.h`)."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from gdn2.ops.cuda import build
from gdn2.ops.operands import Operands
from gdn2.ops.selfcheck import make_operands
from gdn2.ops.triton import checks

COMPILER = shutil.which("c++") or shutil.which("g++")
TYPES = {"v": "void*", "f": "float*", "c": "char*", "i": "const i64*"}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class Emulated:
    """A kernel for a number of heads and widths; `arguments` has a letter for each of its pointers (`TYPES`)."""

    def __init__(
        self, folder: Path, kernel: str, arguments: str, heads: int, width: int, b: int, w: int
    ) -> None:
        given = ", ".join(f"({TYPES[letter]})p[{n}]" for n, letter in enumerate(arguments))
        text = f"""#include "emulated.h"
{build.source(f"{kernel}.cu", given=frozenset({"warp.cuh"}))}
extern "C" void run(int programs, void** p, float scale) {{
    for (int i = 0; i < programs; i++) run_program(i, THREADS, [=] {{ {kernel}({given}, scale); }});
}}
extern "C" int memory() {{ return MEMORY; }}
"""
        shutil.copy(Path(__file__).parent / "emulated.h", folder)
        library = folder / f"{kernel}-{heads}-{width}-{b}-{w}.so"
        source = library.with_suffix(".cpp")
        source.write_text(text)
        widths = [f"-DD={width}", f"-DHEADS={heads}", f"-DB_WIDTH={b}", f"-DW_WIDTH={w}"]
        options = [*widths, "-DPROGRAMS=1", "-std=c++17", "-O1", "-w"]
        assert COMPILER is not None
        command = [COMPILER, *options, "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))
        self.arguments = arguments

    def __call__(self, programs: int, tensors: Sequence[Tensor], scale: float) -> None:
        assert len(tensors) == len(self.arguments)
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        self.library.run(programs, pointers, ctypes.c_float(scale))

    @property
    def shared_memory(self) -> int:
        return int(self.library.memory())


Emulate = Callable[[Operands], Emulated]


def emulator(folder: Path, kernel: str, arguments: str) -> Emulate:
    """Compile a kernel once for each number of heads and widths of operands."""

    @cache
    def compiled(*sizes: int) -> Emulated:
        return Emulated(folder, kernel, arguments, *sizes)

    def emulate(x: Operands) -> Emulated:
        gates = [0 if t is None else t.shape[2] for t in (x.b, x.w)]
        return compiled(*x.q.shape[1:], *gates)

    return emulate


def change_operands(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Let `Exact` take operands that were changed."""
    monkeypatch.setattr(
        checks, "make_operands", lambda scenario, dtype: change(make_operands(scenario, dtype))
    )
