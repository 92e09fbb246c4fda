"""Compile every kernel for the launches of its check, as a GPU would be given them; none is needed.

A script, since tests interpret:

    python -m tests.ops.triton.compile_checks ARCHITECTURE DTYPE …

Prints a JSON object: bytes of shared memory of all variants of each kernel, and what each check that stopped said.
"""

import json
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from gdn2.ops import triton as kernels
from gdn2.ops.cuda import band
from gdn2.ops.cuda.launch import BACKWARD, FORWARD, GRADIENT, GROUP_GRADIENT, INTRA, PLAIN
from gdn2.ops.triton import ahead, launch, plain
from gdn2.ops.triton.checks import CHECKS
from tests.ops.triton.compile_kernels import DTYPES

ELSEWHERE = (INTRA, PLAIN, FORWARD, BACKWARD, GRADIENT, GROUP_GRADIENT, band.NAME)  # not Triton's
NOT_ON_GPUS = (plain.NAME, "fp32")


class NoGpu:
    """What Triton asks its driver before it compiles."""

    def __init__(self, architecture: tuple[int, int]) -> None:
        self.architecture = architecture
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        major, minor = self.architecture
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": launch.ARCHITECTURES[self.architecture].shared_memory}

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def modules() -> list[Any]:
    names = (module.name for module in pkgutil.iter_modules(kernels.__path__))
    return [import_module(f"{kernels.__name__}.{name}") for name in names]


def all_kernels() -> Iterator[tuple[str, Any]]:
    """By the file and the name of each."""
    for module in modules():
        for name, kernel in vars(module).items():
            own = isinstance(kernel, JITFunction) and kernel.__module__ == module.__name__
            if own and name.endswith("_kernel"):
                yield f"{module.__name__.rpartition('.')[2]}.{name}", kernel


def main(target: str, *dtypes: str) -> None:
    launch.INTERPRETED = divmod(int(target), 10)  # taken for that of tensors on a CPU
    driver.set_active(NoGpu(launch.INTERPRETED))
    if launch.INTERPRETED >= (9, 0):
        for module in modules():
            if hasattr(module, "overlapping"):
                module.overlapping = lambda device: {"PDL": True, "launch_pdl": True}
    ahead._compiling.set(True)
    stopped: dict[str, str] = {}
    for dtype in dtypes:
        for name, check in CHECKS.items():
            if name in ELSEWHERE or (name, dtype) == NOT_ON_GPUS:
                continue
            try:
                check(torch.device("cpu"), DTYPES[dtype])
            except Exception as failure:
                stopped[f"{name}, {dtype}"] = f"{type(failure).__name__}: {failure}"[-500:]
    compiled: dict[str, list[int]] = {}
    for name, kernel in all_kernels():
        variants = kernel.device_caches[0][0].values()
        compiled[name] = sorted(variant.metadata.shared for variant in variants)
    print(json.dumps({"compiled": compiled, "stopped": stopped}))


if __name__ == "__main__":
    main(*sys.argv[1:])
