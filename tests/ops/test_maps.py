"""Maps of one input against as many calls of torch's."""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gdn2.ops.maps import maps, side_by_side
from tests.closeness import assert_close, relative_error

Maps = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
EXACT = 1e-12


def apart(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(
    shape: tuple[int, ...], widths: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor]]:
    """An input and weights that take gradients."""
    weights = [rand(n, shape[-1], seed=i + 1, dtype=dtype) for i, n in enumerate(widths)]
    return rand(*shape, dtype=dtype).requires_grad_(), [w.requires_grad_() for w in weights]


def gradients(
    function: Maps, x: Tensor, weights: Sequence[Tensor], unused: Sequence[int] = ()
) -> list[Tensor | None]:
    """Of x and the weights, where it is asked for, by all outputs but the unused ones."""
    made = function(x, weights)
    ys = [y for i, y in enumerate(made) if i not in unused and y.requires_grad]
    asked = [t for t in (x, *weights) if t.requires_grad]
    dys = [rand(*y.shape, seed=10 + y.shape[-1], dtype=y.dtype) for y in ys]
    return list(torch.autograd.grad(ys, asked, dys, allow_unused=True))


def assert_same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None), f"gradient {i}"
        if a is not None and b is not None:
            assert_close(f"gradient {i}", a, b, EXACT)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5), (2, 3, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("widths", [(3,), (3, 1), (4, 7, 1), (2, 9, 3, 5)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], widths: tuple[int, ...]) -> None:
    x, weights = operands(shape, widths)
    for y, expected in zip(maps(x, weights), apart(x, weights), strict=True):
        assert torch.equal(y, expected)
    assert_same(gradients(maps, x, weights), gradients(apart, x, weights))


def test_any_layout() -> None:
    """Whatever lies otherwise in memory, or shares it."""
    inputs = rand(5, 3, 2).permute(2, 1, 0), rand(5, 4).t(), rand(5, 6).t()
    x, *weights = (t.requires_grad_() for t in inputs)
    dys = rand(4, 3, 2).permute(2, 1, 0), rand(1, 1, 6).expand(2, 3, 6)
    found, expected = (
        torch.autograd.grad(function(x, weights), [x, *weights], dys) for function in (maps, apart)
    )
    assert_same(found, expected)


def laid(weights: Sequence[Tensor]) -> list[Tensor]:
    """The same, next to each other in memory."""
    parts = torch.cat([w.detach() for w in weights]).split([len(w) for w in weights])
    return [part.requires_grad_() for part in parts]


JOINED = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("one_output", "one_gradient"), JOINED)
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5)], ids=str)
def test_joined_maps_are_the_same(
    shape: tuple[int, ...], one_output: bool, one_gradient: bool, neighbours: bool
) -> None:
    x, weights = operands(shape, (4, 7, 1))
    given = laid(weights) if neighbours else weights
    joined = partial(maps, one_output=one_output, one_gradient=one_gradient)
    ys = joined(x, given)
    for y, expected in zip(ys, apart(x, weights), strict=True):
        assert_close("output", y, expected, EXACT)
    assert one_output == (ys[0].untyped_storage().data_ptr() == ys[1].untyped_storage().data_ptr())
    found = gradients(joined, x, given)
    assert_same(found, gradients(apart, x, weights))
    owners = [found[i].untyped_storage().data_ptr() for i in (1, 2)]  # type: ignore[union-attr]
    assert one_gradient == (owners[0] == owners[1])


@pytest.mark.parametrize("neighbours", [False, True])
def test_joined_maps_may_be_frozen_or_unused(neighbours: bool) -> None:
    joined = partial(maps, one_output=True, one_gradient=True)
    for frozen in FROZEN:
        x, weights = operands((2, 3, 5), (4, 7, 1))
        weights = laid(weights) if neighbours else weights
        freeze(frozen, x, weights)
        assert_same(gradients(joined, x, weights), gradients(apart, x, weights))
    for shape, unused in (((2, 3, 5), (1,)), ((0, 5), ())):
        x, weights = operands(shape, (4, 7, 1))
        found = gradients(joined, x, weights, unused)
        assert_same(found, gradients(apart, x, weights, unused))


def products(function: Maps, x: Tensor, weights: Sequence[Tensor]) -> int:
    """How many are made, both ways."""
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        gradients(function, x, weights)
    return sum(event.name in ("aten::mm", "aten::addmm_") for event in profile.function_events)


