"""The short causal depthwise convolution before the rule, and the inputs it carries on.

The state [N, channels, width - 1] of a sequence holds its last width - 1 inputs, oldest first. A
sequence that follows its state in one stream has no special case: nothing is padded, and the next
state is the stream's last width - 1 rows, however short the sequence was.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from gdn2.ops.arguments import exact_products
from gdn2.ops.conv_op import convolve, convolve_step, kernels_take
from gdn2.ops.norm import L2_EPS, l2_normalize
from gdn2.ops.packing import FLOATS, check_cu_seqlens, check_operand, sequence_ids

Activation = Literal["silu"] | None
FEW_TOKENS = 16  # of a step in place, which one program holds


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    l2_width: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y_t = act(bias + Σ_i weight_i ⊙ x_{t-width+1+i}), shaped as x, and the final state.

    x is [batch, length, channels]; the last tap of weight [channels, width] meets the current
    token. With `l2_width` each head of so many channels of y is divided as by `l2_normalize`. Sums
    are fp32 (fp64 for fp64 x). The state has the dtype of the initial one, or of x.
    """
    _check(x, weight, bias, activation, l2_width)
    batch, length, channels = x.shape
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length, x.device)
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, channels, weight.shape[1] - 1)
    if initial_state is not None:
        check_operand("initial_state", initial_state, shape, x.device)

    if kernels_take(x, weight, bias, initial_state, l2_width):
        options = (activation == "silu", l2_width, L2_EPS, output_final_state)
        y, final = convolve(x, weight, bias, initial_state, cu_seqlens, *options)
        return y, final if output_final_state else None
    state = x.new_zeros(shape) if initial_state is None else initial_state
    if cu_seqlens is None:
        stream = torch.cat([state.mT, x], dim=1)
        y = _convolve(stream, weight, bias, activation)
        last = stream[:, length:]
    else:
        stream, outputs, ends = _interleave(state, x, cu_seqlens)
        y = _convolve(stream, weight, bias, activation).index_select(1, outputs)
        last = stream[0, ends]
    if l2_width is not None:
        y = l2_normalize(y.unflatten(-1, (-1, l2_width))).flatten(-2)
    if not output_final_state:
        return y.to(x.dtype), None
    # A copy always: a view would hold all tokens.
    own = last.mT.to(state.dtype, copy=True, memory_format=torch.contiguous_format)
    return y.to(x.dtype), own


def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    l2_width: int | None = None,
    state: Tensor,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return y of the next few tokens and the state after them, in the given tensor if `inplace`.

    The arithmetic is that of `short_convolution`, so that decoding repeats what training computed.
    """
    _check(x, weight, bias, activation, l2_width)
    check_operand("state", state, (x.shape[0], x.shape[2], weight.shape[1] - 1), x.device)
    if inplace and state.is_leaf and state.requires_grad and torch.is_grad_enabled():
        raise ValueError("inplace is True for a state that requires grad, expected False")
    few = x.shape[1] <= FEW_TOKENS and not _differentiable(x, weight, bias, state)
    if inplace and few and _apart(state) and kernels_take(x, weight, bias, state, l2_width):
        options = (activation == "silu", l2_width, L2_EPS)
        return convolve_step(x, weight, bias, state, *options), state
    if few and x.shape[1] == 1:
        y, last = _one_token(x, weight, bias, activation, l2_width, state)
        return y, state.copy_(last) if inplace else last.contiguous()
    y, new = short_convolution(
        x,
        weight,
        bias,
        activation=activation,
        l2_width=l2_width,
        initial_state=state,
        output_final_state=True,
    )
    assert new is not None
    return y, state.copy_(new) if inplace else new


def _one_token(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    l2_width: int | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output and a view of the state after one token, in a third of the operations that a stream takes."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    window = torch.cat([state, x.mT], dim=2)
    with exact_products(x.device):
        y = torch.linalg.vecdot(window.to(dtype), weight.to(dtype)).unsqueeze(1)
    y = y if bias is None else y + bias.to(dtype)
    y = silu(y) if activation == "silu" else y
    if l2_width is not None:
        y = l2_normalize(y.unflatten(-1, (-1, l2_width))).flatten(-2)
    return y.to(x.dtype), window[:, :, 1:].to(state.dtype)


def _differentiable(*operands: Tensor | None) -> bool:
    """Whether gradients of any of them may be asked for."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _apart(state: Tensor) -> bool:
    """Whether the state of each sequence is one piece of memory of its own."""
    sequences, channels, past = state.shape
    return state[:1].is_contiguous() and (sequences < 2 or state.stride(0) >= channels * past)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    l2_width: int | None,
) -> None:
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
    if l2_width is not None and (l2_width < 1 or channels % l2_width):
        raise ValueError(f"l2_width is {l2_width}, expected a divisor of the {channels} channels")


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
    """Return act(bias + the convolution without padding) [batch, rows - width + 1, channels].

    It is as wide as the sums.
    """
    dtype = torch.promote_types(stream.dtype, torch.float32)
    taps = weight.to(dtype).mT.contiguous()
    offset = None if bias is None else bias.to(dtype)
    if not _differentiable(stream, taps, offset):  # autograd would take longer than a decoded token
        return _Convolution.forward(stream, taps, offset, activation)
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
        return silu(y) if activation == "silu" else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        stream, taps, bias, ctx.activation = inputs
        ctx.save_for_backward(stream, taps, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        stream, taps, bias = ctx.saved_tensors
        x = stream.to(taps.dtype)
        if ctx.activation == "silu":
            # Rows across a seam of packed sequences have no gradient, whatever number the activation would have there.
            none = dy == 0
            dy = torch.ops.aten.silu_backward(dy, _sum_taps(x, taps, bias)).masked_fill_(none, 0)
        windows = [slice(i, i + dy.shape[1]) for i in range(len(taps))]
        dx = torch.zeros_like(x)
        for window, tap in zip(windows, taps, strict=True):
            dx[:, window].addcmul_(dy, tap)
        d_taps = torch.stack([(dy * x[:, window]).sum(dim=(0, 1)) for window in windows])
        d_bias = None if bias is None else dy.sum(dim=(0, 1))
        return dx.to(stream.dtype), d_taps, d_bias, None
