"""Attention against an explicit softmax, token by token."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops.attention import attention
from gdn2.ops.kv_cache import KVCache
from tests.closeness import assert_close
from tests.ops.attention_cases import assert_same_gradients, literal, operands

LENGTHS = [1, 63, 65, 130]
WINDOWS = [None, 1, 5, 64, 130, 1000]


def largest_allocation(function: Callable[[], object]) -> int:
    """The most bytes that one operator asked for, counted below autograd and custom operators."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        function()
    return max(int(event.self_cpu_memory_usage) for event in profile.function_events)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients(length: int, window: int | None) -> None:
    q, k, v = (x.requires_grad_() for x in operands(2, length))
    y, cache = attention(q, k, v, window=window)
    expected = literal(q, k, v, window)
    assert cache is None
    assert_close("y", y, expected, 1e-12)
    assert_same_gradients(y, expected, (q, k, v))


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_heads_and_scale(kv_heads: int) -> None:
    q, k, v = operands(1, 65, heads=6, kv_heads=kv_heads)
    for window in (None, 7):
        y, _ = attention(q, k, v, window=window, scale=0.7)
        assert_close("y", y, literal(q, k, v, window, 0.7), 1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_gradcheck(window: int | None) -> None:
    # Past and present both, through the returned cache too.
    q, k, v = operands(2, 5, heads=2, kv_heads=1, width=4)
    past = operands(2, 4, heads=2, kv_heads=1, width=4, seed=1)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        _, cache = attention(*x[:3], window=window, output_cache=True)
        y, cache = attention(*x[3:], window=window, cache=cache)
        assert cache is not None
        return y, cache.keys, cache.values

    inputs = [x.requires_grad_() for x in (*past, q, k, v)]
    assert torch.autograd.gradcheck(run, inputs)

    def run_packed(*x: Tensor) -> tuple[Tensor, ...]:
        # Sequences longer than the window: a token that the ring forgets has no gradient.
        cu_seqlens = torch.tensor([0, 4, 5])
        y, cache = attention(*x, window=window, cu_seqlens=cu_seqlens, output_cache=True)
        assert cache is not None
        return y, cache.keys, cache.values

    packed = [x.detach()[:1].requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(run_packed, packed)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, window: int | None) -> None:
    q, k, v = operands(2, 130, dtype=dtype)
    y, _ = attention(q, k, v, window=window)
    assert y.dtype == dtype
    exact = literal(q.double(), k.double(), v.double(), window)
    assert_close("y", y, exact, {torch.float32: 1e-6, torch.bfloat16: 5e-3}.get(dtype, 1e-3))


@pytest.mark.parametrize("window", [None, 1, 7, 64, 500])
def test_packed_equals_separate(window: int | None) -> None:
    lengths = [1, 63, 0, 2, 65, 1]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    q, k, v = (x.requires_grad_() for x in operands(1, sum(lengths)))
    y, _ = attention(q, k, v, window=window, cu_seqlens=cu_seqlens)
    sequences = zip(*(torch.split(x, lengths, 1) for x in (q, k, v)), strict=True)
    expected = torch.cat([literal(a, b, c, window) for a, b, c in sequences], 1)
    assert_close("y", y, expected, 1e-12)
    assert_same_gradients(y, expected, (q, k, v))


@pytest.mark.parametrize("window", [600, 1500])
def test_blocks_of_a_long_window(window: int) -> None:
    q, k, v = operands(1, 1700, heads=1, kv_heads=1)
    y, _ = attention(q, k, v, window=window)
    assert_close("y", y, literal(q, k, v, window), 1e-12)


@pytest.mark.parametrize("window", [None, 5])
def test_no_tokens(window: int | None) -> None:
    q, k, v = operands(2, 4)
    none = [x[:, :0] for x in (q, k, v)]
    y, cache = attention(*none, window=window, output_cache=True)
    assert y.shape == (2, 0, 4, 8)
    assert cache is not None
    y, cache = attention(q, k, v, window=window, cache=cache)
    assert_close("after nothing", y, literal(q, k, v, window), 1e-12)
    y, same = attention(*none, window=window, cache=cache)
    assert y.shape == (2, 0, 4, 8)
    assert cache is not None
    assert same is not None
    assert_close("keys", same.keys, cache.keys, 0)
    empty = torch.tensor([0, 0, 0])
    y, cache = attention(*(x[:1] for x in none), window=window, cu_seqlens=empty, output_cache=True)
    assert cache is not None
    assert cache.seen.tolist() == [0, 0]


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
def test_the_future_and_neighbours_move_no_bit(window: int | None) -> None:
    q, k, v = operands(2, 130, dtype=torch.float32)
    y, _ = attention(q, k, v, window=window)
    for border in (1, 63, 64, 65, 129):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, border:] = 1e3 * x[:, border:].flip(1) + 7
        moved, _ = attention(*later, window=window)
        assert torch.equal(moved[:, :border], y[:, :border])
    packed = [x[:1] for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, 40, 75, 130])
    y, _ = attention(*packed, window=window, cu_seqlens=cu_seqlens)
    others = [x.clone() for x in packed]
    for x in others:
        x[:, :40], x[:, 75:] = -300, 500 * x[:, 75:]
    moved, _ = attention(*others, window=window, cu_seqlens=cu_seqlens)
    assert torch.equal(moved[:, 40:75], y[:, 40:75])


