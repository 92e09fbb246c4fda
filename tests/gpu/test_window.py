"""Sliding windows on a GPU, by cuDNN's own and by two triangles, against fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gdn2.ops import attention as module
from gdn2.ops.attention import attention
from gdn2.ops.cuda import band
from gdn2.ops.window_attention import on_hopper, window_attention
from tests.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
WINDOW, HEADS = 128, 3


@pytest.fixture(params=["cudnn", "triangles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How windows are attended to."""
    monkeypatch.setattr(band, "_plans", {})
    if request.param == "triangles":
        monkeypatch.setattr(band, "lack", lambda device: "not wanted")
    elif band.lack(torch.device("cuda", 0)):
        pytest.skip("needs nvidia-cudnn-frontend")
    return str(request.param)


def draw(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, the last a part of a larger tensor, as a joint product leaves it."""
    torch.manual_seed(0)
    all_three = torch.randn(2, length, 3 * HEADS * width, device="cuda").to(dtype)
    q, k, v = (x.unflatten(-1, (HEADS, width)) for x in all_three.chunk(3, -1))
    return q.contiguous().requires_grad_(), k.contiguous().requires_grad_(), v.requires_grad_()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, window=WINDOW)[0]


def literal(
    q: Tensor, k: Tensor, v: Tensor, window: int = WINDOW, scale: float | None = None
) -> Tensor:
    """In fp64, with a mask."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    at = torch.arange(q.shape[2], device=q.device)
    ago = at[:, None] - at
    scores = (q @ k.mT * scale).masked_fill((ago < 0) | (ago >= window), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients(
    dtype: torch.dtype, width: int, compiled: bool, way: str, monkeypatch: pytest.MonkeyPatch
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
    by_cudnn = way == "cudnn" and on_hopper(x[0].device)
    assert len(band._plans) == (2 if by_cudnn else 0) and all(band._plans.values())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("way", ["cudnn"], indirect=True)
def test_cudnn_takes_any_length(exact: bool, way: str) -> None:
    """Windows that do not divide it, and gradients that are the same each time if asked for."""
    x = draw(1000, 128, torch.bfloat16)
    dy = torch.randn_like(x[0])
    torch.use_deterministic_algorithms(exact)
    try:
        found = band.attend(*x, 300, 0.1)
        assert found is not None
        grads = [band.differentiate(dy, *x, *found, 300, 0.1) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert grads[0] is not None and grads[1] is not None
    y = literal(*x, window=300, scale=0.1)
    expected = [y, *torch.autograd.grad(y, x, dy.double())]
    for actual, right in zip((found[0], *grads[0]), expected, strict=True):
        assert relative_error(actual.double(), right) < TOLERANCE[torch.bfloat16]
    if exact:
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_gradients_of_a_sum(way: str) -> None:
    """They are one number, read by everyone."""
    x = draw(2 * WINDOW, 64, torch.bfloat16)
    results = [torch.autograd.grad(f(*x).sum(), x) for f in (attend, literal)]
    for actual, expected in zip(*results, strict=True):
        if expected.norm() > 1:  # those of queries and keys are sums that cancel
            assert relative_error(actual.double(), expected) < TOLERANCE[torch.bfloat16]


def test_more_blocks_than_an_axis_of_a_grid_has() -> None:
    from gdn2.ops.triton import window  # noqa: PLC0415 (needs Triton)

    x = torch.randn(1, 70_000, 16, 1, 16, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    window.turn(x, y, True, add=False)
    assert torch.equal(y, x.flip(2))
