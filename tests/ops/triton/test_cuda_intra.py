"""The CUDA kernel of all that a chunk computes on its own, emulated on the CPU, beside the equations in fp64."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda.launch import PROGRAMS
from gdn2.ops.selfcheck import Scenario
from gdn2.ops.triton import stages
from gdn2.ops.triton.checks import CHUNK, FACTORS, MILD, Exact, reordered
from tests.closeness import relative_error
from tests.ops.triton.emulation import Emulate, change_operands, emulator, needs_compiler

CPU = torch.device("cpu")
ARGUMENTS = "vvvvvviivvfvvvvcsn"
TOLERANCE = 5e-3
NARROW = replace(MILD, heads=(2, 2, 2, 2), widths=(64, 64))
exact = cache(Exact)


@pytest.fixture(scope="session")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    return emulator(tmp_path_factory.mktemp("intra"), "intra", ARGUMENTS, BLOCKS=0)


@pytest.fixture(scope="session")
def emulate_blocks(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    return emulator(tmp_path_factory.mktemp("blocks"), "intra", ARGUMENTS, BLOCKS=1)


def launch(emulate: Emulate, right: Exact) -> stages.Factors:
    """What it makes of one sequence, and which rows are deep."""
    x, table = right.operands(CPU)
    f = stages.new_factors(x, table.start.numel(), CHUNK)
    found = f.tensors()
    for tensor in found:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    operands = [x.v if t is None else t for t in x[:6]]
    programs = x.heads * table.start.numel()
    emulate(x)(programs, [*operands, table.start, table.length, *found], x.scale, 1)
    return f


@needs_compiler
@pytest.mark.parametrize(
    "scenario",
    [
        MILD,
        NARROW,
        replace(MILD, heads=(1, 3, 1, 1)),
        replace(NARROW, heads=(1, 2, 1, 2), scalar_gates=True),
    ],
    ids=["128", "two heads of 64", "three value heads", "two that share keys and decays"],
)
def test_factors_are_those_of_the_equations(emulate: Emulate, scenario: Scenario) -> None:
    right = exact(scenario, torch.bfloat16)
    found = launch(emulate, right)
    found = found._replace(U=found.U.view(right.U.shape))
    assert not found.deep.any()
    for name in FACTORS:
        made = getattr(found, name).double()
        error = relative_error(made, getattr(right, name).expand(made.shape))
        assert error < (1e-6 if name == "gamma_C" else TOLERANCE), name
    for matrix in (found.A_qk, found.A):
        assert matrix is not None
        assert torch.equal(matrix, matrix.tril())


@needs_compiler
@pytest.mark.parametrize("scenario", [MILD, NARROW], ids=["128", "two heads of 64"])
def test_blocks_hold_the_same(
    emulate: Emulate, emulate_blocks: Emulate, scenario: Scenario
) -> None:
    """To the bit, where the scans look for it."""
    right = exact(scenario, torch.bfloat16)
    rows, blocks = launch(emulate, right), launch(emulate_blocks, right)
    assert not torch.equal(rows.U, blocks.U)
    for name, found in reordered(blocks._replace(blocks=True))._asdict().items():
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(getattr(rows, name))), name
    for name, found in reordered(rows)._asdict().items():
        assert name == "blocks" or torch.equal(found, getattr(blocks, name)), name


@needs_compiler
@pytest.mark.parametrize("decay", ["strong", 0.0, -1.0, -5.0, -20.0, -200.0])
def test_factors_for_any_decay(
    emulate: Emulate, decay: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deep rows are computed pair by pair."""
    scenario = replace(NARROW, name=str(decay), strong=decay == "strong")

    if not isinstance(decay, str):
        change_operands(monkeypatch, lambda x: {**x, "g": torch.full_like(x["g"], decay)})
    right = Exact(scenario, torch.bfloat16)
    found = launch(emulate, right)
    assert bool(found.deep.any()) == (decay not in (0.0, -1.0))
    for name in FACTORS:
        expected: Tensor = getattr(right, name)
        if expected.abs().max() > 1e-30:  # what bf16 holds
            assert relative_error(getattr(found, name).double(), expected) < TOLERANCE, name


@needs_compiler
def test_what_is_no_number_stays_none(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-decay that is NaN spoils what it decays: its token and those after it in the chunk."""
    right = exact(NARROW, torch.bfloat16)

    def spoil(x: dict[str, Tensor]) -> dict[str, Tensor]:
        x["g"][0, 5, 0, 3] = torch.nan
        return x

    change_operands(monkeypatch, spoil)
    found = launch(emulate, Exact(replace(NARROW, name="spoiled"), torch.bfloat16))
    assert found.Q_gamma[0, 0, 5:, 3].isnan().all() and found.gamma_C[0, 0, 3].isnan()
    assert torch.equal(found.Q_gamma[0, 0, :5], launch(emulate, right).Q_gamma[0, 0, :5])
    assert found.Q_gamma[0, 1].isfinite().all()


@needs_compiler
def test_written_values_are_rounded_once(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left to erase, U is W V, whose bits are all there until then."""
    change_operands(monkeypatch, lambda x: {**x, "g": torch.full_like(x["g"], -200.0)})
    right = Exact(replace(MILD, name="alone"), torch.bfloat16)
    assert torch.equal(launch(emulate, right).U, right.U.bfloat16())


@needs_compiler
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("narrow", ["bw", "gbw"], ids=["gates", "decays too"])
def test_gates_for_all_channels(
    emulate: Emulate, narrow: str, strong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each head."""
    change_operands(monkeypatch, lambda x: {**x, **{n: x[n][..., :1].contiguous() for n in narrow}})
    right = Exact(replace(NARROW, name=narrow, strong=strong), torch.bfloat16)
    found = launch(emulate, right)
    for name in FACTORS:
        made = getattr(found, name).double()
        assert relative_error(made, getattr(right, name).expand(made.shape)) < TOLERANCE, name


@needs_compiler
def test_later_tokens_move_no_bit(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a chunk do not depend on what comes after them."""
    right, until = exact(NARROW, torch.bfloat16), 41
    before = launch(emulate, right)

    def halve(x: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in "qkvgbw":
            x[name][:, until:] *= 0.5
        return x

    change_operands(monkeypatch, halve)
    after = launch(emulate, Exact(replace(NARROW, name="changed"), torch.bfloat16))
    for name in ("Q_gamma", "A_qk", "A", "Y", "U", "deep"):
        rows = [getattr(f, name)[0, :, :until] for f in (before, after)]
        assert torch.equal(*rows), name
    assert not torch.equal(before.A_qk[0], after.A_qk[0])


@needs_compiler
@pytest.mark.parametrize("width", PROGRAMS)
def test_shared_memory_is_what_the_kernel_says(emulate: Emulate, width: int) -> None:
    x, _ = exact(MILD if width == 128 else NARROW, torch.bfloat16).operands(CPU)
    assert emulate(x).has_said_memory()
