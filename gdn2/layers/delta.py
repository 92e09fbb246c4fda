"""The token mixer of Gated DeltaNet-2 and of the family it contains."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from gdn2.layers.bare import is_bare
from gdn2.layers.config import DeltaConfig
from gdn2.layers.convolution import ShortConvolution
from gdn2.layers.initialisation import fill
from gdn2.layers.joint import have_one_gradient, joint, single
from gdn2.layers.layout import Layout
from gdn2.layers.norm import RMSNorm
from gdn2.layers.recurrence import CHUNK, run_rule, wide_parameter
from gdn2.ops.arguments import state_dtype
from gdn2.ops.delta_inputs import delta_inputs, kernel_takes
from gdn2.ops.entry import kernels_enter, mixer_inputs
from gdn2.ops.family import Pattern, gated_delta_net_2, kda
from gdn2.ops.flops import rule_flops
from gdn2.ops.log_decay import log_decay

# What maps of the input lead to.
INPUTS = ("q", "k", "v", "erase", "write", "beta", "decay", "gate")


class DeltaState(NamedTuple):
    """What the mixer carries from token to token."""

    memory: Tensor  # [rows, value heads, key width, value width] S, fp32
    q_conv: Tensor  # [rows, channels, conv width − 1] the convolutions' last inputs
    k_conv: Tensor
    v_conv: Tensor


class LowRank(nn.Module):
    """Two maps through a narrow middle, with nothing between them."""

    def __init__(self, inputs: int, rank: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Both maps in turn, for whoever hooks or wraps the pair; where nobody does, the mixer calls each by itself."""
        made: Tensor = self.up(self.down(x))
        return made


