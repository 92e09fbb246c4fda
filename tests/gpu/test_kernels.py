"""The operator by compiled kernels on a GPU, against the torch stages in fp64 on the same rounded operands."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops import chunk_op
from gdn2.ops.backends import choose
from gdn2.ops.packing import check_cu_seqlens
from tests.closeness import assert_close, relative_error
from tests.ops.cases import HALVES, Case, Result, operands, rule

COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

# Head counts, widths and dtype are compiled in, lengths and decays are not: most tests share these.
USUAL = Case(T=200, d_k=64, d_v=64, B=2, heads=(2, 2, 2, 2), chunk_size=64, dtype=torch.bfloat16)


def usual(**changes: object) -> Case:
    return replace(USUAL, **changes)  # type: ignore[arg-type]


def on_gpu(case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Leaves on the GPU, rounded to the case's dtype and, if another is asked for, widened to that."""
    made = {n: x if dtype is None else x.to(dtype) for n, x in operands(case).items()}
    return {n: x.cuda().requires_grad_() for n, x in made.items()}


def options(case: Case, backend: str) -> dict[str, Any]:
    cu_seqlens = case.cu_seqlens
    return {
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.cuda(),
        "backend": backend,
        "chunk_size": case.chunk_size,
        "recompute": case.recompute,
    }


