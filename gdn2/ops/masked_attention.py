"""Attention beside a mask made of positions: of some queries to some keys, and of all blocks of a window at once."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def masked(
    q: Tensor, k: Tensor, v: Tensor, now: Tensor, held: Tensor, window: int | None, scale: float
) -> Tensor:
    """Return attention of queries at positions now [rows, queries] to keys at held [rows, keys]."""
    now, held = now[:, :, None], held[:, None]
    mask = (held >= 0) & (held <= now)
    if window is not None:
        mask &= held > now - window
    # Heads that share a key become more queries of it: beside a mask, `enable_gqa` copies the keys.
    rows, length, heads, width = q.shape
    shared = k.shape[2]
    group = heads // shared
    y = scaled_dot_product_attention(
        q.reshape(rows, length, shared, group, width).permute(0, 2, 3, 1, 4).flatten(2, 3),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask.repeat(1, group, 1)[:, None],
        scale=scale,
    )
    return y.reshape(rows, shared, group, length, width).permute(0, 3, 1, 2, 4).flatten(2, 3)


def windows(
    q: Tensor, k: Tensor, v: Tensor, size: int, reach: int, window: int, scale: float
) -> Tensor:
    """Return attention in a window, all blocks at once: a loop over them is another graph for each length."""
    rows, length = q.shape[:2]
    count = (length + size - 1) // size
    fill = count * size - length
    near = (reach + 1) * size

    def blocks(x: Tensor) -> Tensor:
        """Each block of keys behind those before it that its queries may see."""
        x = pad(x, (0, 0, 0, 0, reach * size, fill))
        parts = [
            x[:, i * size : (i + count) * size].unflatten(1, (count, size))
            for i in range(reach + 1)
        ]
        return torch.cat(parts, 2).flatten(0, 1)

    first = torch.arange(count, device=q.device)[:, None] * size
    now = (first + torch.arange(size, device=q.device)).repeat(rows, 1)
    held = (first - reach * size + torch.arange(near, device=q.device)).repeat(rows, 1)
    queries = pad(q, (0, 0, 0, 0, 0, fill)).unflatten(1, (count, size)).flatten(0, 1)
    y = masked(queries, blocks(k), blocks(v), now, held, window, scale)
    return y.unflatten(0, (rows, count)).flatten(1, 2)[:, :length]