class DeltaMixer(nn.Module):
    """The paper's block design: q, k and v through short convolutions, gates from x, the rule, a gated norm.

    With more value heads than heads, q, k, the log-decay and the erase gate are shared by groups of value heads.
    """

    def __init__(self, config: DeltaConfig, hidden_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.config, self.recompute, self.laid = config, True, False
        keys, values = config.key_width, config.value_width

        def linear(outputs: int) -> nn.Linear:
            return nn.Linear(hidden_size, outputs, bias=False)

        def branch(outputs: int, bias: bool) -> nn.Module:
            if config.gate_rank is None:
                return linear(outputs)
            return LowRank(hidden_size, config.gate_rank, outputs, bias)

        self.q_proj, self.k_proj, self.v_proj = linear(keys), linear(keys), linear(values)
        self.q_conv = ShortConvolution(keys, config.conv_width, l2_width=config.key_head_dim)
        self.k_conv = ShortConvolution(keys, config.conv_width, l2_width=config.key_head_dim)
        self.v_conv = ShortConvolution(values, config.conv_width)
        if config.gates == "separate":
            self.erase_proj, self.write_proj = linear(keys), linear(values)
        else:
            self.beta_proj = linear(config.value_heads)
        if config.decay != "none":
            per_channel = config.decay == "channel"
            speeds = keys if per_channel else config.num_heads
            self.decay_proj = branch(speeds, bias=False) if per_channel else linear(speeds)
            self.decay_log_rate = wide_parameter(config.num_heads)
            self.decay_bias = wide_parameter(speeds)
        if config.output_gate != "none":
            self.gate_proj = branch(values, bias=True)
        self._inputs = [n for n in INPUTS if hasattr(self, f"{n}_proj")]
        self.norm = RMSNorm(config.value_head_dim, norm_eps)
        self.out_proj = nn.Linear(values, hidden_size, bias=False)
        fill(self, config)

    def forward(
        self, x: Tensor, state: DeltaState | None, layout: Layout, inplace: bool = False
    ) -> tuple[Tensor, DeltaState | None]:
        """Mix x [batch, length, width]; a state is returned where one was given, overwritten if `inplace`."""
        past: tuple[Tensor, ...] = ()
        if state is None and self._enters_at_once(x):
            pattern, made = self._training_pattern(x, layout)
        else:
            entries = self._entries
            found = joint(x, *entries.values(), laid=self.laid)
            made = self._finished(entries, dict(zip(entries, found, strict=True)))
            if state is not None and inplace and layout.is_step and self._fused(x, state):
                pattern, past = self._step_pattern(made, state), state[1:]
            else:
                pattern, past = self._pattern(made, state, layout, inplace)
        memory = None if state is None else state.memory
        o, memory = run_rule(pattern, memory, layout, inplace, self.recompute)
        y = single(self.out_proj, self._gated(o, made).flatten(-2))
        return y, None if memory is None else DeltaState(memory, *past)

    @property
    def joint_maps(self) -> list[nn.Linear]:
        """All linear maps of the input; of two with a narrow middle the first."""
        return [map_ for map_ in self._entries.values() if isinstance(map_, nn.Linear)]

    def new_state(self, rows: int, like: Tensor, capacity: int = 0) -> DeltaState:
        """An empty state; its size does not depend on the tokens it will see."""
        c = self.config
        shape = (rows, c.value_heads, c.key_head_dim, c.value_head_dim)
        memory = like.new_zeros(shape, dtype=state_dtype(like))
        return DeltaState(memory, *(conv.new_state(rows, like) for conv in self._convolutions))

    def core_flops(self, length: int) -> float:
        """Forward, per token, without the linear maps."""
        c = self.config
        group = c.value_heads // c.num_heads
        return c.num_heads * rule_flops(c.key_head_dim, group * c.value_head_dim, CHUNK, True)

    @property
    def _convolutions(self) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
        """The convolutions of q, k and v, in the order of their states."""
        return self.q_conv, self.k_conv, self.v_conv

    @property
    def _entries(self) -> dict[str, nn.Linear]:
        """The first maps, or what stands in their place, by what they lead to.

        They are found without the search that a module's attributes take.
        """
        modules: dict[str, Any] = self._modules
        entries = {name: modules[f"{name}_proj"] for name in self._inputs}
        return {n: m.down if is_bare(m, LowRank) else m for n, m in entries.items()}

    def _pattern(
        self, made: dict[str, Tensor], state: DeltaState | None, layout: Layout, inplace: bool
    ) -> tuple[Pattern, tuple[Tensor, Tensor, Tensor]]:
        """The rule's operands, with the gates of Eqs. 11 and 85: b = σ(W_b x), w = σ(W_w x); and new states."""
        c = self.config
        old = [None] * 3 if state is None else state[1:]
        inputs = zip(self._convolutions, "qkv", old, strict=True)
        (q, k, v), past = zip(
            *(conv(made[n], o, layout, inplace) for conv, n, o in inputs), strict=True
        )
        q, k, v = self._key_heads(q), self._key_heads(k), self._value_heads(v)
        g = self._log_decay(made, q)
        if c.gates == "tied":
            return kda(q, k, v, g, self._ranged(made["beta"].sigmoid())), past
        b = self._ranged(self._key_heads(made["erase"].sigmoid()))
        w = self._value_heads(made["write"].sigmoid())
        b = b.mean(-1, keepdim=True) if c.erase_gate == "mean" else b
        w = w.mean(-1, keepdim=True) if c.write_gate == "mean" else w
        return gated_delta_net_2(q, k, v, g, b, w), past

    def _enters_at_once(self, x: Tensor) -> bool:
        """Whether all gradients of what is made of x can be made side by side."""
        c, convolutions = self.config, self._convolutions
        gated = c.gates == "separate" and c.erase_gate == c.write_gate == "channel"
        if not (gated and self.laid and have_one_gradient(x, [*self._entries.values()])):
            return False
        taps = [convolution.weight for convolution in convolutions]
        bare = all(is_bare(convolution, ShortConvolution) for convolution in convolutions)
        alike = bare and all(w.dtype == x.dtype and w.requires_grad for w in taps)
        return alike and kernels_enter(x, taps, c.key_head_dim)

    def _training_pattern(self, x: Tensor, layout: Layout) -> tuple[Pattern, dict[str, Tensor]]:
        """As `_pattern`, without states, and what further maps made."""
        entries = self._entries
        q, k, v, b, w, *others = mixer_inputs(
            x,
            [map_.weight for map_ in entries.values()],
            [convolution.weight for convolution in self._convolutions],
            l2_width=self.config.key_head_dim,
            erase_range=float(self.config.erase_range),
            cu_seqlens=layout.cu_seqlens,
        )
        made = dict(zip([*entries][-len(others) :], others, strict=True)) if others else {}
        made = self._finished(entries, made)
        q, k, b = (self._key_heads(z) for z in (q, k, b))
        v, w = self._value_heads(v), self._value_heads(w)
        return gated_delta_net_2(q, k, v, self._log_decay(made, q), b, w), made

    def _fused(self, x: Tensor, state: DeltaState) -> bool:
        """Whether one kernel can make the operands of a step."""
        c = self.config
        full = c.gates == "separate" and (c.decay, c.erase_gate, c.write_gate) == ("channel",) * 3
        return full and kernel_takes(x, c.conv_width, list(state[1:]))

    def _step_pattern(self, made: dict[str, Tensor], state: DeltaState) -> Pattern:
        """As `_pattern`, of one token, whose inputs the convolutions' states take in."""
        return gated_delta_net_2(
            *delta_inputs(
                [made[name] for name in ("q", "k", "v", "erase", "write", "decay")],
                [convolution.weight for convolution in self._convolutions],
                list(state[1:]),
                self.decay_bias,
                self.decay_log_rate,
                self.config.value_heads,
                self.config.erase_range,
            )
        )

    def _finished(
        self, entries: dict[str, nn.Linear], made: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What whole maps make, given what those in `entries` made.

        Which are firsts of two is not asked again: a hook may have removed itself when its map was called.
        """
        modules: dict[str, Any] = self._modules
        maps = {name: modules[f"{name}_proj"] for name in made}
        return {n: y if maps[n] is entries[n] else single(maps[n].up, y) for n, y in made.items()}

    def _ranged(self, gate: Tensor) -> Tensor:
        return gate if self.config.erase_range == 1 else self.config.erase_range * gate

    def _log_decay(self, made: dict[str, Tensor], q: Tensor) -> Tensor:
        """The log-decay g = −exp(a) ⊙ softplus(W_f x + δ) in fp32 (Eqs. 12, 86)."""
        if self.config.decay == "none":
            return q.new_zeros(*q.shape[:2], 1, 1, dtype=state_dtype(q))
        return log_decay(made["decay"], self.decay_bias, self.decay_log_rate)

    def _gated(self, o: Tensor, made: dict[str, Tensor]) -> Tensor:
        if self.config.output_gate == "none":
            return self.norm(o)
        gate = self._value_heads(made["gate"])
        return self.norm(o, gate, self.config.output_gate)

    def _key_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.num_heads, -1))

    def _value_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.value_heads, -1))
