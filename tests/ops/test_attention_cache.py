"""Attention that goes on from a cache, against an explicit softmax of the whole."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.ops.attention import attention
from gdn2.ops.kv_cache import KVCache
from tests.closeness import assert_close
from tests.ops.attention_cases import literal, operands


def in_pieces(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], cache: KVCache | None, **options: Any
) -> tuple[Tensor, KVCache | None]:
    outputs = []
    for piece in zip(*(torch.split(x, lengths, 1) for x in (q, k, v)), strict=True):
        y, cache = attention(*piece, cache=cache, output_cache=True, **options)
        outputs.append(y)
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize("window", [None, 1, 4, 9, 30])
def test_every_split_equals_the_whole(window: int | None) -> None:
    length = 13
    q, k, v = operands(2, length)
    whole = literal(q, k, v, window)
    for first, second in itertools.combinations_with_replacement(range(length + 1), 2):
        lengths = [first, second - first, length - second]
        y, cache = in_pieces(q, k, v, lengths, None, window=window)
        assert cache is not None
        assert_close(f"{lengths}", y, whole, 1e-12)
        assert cache.seen.tolist() == [length, length]
        steps = 1 in lengths  # one makes all of a ring at once
        whole_ring = window is not None and (steps or length > window)
        assert cache.capacity == (window if whole_ring else length)
    y, _ = in_pieces(q, k, v, [1] * length, None, window=window)
    assert_close("token by token", y, whole, 1e-12)


@pytest.mark.parametrize("lengths", [[700, 1, 1], [3, 600, 97, 2], [520, 170, 12]])
@pytest.mark.parametrize("window", [None, 5, 64, 600])
def test_long_splits(window: int | None, lengths: list[int]) -> None:
    # Longer than a block of queries and than the window; the whole call was checked above.
    q, k, v = operands(2, sum(lengths))
    whole, _ = attention(q, k, v, window=window)
    y, _ = in_pieces(q, k, v, lengths, None, window=window)
    assert_close("y", y, whole, 1e-12)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_ragged_prompts_packed_then_decoded_as_a_batch(window: int | None, inplace: bool) -> None:
    prompts, steps = [1, 9, 4, 0], 8
    alone = [operands(1, n + steps, seed=n) for n in prompts]
    packed = [
        torch.cat([x[i][:, :n] for x, n in zip(alone, prompts, strict=True)], 1) for i in range(3)
    ]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(prompts)], dtype=torch.int32)
    q, k, v = packed
    prompt, cache = attention(q, k, v, window=window, cu_seqlens=cu_seqlens, output_cache=True)
    assert cache is not None
    if window is None and inplace:
        cache = cache.reserve(steps)
    # One token, a few, one by one: rows stand at different positions throughout.
    decoded = []
    for start, stop in [(0, 1), (1, 4), (4, 5), (5, 6), (6, 8)]:
        batch = [
            torch.cat([x[i][:, n + start : n + stop] for x, n in zip(alone, prompts, strict=True)])
            for i in range(3)
        ]
        address = cache.keys.data_ptr()
        y, cache = attention(*batch, window=window, cache=cache, inplace=inplace)
        assert cache is not None
        assert not inplace or cache.keys.data_ptr() == address
        decoded.append(y)
    together = torch.cat(decoded, 1)
    for row, (x, n) in enumerate(zip(alone, prompts, strict=True)):
        first = int(cu_seqlens[row])
        y = torch.cat([prompt[:, first : first + n], together[row : row + 1]], 1)
        assert_close(f"row {row}", y, literal(*x, window), 1e-12)
    assert cache.seen.tolist() == [n + steps for n in prompts]


@pytest.mark.parametrize("window", [None, 1, 6])
def test_packed_continues_from_one_cache_per_sequence(window: int | None) -> None:
    lengths = torch.tensor([[1, 7, 0, 12], [9, 0, 3, 2], [1, 1, 8, 5]])
    alone = [operands(1, int(n), seed=i) for i, n in enumerate(lengths.sum(0))]
    starts = torch.cat([torch.zeros(1, 4, dtype=torch.int64), lengths.cumsum(0)])
    cache, outputs = None, [[] for _ in alone]  # type: ignore[var-annotated]
    for call, counts in enumerate(lengths):
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        q, k, v = (
            torch.cat(
                [x[i][:, starts[call, n] : starts[call + 1, n]] for n, x in enumerate(alone)], 1
            )
            for i in range(3)
        )
        y, cache = attention(
            q, k, v, window=window, cu_seqlens=cu_seqlens, cache=cache, output_cache=True
        )
        for n, piece in enumerate(torch.split(y, counts.tolist(), 1)):
            outputs[n].append(piece)
    for n, x in enumerate(alone):
        assert_close(f"sequence {n}", torch.cat(outputs[n], 1), literal(*x, window), 1e-12)


def test_a_step_leaves_the_callers_cache_alone() -> None:
    q, k, v = operands(2, 6)
    for window in (None, 4):
        _, cache = attention(q, k, v, window=window, output_cache=True)
        assert cache is not None
        before = [x.clone() for x in cache]
        for length in (1, 3):
            attention(q[:, :length], k[:, :length], v[:, :length], window=window, cache=cache)
        assert all(torch.equal(x, y) for x, y in zip(cache, before, strict=True))


def test_memory_of_a_ring_is_constant() -> None:
    q, k, v = operands(2, 200)
    cache: KVCache | None = KVCache.empty(2, 16, k)
    assert cache is not None
    addresses = [x.data_ptr() for x in cache]
    outputs = []
    for t in range(200):
        step = (x[:, t : t + 1] for x in (q, k, v))
        y, cache = attention(*step, window=16, cache=cache, inplace=True)
        outputs.append(y)
    assert cache is not None
    assert [x.data_ptr() for x in cache] == addresses
    assert_close("y", torch.cat(outputs, 1), literal(q, k, v, 16), 1e-12)


def test_an_overfull_cache_is_refused() -> None:
    q, k, v = operands(2, 6)
    for length in (1, 4):
        step = [x[:, :length] for x in (q, k, v)]
        _, cache = attention(q, k, v, output_cache=True)
        assert cache is not None
        with pytest.raises(ValueError, match="cache has capacity 6, expected"):
            attention(*step, cache=cache, inplace=True)
        assert cache.seen.tolist() == [6, 6]
    short = torch.tensor([0, 1, 6])
    x = [t[:1] for t in (q, k, v)]
    _, cache = attention(*x, cu_seqlens=short, output_cache=True)
    with pytest.raises(ValueError, match="cache has capacity 5, expected at least 10"):
        attention(*x, cu_seqlens=short, cache=cache, inplace=True)


def test_a_ring_that_has_not_its_size_yet_is_not_torn() -> None:
    q, k, v = operands(2, 6)
    _, cache = attention(*(x[:, :4] for x in (q, k, v)), window=5, output_cache=True)
    assert cache is not None
    step = [x[:, 4:5] for x in (q, k, v)]
    with pytest.raises(ValueError, match="cache has capacity 4, expected at least 5: reserve"):
        attention(*step, window=5, cache=cache, inplace=True)
    assert cache.seen.tolist() == [4, 4]
    y, after = attention(*step, window=5, cache=cache.reserve(1), inplace=True)
    assert after is not None
    last, _ = attention(*(x[:, 5:] for x in (q, k, v)), window=5, cache=after, inplace=True)
    assert_close("y", torch.cat([y, last], 1), literal(q, k, v, 5)[:, 4:], 1e-12)


def test_packed_single_tokens_make_no_whole_ring() -> None:
    q, k, v = (x[:1] for x in operands(1, 7))
    ends = torch.tensor([0, 3, 7])
    _, cache = attention(q, k, v, window=500, cu_seqlens=ends, output_cache=True)
    ones = [x[:, :2] for x in (q, k, v)]
    y, after = attention(*ones, window=500, cu_seqlens=torch.tensor([0, 1, 2]), cache=cache)
    assert after is not None
    assert after.capacity == 5
    first_q, first_k, first_v = (torch.cat([x[:, :3], x[:, :1]], 1) for x in (q, k, v))
    assert_close("y", y[:, :1], literal(first_q, first_k, first_v, 500)[:, 3:], 1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
@pytest.mark.parametrize("window", [None, 12])
def test_a_step_can_be_captured(window: int | None) -> None:
    q, k, v = (x.to("cuda") for x in operands(2, 40, dtype=torch.float32))
    prompt = [x[:, :9] for x in (q, k, v)]
    _, cache = attention(*prompt, window=window, output_cache=True)
    assert cache is not None
    cache = cache.reserve(31 if window is None else window - 9)
    inputs = [x[:, 9:10].clone() for x in (q, k, v)]
    scratch = KVCache(*(x.clone() for x in cache))
    attention(*inputs, window=window, cache=scratch, inplace=True)
    graph = torch.cuda.CUDAGraph()
    before = KVCache(*(x.clone() for x in cache))
    with torch.cuda.graph(graph):
        y, _ = attention(*inputs, window=window, cache=cache, inplace=True)
    for now, then in zip(cache, before, strict=True):
        now.copy_(then)
    expected = literal(q.double(), k.double(), v.double(), window)
    for t in range(9, 40):
        for static, x in zip(inputs, (q, k, v), strict=True):
            static.copy_(x[:, t : t + 1])
        graph.replay()
        assert_close(f"token {t}", y, expected[:, t : t + 1], 1e-5)
    if window is None:
        graph.replay()
        assert bool(y.isnan().all())
