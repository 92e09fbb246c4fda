"""Short convolution, RMS normalisation and activation by compiled kernels on a GPU, against their twins in fp64."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.layers.mlp import SwiGLU
from gdn2.ops import conv, conv_op, norm, norm_op
from gdn2.ops.conv import short_convolution, short_convolution_step
from gdn2.ops.norm import gated_rms_norm, rms_norm
from gdn2.ops.packing import check_cu_seqlens
from gdn2.ops.swiglu import swiglu_linear
from tests.closeness import assert_close, relative_error

COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="needs a CUDA GPU, and kernels that are compiled"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

Call = Callable[..., list[Tensor]]
Operands = dict[str, Any]  # tensors by the names of arguments


def draw(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> Operands:
    rand = torch.Generator("cuda").manual_seed(seed)
    return {
        name: torch.randn(shape, generator=rand, device="cuda").to(dtype)
        for name, shape in shapes.items()
    }


def differentiate(call: Call, operands: Operands, rounded: torch.dtype | None = None) -> Operands:
    """Outputs and all gradients, with outer gradients rounded to the operands' dtype or to another."""
    leaves = {name: t.detach().requires_grad_() for name, t in operands.items()}
    outputs = call(**leaves)
    shapes = {str(i): tuple(y.shape) for i, y in enumerate(outputs)}
    outer = draw(shapes, rounded or outputs[0].dtype, seed=1).values()
    pairs = zip(outer, outputs, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), [d.to(y.dtype) for d, y in pairs])
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"d{name}": d for name, d in zip(leaves, grads, strict=True)}


def check(call: Call, operands: Operands) -> None:
    """Compare with the twin, which takes what is fp64, on the same rounded operands."""
    dtype = operands["x"].dtype
    actual = differentiate(call, operands)
    exact = differentiate(call, {name: t.double() for name, t in operands.items()}, dtype)
    expected = {name: t.to(dtype) for name, t in exact.items()}
    errors = {name: relative_error(t, expected[name]) for name, t in actual.items()}
    print("", *(f"{name} {error:.1e}" for name, error in errors.items()), sep="  ")
    for name, t in actual.items():
        assert t.dtype == dtype
        assert_close(name, t, expected[name], TOLERANCE[dtype])


@dataclass(frozen=True)
class Convolution:
    """A call of the short convolution; `lengths` packs."""

    B: int = 2
    T: int = 1000
    channels: int = 2048
    width: int = 4
    lengths: tuple[int, ...] = ()
    l2_width: int | None = 128
    bias: bool = False
    state: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        B, T = (1, sum(self.lengths)) if self.lengths else (self.B, self.T)
        past = (len(self.lengths) or B, self.channels, self.width - 1)
        shapes: dict[str, tuple[int, ...]] = {
            "x": (B, T, self.channels),
            "weight": (self.channels, self.width),
        }
        shapes |= {"bias": (self.channels,)} if self.bias else {}
        return shapes | ({"initial_state": past} if self.state else {})

    def call(self) -> Call:
        cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).int().cuda()
        options: dict[str, Any] = {
            "activation": "silu",
            "l2_width": self.l2_width,
            "output_final_state": self.state,
            "cu_seqlens": cu_seqlens if self.lengths else None,
        }

        def call(**operands: Tensor) -> list[Tensor]:
            given: Operands = operands
            y, final = short_convolution(**given, **options)
            return [y] if final is None else [y, final]

        return call


DOCUMENTS = (*(1 + n * n for n in range(16)), 0, *(1 + n * n for n in range(16, 32)))
CONVOLUTIONS = [
    Convolution(),
    Convolution(l2_width=None),
    Convolution(l2_width=None, bias=True, channels=4736),  # Mamba-2 of width 2304
    Convolution(state=True, bias=True),
    Convolution(lengths=DOCUMENTS),
    Convolution(lengths=DOCUMENTS, state=True, l2_width=None),
    Convolution(T=1, B=7, state=True),
    Convolution(T=2, B=3, state=True, channels=96, l2_width=48),
    Convolution(T=63, channels=200, l2_width=100, width=3, bias=True, state=True),
    Convolution(T=65, channels=130, l2_width=None, width=2, state=True),
    Convolution(T=5000, B=1, channels=256, l2_width=256, width=4),
    Convolution(T=130, channels=24, l2_width=1, bias=True),
    Convolution(T=33, channels=37, l2_width=None, width=1, bias=True),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for case in CONVOLUTIONS
        for dtype in DTYPES
        # the gradient of a normalised number is all rounding in half precision
        if case.l2_width != 1 or dtype == torch.float32
    ],
    ids=str,
)
def test_convolution(case: Convolution, dtype: torch.dtype) -> None:
    operands = draw(case.shapes, dtype)
    if case.l2_width == 1:
        operands = {n: 1e-3 * t for n, t in operands.items()}  # where eps still counts
    check(case.call(), operands)


