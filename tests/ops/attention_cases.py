"""Operands of attention, and what it is: a softmax of each token's scores."""

import itertools

import torch
from torch import Tensor

from tests.closeness import assert_close


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
