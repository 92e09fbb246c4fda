"""The decode kernel compiled for a GPU, against the token loop in fp64 on the same rounded operands."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2 import gated_delta_step
from gdn2.bench import decode
from gdn2.ops import rule
from gdn2.ops.reference import token_loop
from tests.closeness import assert_close
from tests.ops.cases import Case, operands

COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SUMS = 5e-6  # of fp32, with the GPU's exponential

FULL = Case(T=1, d_k=128, d_v=128, B=4, heads=(16, 16, 16, 16), dtype=torch.bfloat16)


def full(**changes: object) -> Case:
    return replace(FULL, **changes)  # type: ignore[arg-type]


def on_gpu(case: Case) -> tuple[dict[str, Any], Tensor]:
    """Operands and state."""
    x = {n: y.cuda() for n, y in operands(case).items()}
    state = x.pop("initial_state")
    return x, state


def exact(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    wide = [None if (y := x.get(n)) is None else y.double() for n in "qkvgbw"]
    q, k, v, g, b, w = wide
    assert q is not None and k is not None and v is not None and g is not None
    return token_loop(q, k, v, g, b, w, q.shape[-1] ** -0.5, state.double())


@pytest.fixture(autouse=True)
def no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function has the kernel alone."""
    monkeypatch.delattr(rule, "token_loop")


def check(case: Case, inplace: bool = True) -> None:
    x, state = on_gpu(case)
    expected_o, expected_state = exact(x, state)
    kept = state.clone()
    o, after = gated_delta_step(**x, state=state, inplace=inplace)
    assert (o.dtype, after.dtype) == (case.dtype, torch.float32)
    assert (after is state) == inplace
    assert inplace or torch.equal(state, kept)
    rounding = torch.finfo(case.dtype).eps / 2 if case.dtype != torch.float32 else 0.0
    assert_close("o", o, expected_o, rounding + SUMS)
    assert_close("state", after, expected_state, SUMS)


@each_dtype
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("inplace", [False, True])
def test_full_size(T: int, dtype: torch.dtype, inplace: bool) -> None:
    check(full(T=T, dtype=dtype), inplace)


@pytest.mark.parametrize(
    ("B", "H"), [(1, 1), (1, 3), (1, 16), (4, 16), (5, 16), (16, 16), (32, 16), (64, 16), (7, 150)]
)
def test_batches_and_heads(B: int, H: int) -> None:
    """Of each row of the table of tiles, its bounds too."""
    check(full(B=B, heads=(H, H, H, H)))


@pytest.mark.parametrize("d", [1, 16, 48, 64, 96, 100, 160, 192, 256])
def test_widths(d: int) -> None:
    check(full(T=2, d_k=d, d_v=d, heads=(2, 2, 2, 2)))


@pytest.mark.parametrize(
    "case",
    [
        full(heads=(1, 4, 4, 2), widths=("one", "one", "one")),
        full(heads=(2, 6, 3, 1), widths=("full", "none", "full"), B=7),
        full(heads=(2, 4, 1, 4), widths=("full", "full", "none"), T=16),
        full(heads=(4, 4, 2, 1), widths=("one", "none", "none"), T=5),
        full(heads=(2, 2, 2, 2), contiguous=False, T=3),
        full(heads=(2, 2, 2, 2), decay="mixed", erase_range=2.0, T=16),
        full(heads=(2, 2, 2, 2), decay="spiky", T=4),
        full(heads=(2, 2, 2, 2), decay=-200.0, T=4),
        full(heads=(2, 2, 2, 2), decay=0.0, erase_range=2.0, T=4),
        full(heads=(2, 2, 2, 2), T=300),
        full(heads=(2, 2, 2, 2), d_k=20, d_v=256),
        full(heads=(2, 2, 2, 2), d_k=256, d_v=20),
    ],
    ids=str,
)
def test_gates_heads_and_decays(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [full(T=0), full(B=0)], ids=str)
def test_nothing_to_do(case: Case) -> None:
    x, state = on_gpu(case)
    o, after = gated_delta_step(**x, state=state)
    assert o.shape == x["v"].shape
    assert torch.equal(after, state)


def views(B: int) -> tuple[dict[str, Tensor], Tensor]:
    """Operands sliced from one projection, and the state of one layer in a pool of three."""
    H, d = 16, 128
    rand = torch.Generator("cuda").manual_seed(0)
    projected = torch.rand(B, 1, 6 * H * d, generator=rand, dtype=torch.bfloat16, device="cuda")
    parts = [x.unflatten(-1, (H, d)) for x in projected.chunk(6, -1)]
    x = dict(zip("qkvgbw", parts, strict=True))
    x["k"].div_(d**0.5)
    x["g"].neg_()
    pool = torch.rand(B, 3, H, d, d, generator=rand, device="cuda")
    return x, pool[:, 1]