def test_rows_of_a_ragged_batch_do_not_move_each_other() -> None:
    q, k, v = operands(2, 9, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, 3, 9])
    for window in (None, 4):
        results = []
        for factor in (1.0, 1e4):
            x = [torch.cat([t[:1, :3], factor * t[1:, :6]], 1) for t in (q, k, v)]
            _, cache = attention(*x, window=window, cu_seqlens=cu_seqlens, output_cache=True)
            step = [torch.cat([t[:1, 8:], factor * t[1:, 8:]]) for t in (q, k, v)]
            y, _ = attention(*step, window=window, cache=cache)
            results.append(y[0])
        assert torch.equal(*results)


def test_memory_of_a_window_is_linear() -> None:
    length, window = 4096, 64
    q, k, v = (x.requires_grad_() for x in operands(1, length, 2, 1, 16, torch.float32))
    packed = torch.tensor([0, 4000, length])

    def train(cu_seqlens: Tensor | None) -> None:
        y, _ = attention(q, k, v, window=window, cu_seqlens=cu_seqlens)
        torch.autograd.grad(y.sum(), (q, k, v))

    # A mask of length² would take 16 MB even in booleans.
    for cu_seqlens in (None, packed):
        most = largest_allocation(lambda layout=cu_seqlens: train(layout))  # type: ignore[misc]
        assert most <= 4 * q.numel(), most


def test_compiles_whole() -> None:
    q, k, v = operands(2, 70, dtype=torch.float32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, KVCache | None]:
        _, cache = attention(q[:, :-1], k[:, :-1], v[:, :-1], window=9, output_cache=True)
        return attention(q[:, -1:], k[:, -1:], v[:, -1:], window=9, cache=cache, inplace=True)

    y, cache = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_close("y", y, literal(q, k, v, 9)[:, -1:], 1e-6)
    assert cache is not None
    assert cache.seen.tolist() == [70, 70]


@pytest.mark.parametrize(
    ("window", "length"), [(1, 150), (9, 64), (70, 333), (70, 140), (520, 530)]
)
def test_blocks_that_are_compiled_at_once(window: int, length: int) -> None:
    q, k, v = (x.requires_grad_() for x in operands(2, length))
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="eager")
    y, _ = compiled(q, k, v, window=window)
    expected = literal(q, k, v, window)
    assert_close("y", y, expected, 1e-12)
    assert_same_gradients(y, expected, (q, k, v))


def test_bad_input_is_refused() -> None:
    q, k, v = operands(2, 6)
    _, ring = attention(q, k, v, window=4, output_cache=True)
    assert ring is not None
    packed = {"cu_seqlens": torch.tensor([0, 6])}
    cases: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
        ("q is torch.float64 .2, 6, 32., expected floating", (q.flatten(2), k, v), {}),
        ("q is torch.int64", (q.long(), k, v), {}),
        ("k is .*, expected floating point .2, 6, 2, 8.", (q, k[:, :5], v), {}),
        ("v is .*, expected floating point .2, 6, 2, 8.", (q, k, v[..., :7]), {}),
        ("v is torch.float32, expected torch.float64 like q", (q, k, v.float()), {}),
        ("k is .* on meta, expected", (q, k.to("meta"), v), {}),
        ("k has 3 heads, expected a divisor of the 4", (q, q[:, :, :3], v), {}),
        ("window is 0, expected None or an integer of at least 1", (q, k, v), {"window": 0}),
        ("window is 2.5, expected None or an integer of at", (q, k, v), {"window": 2.5}),
        ("batch of 2, expected a batch of 1", (q, k, v), packed),
        (r"^scale: got 0.0, expected more than 0$", (q, k, v), {"scale": 0}),
        (r"^scale: got -0.5, expected more than 0$", (q, k, v), {"scale": -0.5}),
        (r"^scale: got inf, expected a finite number$", (q, k, v), {"scale": math.inf}),
        ("backend is 'fast', expected 'auto'", (q, k, v), {"backend": "fast"}),
        ("'flex', which needs CUDA, and q is on cpu", (q, k, v), {"backend": "flex"}),
        ("inplace is True and cache is None", (q, k, v), {"inplace": True}),
        ("cache.keys is .* expected .*2, 3, 2, 8", (q, k, v), {"window": 3, "cache": ring}),
        ("cache.keys is .* expected .*1, 4, 2, 8", (q[:1], k[:1], v[:1]), {"cache": ring}),
        (
            "cache.keys is torch.float64, expected",
            (q.float(), k.float(), v.float()),
            {"cache": ring},
        ),
        ("cache.seen is torch.int64 .1,.", (q, k, v), {"cache": ring._replace(seen=ring.seen[:1])}),
    ]
    for message, (a, b, c), options in cases:
        with pytest.raises(ValueError, match=message) as raised:
            attention(a, b, c, **options)
        assert "\n" not in str(raised.value)
