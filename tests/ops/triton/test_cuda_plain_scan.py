"""The CUDA kernel without an erase gate, emulated on the CPU, beside the loop over tokens in fp64."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from gdn2 import gated_delta_rule
from gdn2.ops.cuda.launch import PLAIN, value_channels
from gdn2.ops.triton.table import chunk_table
from tests.closeness import relative_error
from tests.ops.triton.emulation import Emulated, needs_compiler

TOLERANCE = 5e-3
ARGUMENTS = "vvvfvfvfiiis"
MACROS = ("HEADS", "K_HEADS", "G_HEADS", "W_BYTES", "D", "VALUES")
Compile = Callable[..., Emulated]


@pytest.fixture(scope="session")
def compile_scan(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder = tmp_path_factory.mktemp("plain_scan")

    @cache
    def compiled(*sizes: int) -> Emulated:
        return Emulated(folder, PLAIN, ARGUMENTS, **dict(zip(MACROS, sizes, strict=True)))

    return compiled


def draw(
    heads: tuple[int, int, int],
    width: int,
    lengths: tuple[int, ...],
    decay: float | None,
    gate: torch.dtype | None,
) -> dict[str, Tensor]:
    """Packed operands: a decay for each head, and maybe a write gate."""
    generator = torch.Generator().manual_seed(0)
    (H, HK, HG), L = heads, sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = {n: normalize(normal(1, L, HK, width), dim=-1).bfloat16() for n in "qk"}
    x["v"] = normal(1, L, H, width).bfloat16()
    g = -torch.rand((1, L, HG, 1), generator=generator)
    x["g"] = g if decay is None else torch.full_like(g, decay)
    x["initial_state"] = 0.3 * normal(len(lengths), H, width, width)
    if gate is not None:
        x["w"] = normal(1, L, H, 1).sigmoid().to(gate)
    return x


def launch(
    compile_scan: Compile, x: dict[str, Tensor], values: int, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Outputs and final states, by programs of so many value channels."""
    table = chunk_table(
        torch.tensor([0, *lengths]).cumsum(0), sum((n + 63) // 64 for n in lengths), 64
    )
    (H, width), (HK, HG) = x["v"].shape[2:], (x[n].shape[2] for n in "qg")
    gate, state = x.get("w"), x["initial_state"]
    o, final = torch.full_like(x["v"][0], torch.nan), torch.full_like(state, torch.nan)
    kernel = compile_scan(H, HK, HG, 0 if gate is None else gate.itemsize, width, values)
    operands = [x[n][0].contiguous() for n in "qkvg"]
    w = None if gate is None else gate[0]
    places = (table.start, table.length, table.first)
    kernel(len(lengths) * H * (width // values), [*operands, w, state, o, final, *places], 0.5)
    return o, final


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "width", "values", "lengths", "decay", "gate"),
    [
        ((2, 2, 2), 64, 64, (200,), None, torch.bfloat16),
        ((2, 2, 2), 64, 64, (200,), None, torch.float32),
        ((2, 1, 2), 64, 32, (1, 64, 130), None, None),
        ((2, 2, 1), 128, 64, (65, 63), None, torch.bfloat16),
        ((1, 1, 1), 64, 64, (130,), 0.0, None),
        ((1, 1, 1), 64, 64, (130,), -20.0, torch.float32),
        ((1, 1, 1), 64, 64, (70,), -300.0, None),
    ],
    ids=str,
)
def test_outputs_and_final_states(
    compile_scan: Compile,
    heads: tuple[int, int, int],
    width: int,
    values: int,
    lengths: tuple[int, ...],
    decay: float | None,
    gate: torch.dtype | None,
) -> None:
    x = draw(heads, width, lengths, decay, gate)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    exact: dict[str, Any] = {n: t.double() for n, t in x.items()}
    expected, last = gated_delta_rule(
        **exact, cu_seqlens=cu_seqlens, output_final_state=True, backend="reference", scale=0.5
    )
    assert last is not None
    o, final = launch(compile_scan, x, values, lengths)
    assert relative_error(o.double(), expected[0]) < TOLERANCE
    assert relative_error(final.double(), last) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize(("width", "values"), [(64, 64), (64, 32), (128, 64)])
def test_shared_memory_is_what_the_kernel_says(
    compile_scan: Compile, width: int, values: int
) -> None:
    kernel = compile_scan(*((2, 2, 2) if width == 64 else (2, 2, 1)), 2, width, values)
    assert kernel.has_said_memory()


@pytest.mark.parametrize(
    ("width", "rows", "expected"),
    [(128, 64, 64), (128, 32, 32), (128, 1, 32), (64, 64, 32), (64, 96, 64)],
)
def test_few_rows_are_spread_over_more_programs(width: int, rows: int, expected: int) -> None:
    assert value_channels(width, rows) == expected