def test_neighbours_are_multiplied_at_once() -> None:
    x, weights = operands((7, 5), (4, 7, 1))
    joined = partial(maps, one_output=True, one_gradient=True)
    assert products(joined, x, laid(weights)) == 3
    assert products(joined, x, weights) == 7  # but for the weights' gradients
    assert products(maps, x, laid(weights)) == 9


def test_only_neighbours_are_side_by_side() -> None:
    rows, columns = rand(7, 5), rand(7, 5).t().contiguous().t()
    for whole in (rows, columns, rand(9, 8)[1:8, 2:7]):
        for dim in (0, 1):
            found = side_by_side(whole.split([2, whole.shape[dim] - 2], dim), dim)
            assert found is not None
            assert torch.equal(found, whole)
            assert found.data_ptr() == whole.data_ptr()
    a, b, c = rows.split([2, 3, 2])
    others = [
        *((a, c), (b, a), (a, b.clone()), (a, b.float()), (a, b[:, :4]), (a, b.t())),
        *((a[:, ::2], b[:, ::2]), (a.expand(2, 5), b[:1].expand(2, 5))),
    ]
    for parts in others:
        assert side_by_side(parts, 0) is None


@pytest.mark.parametrize("unused", [(0,), (2,), (0, 1), (1, 2)], ids=str)
def test_unused_outputs_are_left_out(unused: tuple[int, ...]) -> None:
    x, weights = operands((2, 3, 5), (4, 7, 1))
    assert_same(gradients(maps, x, weights, unused), gradients(apart, x, weights, unused))


