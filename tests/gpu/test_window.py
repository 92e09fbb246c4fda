"""Sliding windows on a GPU, by two triangles where they fit, against fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gdn2.ops import attention as module
from gdn2.ops.attention import attention
from gdn2.ops.window_attention import on_hopper, window_attention
from tests.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
WINDOW, HEADS = 128, 3


def draw(length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values, the last a part of a larger tensor, as a joint product leaves it."""
    torch.manual_seed(0)
    all_three = torch.randn(2, length, 3 * HEADS * width, device="cuda").to(dtype)
    q, k, v = (x.unflatten(-1, (HEADS, width)) for x in all_three.chunk(3, -1))
    return [x.requires_grad_() for x in (q.contiguous(), k.contiguous(), v)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, window=WINDOW)[0]


def literal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In fp64, with a mask."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    at = torch.arange(q.shape[2], device=q.device)
    ago = at[:, None] - at
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill((ago < 0) | (ago >= WINDOW), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients(
    dtype: torch.dtype, width: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def counted(*given: object) -> Tensor:
        taken.append(1)
        return window_attention(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "window_attention", counted)

    torch.compiler.reset()
    call: Callable[..., Tensor] = torch.compile(attend, fullgraph=True) if compiled else attend
    x = draw(4 * WINDOW, width, dtype)
    dy = torch.randn_like(x[0])
    results = [(y, *torch.autograd.grad(y, x, dy.to(y.dtype))) for y in (call(*x), literal(*x))]
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual.double(), expected) < TOLERANCE[dtype]
    assert bool(taken) == on_hopper(x[0].device)


def test_gradients_of_a_sum() -> None:
    """They are one number, read by everyone."""
    x = draw(2 * WINDOW, 64, torch.bfloat16)
    results = [torch.autograd.grad(f(*x).sum(), x) for f in (attend, literal)]
    for actual, expected in zip(*results, strict=True):
        if expected.norm() > 1:  # those of queries and keys are sums that cancel
            assert relative_error(actual.double(), expected) < TOLERANCE[torch.bfloat16]
