"""What a decode step of Gated DeltaNet-2 does between its linear maps and the rule, where one kernel does it all."""

import torch
from torch import Tensor

from gdn2.ops.backends import why_not
from gdn2.ops.conv_op import MOST_TAPS
from gdn2.ops.norm import L2_EPS


def kernel_takes(x: Tensor, taps: int, states: list[Tensor]) -> bool:
    """Whether the kernel can take a step of these, and is to be trusted. It has no gradients."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or taps > MOST_TAPS:
        return False
    if why_not("triton", x.device, x.dtype, ("delta_inputs",)) is not None:
        return False
    return all(state[:1].is_contiguous() for state in states)


def delta_inputs(
    maps: list[Tensor],
    weights: list[Tensor],
    states: list[Tensor],
    bias: Tensor,
    log_rate: Tensor,
    value_heads: int,
    erase_range: float,
) -> list[Tensor]:
    """q, k, v, g, b and w [rows, 1, heads, width] of one token of each row.

    Args:
        maps: what linear maps made of the token, [rows, 1, channels]: for q, k, v, erase gate, write gate and decay.
        weights: of the convolutions of q, k and v, [channels, taps].
        states: of these, [rows, channels, taps − 1], each row contiguous; overwritten.
        bias, log_rate: of the decay, [channels] and [heads].
    """
    from gdn2.ops.triton import delta_inputs as kernel  # noqa: PLC0415 (optional dependency)

    found = kernel.delta_inputs(
        maps, weights, states, bias, log_rate, value_heads, erase_range, L2_EPS
    )
    for state in states:
        if not state.is_inference():
            torch.autograd.graph.increment_version(state)
    return found
