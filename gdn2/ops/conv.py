"""The short causal depthwise convolution before the rule, and the inputs it carries on.

The state [N, channels, width - 1] of a sequence holds its last width - 1 inputs, oldest first. A
sequence that follows its state in one stream has no special case: nothing is padded, and the next
state is the stream's last width - 1 rows, however short the sequence was.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from gdn2.ops.packing import FLOATS, check_cu_seqlens, check_operand, sequence_ids

Activation = Literal["silu"] | None


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y_t = act(bias + Σ_i weight_i ⊙ x_{t-width+1+i}), shaped as x, and the final state.

    x is [batch, length, channels]; the last tap of weight [channels, width] meets the current
    token. Sums are fp32 (fp64 for fp64 x). The state has the dtype of the initial one, or of x.
    """
    _check(x, weight, bias, activation)
    batch, length, channels = x.shape
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length, x.device)
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = initial_state
    if state is None:
        state = x.new_zeros(count, channels, weight.shape[1] - 1)
    check_operand("initial_state", state, (count, channels, weight.shape[1] - 1), x.device)

    if cu_seqlens is None:
        stream = torch.cat([state.mT, x], dim=1)
        y = _convolve(stream, weight, bias, activation)
        last = stream[:, length:]
    else:
        stream, outputs, ends = _interleave(state, x, cu_seqlens)
        y = _convolve(stream, weight, bias, activation).index_select(1, outputs)
        last = stream[0, ends]
    final_state = last.mT.to(state.dtype).contiguous() if output_final_state else None
    return y.to(x.dtype), final_state


def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state: Tensor,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return y of the next few tokens and the state after them, in the given tensor if `inplace`.

    The arithmetic is that of `short_convolution`, so that decoding repeats what training computed.
    """
    _check(x, weight, bias, activation)
    check_operand("state", state, (x.shape[0], x.shape[2], weight.shape[1] - 1), x.device)
    if inplace and state.is_leaf and state.requires_grad and torch.is_grad_enabled():
        raise ValueError("inplace is True for a state that requires grad, expected False")
    y, new = short_convolution(
        x, weight, bias, activation=activation, initial_state=state, output_final_state=True
    )
    assert new is not None
    return y, state.copy_(new) if inplace else new


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
    if x.ndim != 3 or x.dtype not in FLOATS:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, expected floating point [batch, length, channels]"
        )
    channels = x.shape[2]
    if weight.ndim != 2 or weight.shape[1] < 1:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected ({channels}, width of 1 or more)"
        )
    check_operand("weight", weight, (channels, weight.shape[1]), x.device)
    if bias is not None:
        check_operand("bias", bias, (channels,), x.device)
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}, expected None or 'silu'")


def _interleave(state: Tensor, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stream of packed sequences, each behind its state, and where its results lie.

    Those are the outputs [length] that belong to tokens, and the rows [N, width - 1] of the final
    states. No row is written or read twice, so neither direction needs atomics.
    """
    count, channels, past = state.shape
    length = x.shape[1]
    outputs = torch.arange(length, device=x.device) + past * sequence_ids(cu_seqlens, length)
    shift = past * torch.arange(count, device=x.device)[:, None]
    window = shift + torch.arange(past, device=x.device)
    starts, ends = cu_seqlens[:-1, None] + window, cu_seqlens[1:, None] + window

    dtype = torch.promote_types(x.dtype, state.dtype)
    stream = x.new_empty(1, length + count * past, channels, dtype=dtype)
    stream.index_copy_(1, outputs + past, x.to(dtype))
    stream.index_copy_(1, starts.flatten(), state.mT.reshape(1, -1, channels).to(dtype))
    return stream, outputs, ends


def _convolve(
    stream: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
) -> Tensor:
    """Return act(bias + the convolution without padding) [batch, rows - width + 1, channels]."""
    dtype = torch.promote_types(stream.dtype, torch.float32)
    taps = weight.to(dtype).mT.contiguous()
    offset = None if bias is None else bias.to(dtype)
    y: Tensor = _Convolution.apply(stream, taps, offset, activation)  # type: ignore[no-untyped-call]
    return y


def _sum_taps(stream: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    rows = stream.shape[1] - len(taps) + 1
    y = stream[:, :rows] * taps[0]
    for i in range(1, len(taps)):
        y.addcmul_(stream[:, i : i + rows], taps[i])
    return y if bias is None else y.add_(bias)


class _Convolution(torch.autograd.Function):
    """Shifted multiply-adds that save only the stream; the backward sums the taps again.

    On two CPU cores at batch 1, length 2048, 768 channels, width 4, fp32 with SiLU, `F.conv1d` with
    one group per channel takes 2.6 times as long forward and 2.6 times with its backward, the same
    sum left to autograd 1.8 and 1.7 times. Autocast would also round the operands of `F.conv1d`.
    """

    @staticmethod
    def forward(
        stream: Tensor, taps: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        y = _sum_taps(stream.to(taps.dtype), taps, bias)
        return (silu(y) if activation == "silu" else y).to(stream.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        stream, taps, bias, ctx.activation = inputs
        ctx.save_for_backward(stream, taps, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        stream, taps, bias = ctx.saved_tensors
        x, dy = stream.to(taps.dtype), dy.to(taps.dtype)
        if ctx.activation == "silu":
            dy = torch.ops.aten.silu_backward(dy, _sum_taps(x, taps, bias))
        windows = [slice(i, i + dy.shape[1]) for i in range(len(taps))]
        dx = torch.zeros_like(x)
        for window, tap in zip(windows, taps, strict=True):
            dx[:, window].addcmul_(dy, tap)
        d_taps = torch.stack([(dy * x[:, window]).sum(dim=(0, 1)) for window in windows])
        d_bias = None if bias is None else dy.sum(dim=(0, 1))
        return dx.to(stream.dtype), d_taps, d_bias, None
