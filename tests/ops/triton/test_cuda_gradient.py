"""The CUDA kernel of all gradients, its threads emulated on the CPU, beside the equations written out in fp64."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda.blocks import to_blocks
from gdn2.ops.cuda.launch import (
    GRADIENT,
    GROUP_GRADIENT,
    GROUPED,
    PROGRAMS,
    aligned,
    takes,
)
from gdn2.ops.operands import Operands, spread
from gdn2.ops.selfcheck import Scenario
from gdn2.ops.triton import stages
from gdn2.ops.triton.checks import CHUNK, MILD, Exact
from gdn2.ops.triton.pipeline import contiguous
from gdn2.ops.triton.sums import sum_to
from gdn2.ops.triton.table import Table
from tests.closeness import relative_error
from tests.ops.triton.emulation import Emulate, change_operands, emulator, needs_compiler

ARGUMENTS = "vvvfvvvvvvvvciiffvvvfvvs"
CPU = torch.device("cpu")
TOLERANCE = 5e-3  # bf16 rounds by 2e-3 at most
NARROW = replace(MILD, heads=(2, 2, 2, 2), widths=(64, 64))
SHARING = {
    "shared keys": replace(NARROW, heads=(1, 2, 2, 2)),
    "shared keys of 128": replace(MILD, heads=(1, 2, 2, 2), scalar_gates=True),
    "all but values": replace(NARROW, heads=(1, 2, 1, 1)),
    "all but values of 128": replace(MILD, heads=(1, 2, 1, 1)),
}
exact = cache(Exact)


@pytest.fixture(scope="session", params=[0, 1], ids=["rows", "blocks"])
def blocks(request: pytest.FixtureRequest) -> int:
    """Whether what lies between the scans and this is in blocks."""
    layout: int = request.param
    return layout


@pytest.fixture(scope="session")
def two_heads(blocks: int) -> Scenario:
    """Those that kernels differ for."""
    return replace(MILD, heads=(2, 2, 2, 2)) if blocks else NARROW


@pytest.fixture(scope="session")
def emulate(blocks: int, tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    """One kernel, or another for blocks of heads of 128."""
    folder = tmp_path_factory.mktemp("gradient")
    usual = emulator(folder, GRADIENT, ARGUMENTS, BLOCKS=blocks)
    grouped = emulator(folder, GROUP_GRADIENT, ARGUMENTS + "n", BLOCKS=1)
    return lambda x: grouped(x) if blocks and x.q.shape[2] == GROUPED else usual(x)


class Launched:
    """What the kernel makes of one sequence whose other stages are exact; `extra` chunks have no tokens."""

    def __init__(
        self,
        emulate: Emulate,
        right: Exact,
        extra: int = 0,
    ) -> None:
        self.right = right
        self.x, self.table = self.right.operands(CPU)
        x, table = self.x, self.table
        heads = x.v.shape[1]
        self.deep = spread(stages.intra(*self.wide(), "ieee").deep, heads, 1)
        between = [self.right.give(name, CPU) for name in ("A", "R", "dR", "starts", "ends")]
        kernel = emulate(x)
        if kernel.macros["BLOCKS"]:
            between[1:] = [to_blocks(t) for t in between[1:]]
        operands = [x.v if t is None else t for t in x[:6]]
        self.found = [t.new_full((len(t), heads, t.shape[2]), torch.nan) for t in operands]
        lengths = [torch.nn.functional.pad(t, (0, extra)) for t in (table.start, table.length)]
        per_chunk = [pad_chunks(t, extra) for t in (*between, self.deep)]
        halves = (len(per_chunk[0]), heads, CHUNK, CHUNK // 2)
        self.scores = [torch.full(halves, torch.nan) for _ in range(2)]
        do = self.right.give("do", CPU)
        given = [*operands, do, *per_chunk, *lengths, *self.scores, *self.found]
        chunks = heads * (table.start.numel() + extra)
        # each of two goes through several chunks
        programs = 2 if kernel.kernel == GROUP_GRADIENT else chunks
        kernel(programs, given, x.scale, chunks)

    def wide(self) -> tuple[Operands, Table]:
        """The rounded operands in fp32: the interpreter multiplies no bf16."""
        tensors = {n: t.float() for n, t in self.x._asdict().items() if n != "scale"}
        return self.x._replace(**tensors), self.table

    def with_deep_rows(self) -> list[Tensor]:
        """All gradients after the kernel for deep rows."""
        dq, dk, dv, dg, db, dw = (t.float() for t in self.found)
        x, table = self.wide()
        grads, width, heads = (dq, dk, dg, db), x.k.shape[2], x.v.shape[1]
        stages.deep_gradient(x, self.deep, table, self.scores, grads, width, heads, whole=False)
        return [dq, dk, dv, dg, db, dw]

    def errors(self, found: list[Tensor]) -> dict[str, float]:
        """Of gradients, summed over what their operands were shared by."""
        grads = zip("qkvgbw", found, self.x[:6], strict=True)
        summed = {n: sum_to(y.double(), x.double()) for n, y, x in grads if x is not None}
        return {f"d{n}": relative_error(y, self.right.grads[n]) for n, y in summed.items()}


def pad_chunks(x: Tensor, extra: int) -> Tensor:
    """Chunks that nobody has filled, after those of a sequence."""
    made = x.new_full((len(x) + extra, *x.shape[1:]), torch.nan if x.is_floating_point() else 1)
    made[: len(x)] = x
    return made


@needs_compiler
@pytest.mark.parametrize(
    "scenario",
    [MILD, NARROW, *SHARING.values()],
    ids=["128", "two heads of 64", *SHARING],
)
def test_gradients_are_those_of_the_equations(emulate: Emulate, scenario: Scenario) -> None:
    launched = Launched(emulate, exact(scenario, torch.bfloat16))
    assert launched.deep.sum() == 0
    errors = launched.errors(launched.found)
    assert max(errors.values()) < TOLERANCE, errors
    assert all(scores.isnan().all() for scores in launched.scores)  # only deep rows need them


@needs_compiler
def test_deep_rows_are_left_to_their_own_kernel(emulate: Emulate, two_heads: Scenario) -> None:
    strong = replace(two_heads, name="strong", strong=True)
    launched = Launched(emulate, exact(strong, torch.bfloat16))
    assert 0 < launched.deep.sum() < launched.deep.numel()
    assert max(launched.errors(launched.found).values()) > TOLERANCE
    errors = launched.errors(launched.with_deep_rows())
    assert max(errors.values()) < TOLERANCE, errors


@needs_compiler
@pytest.mark.parametrize("decay", [0.0, -1.0, -5.0, -20.0, -200.0])
def test_gradients_for_any_decay(
    emulate: Emulate, two_heads: Scenario, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a log-decay gets may be much smaller than what passes beside it."""

    change_operands(monkeypatch, lambda x: {**x, "g": torch.full_like(x["g"], decay)})
    launched = Launched(emulate, Exact(replace(two_heads, name=str(decay)), torch.bfloat16))
    grads = launched.right.grads
    errors = launched.errors(launched.with_deep_rows())
    visible = [name for name in errors if grads[name[1:]].abs().max() > 1e-30]  # what bf16 holds
    assert len(visible) >= 4
    assert max(errors[name] for name in visible) < TOLERANCE, errors