@pytest.mark.parametrize("B", [1, 7])
def test_views_cost_no_memory(B: int) -> None:
    """Nothing but the output is allocated, and the neighbours in the pool keep their bits."""
    x, state = views(B)
    given: Any = x
    pool = state._base
    assert pool is not None
    kept, expected = pool.clone(), exact(x, state)
    gated_delta_step(**given, state=state.clone(), inplace=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = gated_delta_step(**given, state=state, inplace=True)
    assert torch.cuda.max_memory_allocated() - before == o.nbytes
    assert_close("o", o, expected[0], torch.finfo(torch.bfloat16).eps / 2 + SUMS)
    assert_close("state", state, expected[1], SUMS)
    assert torch.equal(pool[:, [0, 2]], kept[:, [0, 2]])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("T", [1, 4])
def test_graphs_replay_the_same_bits(T: int, inplace: bool) -> None:
    """Five steps in a graph, on operands that change after the capture."""
    x, state = on_gpu(full(T=T))
    other, start = on_gpu(full(T=T, seed=1, decay="spiky"))

    def steps() -> tuple[Tensor, Tensor]:
        S = state
        for _ in range(5):
            o, S = gated_delta_step(**x, state=S, inplace=inplace)
        return o, S

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps()
    for name, y in x.items():
        y.copy_(other[name])
    state.copy_(start)
    graph.replay()
    replayed = [y.clone() for y in results]
    state.copy_(start)
    for actual, expected in zip(replayed, steps(), strict=True):
        assert bool(actual.isfinite().all())
        assert torch.equal(actual, expected)


class Tiny(torch.nn.Module):
    """A decoding layer with neighbours to fuse."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(64, 6 * 2 * 32, bias=False)
        self.inplace = inplace

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, b, w = (y.unflatten(-1, (2, 32)) for y in self.proj(x).chunk(6, -1))
        o, state = gated_delta_step(
            q,
            torch.nn.functional.normalize(k, dim=-1),
            v,
            -torch.nn.functional.softplus(g),
            b.sigmoid(),
            w.sigmoid(),
            state=state,
            inplace=self.inplace,
        )
        return torch.nn.functional.silu(o), state


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles(inplace: bool) -> None:
    """As one graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Tiny(inplace).cuda()
    x, start = torch.randn(3, 1, 64).cuda(), torch.randn(3, 2, 32, 32).cuda()
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        states = start.clone(), start.clone()
        actual, expected = compiled(x, states[0]), layer(x, states[1])
    for name, one, other in zip(("o", "state"), actual, expected, strict=True):
        assert_close(name, one, other, 1e-5)
    assert_close("given state", states[0], expected[1] if inplace else start, 1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_waits_for_the_gpu(inplace: bool) -> None:
    x, state = on_gpu(full())
    gated_delta_step(**x, state=state, inplace=inplace)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, _ = gated_delta_step(**x, state=state, inplace=inplace)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert bool(o.isfinite().all())


def test_gradients_take_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "token_loop", token_loop, raising=False)
    x, state = on_gpu(full(T=2, heads=(2, 2, 2, 2), dtype=torch.float32))
    x["k"].requires_grad_()
    o, after = gated_delta_step(**x, state=state)
    (gradient,) = torch.autograd.grad(o.sum() + after.sum(), x["k"])
    assert float(gradient.norm()) > 0
    with torch.no_grad():
        assert_close("o", o, gated_delta_step(**x, state=state)[0], SUMS)


def test_every_tile_of_the_sweep_is_right() -> None:
    shape = decode.Shape(3, 2, 128, 128)
    plan = decode.Plan((shape,), torch.device("cuda"), "bf16")
    x = decode.make_operands(shape, plan)
    start = torch.randn(shape, device="cuda")
    _, expected = exact(x, start)
    for name, step in decode.tiled_steps(x, decode.sweep_tiles(shape)).items():
        state = start.clone()
        step(state)
        assert_close(name, state, expected, SUMS)


def test_the_benchmark_times_graphs() -> None:
    device = torch.device("cuda")
    plan = decode.Plan((decode.Shape(16, 16, 128, 128),), device, "bf16", seconds=0.05)
    rows = {row.name: row for row in decode.run(plan).rows}
    assert list(rows) == ["copy", "gdn2", "gdn2, new state"]
    for row in rows.values():
        assert 1e-6 < row.timing.median < 1e-3
        assert 0 < row.of_copy < 2
