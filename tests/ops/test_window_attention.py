"""Sliding windows as two triangles, against a loop over tokens."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gdn2.ops.attention import _use_flex, attention
from gdn2.ops.window_attention import fits, window_attention
from tests.closeness import assert_close
from tests.ops.attention_cases import literal, operands


def leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize(
    ("length", "window"), [(6, 2), (6, 3), (20, 4), (24, 12), (60, 20)], ids=str
)
def test_values_and_gradients(length: int, window: int) -> None:
    x = leaves(*operands(2, length, heads=3, kv_heads=3, width=16))
    weights = operands(2, length, heads=3, kv_heads=3, width=16, seed=1)[0]
    results = []
    for y in (window_attention(*x, window, 0.3), literal(*x, window, 0.3)):
        gradients = torch.autograd.grad((y * weights).sum(), x)
        results.append((y, *gradients))
    for name, actual, expected in zip(("y", "q", "k", "v"), *results, strict=True):
        assert_close(name, actual, expected, 1e-12)


def test_a_window_of_one_returns_the_values() -> None:
    q, k, v = operands(2, 5, heads=2)
    assert_close("y", window_attention(q, k, v, 1, 0.3), v, 1e-12)


def test_large_scores_stay_finite() -> None:
    """The row that takes no part would overflow if it did."""
    q, k, v = operands(1, 12, heads=1, kv_heads=1, width=16)
    k = k.clone()
    k[:, :4] *= 1e4
    x = leaves(q, k, v)
    results = []
    for y in (window_attention(*x, 4, 1.0), literal(*x, 4, 1.0)):
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for name, actual, expected in zip(("y", "q", "k", "v"), *results, strict=True):
        assert_close(name, actual, expected, 1e-9)


def test_operators_are_as_torch_demands() -> None:
    q, k, v = operands(2, 12, heads=3, kv_heads=3, width=16)
    ops = torch.ops.gdn2
    torch.library.opcheck(ops.attend_window.default, (*leaves(q, k, v), 4, 0.3))
    q, k, v = (x.detach() for x in (q, k, v))
    y, log = ops.attend_window(q, k, v, 4, 0.3)
    torch.library.opcheck(ops.attend_window_backward.default, (y + 1, q, k, v, y, log, 4, 0.3))


def test_which_calls_fit() -> None:
    q, k, _ = operands(1, 12, heads=4, kv_heads=2)
    assert fits(q, q, 4) and fits(q, q, 6)
    for other, window in ((q, None), (q, 12), (q, 20), (q, 5), (k, 4)):
        assert not fits(q, other, window)


def test_a_batch_of_none_asks_nobody() -> None:
    """CuDNN returns nothing then, not even an empty tensor, and FlexAttention would be compiled in vain."""
    x = leaves(*operands(0, 12, heads=3, kv_heads=3, width=16))
    assert not fits(x[0], x[1], 4)
    y, _ = attention(*x, window=4)
    assert y.shape == x[0].shape
    gradients = torch.autograd.grad(y.sum(), x)
    assert [d.shape for d in gradients] == [t.shape for t in x]
    with pytest.raises(ValueError, match="backend is 'flex', which needs"):
        attention(*x, window=4, backend="flex")
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.float32, shape=x[0].shape)
    assert not _use_flex("auto", on_gpu, 5, None, None)  # type: ignore[arg-type]


def test_a_compiled_call_keeps_nothing_turned() -> None:
    """Queries, keys, values, output and normalisers, as attention without a window does."""
    x = leaves(*operands(2, 96, heads=2, kv_heads=2, width=64, dtype=torch.float32))
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # other values than the leaves', which would be kept in any case
        return attention(1.5 * q, 0.5 * k, 2 * v, window=32)[0].cos()

    torch.compiler.reset()
    # divides a graph as the usual backend does, and needs no C++ compiler
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = compiled(*x)
    assert sum(kept.values()) <= 4.1 * x[0].nbytes
    results = [(z, *torch.autograd.grad(z.sum(), x)) for z in (y, run(*x))]
    for name, actual, expected in zip(("y", "q", "k", "v"), *results, strict=True):
        assert_close(name, actual, expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's kernels need CUDA")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("length", "window", "width"), [(256, 128, 64), (4096, 1024, 128)])
def test_on_a_gpu(length: int, window: int, width: int, compiled: bool) -> None:
    exact = operands(2, length, heads=3, kv_heads=3, width=width)
    weights = operands(2, length, heads=3, kv_heads=3, width=width, seed=1)[0].to("cuda")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window=window)[0]

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q, k, v, window, width**-0.5)

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window=window, backend="sdpa")[0]

    call = torch.compile(run, fullgraph=True) if compiled else blocks
    results = []
    for function, dtype in ((call, torch.bfloat16), (right, torch.float64)):
        x = leaves(*(t.bfloat16().to("cuda", dtype) for t in exact))
        y = function(*x)
        results.append((y, *torch.autograd.grad((y * weights).sum(), x)))
    for name, actual, expected in zip(("y", "q", "k", "v"), *results, strict=True):
        assert_close(name, actual, expected, 1e-2)


def test_tangents_are_refused_but_by_sdpa() -> None:
    q = operands(1, 8, kv_heads=4)[0]
    with pytest.raises(ValueError, match="window_attention: got operands with tangents"):
        torch.func.jvp(lambda x: attention(x, x, x, window=4)[0], (q,), (q,))
    with sdpa_kernel(SDPBackend.MATH):
        call = partial(attention, q, q, window=4, backend="sdpa")
        found = torch.func.jvp(lambda x: call(x)[0], (q,), (q,))
    assert_close("linear in v", found[1], found[0], 1e-14)