def gated(**options: Any) -> Call:
    def call(x: Tensor, gate: Tensor, weight: Tensor) -> list[Tensor]:
        return [gated_rms_norm(x, gate, weight, **options)]

    return call


def plain(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [rms_norm(x, weight)]


def gated_shapes(*shape: int) -> dict[str, tuple[int, ...]]:
    return {"x": shape, "gate": shape, "weight": shape[-1:]}


NORMS: dict[str, tuple[Call, dict[str, tuple[int, ...]]]] = {
    "heads": (gated(), gated_shapes(2, 1000, 16, 128)),
    "sigmoid": (gated(activation="sigmoid"), gated_shapes(2, 100, 16, 128)),
    "odd": (gated(), gated_shapes(3, 37, 5, 100)),
    "narrow": (gated(), gated_shapes(1000, 3)),
    "gate first": (gated(gate_first=True), gated_shapes(2, 500, 4608)),
    "model": (plain, {"x": (2, 1000, 2304), "weight": (2304,)}),
    "wide": (plain, {"x": (37, 8192), "weight": (8192,)}),
}
each_norm = pytest.mark.parametrize("name", NORMS)


@each_dtype
@each_norm
def test_norms(name: str, dtype: torch.dtype) -> None:
    call, shapes = NORMS[name]
    check(call, draw(shapes, dtype))


def activated(x: Tensor, up: Tensor, weight: Tensor) -> list[Tensor]:
    return [swiglu_linear(x, up, weight)]


@each_dtype
@pytest.mark.parametrize("width", [384, 333])
def test_the_map_of_an_activation(width: int, dtype: torch.dtype) -> None:
    shape = (2, 100, width)
    check(activated, draw({"x": shape, "up": shape, "weight": (256, width)}, dtype))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_mlp_does_not_keep_its_activation(compiled: bool) -> None:
    """But gate and up, and its small result."""
    torch._dynamo.reset()
    width, inner, tokens = 256, 4096, 4096
    made = SwiGLU(width, inner).cuda().bfloat16()
    call: Any = torch.compile(made, fullgraph=True) if compiled else made
    (x,) = draw({"x": (1, tokens, width)}, torch.bfloat16).values()
    x.requires_grad_()
    call(x).sum().backward()
    before = torch.cuda.memory_allocated()
    y = call(x)
    kept = torch.cuda.memory_allocated() - before
    y.sum().backward()
    assert kept < 2.2 * tokens * inner * x.itemsize


def companions(dtype: torch.dtype) -> list[tuple[str, Call, Operands]]:
    """One of each, for what holds of all."""
    dense, packed = Convolution(state=True, bias=True), Convolution(lengths=DOCUMENTS)
    calls = [("dense", dense.call(), dense.shapes), ("packed", packed.call(), packed.shapes)]
    calls += [(name, *NORMS[name]) for name in ("heads", "model")]
    return [(name, call, draw(shapes, dtype)) for name, call, shapes in calls]


def bits(x: Tensor) -> Tensor:
    """View as integers, so that −0 is not 0 and NaN is itself."""
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32}[x.itemsize])


def assert_same_bits(actual: Operands, expected: Operands) -> None:
    for name, t in actual.items():
        assert torch.equal(bits(t), bits(expected[name])), name


@each_dtype
def test_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    for _, call, operands in companions(dtype):
        expected = differentiate(call, operands)
        for _ in range(3):
            assert_same_bits(differentiate(call, operands), expected)


@each_dtype
def test_they_are_chosen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By public functions for every dtype that they take; fp64 goes to the twins."""
    for owner in ("_convolve", "_normalize"):
        monkeypatch.delattr(conv if owner == "_convolve" else norm, owner)
    for _, call, operands in companions(dtype):
        differentiate(call, operands)
    x = torch.zeros(1, 2, 4, dtype=torch.float64, device="cuda")
    assert not conv_op.kernels_take(x, x[0].mT, None, None, None)
    assert not norm_op.kernels_take(x, None, None)


@contextmanager
def allocating(most: int) -> Iterator[None]:
    """Fail if more bytes are asked for at a time.

    Not those that are allocated: the allocator counts all of a block that it reuses, which may be a MiB larger.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    yield
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert taken <= most, f"{taken} bytes were asked for, expected {most} at most"


