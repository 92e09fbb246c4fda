"""Small mixers of every kind, at odd sizes, with parameters that hide nothing."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gdn2.layers.config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
)
from gdn2.layers.layout import Layout
from gdn2.layers.mixers import Mixer, build_mixer

WIDTH = 10
DELTA = DeltaConfig(
    num_heads=2, num_value_heads=6, key_head_dim=5, value_head_dim=4, conv_width=4, gate_rank=3
)
MIXERS: dict[str, MixerConfig] = {
    "gdn2": DELTA,
    "gdn2, scalar erase": replace(DELTA, erase_gate="mean"),
    "gdn2, scalar write": replace(DELTA, write_gate="mean", conv_width=2),
    "gdn2, erase to 2": replace(DELTA, erase_range=2, gate_rank=None),
    "gdn2, sigmoid gate": replace(DELTA, output_gate="sigmoid", conv_width=1),
    "kda": replace(DELTA, gates="tied", output_gate="sigmoid"),
    "kda to 2": replace(DELTA, gates="tied", erase_range=2),
    "gdn": replace(DELTA, decay="head", gates="tied", gate_rank=None),
    "deltanet": replace(DELTA, decay="none", gates="tied", output_gate="none"),
    "mamba2": Mamba2Config(inner_size=12, head_dim=4, state_size=5, conv_width=3),
    "mamba3": Mamba3Config(inner_size=12, head_dim=4, state_size=9),
    "mamba3, rank 3": Mamba3Config(
        inner_size=12, head_dim=4, state_size=6, rank=3, decay_rate="heavy-tail"
    ),
    "attention": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6),
    "window": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, window=5),
}


def scramble(module: nn.Module, seed: int = 0, size: float = 0.5) -> None:
    """Random parameters everywhere: ones and zeros of the initialisation would hide mistakes."""
    rand = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = size * torch.randn(parameter.shape, generator=rand, dtype=torch.float64)


def make(name: str) -> Mixer:
    mixer = build_mixer(MIXERS[name], WIDTH).double()
    scramble(mixer)
    return mixer


def inputs(batch: int, length: int, seed: int = 1) -> Tensor:
    rand = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=rand, dtype=torch.float64)


def run(mixer: Mixer, x: Tensor, state: Any, past: int = 0) -> tuple[Tensor, Any]:
    """A dense call after `past` tokens of each row."""
    layout = Layout.dense(*x.shape[:2]).after(torch.full((x.shape[0],), past))
    return mixer(x, state, layout)


def run_split(mixer: Mixer, x: Tensor, pieces: list[int]) -> tuple[Tensor, Any]:
    """Calls of these lengths, one after the other."""
    outputs, state, past = [], mixer.new_state(x.shape[0], x), 0
    for piece in x.split(pieces, 1):
        y, state = run(mixer, piece, state, past)
        outputs.append(y)
        past += piece.shape[1]
    return torch.cat(outputs, 1), state


class Doubling(nn.Module):
    """As an adapter that holds a module, and has no weight of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)
