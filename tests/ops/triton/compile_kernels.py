"""Compile what the stages, the plain backward and a convolution would launch, for any sizes and architecture.

No GPU is needed. A script, since tests interpret:

    python -m tests.ops.triton.compile_kernels KERNELS ARCHITECTURE,DTYPE,WIDTH,CHUNK …

KERNELS are names with commas, or "all" for those of the stages. Prints a JSON list of [case, kernel, bytes of shared
memory or an error].
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn2.ops.operands import Operands
from gdn2.ops.triton import conv_launch, launch, plain, stages, table

MODULES = (stages, plain, conv_launch, table)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTEGERS = {torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
NAMES = {dtype: name for name, dtype in DTYPES.items()} | INTEGERS


class Compiled:
    """In place of a kernel: compiles it for the arguments it is launched with."""

    def __init__(self, kernel: Any, target: int, report: Callable[[str, int | str], None]) -> None:
        self.kernel, self.target, self.report = kernel, target, report

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(
        self,
        *arguments: Any,
        num_warps: int,
        num_stages: int = 3,
        maxnreg: int | None = None,
        **options: Any,
    ) -> None:
        given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | options
        types, constants, aligned = {}, {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            value = given[name]
            if isinstance(value, Tensor):
                types[name] = f"*{NAMES[value.dtype]}"
                aligned[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float) and name not in options:
                types[name] = "fp32"
            else:
                types[name], constants[(i,)] = "constexpr", value
        source = ASTSource(self.kernel, types, constants, aligned)
        how = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        try:
            made = compile_kernel(source, target=GPUTarget("cuda", self.target, 32), options=how)
            self.report(self.kernel.__name__, made.metadata.shared)
        except Exception as failure:
            self.report(self.kernel.__name__, f"{type(failure).__name__}: {failure}"[-300:])


class Skipped:
    """In place of a kernel that is not asked for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: None


def run_stages(dtype: torch.dtype, width: int, chunk: int) -> None:
    """Two chunks through all stages, forward and backward."""

    def zeros(dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(2 * chunk, 2, width, dtype=dtype)

    x = Operands(zeros(), zeros(), zeros(), zeros(torch.float32), zeros(), zeros(), 0.1)
    chunks = table.chunk_table(torch.tensor([0, 2 * chunk]), 2, chunk)
    state = torch.zeros(1, 2, width, width)
    sums = stages.decays(x, chunks)
    f = stages.intra(x, chunks, "ieee", sums)
    stages.scan(x, f, chunks, state, outputs=True, save=False)
    _, _, starts, R = stages.scan(x, f, chunks, state, outputs=False, save=True)
    assert starts is not None and R is not None
    dR, ends, _ = stages.scan_reverse(x, f, chunks, x.v, state)
    stages.gradient(x, f.A, f.deep, chunks, sums, x.v, [starts, R, ends, dR])


def run_plain(dtype: torch.dtype, width: int, chunk: int) -> None:
    """The backward of two chunks without an erase gate, of what it takes."""
    q, k, v = (torch.zeros(2 * chunk, 2, width, dtype=dtype) for _ in range(3))
    g, w = (torch.zeros(2 * chunk, 2, 1) for _ in range(2))
    x, state = Operands(q, k, v, g, None, w, 0.1), torch.zeros(1, 2, width, width)
    if plain.takes(x, chunk):
        chunks = table.chunk_table(torch.tensor([0, 2 * chunk]), 2, chunk)
        plain.backward(x, chunks, state, v, state)


def run_convolution(dtype: torch.dtype, width: int) -> None:
    """The gradient of two heads."""
    x, weight = torch.zeros(1, 2, 2 * width, dtype=dtype), torch.zeros(2 * width, 4, dtype=dtype)
    given = conv_launch.Inputs.of(x, weight, None, None, None)
    conv_launch.backward(given, x, None, True, width, 1e-6)


def main(wanted: str, *cases: str) -> None:
    rows: list[tuple[str, str, int | str]] = []
    kernels = [
        (module, name, kernel)
        for module in MODULES
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]
    for case in cases:
        target, dtype, width, chunk = case.split(",")

        def report(kernel: str, result: int | str, case: str = case) -> None:
            rows.append((case, kernel, result))

        for module, name, kernel in kernels:
            every = wanted == "all" and module is stages
            asked = every or name.removesuffix("_kernel") in wanted.split(",")
            setattr(module, name, Compiled(kernel, int(target), report) if asked else Skipped())
        launch.INTERPRETED = divmod(int(target), 10)
        launch.capability.cache_clear()
        run_stages(DTYPES[dtype], int(width), int(chunk))
        run_plain(DTYPES[dtype], int(width), int(chunk))
        run_convolution(DTYPES[dtype], int(width))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
