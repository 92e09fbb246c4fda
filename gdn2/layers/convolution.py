"""The short convolution as a layer, and the inputs it carries."""

import torch
from torch import Tensor, nn

from gdn2.layers.layout import Layout
from gdn2.ops.conv import short_convolution, short_convolution_step


class ShortConvolution(nn.Module):
    """Causal depthwise convolution and SiLU; its state [rows, channels, width − 1] are the last inputs.

    With `l2_width`, each head of so many channels is brought to unit length afterwards.
    """

    def __init__(
        self, channels: int, width: int, *, bias: bool = False, l2_width: int | None = None
    ) -> None:
        super().__init__()
        self.l2_width = l2_width
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self, x: Tensor, state: Tensor | None, layout: Layout, inplace: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve x [batch, length, channels] after its state; a state is returned where one was given."""
        if state is not None and layout.is_step:
            return short_convolution_step(
                x,
                self.weight,
                self.bias,
                activation="silu",
                l2_width=self.l2_width,
                state=state,
                inplace=inplace,
            )
        return short_convolution(
            x,
            self.weight,
            self.bias,
            activation="silu",
            l2_width=self.l2_width,
            initial_state=state,
            output_final_state=state is not None,
            cu_seqlens=layout.cu_seqlens,
        )

    def new_state(self, rows: int, like: Tensor) -> Tensor:
        channels, width = self.weight.shape
        return like.new_zeros(rows, channels, width - 1)
