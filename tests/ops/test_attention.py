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

LENGTHS = [1, 63, 65, 130]
WINDOWS = [None, 1, 5, 64, 130, 1000]


def operands(
    batch: int,
    length: int,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def literal(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Softmax of each query's scores with the keys it may see, one query at a time."""
    batch, length, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    y = []
    for row, t, head in itertools.product(range(batch), range(length), range(heads)):
        shared = head // (heads // k.shape[2])
        start = 0 if window is None else max(0, t - window + 1)
        scores = scale * k[row, start : t + 1, shared] @ q[row, t, head]
        weights = (scores - scores.max()).exp()
        y.append((weights / weights.sum()) @ v[row, start : t + 1, shared])
    return torch.stack(y).reshape(q.shape) if y else q


def assert_same_gradients(y: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    # A window of one has no gradient in q and k; the squares keep their norm from vanishing.
    actual, exact = (
        torch.autograd.grad((z * weights).sum() + sum(x.square().sum() for x in inputs), inputs)
        for z in (y, expected)
    )
    for name, x, z in zip("qkv", actual, exact, strict=True):
        assert_close(f"gradient of {name}", x, z, 1e-12)


def in_pieces(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], cache: KVCache | None, **options: Any
) -> tuple[Tensor, KVCache | None]:
    outputs = []
    for piece in zip(*(torch.split(x, lengths, 1) for x in (q, k, v)), strict=True):
        y, cache = attention(*piece, cache=cache, output_cache=True, **options)
        outputs.append(y)
    return torch.cat(outputs, 1), cache


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


@pytest.mark.parametrize("window", [600, 1500])
def test_blocks_of_a_long_window(window: int) -> None:
    q, k, v = operands(1, 1700, heads=1, kv_heads=1)
    y, _ = attention(q, k, v, window=window)
    assert_close("y", y, literal(q, k, v, window), 1e-12)


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
