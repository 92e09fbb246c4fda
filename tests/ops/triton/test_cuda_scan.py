"""The CUDA kernels of both scans, emulated on the CPU, beside the equations in fp64."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gdn2.ops.cuda.blocks import to_blocks, to_rows
from gdn2.ops.selfcheck import Scenario
from gdn2.ops.triton import stages
from gdn2.ops.triton.checks import MILD, Exact
from tests.closeness import relative_error
from tests.ops.triton.emulation import Emulated, needs_compiler

CPU = torch.device("cpu")
TOLERANCE = 5e-3
NARROW = replace(MILD, heads=(2, 2, 2, 2), widths=(64, 64))
ARGUMENTS = {"forward_scan": "vvfvvvfvfvviii", "reverse_scan": "vvfvvvffvviii"}
exact = cache(Exact)
Compile = Callable[..., Emulated]


@pytest.fixture(scope="session")
def compile_scan(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder: Path = tmp_path_factory.mktemp("scan")

    @cache
    def compiled(kernel: str, heads: int, width: int, **states: int) -> Emulated:
        return Emulated(folder, kernel, ARGUMENTS[kernel], HEADS=heads, D=width, **states)

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


CASES = [MILD, NARROW]


@needs_compiler
@pytest.mark.parametrize("scenario", CASES)
@pytest.mark.parametrize("states", [0, 1])
def test_forward(compile_scan: Compile, scenario: Scenario, states: int) -> None:
    right = exact(scenario, torch.bfloat16)
    x, table = right.operands(CPU)
    heads, width = x.q.shape[1:]
    factors = given(right, "Q_gamma", "K_tail", "gamma_C", "A_qk", "Y", "U")
    state = right.give("state", CPU)
    if states:
        found = {name: new(right.give(name, CPU)) for name in ("starts", "R")}
    else:
        found = {"o": new(x.v), "final": new(state)}
    made = [found.get(name) for name in ("o", "final", "starts", "R")]
    kernel = compile_scan("forward_scan", heads, width, STATES=states)
    kernel(heads * (width // 64), [*factors, state, *made, table.start, table.length, table.first])
    for name, error in errors(right, found).items():
        assert error < TOLERANCE, name


@needs_compiler
@pytest.mark.parametrize("scenario", CASES)
def test_reverse(compile_scan: Compile, scenario: Scenario) -> None:
    right = exact(scenario, torch.bfloat16)
    x, table = right.operands(CPU)
    heads, width = x.q.shape[1:]
    tensors = given(right, "Q_gamma", "K_tail", "gamma_C", "A_qk", "Y", "do", "d_final")
    found = {
        "d_state": new(right.give("state", CPU)),
        **{name: new(right.give(name, CPU)) for name in ("ends", "dR")},
    }
    kernel = compile_scan("reverse_scan", heads, width)
    kernel(
        heads * (width // 64), [*tensors, *found.values(), table.start, table.length, table.first]
    )
    for name, error in errors(right, found).items():
        assert error < TOLERANCE, name


@needs_compiler
@pytest.mark.parametrize("lengths", [(1, 70, 64), (0, 65, 3)])
def test_packed_sequences(compile_scan: Compile, lengths: tuple[int, ...]) -> None:
    """Each as if it were alone, to the bit; one without tokens keeps its state."""
    heads, width, generator = 2, 64, torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    chunks = sum((n + 63) // 64 for n in lengths)
    table = stages.chunk_table(cu_seqlens, chunks, 64)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (0.1 * torch.randn(shape, generator=generator)).to(dtype)

    tiles = {n: draw(chunks, heads, 64, width) for n in ("Q_gamma", "K_tail", "Y", "U")}
    gamma_C = draw(chunks, heads, width, dtype=torch.float32).sigmoid()
    A_qk = draw(chunks, heads, 64, 64).tril()
    state = draw(len(lengths), heads, width, width, dtype=torch.float32)
    for chunk, length in enumerate(table.length.tolist()):
        for tile in tiles.values():
            tile[chunk, :, length:] = 0
    kernel = compile_scan("forward_scan", heads, width, STATES=0)
    o, final = new(draw(sum(lengths), heads, width)), new(state)
    factors = [tiles["Q_gamma"], tiles["K_tail"], gamma_C, A_qk, tiles["Y"], tiles["U"]]
    places = (table.start, table.length, table.first)
    kernel(len(lengths) * heads, [*factors, state, o, final, None, None, *places])
    for i, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        part = slice(int(table.first[i]), int(table.first[i + 1]))
        alone = [t[part].contiguous() for t in factors]
        own = stages.chunk_table(cu_seqlens[i : i + 2] - begin, part.stop - part.start, 64)
        y, last = new(o[begin:end]), new(state[i])
        places = (own.start, own.length, own.first)
        kernel(heads, [*alone, state[i].contiguous(), y, last, None, None, *places])
        assert torch.equal(y, o[begin:end]) and torch.equal(last, final[i])
        if begin == end:
            assert torch.equal(last, state[i])


@needs_compiler
@pytest.mark.parametrize(("heads", "width"), [(1, 128), (2, 64)])
def test_shared_memory_is_what_the_kernel_says(
    compile_scan: Compile, heads: int, width: int
) -> None:
    assert compile_scan("forward_scan", heads, width, STATES=0).has_said_memory()
    assert compile_scan("forward_scan", heads, width, STATES=1).has_said_memory()
    assert compile_scan("reverse_scan", heads, width).has_said_memory()
