"""What there is to choose about each mixer; the defaults are the paper's 1.3B models."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from gdn2.layers.plain import at_least_one, check_types, none_or_at_least_one
from gdn2.ops.arguments import MAX_WIDTH, require


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """The delta rule's family (Table 1): Gated DeltaNet-2 as it stands, its relatives by their gates.

        model              decay       gates
        DeltaNet           none        tied
        Gated DeltaNet     per head    tied
        KDA                channel     tied
        Gated DeltaNet-2   channel     separate

    The ablations replace a gate by its mean over the channels of a head, or let the erasure reach 2.
    """

    type: Literal["delta"] = "delta"
    num_heads: int = 16
    num_value_heads: int | None = None  # as many as heads; more of them share keys in groups
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_width: int = 4
    decay: Literal["channel", "head", "none"] = "channel"
    gates: Literal["separate", "tied"] = "separate"  # tied: one β per value head erases and writes
    erase_gate: Literal["channel", "mean"] = "channel"
    write_gate: Literal["channel", "mean"] = "channel"
    # 2 allows negative eigenvalues; a tied gate then writes up to 2 as well.
    erase_range: float = 1.0
    output_gate: Literal["silu", "sigmoid", "none"] = "silu"
    # Of the output gate and of a channel-wise decay; None for full rank.
    gate_rank: int | None = 128

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "num_heads", "key_head_dim", "value_head_dim", "conv_width")
        none_or_at_least_one(self, "num_value_heads", "gate_rank")
        _narrow(self, "key_head_dim", "value_head_dim")
        fits = self.value_heads % self.num_heads == 0
        require(fits, "num_value_heads", self.value_heads, f"a multiple of {self.num_heads} heads")
        require(self.erase_range in (1, 2), "erase_range", self.erase_range, "1 or 2")
        if self.gates == "tied":
            for name in ("erase_gate", "write_gate"):
                gate = getattr(self, name)
                require(gate == "channel", name, repr(gate), "'channel' where gates is 'tied'")

    @property
    def value_heads(self) -> int:
        return self.num_heads if self.num_value_heads is None else self.num_value_heads

    @property
    def key_width(self) -> int:
        return self.num_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Mamba-2 with one group: keys and queries are shared by all heads."""

    type: Literal["mamba2"] = "mamba2"
    inner_size: int = 4096
    head_dim: int = 64
    state_size: int = 64
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "inner_size", "head_dim", "state_size", "conv_width")
        _narrow(self, "head_dim", "state_size")
        _whole_heads(self.inner_size, self.head_dim)

    @property
    def num_heads(self) -> int:
        return self.inner_size // self.head_dim


@dataclass(frozen=True, kw_only=True)
class Mamba3Config:
    """Mamba-3: SISO with rank 1, MIMO above; one group."""

    type: Literal["mamba3"] = "mamba3"
    inner_size: int = 4096
    head_dim: int = 64
    state_size: int = 64
    rank: int = 1
    rotary_fraction: float = 0.5  # of the state's channels that turn
    # What makes rates of decay positive; heavy-tail, 1 + x or 1 / (1 − x) below zero, came after the paper.
    decay_rate: Literal["softplus", "heavy-tail"] = "softplus"

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "inner_size", "head_dim", "state_size", "rank")
        _narrow(self, "head_dim", "state_size")
        _whole_heads(self.inner_size, self.head_dim)
        fits = 0 < self.rotary_fraction <= 1 and self.num_angles > 0
        expected = f"a part of {self.state_size} channels that holds a pair"
        require(fits, "rotary_fraction", self.rotary_fraction, expected)

    @property
    def num_heads(self) -> int:
        return self.inner_size // self.head_dim

    @property
    def num_angles(self) -> int:
        return int(self.state_size * self.rotary_fraction) // 2


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal softmax attention with rotary embedding, full or over the last `window` tokens."""

    type: Literal["attention"] = "attention"
    num_heads: int = 18
    num_kv_heads: int | None = None  # as many as heads; fewer are shared in groups
    head_dim: int = 128
    window: int | None = None
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "num_heads", "head_dim")
        none_or_at_least_one(self, "num_kv_heads", "window")
        fits = self.num_heads % self.kv_heads == 0
        require(fits, "num_kv_heads", self.kv_heads, f"a divisor of {self.num_heads} heads")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        finite = 0 < self.rotary_base < inf
        require(finite, "rotary_base", self.rotary_base, "more than 0 and finite")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


MixerConfig = DeltaConfig | Mamba2Config | Mamba3Config | AttentionConfig


def _narrow(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value <= MAX_WIDTH, name, value, f"at most {MAX_WIDTH}, the rule's widest head")


def _whole_heads(inner_size: int, head_dim: int) -> None:
    fits = inner_size % head_dim == 0
    require(fits, "inner_size", inner_size, f"a multiple of head_dim {head_dim}")
