"""The token mixer of Mamba-3, SISO and MIMO."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from gdn2.layers.config import Mamba3Config
from gdn2.layers.initialisation import fill
from gdn2.layers.layout import Layout
from gdn2.layers.norm import RMSNorm
from gdn2.layers.recurrence import CHUNK, wide_parameter
from gdn2.ops.arguments import state_dtype
from gdn2.ops.flops import rule_flops
from gdn2.ops.log_decay import softplus
from gdn2.ops.mamba3 import Mamba3State as Carried
from gdn2.ops.mamba3 import mamba3, mamba3_step
from gdn2.ops.rotary import cosine_and_sine, cumulative_rotation, turn_pairs

SMALLEST_RATE = 1e-4


class Mamba3State(NamedTuple):
    """What the mixer carries from token to token."""

    # [rows, heads, state size, head width] S, fp32, the last token's own write included.
    memory: Tensor
    key: Tensor  # [rows, rank, heads, state size] the last token's keys, rotated
    value: Tensor  # [rows, heads, head width] and its value; the ranks are made from it again
    angle: Tensor  # [rows, heads, angles] Θ, fp32


def heavy_tail(x: Tensor) -> Tensor:
    """1 + x, and 1 / (1 − x) below zero, where softplus would fall as fast as exp x."""
    # clamped on both sides, zero would count twice in the gradient
    return torch.where(x < 0, 1 / (1 - x.clamp(max=0)), 1 + x)


class Mamba3Mixer(nn.Module):
    """The two writes of Eq. 16, with data-dependent decay, keys and queries rotated by the angle turned so far.

    One linear map makes gate, v, k, q, step size, decay rate, trapezoid and angle, in this order. With rank R > 1 every
    token has R keys and queries, and its value, gate and output are spread over the ranks by diagonal maps.
    """

    def __init__(self, config: Mamba3Config, hidden_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.config, self.recompute = config, True
        heads, rank, state = config.num_heads, config.rank, config.state_size
        ranks = rank * state
        self.widths = [config.inner_size] * 2 + [ranks] * 2 + [heads] * 3 + [config.num_angles]
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=False)
        self.step_bias = wide_parameter(heads)
        self.key_norm, self.query_norm = RMSNorm(state, norm_eps), RMSNorm(state, norm_eps)
        self.key_bias = nn.Parameter(torch.empty(heads, rank, state))
        self.query_bias = nn.Parameter(torch.empty(heads, rank, state))
        self.skip = nn.Parameter(torch.empty(heads))

        def diagonal() -> nn.Parameter | None:
            return nn.Parameter(torch.empty(heads, rank, config.head_dim)) if rank > 1 else None

        self.mimo_value, self.mimo_gate, self.mimo_out = diagonal(), diagonal(), diagonal()
        self.out_proj = nn.Linear(config.inner_size, hidden_size, bias=False)
        fill(self, config)

    def forward(
        self, x: Tensor, state: Mamba3State | None, layout: Layout, inplace: bool = False
    ) -> tuple[Tensor, Mamba3State | None]:
        """Mix x [batch, length, width]; a state is returned where one was given, overwritten if `inplace`."""
        gate, v, k, q, step, rate, trapezoid, angle = self.in_proj(x).split(self.widths, -1)
        wide = state_dtype(q)
        dt = softplus(step.to(wide) + self.step_bias.to(wide))
        positive = softplus if self.config.decay_rate == "softplus" else heavy_tail
        g = -positive(rate.to(wide)).clamp(min=SMALLEST_RATE) * dt
        lam = trapezoid.to(wide).sigmoid()
        theta = cumulative_rotation(
            angle,
            dt,
            initial_angle=None if state is None else state.angle,
            cu_seqlens=layout.cu_seqlens,
        )
        turns = cosine_and_sine(theta)
        k = self._rotated(self.key_norm, self.key_bias, k, turns)
        q = self._rotated(self.query_norm, self.query_bias, q, turns)
        gate, v = (z.unflatten(-1, (self.config.num_heads, -1)) for z in (gate, v))
        operands = (q, k, self._spread(v, self.mimo_value), g, dt, lam)
        o, carried = self._run(operands, state, layout, inplace)
        o = o + self.skip.to(o.dtype).unsqueeze(-1) * operands[2]
        y = self.out_proj(self._joined(o, gate).flatten(-2))
        if state is None:
            return y, None
        value, turned = layout.last(v, state.value), layout.last(theta, state.angle)
        if inplace and layout.is_step:
            pairs = zip(state, (carried.S, carried.k, value, turned), strict=True)
            return y, Mamba3State(*(old.copy_(new) for old, new in pairs))
        own = value.clone(), turned.clone()  # views would hold all tokens, or be the state before
        pairs = zip(state, (carried.S, carried.k, *own), strict=True)
        return y, Mamba3State(*(new.to(old.dtype) for old, new in pairs))  # whatever autocast made

    def new_state(self, rows: int, like: Tensor, capacity: int = 0) -> Mamba3State:
        """An empty state; its size does not depend on the tokens it will see."""
        c, wide = self.config, state_dtype(like)
        return Mamba3State(
            memory=like.new_zeros(rows, c.num_heads, c.state_size, c.head_dim, dtype=wide),
            key=like.new_zeros(rows, c.rank, c.num_heads, c.state_size),
            value=like.new_zeros(rows, c.num_heads, c.head_dim),
            angle=like.new_zeros(rows, c.num_heads, c.num_angles, dtype=wide),
        )

    def core_flops(self, length: int) -> float:
        """Forward, per token, without the linear maps: a token is R of the rule's, and its ranks meet twice."""
        c = self.config
        rule = c.rank * rule_flops(c.state_size, c.head_dim, CHUNK, False)
        blocks = 1 if c.rank == 1 else 2
        return c.num_heads * (rule + blocks * 2 * c.rank**2 * (c.state_size + c.head_dim))

    def _run(
        self,
        operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        state: Mamba3State | None,
        layout: Layout,
        inplace: bool,
    ) -> tuple[Tensor, Carried]:
        q, v = operands[0], operands[2]
        carried = None
        if state is not None:
            last = self._spread(state.value.unsqueeze(1), self.mimo_value).squeeze(1)
            carried = Carried(state.memory, state.key.to(q.dtype), last.to(v.dtype))
            if layout.is_step:
                return mamba3_step(*operands, state=carried, inplace=inplace)
        return mamba3(
            *operands, state=carried, cu_seqlens=layout.cu_seqlens, recompute=self.recompute
        )

    def _rotated(
        self, norm: RMSNorm, bias: Tensor, x: Tensor, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Keys or queries [batch, length, rank, heads, state size], rotated by Θ, given its cosine and sine."""
        normed = norm(x.unflatten(-1, (self.config.rank, -1))).unsqueeze(3)
        cos, sin = (t.unsqueeze(2) for t in turns)
        return turn_pairs(normed + bias.transpose(0, 1).to(x.dtype), cos, sin)

    def _spread(self, x: Tensor, over: Tensor | None) -> Tensor:
        """From [batch, length, heads, head width] to [batch, length, rank, heads, head width]."""
        x = x.unsqueeze(2)
        return x if over is None else x * over.transpose(0, 1).to(x.dtype)

    def _joined(self, o: Tensor, gate: Tensor) -> Tensor:
        """Gate the ranks and add them up."""
        o = o * silu(self._spread(gate, self.mimo_gate))
        if self.mimo_out is not None:
            o = o * self.mimo_out.transpose(0, 1).to(o.dtype)
        return o.sum(2)