class Stop(torch.autograd.Function):
    """Passes a value on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


def test_no_gradient_makes_none() -> None:
    x, weights = operands((2, 3, 5), (4, 7))
    ys: list[Tensor] = [Stop.apply(y) for y in maps(x, weights)]  # type: ignore[no-untyped-call]
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert all(t.grad is None for t in (x, *weights))


FROZEN: list[tuple[str | int, ...]] = [("x",), (0,), (1, 2), ("x", 1), (0, 1, 2)]


def freeze(frozen: tuple[str | int, ...], x: Tensor, weights: Sequence[Tensor]) -> None:
    for name in frozen:
        (x if isinstance(name, str) else weights[name]).requires_grad_(False)


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
def test_frozen_operands_get_no_gradient(frozen: tuple[str | int, ...]) -> None:
    x, weights = operands((2, 3, 5), (4, 7, 1))
    freeze(frozen, x, weights)
    assert_same(gradients(maps, x, weights), gradients(apart, x, weights))


def test_frozen_maps_keep_no_input() -> None:
    x, weights = operands((2, 3, 5), (4, 7))
    freeze((0, 1), x, weights)
    kept: list[torch.Size] = []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved.shape)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        maps(x * 1, weights)
    assert kept == [weight.shape for weight in weights]


def counted(function: Maps, frozen: tuple[str | int, ...], unused: tuple[int, ...]) -> int:
    """FLOPs of both directions."""
    x, weights = operands((2, 3, 5), (4, 7, 1))
    freeze(frozen, x, weights)
    with FlopCounterMode(display=False) as counter:
        gradients(function, x, weights, unused)
    return counter.get_total_flops()


@pytest.mark.parametrize("frozen", [(), *FROZEN], ids=str)
@pytest.mark.parametrize("unused", [(), (0,), (1, 2)], ids=str)
def test_nothing_is_multiplied_for_nobody(
    frozen: tuple[str | int, ...], unused: tuple[int, ...]
) -> None:
    expected = counted(apart, frozen, unused)
    assert counted(maps, frozen, unused) == expected
    assert counted(partial(maps, one_output=True, one_gradient=True), frozen, unused) == expected


def test_gradcheck() -> None:
    x, weights = operands((2, 3, 5), (4, 1, 2))
    assert torch.autograd.gradcheck(lambda x, *weights: maps(x, weights), (x, *weights))


def test_a_second_derivative_is_refused() -> None:
    x, weights = operands((3, 5), (4, 2))
    total = torch.stack([y.square().sum() for y in maps(x, weights)]).sum()
    (dx,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="input_gradient"):
        dx.sum().backward()


def test_passes_opcheck() -> None:
    x, weights = operands((3, 5), (4, 7, 1))
    for given in (weights, laid(weights)):
        joined = (x.detach(), [weight.detach() for weight in given])
        torch.library.opcheck(torch.ops.gdn2.joint_product.default, joined)
    dys = [rand(6, len(weight)) for weight in weights]
    arguments = (dys, [weight.detach() for weight in weights])
    torch.library.opcheck(torch.ops.gdn2.input_gradient.default, arguments)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_bf16_rounds_no_more_than_autograd(count: int) -> None:
    """Both round every sum; autograd rounds what it adds, too."""
    x, weights = operands((2, 65, 96), (128,) * count, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    exact = gradients(apart, wide[0], wide[1:])
    found, usual = gradients(maps, x, weights), gradients(apart, x, weights)
    for actual, other, expected in zip(found, usual, exact, strict=True):
        assert actual is not None and other is not None and expected is not None
        assert actual.dtype == torch.bfloat16
        assert relative_error(actual, expected) <= 1.2 * relative_error(other, expected)


def test_autocast_around_the_backward_does_not_round_the_sum() -> None:
    x, weights = operands((2, 3, 5), (4, 7, 1), torch.float32)
    plain = gradients(maps, x, weights)
    ys = maps(x, weights)
    dys = [rand(*y.shape, seed=10 + y.shape[-1], dtype=y.dtype) for y in ys]
    with torch.autocast("cpu", torch.bfloat16):
        (dx,) = torch.autograd.grad(ys, x, dys)
    assert plain[0] is not None
    assert torch.equal(dx, plain[0])


def test_checkpointing_changes_nothing() -> None:
    x, weights = operands((2, 3, 5), (4, 7, 1))

    def again(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ys: tuple[Tensor, ...] = checkpoint(maps, x, weights, use_reentrant=False)
        return ys

    assert_same(gradients(again, x, weights), gradients(maps, x, weights))


@pytest.mark.parametrize("frozen", [(), ("x",), (0,), (0, 1, 2)], ids=str)
def test_compiled_equals_eager(frozen: tuple[str | int, ...]) -> None:
    torch._dynamo.reset()
    x, weights = operands((2, 3, 5), (4, 7, 1))
    freeze(frozen, x, weights)
    expected = gradients(apart, x, weights)
    for function in (maps, partial(maps, one_output=True, one_gradient=True)):
        compiled: Maps = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same(gradients(compiled, x, weights), expected)


def test_an_unused_output_compiles() -> None:
    torch._dynamo.reset()
    x, weights = operands((2, 3, 5), (4, 7, 1))

    def two(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        first, _, last = maps(x, weights)
        return first, last

    def expected(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return F.linear(x, weights[0]), F.linear(x, weights[2])

    compiled: Maps = torch.compile(two, fullgraph=True, backend="aot_eager")
    found, reference = gradients(compiled, x, weights), gradients(expected, x, weights)
    nothing = torch.zeros_like(weights[1])  # what compiled functions make of no gradient
    assert_same(found, [nothing if d is None else d for d in reference])


def test_lengths_do_not_recompile() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Maps = torch.compile(maps, fullgraph=True, backend=counter)
    for length in (3, 5, 17, 33, 64):
        x, weights = operands((2, length, 5), (4, 7, 1))
        assert_same(gradients(compiled, x, weights), gradients(apart, x, weights))
    assert counter.frame_count <= 2  # one static graph, one dynamic


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_writes_each_gradient_once() -> None:
    """Gradients that it makes itself are read where they lie, by the sum and for the gradients of the weights."""
    torch._dynamo.reset()
    x, weights = operands((2, 6, 5), (3, 3, 3))

    def layer(x: Tensor, weights: Sequence[Tensor], by: Maps = maps) -> tuple[Tensor, ...]:
        first, second, third = by(x.sin(), weights)
        return (F.silu(first) * second + third.tanh(),)

    with fresh_cache():
        compiled: Maps = torch.compile(layer, fullgraph=True)
        found, code = run_and_get_code(gradients, compiled, x, weights)
    assert_same(found, gradients(lambda x, weights: layer(x, weights, apart), x, weights))
    call = re.search(r"gdn2\.input_gradient\.default\((.*?)\], \[", code[-1])
    assert call is not None
    buffers = re.findall(r"buf\d+", call[1])
    assert len(buffers) == 3
    assert all(f"mm(reinterpret_tensor({buffer}, (3, 12)" in code[-1] for buffer in buffers)
