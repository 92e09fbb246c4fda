"""Attention over a sliding window by two causal calls of the device's own attention kernels.

Cut into blocks as long as the window, a query sees the keys of its own block up to itself, a lower triangle, and those
of the block before it that come after its own place, a strictly upper one. Read backwards, and with its rows moved by
one, the second is a lower triangle too; the row that then comes last sees nothing, and its result is dropped. Both
results are joined by their normalisers. The gradient of each triangle is that of causal attention, given the output and
the normaliser of the whole.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
UNSEEN = 1e30  # logarithm of a normaliser that leaves nothing of a row


def is_whole(length: int, window: int | None) -> bool:
    """Whether there are several blocks, all of them whole."""
    return window is not None and window < length and length % window == 0


def fits(q: Tensor, k: Tensor, window: int | None) -> bool:
    """Whether the blocks are whole, the kernels take such heads, and on a GPU what is around them will be fused."""
    if not is_whole(q.shape[1], window) or q.shape[2] != k.shape[2]:
        return False
    if q.is_cuda:
        known = q.dtype in HALVES and q.shape[3] in (64, 128)
        return known and is_compiling() and _is_hopper()
    return q.device.type == "cpu"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_hopper() -> bool:
    """Whether cuDNN is there, on the GPUs where it was measured, or newer ones."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (9, 0)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Return attention of q, k and v [batch, length, heads, d], where the window divides the length."""
    y: Tensor = _WindowAttention.apply(q, k, v, window, scale)  # type: ignore[no-untyped-call]
    return y


class _WindowAttention(torch.autograd.Function):
    """Inside, tensors are [batch, blocks, heads, window, d], logarithms of normalisers without the d."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        blocks = _blocks(q, window), _blocks(k, window), _blocks(v, window)
        own, own_log = _causal(*blocks, scale)
        before, before_log = _causal(*_upper(*blocks), scale)
        before, before_log = _turned(before), _turned(before_log.unsqueeze(-1)).squeeze(-1)
        sees = torch.arange(window, device=q.device) < window - 1
        before_log = torch.where(sees, before_log, -torch.inf)
        log = torch.logaddexp(own_log[:, 1:], before_log)
        joined = own[:, 1:] * (own_log[:, 1:] - log).exp().unsqueeze(-1)
        joined = joined + before * (before_log - log).exp().unsqueeze(-1)
        y = _rows(torch.cat([own[:, :1], joined.to(q.dtype)], 1))
        log = torch.cat([own_log[:, :1], log], 1)
        ctx.save_for_backward(q, k, v, y, log)
        ctx.window, ctx.scale = window, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, log = ctx.saved_tensors
        q, k, v, y, dy = (_blocks(x, ctx.window) for x in (*saved, dy))
        own = _causal_backward(dy, q, k, v, y, log, ctx.scale)
        dq, dk, dv = _upper_backward(dy, q, k, v, y, log, ctx.scale)
        return (
            _rows(torch.cat([own[0][:, :1], own[0][:, 1:] + _turned(dq)], 1)),
            _rows(torch.cat([own[1][:, :-1] + dk.flip(-2), own[1][:, -1:]], 1)),
            _rows(torch.cat([own[2][:, :-1] + dv.flip(-2), own[2][:, -1:]], 1)),
            None,
            None,
        )


def _blocks(x: Tensor, window: int) -> Tensor:
    return x.unflatten(1, (-1, window)).transpose(2, 3)


def _rows(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)


def _turned(x: Tensor) -> Tensor:
    """All rows of a block but the last read backwards; twice is nothing."""
    return x.flip(-2).roll(-1, -2)


def _upper(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and the block before each, such that what they see of it is a lower triangle."""
    return _turned(q[:, 1:]), k[:, :-1].flip(-2), v[:, :-1].flip(-2)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each block, and the logarithms of its normalisers."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if q.is_cuda:
        found = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, is_causal=True, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=True, scale=scale
        )
    return found[0].unflatten(0, shape[:2]), found[1].reshape(shape[:-1])


def _causal_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, scale: float
) -> list[Tensor]:
    blocks = q.shape[:2]
    dy, q, k, v, y = (x.flatten(0, 1) for x in (dy, q, k, v, y))
    log = log.flatten(0, 1)
    if q.is_cuda:
        length, seed = q.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)
        found = aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, y, log.unsqueeze(-1).contiguous(), seed, seed, None, None, None,
            length, length, 0.0, True, scale=scale,
        )  # fmt: skip
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, log, 0.0, True, scale=scale
        )
    return [x.unflatten(0, blocks) for x in found]


# An operator of its own: in the open, a compiler would keep the forward's turned tensors for the backward, up to 5 % of
# all memory of training, since it never computes anew what a kernel needs in memory.
@torch.library.custom_op("gdn2::window_upper_backward", mutates_args=())
def _upper_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through the upper triangles, turned as `_upper` turns its operands."""
    window = q.shape[-2]
    dy, q, k, v, y, log = dy[:, 1:], q[:, 1:], k[:, :-1], v[:, :-1], y[:, 1:], log[:, 1:]
    back = torch.arange(window - 1, -1, -1, device=q.device)
    turn = back.roll(-1)
    dy, q, y = (_select(x, turn) for x in (dy, q, y))
    k, v = _select(k, back), _select(v, back)
    log = log.index_select(-1, turn)
    dy[..., -1, :], log[..., -1] = 0, UNSEEN
    dq, dk, dv = (x.contiguous() for x in _causal_backward(dy, q, k, v, y, log, scale))
    return dq, dk, dv


def _select(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of blocks; by 16 bytes at once where they lie so, since a GPU copies number by number."""
    whole = 16 // x.element_size()
    places = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    if x.stride(-1) != 1 or any(place % whole for place in places):
        return x.index_select(-2, rows)
    return x.view(torch.complex128).index_select(-2, rows).view(x.dtype)


@_upper_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    new = [x.new_empty(x.shape) for x in (q[:, 1:], k[:, 1:], v[:, 1:])]
    return new[0], new[1], new[2]
