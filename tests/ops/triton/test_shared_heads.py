"""The whole operator by the CUDA kernels, emulated on the CPU, where heads share some of their operands."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from gdn2.ops.chunk_op import pack
from gdn2.ops.cuda import gradient, intra, launch, scan
from gdn2.ops.cuda.launch import BACKWARD, FORWARD, GRADIENT, GROUP_GRADIENT, INTRA, PROGRAMS
from gdn2.ops.operands import Operands
from gdn2.ops.triton.pipeline import widened
from tests.closeness import relative_error
from tests.ops.cases import Case, run
from tests.ops.triton import test_cuda_gradient, test_cuda_intra, test_cuda_scan
from tests.ops.triton.emulation import Emulated, needs_compiler
from tests.ops.triton.test_operator import kernels, single

TOLERANCE = 1e-2  # several stages round to bf16
ARGUMENTS = {
    INTRA: test_cuda_intra.ARGUMENTS,
    GRADIENT: test_cuda_gradient.ARGUMENTS,
    GROUP_GRADIENT: test_cuda_gradient.ARGUMENTS + "n",
    **test_cuda_scan.ARGUMENTS,
}


def sharing(heads: tuple[int, int, int, int], width: int = 64, **changes: object) -> Case:
    sizes = {"d_k": width, "d_v": width, "chunk_size": 64, "dtype": torch.bfloat16}
    return single(T=100, heads=heads, **sizes, **changes)


CASES = {
    "nothing": sharing((2, 2, 2, 2)),
    "keys": sharing((1, 2, 2, 2), widths=("one", "one", "one")),
    "gates": sharing((2, 2, 1, 1), widths=("one", "one", "none")),
    "decays of a head": sharing((1, 2, 2, 1), widths=("one", "full", "full")),
    "all but values": sharing((1, 2, 1, 1), 128),
    "values of three": sharing((1, 3, 1, 1), widths=("full", "one", "full"), lengths=(70, 0, 7)),
    "all in part": sharing((1, 4, 2, 1), widths=("full", "full", "one")),
}


Compile = Callable[[str, tuple[tuple[str, int], ...]], Emulated]


class Kernels:
    """The CUDA kernels as `loaded` gives them; `started` has the names of those that ran."""

    def __init__(self, compiled: Compile) -> None:
        self.compiled, self.started = compiled, set[str]()

    def loaded(self, kernel: str, x: Operands, **also: int) -> Callable[..., None]:
        sizes = launch.macros(kernel, x) | also | {"PROGRAMS": 1}
        emulated = self.compiled(kernel, tuple(sizes.items()))

        def start(programs: int, *given: Tensor | float | None) -> None:
            numbers = [y for y in given if isinstance(y, int | float)]
            self.started.add(kernel)
            emulated(programs, given[: len(given) - len(numbers)], *numbers)  # type: ignore[arg-type]

        return start


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder = tmp_path_factory.mktemp("shared")

    @cache
    def compiled(kernel: str, sizes: tuple[tuple[str, int], ...]) -> Emulated:
        return Emulated(folder, kernel, ARGUMENTS[kernel], **dict(sizes))

    return compiled


@pytest.fixture
def emulated(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """CPUs are taken for Hoppers with two multiprocessors."""
    made = Kernels(compiled)
    monkeypatch.setattr(launch, "is_usual", lambda x, chunk: x.q.shape[2] in PROGRAMS)
    monkeypatch.setattr(launch, "capability", lambda device: launch.HOPPER)
    monkeypatch.setattr(launch, "ready", lambda *_, **__: True)
    monkeypatch.setattr(launch, "compile_together", lambda keys: None)
    monkeypatch.setattr(gradient, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (intra, gradient, scan):
        monkeypatch.setattr(module, "loaded", made.loaded)
    return made


@needs_compiler
@pytest.mark.parametrize(
    ("name", "keep"), [*((name, "states") for name in CASES), ("all in part", "factors")]
)
def test_results_and_gradients(name: str, keep: str, emulated: Kernels) -> None:
    case = CASES[name]
    expected = run(case, "reference", torch.float64).named()
    for quantity, found in kernels(case, keep).named().items():
        assert relative_error(found, expected[quantity]) < TOLERANCE, quantity
    group = GROUP_GRADIENT if case.d_k == 128 else GRADIENT
    assert emulated.started == {INTRA, FORWARD, BACKWARD, group}


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["keys", "decays of a head"])
def test_factors_are_kept_as_the_backward_will_read_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no first call that keeps them is captured, when nothing can be loaded."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = (
        "recompute: got False in a first call that a CUDA graph captures, "
        "expected a call before, in which the kernels are loaded"
    )
    with pytest.raises(ValueError, match=message):
        kernels(CASES[name], "factors")
    assert kernels(CASES[name], "states").o.isfinite().all()


def packed(heads: tuple[int, int, int], g_width: int, b_width: int | None) -> Operands:
    qk, g, b = heads
    q, k, v = (torch.randn(1, 5, n, 64) for n in (qk, qk, 2))
    gate = None if b_width is None else torch.randn(1, 5, b, b_width)
    return pack(q, k, v, torch.randn(1, 5, g, g_width), gate, None, 1.0)


def test_decays_of_a_head_are_repeated_for_gates_of_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the CUDA kernels do it all: others take them as they are."""
    module = "gdn2.ops.triton.pipeline.in_blocks"
    x = packed((1, 1, 2), 1, 64)
    assert widened(x, 64) is x  # not on a GPU
    monkeypatch.setattr(module, lambda x, chunk: True)
    wide = widened(x, 64)
    assert torch.equal(wide.g, x.g.expand(-1, -1, 64)) and wide.g.is_contiguous()
    assert all(a is b for a, b in zip(wide[:3], x[:3], strict=True)) and wide.b is x.b
    for other in (packed((1, 1, 2), 64, 64), packed((1, 2, 2), 1, 1), packed((1, 1, 1), 1, None)):
        assert widened(other, 64) is other
