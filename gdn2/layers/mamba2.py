"""The token mixer of Mamba-2."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gdn2.layers.config import Mamba2Config
from gdn2.layers.convolution import ShortConvolution
from gdn2.layers.initialisation import fill
from gdn2.layers.layout import Layout
from gdn2.layers.norm import RMSNorm
from gdn2.layers.recurrence import CHUNK, run_rule, wide_parameter
from gdn2.ops.arguments import state_dtype
from gdn2.ops.family import mamba2
from gdn2.ops.flops import rule_flops
from gdn2.ops.log_decay import softplus


class Mamba2State(NamedTuple):
    """What the mixer carries from token to token."""

    memory: Tensor  # [rows, heads, state size, head width] S, fp32
    conv: Tensor  # [rows, channels, conv width − 1] the convolution's last inputs


class Mamba2Mixer(nn.Module):
    """S_t = exp(A Δ_t) S_{t−1} + Δ_t k_t v_tᵀ, o_t = S_tᵀ q_t + D v_t (Eq. 4), gated and then normalised.

    Mamba-2 calls v, k and q x, B and C. One linear map makes gate, v, k, q and step size, in this order.
    """

    def __init__(self, config: Mamba2Config, hidden_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.config, self.recompute = config, True
        inner, state, heads = config.inner_size, config.state_size, config.num_heads
        self.widths = [inner, inner + 2 * state, heads]
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=False)
        self.conv = ShortConvolution(inner + 2 * state, config.conv_width, bias=True)
        self.step_bias = wide_parameter(heads)
        self.decay_log_rate = wide_parameter(heads)
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(inner, norm_eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        fill(self, config)

    def forward(
        self, x: Tensor, state: Mamba2State | None, layout: Layout, inplace: bool = False
    ) -> tuple[Tensor, Mamba2State | None]:
        """Mix x [batch, length, width]; a state is returned where one was given, overwritten if `inplace`."""
        c = self.config
        memory, past = state or (None, None)
        gate, vkq, step = self.in_proj(x).split(self.widths, -1)
        vkq, past = self.conv(vkq, past, layout, inplace)
        v, k, q = vkq.split([c.inner_size, c.state_size, c.state_size], -1)
        v, k, q = v.unflatten(-1, (c.num_heads, -1)), k.unsqueeze(2), q.unsqueeze(2)
        wide = state_dtype(q)
        dt = softplus(step.to(wide) + self.step_bias.to(wide))
        g = -self.decay_log_rate.to(wide).exp() * dt
        o, memory = run_rule(mamba2(q, k, v, g, dt), memory, layout, inplace, self.recompute)
        o = (o + self.skip.to(o.dtype).unsqueeze(-1) * v).flatten(-2)
        y = self.out_proj(self.norm(o, gate, "silu", gate_first=True))
        return y, None if memory is None else Mamba2State(memory, past)

    def new_state(self, rows: int, like: Tensor, capacity: int = 0) -> Mamba2State:
        """An empty state; its size does not depend on the tokens it will see."""
        c = self.config
        shape = (rows, c.num_heads, c.state_size, c.head_dim)
        memory = like.new_zeros(shape, dtype=state_dtype(like))
        return Mamba2State(memory, self.conv.new_state(rows, like))

    def core_flops(self, length: int) -> float:
        """Forward, per token, without the linear maps."""
        c = self.config
        return c.num_heads * rule_flops(c.state_size, c.head_dim, CHUNK, False)
