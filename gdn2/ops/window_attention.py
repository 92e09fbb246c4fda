"""Attention over a sliding window: by cuDNN where it can be told of windows, else by two of the device's causal calls.

Cut into blocks as long as the window, a query sees the keys of its own block up to itself, a lower triangle, and those
of the block before it that come after its own place, a strictly upper one. Read backwards, and with its rows moved by
one, the second is a lower triangle too; the row that then comes last sees nothing, and its result is dropped. Both
results are joined by their normalisers. The gradient of each triangle is that of causal attention, given the output and
the normaliser of the whole.
"""

from typing import Any

import torch
from torch import Tensor

from gdn2.ops.arguments import check_no_tangents
from gdn2.ops.backends import why_not
from gdn2.ops.cuda import band

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
UNSEEN = 1e30  # logarithm of a normaliser that leaves nothing of a row


def is_whole(length: int, window: int | None) -> bool:
    """Whether there are several blocks, all of them whole."""
    return window is not None and window < length and length % window == 0


def fits(q: Tensor, k: Tensor, window: int | None) -> bool:
    """Whether the blocks are whole, and kernels take such heads; of a batch of none cuDNN makes nothing."""
    whole = is_whole(q.shape[1], window) and q.shape[2] == k.shape[2]
    return whole and q.shape[0] > 0 and takes_heads(q.shape[3], q.dtype, q.device)


def takes_heads(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device has kernels for heads of this width."""
    if device.type == "cuda":
        known = dtype in HALVES and head_dim in (64, 128) and on_hopper(device)
        return known and why_not("triton", device, dtype, ("window",)) is None
    return device.type == "cpu"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def on_hopper(device: torch.device) -> bool:
    """Whether cuDNN is there, on the GPUs where it was measured, or newer ones."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Return attention of q, k and v [batch, length, heads, d], where the window divides the length."""
    check_no_tangents("window_attention", "backend='sdpa' with torch's MATH kernel", q, k, v)
    y: Tensor = _attend(q, k, v, window, scale)[0]
    return y


# Operators of their own, opaque to compilers: these would keep the turned tensors for the backward, up to 5 % of all
# memory of training, since they never compute anew what a kernel needs in memory.
@torch.library.custom_op("gdn2::attend_window", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output, and logarithms of the normalisers [batch, heads, length], which are the same in either way.

    In the way of triangles, tensors are [batch, blocks, window, heads, d].
    """
    known = band.attend(q, k, v, window, scale)
    if known is not None:
        return known
    q, k, v = (x.unflatten(1, (-1, window)) for x in (q, k, v))
    y, log = _causal(q, k, v, scale)
    before, before_log = _causal(*_upper(q, k, v), scale)
    _join(y[:, 1:], log[:, 1:], before, before_log)
    return y.flatten(1, 2), log.transpose(1, 2).flatten(2)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=dtype)


@torch.library.custom_op("gdn2::attend_window_backward", mutates_args=())
def _differentiate(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    known = band.differentiate(dy, q, k, v, y, log, window, scale)
    if known is not None:
        return known
    log = log.unflatten(2, (-1, window)).transpose(1, 2).contiguous()
    dy, q, k, v, y = (x.unflatten(1, (-1, window)) for x in (dy, q, k, v, y))
    dq, dk, dv = _causal_backward(dy, q, k, v, y, log, scale)
    back = torch.arange(window - 2, -2, -1, device=q.device) % window
    upper_log = log[:, 1:].index_select(-1, back)
    upper_dy, upper_y = (_turned(x[:, 1:], keys=False) for x in (dy, y))
    upper_dy[:, :, -1], upper_log[..., -1] = 0, UNSEEN
    upper = _causal_backward(upper_dy, *_upper(q, k, v), upper_y, upper_log, scale)
    _add_turned(dq[:, 1:], upper[0], keys=False)
    _add_turned(dk[:, :-1], upper[1], keys=True)
    _add_turned(dv[:, :-1], upper[2], keys=True)
    return dq.flatten(1, 2), dk.flatten(1, 2), dv.flatten(1, 2)


@_differentiate.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _d_log: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    return *_differentiate(dy, *ctx.saved_tensors, *ctx.options), None, None


_attend.register_autograd(_backward, setup_context=_save)


def _upper(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and the block before each, such that what they see of it is a lower triangle."""
    k, v = (_turned(x[:, :-1], keys=True) for x in (k, v))
    return _turned(q[:, 1:], keys=False), k, v


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each block, and the logarithms of its normalisers."""
    blocks = q.shape[:2]
    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))
    if q.is_cuda:
        found = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, is_causal=True, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=True, scale=scale
        )
    log = found[1].reshape(*blocks, *q.shape[1:3]).contiguous()
    return _by_rows(found[0], blocks), log


def _causal_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log: Tensor, scale: float
) -> list[Tensor]:
    blocks = q.shape[:2]
    dy, q, k, v, y = (x.flatten(0, 1).transpose(1, 2) for x in (dy, q, k, v, y))
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
    return [_by_rows(x, blocks) for x in found]


def _by_rows(x: Tensor, blocks: torch.Size) -> Tensor:
    """From [batch · blocks, heads, window, d], where kernels leave rows as they found them."""
    return x.transpose(1, 2).contiguous().unflatten(0, blocks)


def _turned(x: Tensor, keys: bool) -> Tensor:
    """Each block's rows read backwards; of queries all but the last."""
    if x.is_cuda:
        from gdn2.ops.triton import window  # noqa: PLC0415 (optional dependency)

        y, x = x.new_empty(x.shape), x if x.stride(-1) == 1 else x.contiguous()
        with torch.cuda.device_of(x):  # a launch goes to the current device
            window.turn(x, y, keys, add=False)
        return y
    x = x.flip(2)
    return x if keys else x.roll(-1, 2)


def _add_turned(to: Tensor, x: Tensor, keys: bool) -> None:
    """Add x, turned, in place."""
    if x.is_cuda:
        from gdn2.ops.triton import window  # noqa: PLC0415 (optional dependency)

        with torch.cuda.device_of(x):
            window.turn(x, to, keys, add=True)
    else:
        to += _turned(x, keys)


def _join(own: Tensor, own_log: Tensor, before: Tensor, before_log: Tensor) -> None:
    """Weigh both results by their normalisers, in the place of the first."""
    if own.is_cuda:
        from gdn2.ops.triton import window  # noqa: PLC0415 (optional dependency)

        with torch.cuda.device_of(own):
            return window.join(own, own_log, before, before_log)
    rows = own_log.shape[-1]
    before_log = before_log.flip(-1).roll(-1, -1)
    before_log = torch.where(torch.arange(rows) < rows - 1, before_log, -torch.inf)
    log = torch.logaddexp(own_log, before_log)
    weights = ((x - log).exp().mT.unsqueeze(-1) for x in (own_log, before_log))
    own.copy_(own * next(weights) + _turned(before, keys=False) * next(weights))
    own_log.copy_(log)
    return None