@needs_compiler
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("narrow", ["bw", "gbw"], ids=["gates", "decays too"])
def test_gates_for_all_channels(
    emulate: Emulate,
    two_heads: Scenario,
    narrow: str,
    strong: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for each head."""
    change_operands(monkeypatch, lambda x: {**x, **{n: x[n][..., :1].contiguous() for n in narrow}})
    right = Exact(replace(two_heads, name=narrow, strong=strong), torch.bfloat16)
    launched = Launched(emulate, right)
    errors = launched.errors(launched.with_deep_rows())
    assert max(errors.values()) < TOLERANCE, errors


@needs_compiler
def test_chunks_without_tokens_write_nothing(emulate: Emulate, two_heads: Scenario) -> None:
    right = exact(two_heads, torch.bfloat16)
    alone, padded = Launched(emulate, right), Launched(emulate, right, extra=2)
    for a, b in zip(alone.found, padded.found, strict=True):
        assert torch.equal(a, b)


@needs_compiler
@pytest.mark.parametrize("width", PROGRAMS)
def test_shared_memory_is_what_the_kernel_says(emulate: Emulate, width: int) -> None:
    x, _ = exact(MILD if width == 128 else NARROW, torch.bfloat16).operands(CPU)
    assert emulate(x).has_said_memory()


def test_operands_elsewhere_are_not_taken() -> None:
    x, _ = exact(MILD, torch.bfloat16).operands(CPU)
    assert not takes("gradient", x, 64)  # not on a GPU
    assert not takes("gradient", x._replace(b=None), 64)


def test_tensors_that_begin_anywhere_are_copied() -> None:
    whole = torch.randn(33)
    assert aligned(whole) is whole
    part = aligned(whole[1:])
    assert part.data_ptr() % 16 == 0
    assert torch.equal(part, whole[1:])
    x, _ = exact(MILD, torch.bfloat16).operands(CPU)
    wider = [torch.cat([t.flatten()[:1], t.flatten()]) for t in x if isinstance(t, Tensor)]
    shifted = [t[1:].view_as(x.q) for t in wider]
    given = contiguous(Operands(*shifted, x.scale))  # type: ignore[call-arg, arg-type]
    for t, other in zip(given[:-1], x[:-1], strict=True):
        assert isinstance(t, Tensor) and isinstance(other, Tensor)
        assert t.data_ptr() % 16 == 0 and torch.equal(t, other)
