"""The CUDA kernel of all gradients, its threads emulated on the CPU, beside the equations written out in fp64."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda import build
from gdn2.ops.cuda import gradient as fused
from gdn2.ops.operands import Operands
from gdn2.ops.selfcheck import Scenario, make_operands
from gdn2.ops.triton import checks, stages
from gdn2.ops.triton.checks import MILD, Exact
from tests.closeness import relative_error

CPU = torch.device("cpu")
COMPILER = shutil.which("c++") or shutil.which("g++")
TOLERANCE = 5e-3  # bf16 rounds by 2e-3 at most
NARROW = replace(MILD, heads=(2, 2, 2, 2), widths=(64, 64))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
exact = cache(Exact)

MAIN = """
extern "C" void run(int programs, void** p, float scale) {
    for (int i = 0; i < programs; i++) run_program(i, THREADS, [=] {
        gradient(p[0], p[1], p[2], (const float*)p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11],
                 (const char*)p[12], (const i64*)p[13], (const i64*)p[14], (float*)p[15], (float*)p[16],
                 p[17], p[18], p[19], (float*)p[20], p[21], p[22], scale);
    });
}
extern "C" int memory() { return MEMORY; }
"""


@pytest.fixture(scope="session")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], ctypes.CDLL]:
    """Compile the kernel for the CPU, for a number of heads and a width."""
    folder = tmp_path_factory.mktemp("cuda")
    shutil.copy(Path(__file__).parent / "emulated.h", folder)

    @cache
    def compiled(heads: int, width: int) -> ctypes.CDLL:
        kernel = build.source("gradient.cu", given=frozenset({"warp.cuh"}))
        text, library = folder / f"{heads}x{width}.cpp", folder / f"{heads}x{width}.so"
        text.write_text('#include "emulated.h"\n' + kernel + MAIN)
        options = [f"-DD={width}", f"-DHEADS={heads}", "-DPROGRAMS=1", "-std=c++17", "-O1", "-w"]
        assert COMPILER is not None
        command = [COMPILER, *options, "-shared", "-fPIC", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))

    return compiled


class Launched:
    """What the kernel makes of one sequence whose other stages are exact; `extra` chunks have no tokens."""

    def __init__(
        self,
        emulate: Callable[[int, int], ctypes.CDLL],
        right: Exact,
        extra: int = 0,
    ) -> None:
        self.right = right
        self.x, self.table = self.right.operands(CPU)
        x, table = self.x, self.table
        self.deep = stages.intra(*self.wide(), "ieee").deep
        between = [self.right.give(name, CPU) for name in ("A", "R", "dR", "starts", "ends")]
        operands = [t for t in (x.q, x.k, x.v, x.g, x.b, x.w) if t is not None]
        self.found = [torch.full_like(t, torch.nan) for t in operands]
        lengths = [torch.nn.functional.pad(t, (0, extra)) for t in (table.start, table.length)]
        per_chunk = [pad_chunks(t, extra) for t in (*between, self.deep)]
        self.scores = [torch.full(per_chunk[0].shape, torch.nan) for _ in range(2)]
        do = self.right.give("do", CPU)
        given = [*operands, do, *per_chunk, *lengths, *self.scores, *self.found]
        pointers = (ctypes.c_void_p * len(given))(*(t.data_ptr() for t in given))
        heads, width = x.q.shape[1:]
        programs = heads * (table.start.numel() + extra)
        emulate(heads, width).run(programs, pointers, ctypes.c_float(x.scale))

    def wide(self) -> tuple[Operands, stages.Table]:
        """The rounded operands in fp32: the interpreter multiplies no bf16."""
        tensors = {n: t.float() for n, t in self.x._asdict().items() if n != "scale"}
        return self.x._replace(**tensors), self.table

    def with_deep_rows(self) -> list[Tensor]:
        """All gradients after the kernel for deep rows."""
        dq, dk, dv, dg, db, dw = (t.float() for t in self.found)
        x, table = self.wide()
        stages.deep_gradient(x, self.deep, table, self.scores, (dq, dk, dg, db))
        return [dq, dk, dv, dg, db, dw]

    def errors(self, found: list[Tensor]) -> dict[str, float]:
        grads = zip("qkvgbw", found, strict=True)
        return {f"d{n}": relative_error(y.double(), self.right.grads[n]) for n, y in grads}


def pad_chunks(x: Tensor, extra: int) -> Tensor:
    """Chunks that nobody has filled, after those of a sequence."""
    made = x.new_full((len(x) + extra, *x.shape[1:]), torch.nan if x.is_floating_point() else 1)
    made[: len(x)] = x
    return made


@needs_compiler
@pytest.mark.parametrize("scenario", [MILD, NARROW], ids=["128", "two heads of 64"])
def test_gradients_are_those_of_the_equations(
    emulate: Callable[[int, int], ctypes.CDLL], scenario: Scenario
) -> None:
    launched = Launched(emulate, exact(scenario, torch.bfloat16))
    assert launched.deep.sum() == 0
    errors = launched.errors(launched.found)
    assert max(errors.values()) < TOLERANCE, errors
    assert all(scores.isnan().all() for scores in launched.scores)  # only deep rows need them


@needs_compiler
def test_deep_rows_are_left_to_their_own_kernel(
    emulate: Callable[[int, int], ctypes.CDLL],
) -> None:
    strong = replace(NARROW, name="strong", strong=True)
    launched = Launched(emulate, exact(strong, torch.bfloat16))
    assert 0 < launched.deep.sum() < launched.deep.numel()
    assert max(launched.errors(launched.found).values()) > TOLERANCE
    errors = launched.errors(launched.with_deep_rows())
    assert max(errors.values()) < TOLERANCE, errors


@needs_compiler
@pytest.mark.parametrize("decay", [0.0, -1.0, -5.0, -20.0, -200.0])
def test_gradients_for_any_decay(
    emulate: Callable[[int, int], ctypes.CDLL], decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a log-decay gets may be much smaller than what passes beside it."""

    def decayed(scenario: Scenario, dtype: torch.dtype) -> dict[str, Tensor]:
        made = make_operands(scenario, dtype)
        return {**made, "g": torch.full_like(made["g"], decay)}

    monkeypatch.setattr(checks, "make_operands", decayed)
    launched = Launched(emulate, Exact(replace(NARROW, name=str(decay)), torch.bfloat16))
    grads = launched.right.grads
    errors = launched.errors(launched.with_deep_rows())
    visible = [name for name in errors if grads[name[1:]].abs().max() > 1e-30]  # what bf16 holds
    assert len(visible) >= 4
    assert max(errors[name] for name in visible) < TOLERANCE, errors


@needs_compiler
def test_chunks_without_tokens_write_nothing(emulate: Callable[[int, int], ctypes.CDLL]) -> None:
    right = exact(NARROW, torch.bfloat16)
    alone, padded = Launched(emulate, right), Launched(emulate, right, extra=2)
    for a, b in zip(alone.found, padded.found, strict=True):
        assert torch.equal(a, b)


@needs_compiler
@pytest.mark.parametrize("width", fused.WIDTHS)
def test_shared_memory_is_what_the_kernel_says(
    emulate: Callable[[int, int], ctypes.CDLL], width: int
) -> None:
    heads = 1 if width == 128 else 2
    assert emulate(heads, width).memory() == fused.shared_memory(width)


def test_operands_elsewhere_are_not_taken() -> None:
    x, _ = exact(MILD, torch.bfloat16).operands(CPU)
    assert not fused.takes(x, 64)  # not on a GPU
    assert not fused.takes(x._replace(b=None), 64)


def test_tensors_that_begin_anywhere_are_copied() -> None:
    whole = torch.randn(33)
    assert fused.aligned(whole) is whole
    part = fused.aligned(whole[1:])
    assert part.data_ptr() % 16 == 0
    assert torch.equal(part, whole[1:])