class Watched:
    """A kernel that keeps the tensors it was last launched with, by the names of its arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.seen = kernel, dict[str, Tensor]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            named = zip(self.kernel.arg_names, arguments, strict=False)
            self.seen = {name: t for name, t in named if isinstance(t, Tensor)}
            self.kernel[grid](*arguments, **options)

        return run


def test_slices_of_a_projection_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the given tensors themselves, and nothing but the output is allocated."""
    projected = torch.randn(2, 1000, 3 * 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2048, 4, device="cuda", dtype=torch.bfloat16)
    x = projected[..., 2048:4096]
    options: dict[str, Any] = {"activation": "silu", "l2_width": 128}
    expected, _ = short_convolution(x.contiguous(), weight, **options)
    kernel = Watched(conv_op.kernels().convolve_kernel)
    monkeypatch.setattr(conv_op.kernels(), "convolve_kernel", kernel)
    with allocating(most=expected.nbytes):
        y, _ = short_convolution(x, weight, **options)
        for name, given in {"x_ptr": x, "weight_ptr": weight, "y_ptr": y}.items():
            assert kernel.seen[name].data_ptr() == given.data_ptr(), f"{name} is a copy"
    assert torch.equal(y, expected)


@pytest.mark.parametrize("T", [1, 4])
@each_dtype
def test_steps(T: int, dtype: torch.dtype) -> None:
    """In place, in a pool of states, with nothing allocated but the output, as the whole gives."""
    shapes = Convolution(B=5, T=T, state=True).shapes
    operands = draw(shapes, dtype)
    state = operands.pop("initial_state")
    pool = torch.stack([state, state + 1], 1)
    options: dict[str, Any] = {"activation": "silu", "l2_width": 128}
    expected, final = short_convolution(
        **operands, initial_state=state, output_final_state=True, **options
    )
    short_convolution_step(**operands, state=state.clone(), inplace=True, **options)  # compiles
    with allocating(most=expected.nbytes):
        y, after = short_convolution_step(**operands, state=pool[:, 0], inplace=True, **options)
    assert final is not None
    assert_close("y", y, expected, TOLERANCE[dtype])
    assert torch.equal(after, final)
    assert torch.equal(pool[:, 0], final)
    assert torch.equal(pool[:, 1], state + 1)


@pytest.mark.parametrize("name", ["dense", "packed", "heads", "model"])
def test_graphs_replay_the_same_bits(name: str) -> None:
    """Forward and backward, on operands that change after the capture."""
    _, call, operands = next(c for c in companions(torch.bfloat16) if c[0] == name)
    leaves = {n: t.requires_grad_() for n, t in operands.items()}
    outer = [torch.randn_like(y) for y in call(**leaves)]

    def step() -> list[Tensor]:
        outputs = call(**leaves)
        return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), outer)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for t in leaves.values():
            t.copy_(torch.randn_like(t))
    graph.replay()
    replayed = [t.detach().clone() for t in results]
    for actual, expected in zip(replayed, step(), strict=True):
        assert torch.equal(bits(actual), bits(expected))


def test_decoding_replays_in_a_graph() -> None:
    operands = draw(Convolution(B=5, T=1, state=True).shapes, torch.bfloat16)
    state = operands.pop("initial_state")
    start = state.clone()

    def steps() -> Tensor:
        outputs = [
            short_convolution_step(**operands, state=state, inplace=True)[0] for _ in "five!"
        ]
        return torch.cat(outputs, 1)

    expected, after = steps(), state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = steps()
    state.copy_(start)
    graph.replay()
    assert torch.equal(y, expected)
    assert torch.equal(state, after)


@pytest.mark.parametrize("name", ["dense", "packed", "heads", "model"])
def test_compiles(name: str) -> None:
    """As one graph, with the same bits."""
    torch._dynamo.reset()
    _, call, operands = next(c for c in companions(torch.bfloat16) if c[0] == name)
    compiled: Call = torch.compile(call, fullgraph=True)
    assert_same_bits(differentiate(compiled, operands), differentiate(call, operands))


def test_compiled_steps_update_in_place() -> None:
    torch._dynamo.reset()
    operands = draw(Convolution(B=5, T=1, state=True).shapes, torch.bfloat16)
    state = operands.pop("initial_state")
    other = state.clone()
    compiled = torch.compile(short_convolution_step, fullgraph=True)
    y, _ = compiled(**operands, state=state, inplace=True)
    expected, _ = short_convolution_step(**operands, state=other, inplace=True)
    assert torch.equal(y, expected)
    assert torch.equal(state, other)


def test_nothing_waits_for_the_gpu() -> None:
    """After kernels are compiled; offsets of packed sequences are read once, by whoever comes first."""
    case = Convolution(lengths=DOCUMENTS, state=True)
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).int().cuda()
    check_cu_seqlens(cu_seqlens, 1, sum(DOCUMENTS))
    operands = {n: t.requires_grad_() for n, t in draw(case.shapes, torch.bfloat16).items()}

    def step() -> tuple[Tensor, ...]:
        y, _ = short_convolution(**operands, activation="silu", l2_width=128, cu_seqlens=cu_seqlens)
        z = rms_norm(gated_rms_norm(y, y))
        return torch.autograd.grad(z, list(operands.values()), torch.ones_like(z))

    step()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(bool(d.isfinite().all()) for d in grads)
