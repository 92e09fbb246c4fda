"""Run the kernels in Triton's interpreter where there is no GPU, whatever else the process has imported.

`triton.jit` looks at TRITON_INTERPRET when it decorates. The kernels are decorated when `gdn2.ops.triton` is imported,
here, with the variable set. The library functions they call, such as `tl.sum`, were decorated when Triton was, by now
most likely for a GPU; without one nobody else can use them, so they are swapped for interpreted ones. The variable is
set during these tests only. With a GPU the compiled kernels are tested instead, unless the variable says otherwise.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

VARIABLE = "TRITON_INTERPRET"
INTERPRET = os.environ.get(VARIABLE) == "1" or not torch.cuda.is_available()
NAMES = (
    *("stages", "step", "conv_launch", "norm", "delta_inputs", "swiglu", "matvec"),
    *(
        "cross_entropy",
        "adamw",
        "log_decay",
        "window",
        "ranks",
        "plain",
        "table",
        "gates",
        "rotary",
        "squares",
        "sums",
    ),
)
KERNELS = [f"gdn2.ops.triton.{name}" for name in NAMES]

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def import_interpreted() -> None:
    """Import the kernels as interpreted functions, and make those of Triton's library such."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        for module in KERNELS:
            import_module(module)
    from triton import language  # noqa: PLC0415 (optional dependency)
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    for module in (language, language.core, language.math, language.standard):
        for name, function in [*vars(module).items()]:
            if isinstance(function, JITFunction):
                setattr(module, name, InterpretedFunction(function.fn))


if INTERPRET and find_spec("triton"):
    import_interpreted()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret for the time of one test; exponents that overflow are masked in the kernels, but numpy reports them."""
    if not INTERPRET:
        pytest.skip(f"a GPU is here; set {VARIABLE}=1 to run the interpreter all the same")
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415

    for module in KERNELS:
        kernels = [f for n, f in vars(import_module(module)).items() if n.endswith("_kernel")]
        assert kernels and all(isinstance(f, InterpretedFunction) for f in kernels)
    monkeypatch.setenv(VARIABLE, "1")
    with np.errstate(over="ignore"):
        yield


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill whatever is allocated without a value with NaN, or with -1 where there is none."""

    def poisoned(allocate: Any) -> Any:
        def fill(*arguments: Any, **options: Any) -> Tensor:
            made: Tensor = allocate(*arguments, **options)
            return made.fill_(float("nan") if made.is_floating_point() else -1)

        return fill

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