def weights(case: Case, results: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of output and final state that every dtype of the same case shares."""
    rand = torch.Generator().manual_seed(case.seed + 1)
    drawn = [torch.randn(x.shape, generator=rand, dtype=torch.float64) for x in results]
    return [w.to(case.dtype).to(x) for w, x in zip(drawn, results, strict=True)]


def run(case: Case, backend: str = "triton", dtype: torch.dtype | None = None) -> Result:
    """Output, final state and all gradients."""
    leaves = on_gpu(case, dtype)
    results = rule(leaves, **options(case, backend))
    grads = torch.autograd.grad(results, list(leaves.values()), weights(case, results))
    o, state = (x.detach() for x in results)
    return Result(o, state, dict(zip(leaves, grads, strict=True)))


def exact(case: Case) -> Result:
    return run(replace(case, chunk_size=64), "torch", torch.float64)


def check(case: Case) -> None:
    """Compare all results of a case with fp64, as far as their dtype can hold it: fp16 has nothing below 6e-8."""
    actual, expected = run(case), exact(case).named()
    wanted = {n: expected[n].to(x.dtype) for n, x in actual.named().items()}
    errors = {n: relative_error(x, wanted[n]) for n, x in actual.named().items()}
    print(f"\n{case}", *(f"{name} {error:.1e}" for name, error in errors.items()), sep="  ")
    assert (actual.o.dtype, actual.state.dtype) == (case.dtype, torch.float32)
    for name, x in actual.named().items():
        assert_close(name, x, wanted[name], TOLERANCE[case.dtype])


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32}[x.itemsize])


def assert_same_bits(actual: Result, expected: Result) -> None:
    others = expected.named()
    for name, x in actual.named().items():
        assert torch.equal(bits(x), bits(others[name])), name


@each_dtype
@pytest.mark.parametrize("d", [16, 64, 96, 128, 160, 256])
def test_widths(d: int, dtype: torch.dtype) -> None:
    check(usual(T=130, d_k=d, d_v=d, dtype=dtype))


@each_dtype
@pytest.mark.parametrize("T", [1, 63, 65, 5000])
def test_lengths(T: int, dtype: torch.dtype) -> None:
    check(usual(T=T, dtype=dtype))


def test_no_tokens() -> None:
    case = usual(T=0)
    leaves = on_gpu(case)
    o, state = rule(leaves, **options(case, "triton"))
    assert o.shape == leaves["v"].shape
    assert torch.equal(state, leaves["initial_state"])
    outer = torch.randn_like(state)
    grads = torch.autograd.grad(state, list(leaves.values()), outer)
    assert torch.equal(grads[-1], outer)
    assert [d.shape for d in grads] == [x.shape for x in leaves.values()]


@pytest.mark.parametrize(("B", "H"), [(1, 1), (1, 2), (3, 2), (32, 16)])
def test_batches(B: int, H: int) -> None:
    check(usual(T=130, B=B, heads=(H, H, H, H)))


@each_dtype
@pytest.mark.parametrize(
    "decay", ["mild", "uneven", "spiky", "ends", "mixed", 0.0, -1.0, -4.0, -20.0, -200.0]
)
def test_decays(decay: float | str, dtype: torch.dtype) -> None:
    # fp16 holds nothing below 6e-8, so through exp(-20) nothing of the initial state is left
    holds = dtype != torch.float16 or decay not in (-20.0, -200.0)
    check(usual(decay=decay, erase_range=2.0, dtype=dtype, initial_state=holds))


@each_dtype
def test_packed_documents(dtype: torch.dtype) -> None:
    """32 of them with 1, 2, 5, 10, … tokens, and an empty one."""
    lengths = (*(1 + n * n for n in range(16)), 0, *(1 + n * n for n in range(16, 32)))
    assert (lengths[0], max(lengths), len(lengths)) == (1, 962, 33)
    check(usual(lengths=lengths, dtype=dtype))


@pytest.mark.parametrize(
    "case",
    [
        usual(d_k=48, d_v=100, heads=(1, 4, 2, 1), widths=("one", "full", "one")),
        usual(d_k=256, d_v=16, heads=(2, 2, 1, 2), widths=("full", "one", "none")),
        usual(d_k=1, d_v=20, decay=-1.0),
        usual(d_k=20, d_v=1, widths=("one", "one", "full"), initial_state=False),
        usual(heads=(1, 4, 4, 1), widths=("one", "none", "one"), decay=-1.0),
        usual(widths=("full", "none", "none"), initial_state=False, contiguous=False),
        usual(chunk_size=16),
        usual(chunk_size=32, decay="spiky"),
        usual(chunk_size=128, decay="spiky"),
    ],
    ids=str,
)
def test_shapes(case: Case) -> None:
    check(case)


def test_tf32_solve() -> None:
    case = usual(erase_range=2.0)
    leaves, expected = on_gpu(case), exact(case)
    results = rule(leaves, **options(case, "triton"), solve_precision="tf32")
    for name, x, wanted in zip(("o", "final_state"), results, expected[:2], strict=True):
        assert_close(name, x, wanted, TOLERANCE[case.dtype])


@each_dtype
@pytest.mark.parametrize("lengths", [(), (1, 130, 65, 0, 204)], ids=["dense", "packed"])
def test_runs_give_the_same_bits(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Many at once, so that programs meet in another order each time; with and without recomputing."""
    case = usual(T=400, B=8, lengths=lengths, decay="mixed", dtype=dtype)
    expected = run(case)
    for recompute in (True, True, False):
        assert_same_bits(run(replace(case, recompute=recompute)), expected)


@each_dtype
@pytest.mark.parametrize("decay", [-1e-3, "mild", -20.0, "mixed"])
def test_later_tokens_move_no_bit(decay: float | str, dtype: torch.dtype) -> None:
    case = usual(B=1, decay=decay, erase_range=2.0, dtype=dtype)
    x = operands(case)

    def forward(x: dict[str, Tensor]) -> Tensor:
        return rule({n: y.cuda() for n, y in x.items()}, **options(case, "triton"))[0]

    o = forward(x)
    for seed, t in enumerate((0, 15, 31, 32, 62, 63, 64, 100, 127, 128, 198), start=1):
        for kind in ("spiky", -1e-3):
            other = operands(replace(case, decay=kind, seed=seed))
            changed = {n: torch.cat([x[n][:, : t + 1], other[n][:, t + 1 :]], 1) for n in "qkvgbw"}
            moved = forward({**changed, "initial_state": x["initial_state"]})
            assert torch.equal(bits(o[:, : t + 1]), bits(moved[:, : t + 1])), (t, kind)
            assert not torch.equal(o[:, t + 1 :], moved[:, t + 1 :]), (t, kind)


def excess(error: Tensor, floor: float) -> float:
    """Largest |mean| of samples [n, groups], in units of what chance and the floor allow."""
    allowed = 5 * error.std(0) / error.shape[0] ** 0.5 + floor
    return float((error.mean(0).abs() / allowed).max())


@each_dtype
@pytest.mark.parametrize("decay", ["mild", -1e-2])
def test_gradients_are_not_biased(decay: float | str, dtype: torch.dtype) -> None:
    """The mean error of each channel, in either half of the chunks, is within five standard errors of zero.

    Errors inside a chunk hang together, so the mean over each half of each chunk of each head is one sample. The floor
    is a fiftieth of a rounding of the gradient's root mean square.
    """
    case = usual(T=512, B=32, decay=decay, erase_range=2.0, dtype=dtype)
    actual, expected = run(case).grads, exact(case).grads
    half = case.chunk_size // 2
    worst = {}
    for name, d in actual.items():
        error = d.double() - expected[name]
        floor = 0.02 * torch.finfo(dtype).eps * float(expected[name].square().mean().sqrt())
        if name == "initial_state":  # [N, H, d_k, d_v]
            worst[name] = max(excess(error.mean(axis).flatten(0, 1), floor) for axis in (-1, -2))
            continue
        # [B, T, H, d] → samples [B · chunks · H, 2 · d]
        halves = error.unflatten(1, (-1, 2, half)).mean(3).movedim(3, 2)
        worst[name] = excess(halves.flatten(0, 2).flatten(1), floor)
    print(f"\n{decay}", *(f"d{name} {x:.2f}" for name, x in worst.items()), sep="  ")
    for name, x in worst.items():
        assert x < 1, f"d{name}: a mean error is {x:.2f} times what chance explains"


LAYOUTS = {"dense": usual(), "packed": usual(lengths=(1, 130, 65, 0, 204))}
each_layout = pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
def test_compiles(case: Case) -> None:
    """As one graph, with the same bits."""
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(rule, fullgraph=True)
    leaves = on_gpu(case)
    results = compiled(leaves, **options(case, "triton"))
    grads = torch.autograd.grad(results, list(leaves.values()), weights(case, results))
    o, state = (x.detach() for x in results)
    assert_same_bits(Result(o, state, dict(zip(leaves, grads, strict=True))), run(case))


@each_layout
def test_graphs_of_a_compiler(case: Case) -> None:
    """It warms up, captures and replays, forward and backward; nothing stays in its memory, all bits are the same."""
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(rule, mode="reduce-overhead")
    leaves = on_gpu(case)
    expected = run(case)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        results = compiled(leaves, **options(case, "triton"))
        grads = torch.autograd.grad(results, list(leaves.values()), weights(case, results))
        o, state, *copies = (x.detach().clone() for x in (*results, *grads))
        assert_same_bits(Result(o, state, dict(zip(leaves, copies, strict=True))), expected)


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of one call, after a few on a side stream, and the tensors that each replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@each_layout
def test_cuda_graphs(case: Case, backward: bool) -> None:
    """A replay on other operands gives what a call on them gives, bit for bit."""
    leaves, how = on_gpu(case), options(case, "triton")
    outer = weights(case, rule(leaves, **how))

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            results = rule(leaves, **how)
        if not backward:
            return list(results)
        return [*results, *torch.autograd.grad(results, list(leaves.values()), outer)]

    graph, results = captured(step)
    other = on_gpu(replace(case, seed=1, decay="spiky"))
    with torch.no_grad():
        for name, x in leaves.items():
            x.copy_(other[name])
    graph.replay()
    replayed = [x.detach().clone() for x in results]
    for i, (actual, expected) in enumerate(zip(replayed, step(), strict=True)):
        assert torch.equal(bits(actual), bits(expected)), i


@each_layout
def test_nothing_waits_for_the_gpu(case: Case) -> None:
    """After kernels are compiled; offsets of packed sequences are read once, by whoever comes first."""
    run(case)
    longer = replace(case, T=case.T + 1, lengths=tuple(n + 1 for n in case.lengths))
    leaves, how = on_gpu(longer), options(longer, "triton")
    if how["cu_seqlens"] is not None:
        check_cu_seqlens(how["cu_seqlens"], 1, sum(longer.lengths))
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = rule(leaves, **how)
        outer = [torch.ones_like(x) for x in results]
        grads = torch.autograd.grad(results, list(leaves.values()), outer)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(bool(x.isfinite().all()) for x in (*results, *grads))


@each_dtype
def test_auto_picks_the_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def pipeline_of(backend: str) -> chunk_op.Pipeline:
        asked.append(backend)
        return real(backend)

    real = chunk_op.pipeline_of
    monkeypatch.setattr(chunk_op, "pipeline_of", pipeline_of)
    assert choose("auto", torch.device("cuda"), dtype) == "triton"
    case = usual(dtype=dtype)
    assert_same_bits(run(case, "auto"), run(case, "triton"))
    assert asked and set(asked) == {"triton"}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_fp32_gates_are_taken(dtype: torch.dtype) -> None:
    """Gates may be wider than the other operands."""
    case = usual(dtype=dtype)
    leaves = {n: x.detach().float() if n in "bw" else x.detach() for n, x in on_gpu(case).items()}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    results = rule(leaves, **options(case, "triton"))
    grads = torch.autograd.grad(results, list(leaves.values()), weights(case, results))
    expected = exact(case)
    assert_close("o", results[0], expected.o, TOLERANCE[dtype])
    for (name, x), d in zip(leaves.items(), grads, strict=True):
        assert d.dtype == x.dtype, name
        assert_close(f"d{name}", d, expected.grads[name], TOLERANCE[dtype])
