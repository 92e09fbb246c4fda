"""The kernels of the short convolution as functions on tensors: tiles, allocation and launches."""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn2.ops.triton.ahead import over
from gdn2.ops.triton.conv import (
    convolve_gradient_kernel,
    convolve_kernel,
    final_state_kernel,
    state_gradient_kernel,
    step_kernel,
)

# Elements of a tile of the forward, its channels where heads do not decide, its most rows. On an H200, 4 x 4096 x 2048
# in bf16, µs without and with the norm: 46 and 50; tiles of 4096 by 4 warps 50 and 52, of 2048 by 2 warps 48 and 50.
TILE = 1024
BLOCK = 128
MOST_ROWS = 64
WARPS = 2
# Of the backward: elements of a tile, 8 a thread make loads of 16 bytes; tokens that each of its rows walks, and how
# many in a round of its loop, which divides them; stages of its loads. On an H200, 4 x 4096 x 2048 in bf16, µs
# without and with the norm: 61 and 76; 64 tokens 117 and 124, 32 tokens 132 and 141; 2 stages 85 and 82; tiles of 1024
# 76 and 70.
BACKWARD_TILE = 512
BACKWARD_WARPS = 2
SEGMENT = 128
UNROLL = 4
STAGES = 3


class Inputs(NamedTuple):
    """Operands as the kernels take them: of their strides only those of x's sequences and tokens matter."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    cu_seqlens: Tensor | None

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Self:
        """Make contiguous what must be."""
        x = x if x.stride(2) == 1 else x.contiguous()
        optional = (None if t is None else t.contiguous() for t in (bias, state, cu_seqlens))
        return cls(x, weight.contiguous(), *optional)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens in all, tokens of a dense sequence, sequences, and steps of the search among them."""
        batch, length, _ = self.x.shape
        return batch * length, length, self.sequences, self.sequences.bit_length()

    def segments(self, size: int) -> int:
        """Segments of so many tokens that cover every sequence; of packed ones the host knows only the sum."""
        batch, length, _ = self.x.shape
        packed = self.cu_seqlens is not None
        return length // size + self.sequences if packed else batch * triton.cdiv(length, size)

    def taps(self) -> dict[str, Any]:
        """Sizes that every kernel is compiled for, and the dtype of its sums."""
        channels, taps = self.weight.shape
        accumulate = tl.float64 if self.x.dtype == torch.float64 else tl.float32
        return {"CHANNELS": channels, "TAPS": taps, "ACC": accumulate}

    def tile(self, silu: bool, l2_width: int | None) -> dict[str, Any]:
        """What kernels that see outputs are compiled for besides."""
        width = l2_width or min(BLOCK, triton.next_power_of_2(self.weight.shape[0]))
        cols = triton.next_power_of_2(width)
        return self.taps() | {
            "WIDTH": width,
            "COLS": cols,
            "SILU": silu,
            "L2": l2_width is not None,
        }

    def blocks(self, width: int) -> int:
        """Programs along the channels."""
        return triton.cdiv(self.weight.shape[0], width)

    @property
    def past(self) -> int:
        """Power of two that covers the inputs in a state."""
        return triton.next_power_of_2(max(1, self.weight.shape[1] - 1))


def forward(given: Inputs, silu: bool, l2_width: int | None, eps: float) -> Tensor:
    """Output [batch, length, channels]."""
    y = given.x.new_empty(given.x.shape)
    how = given.tile(silu, l2_width)
    rows = min(MOST_ROWS, max(1, TILE // how["COLS"]))
    over(convolve_kernel, triton.cdiv(given.sizes[0], rows) * given.blocks(how["WIDTH"]))(
        *given, y, *given.sizes, *given.x.stride()[:2], eps, **how, ROWS=rows, num_warps=WARPS
    )
    return y


def backward(
    given: Inputs,
    dy: Tensor,
    d_final: Tensor | None,
    silu: bool,
    l2_width: int | None,
    eps: float,
    to: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x and weight, and of the bias, unrounded; that of x in `to` [tokens, channels], if there is one.

    Only channels lie next to each other there.
    """
    dx = given.x.new_empty(given.x.shape) if to is None else to
    stride = given.x.shape[2] if to is None else to.stride(0)
    how = given.tile(silu, l2_width)
    channels, taps = given.weight.shape
    rows = min(MOST_ROWS, max(1, BACKWARD_TILE // how["COLS"]))
    warps = BACKWARD_WARPS * max(1, how["COLS"] // BACKWARD_TILE)  # wide heads fill more registers
    groups = triton.cdiv(given.segments(SEGMENT), rows)
    dtype = torch.promote_types(given.x.dtype, torch.float32)
    partial = dx.new_empty(groups, taps + (given.bias is not None), channels, dtype=dtype)
    over(convolve_gradient_kernel, groups * given.blocks(how["WIDTH"]))(
        dy, d_final, *given, dx, partial, *given.sizes[1:], *given.x.stride()[:2], stride, eps,
        **how, ROWS=rows, SEGMENT=SEGMENT, STAGES=STAGES, UNROLL=UNROLL, num_warps=warps,
    )  # fmt: skip
    sums = partial.sum(0)
    d_bias = None if given.bias is None else sums[taps].clone()
    return dx, sums[:taps].T.to(given.weight.dtype).contiguous(), d_bias


def fill_final_state(given: Inputs, final: Tensor) -> None:
    """Write the last inputs of each sequence into a state [N, channels, width - 1]."""
    cols = min(BLOCK, triton.next_power_of_2(given.weight.shape[0]))
    over(final_state_kernel, given.sequences * given.blocks(cols))(
        given.x, given.state, given.cu_seqlens, final, given.sizes[1], *given.x.stride()[:2],
        **given.taps(), COLS=cols, PAST=given.past, num_warps=1,
    )  # fmt: skip


def state_gradient(
    given: Inputs, dy: Tensor, d_final: Tensor | None, silu: bool, l2_width: int | None, eps: float
) -> Tensor:
    """Gradient of the initial state."""
    assert given.state is not None
    d_state = torch.empty_like(given.state)
    how = given.tile(silu, l2_width)
    over(state_gradient_kernel, given.sequences * given.blocks(how["WIDTH"]))(
        dy, d_final, *given, d_state, given.sizes[1], *given.x.stride()[:2], eps,
        **how, PAST=given.past, num_warps=1,
    )  # fmt: skip
    return d_state


def step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    silu: bool,
    l2_width: int | None,
    eps: float,
) -> Tensor:
    """Output of the next few tokens; the state, contiguous for each sequence, is updated in place."""
    given = Inputs.of(x, weight, bias, None, None)
    x, weight, bias, _, _ = given
    y = x.new_empty(x.shape)
    how = given.tile(silu, l2_width)
    over(step_kernel, x.shape[0] * given.blocks(how["WIDTH"]))(
        x, weight, bias, state, y, x.shape[1], *x.stride()[:2], state.stride(0), eps,
        **how, ROWS=triton.next_power_of_2(max(1, x.shape[1])), PAST=given.past, num_warps=1,
    )  # fmt: skip
    return y
