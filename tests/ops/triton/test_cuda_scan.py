"""The CUDA kernels of both scans, emulated on the CPU, beside the equations in fp64."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda.blocks import to_blocks, to_rows
from gdn2.ops.selfcheck import Scenario
from gdn2.ops.triton.checks import MILD, Exact
from gdn2.ops.triton.table import chunk_table
from tests.closeness import relative_error
from tests.ops.triton.emulation import Emulated, needs_compiler

CPU = torch.device("cpu")
TOLERANCE = 5e-3
NARROW = replace(MILD, heads=(2, 2, 2, 2), widths=(64, 64))
ARGUMENTS = {"forward_scan": "vvfvvvfvfiii", "backward_scans": "vvfvvvfvvvffvviii"}
exact = cache(Exact)
Compile = Callable[[str, int, int, int], Emulated]


@pytest.fixture(scope="session")
def compile_scan(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder: Path = tmp_path_factory.mktemp("scan")

    @cache
    def compiled(kernel: str, heads: int, shared: int, width: int) -> Emulated:
        return Emulated(folder, kernel, ARGUMENTS[kernel], HEADS=heads, F_HEADS=shared, D=width)

    return compiled


def new(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan)


def errors(right: Exact, found: dict[str, Tensor]) -> dict[str, float]:
    def expected(name: str) -> Tensor:
        return right.grads["state"] if name == "d_state" else getattr(right, name)

    blocks = ("starts", "R", "ends", "dR")
    rows = {n: to_rows(y) if n in blocks else y for n, y in found.items()}
    return {n: relative_error(y.double(), expected(n)) for n, y in rows.items()}


def given(right: Exact, *names: str) -> list[Tensor]:
    """Factors as the kernels read them, and others."""
    in_blocks = ("Q_gamma", "K_tail", "A_qk", "Y", "U")
    tensors = [right.give(n, CPU) for n in names]
    return [to_blocks(t) if n in in_blocks else t for n, t in zip(names, tensors, strict=True)]


CASES = [MILD, NARROW, replace(NARROW, heads=(1, 2, 1, 1))]


FACTORS = ("Q_gamma", "K_tail", "gamma_C", "A_qk", "Y", "U")


@needs_compiler
@pytest.mark.parametrize("scenario", CASES)
def test_forward(compile_scan: Compile, scenario: Scenario) -> None:
    right = exact(scenario, torch.bfloat16)
    x, table = right.operands(CPU)
    heads, width = x.v.shape[1:]
    state = right.give("state", CPU)
    found = {"o": new(x.v), "final": new(state)}
    kernel = compile_scan("forward_scan", heads, x.heads, width)
    tensors = [*given(right, *FACTORS), state, *found.values(), *table[1:]]
    kernel(heads * (width // 64), tensors)
    for name, error in errors(right, found).items():
        assert error < TOLERANCE, name


@needs_compiler
@pytest.mark.parametrize("scenario", CASES)
def test_backward(compile_scan: Compile, scenario: Scenario) -> None:
    right = exact(scenario, torch.bfloat16)
    x, table = right.operands(CPU)
    heads, width = x.v.shape[1:]
    states = {name: new(right.give(name, CPU)) for name in ("starts", "R")}
    d_state = {"d_state": new(right.give("state", CPU))}
    grads = {name: new(right.give(name, CPU)) for name in ("ends", "dR")}
    found = states | d_state | grads
    kernel = compile_scan("backward_scans", heads, x.heads, width)
    tensors = [*given(right, *FACTORS, "state"), *states.values()]
    tensors += [*given(right, "do", "d_final"), *d_state.values(), *grads.values(), *table[1:]]
    kernel(2 * heads * (width // 64), tensors)
    for name, error in errors(right, found).items():
        assert error < TOLERANCE, name


class Packed:
    """Random tiles of sequences in one batch, in no order that matters here, and what the scans make of them."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.heads, self.width, generator = 2, 64, torch.Generator().manual_seed(0)
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        chunks = sum((n + 63) // 64 for n in lengths)
        self.table = chunk_table(self.cu_seqlens, chunks, 64)

        def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (0.1 * torch.randn(shape, generator=generator)).to(dtype)

        tile = (chunks, self.heads, 64, self.width)
        self.tiles = {n: draw(*tile) for n in ("Q_gamma", "K_tail", "A_qk", "Y", "U")}
        self.tiles["gamma_C"] = draw(chunks, self.heads, self.width, dtype=torch.float32).sigmoid()
        self.do = draw(sum(lengths), self.heads, self.width)
        state = (len(lengths), self.heads, self.width, self.width)
        self.state = draw(*state, dtype=torch.float32)

    def run(self, compile_scan: Compile, kernel: str, sequence: int | None = None) -> list[Tensor]:
        """Of all sequences, or of one alone."""
        table, tiles, do, state = self.table, self.tiles, self.do, self.state
        if sequence is not None:
            begin, end = (int(self.cu_seqlens[sequence + i]) for i in (0, 1))
            part = slice(int(table.first[sequence]), int(table.first[sequence + 1]))
            tiles = {n: t[part].contiguous() for n, t in tiles.items()}
            table = chunk_table(torch.tensor([0, end - begin]), part.stop - part.start, 64)
            do, state = do[begin:end].contiguous(), state[sequence : sequence + 1].contiguous()
        factors, U = [tiles[n] for n in FACTORS], tiles["U"]
        emulated = compile_scan(kernel, self.heads, self.heads, self.width)
        programs = state.shape[0] * self.heads
        if kernel == "forward_scan":
            made = [new(do), new(state)]
            emulated(programs, [*factors, state, *made, *table[1:]])
            return made
        states = [new(U.new_empty(*U.shape[:2], self.width, self.width)) for _ in range(2)]
        made = [states[0], new(U), new(state), states[1], new(U)]
        emulated(2 * programs, [*factors, state, *made[:2], do, state, *made[2:], *table[1:]])
        return made

    def part_of(self, made: Tensor, sequence: int) -> Tensor:
        """A sequence's part of states, of what chunks have, or of what tokens have."""
        if made.dtype == self.state.dtype:
            return made[sequence : sequence + 1]
        table = self.cu_seqlens if made.shape == self.do.shape else self.table.first
        return made[int(table[sequence]) : int(table[sequence + 1])]


@needs_compiler
@pytest.mark.parametrize("lengths", [(1, 70, 64), (0, 65, 3)])
@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_packed_sequences(compile_scan: Compile, lengths: tuple[int, ...], kernel: str) -> None:
    """Each as if it were alone, to the bit; one without tokens keeps its state."""
    packed = Packed(lengths)
    together = packed.run(compile_scan, kernel)
    for sequence, length in enumerate(lengths):
        alone = packed.run(compile_scan, kernel, sequence)
        for a, b in zip(alone, together, strict=True):
            assert not a.isnan().any()
            assert torch.equal(a, packed.part_of(b, sequence))
            if length == 0 and b.dtype == packed.state.dtype:
                assert torch.equal(a, packed.state[sequence : sequence + 1])


@needs_compiler
@pytest.mark.parametrize(("heads", "width"), [(1, 128), (2, 64)])
def test_shared_memory_is_what_the_kernel_says(
    compile_scan: Compile, heads: int, width: int
) -> None:
    for kernel in ARGUMENTS:
        assert compile_scan(kernel, heads, heads, width).has_said_memory()
