"""The models of the paper's tables, and smaller ones of the same shape.

A preset is `family-size` or `family-size-hybrid`. A hybrid alternates its mixer with attention over 2048 tokens. The
MLP's width is chosen so that the blocks, without embedding and head, come as near as possible to the size's parameters:
so the released Gated DeltaNet-2 models were made, and so every family gets the same size and the same state.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch

from gdn2.layers.config import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
)
from gdn2.layers.mixers import build_mixer
from gdn2.models.config import ModelConfig

WINDOW = 2048


@dataclass(frozen=True)
class Size:
    """What all families of a size share. A delta head is square; the Mamba state is as large as theirs."""

    parameters: float  # of the blocks
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    inner_size: int
    state_size: int
    mlp_multiple: int = 64


SIZES = {
    "1m": Size(1e6, 128, 4, 2, 64, 256, 32, mlp_multiple=8),
    "15m": Size(15e6, 384, 8, 3, 128, 768, 64, mlp_multiple=32),
    "60m": Size(60e6, 512, 18, 4, 128, 1024, 64),
    "150m": Size(150e6, 768, 18, 6, 128, 1536, 64),
    "400m": Size(400e6, 1280, 18, 9, 128, 2304, 64),
    "1.3b": Size(1.3e9, 2304, 18, 16, 128, 4096, 64),
}

FAMILIES: dict[str, MixerConfig] = {
    "gdn2": DeltaConfig(),
    "gdn2-scalar-erase": DeltaConfig(erase_gate="mean"),
    "gdn2-scalar-write": DeltaConfig(write_gate="mean"),
    "gdn2-erase-range-2": DeltaConfig(erase_range=2),
    "kda": DeltaConfig(gates="tied", output_gate="sigmoid"),
    "gdn": DeltaConfig(decay="head", gates="tied", gate_rank=None),
    "deltanet": DeltaConfig(decay="none", gates="tied", output_gate="none", gate_rank=None),
    "mamba2": Mamba2Config(),
    "mamba3-siso": Mamba3Config(),
    "mamba3-mimo": Mamba3Config(rank=4),
    "transformer": AttentionConfig(),
}


def preset_names() -> list[str]:
    """All presets, family by family."""
    return [
        f"{family}-{size}{kind}"
        for family in FAMILIES
        for kind in (("",) if family == "transformer" else ("", "-hybrid"))
        for size in SIZES
    ]


def preset(name: str) -> ModelConfig:
    """The config called `family-size` or `family-size-hybrid`, such as gdn2-1.3b-hybrid."""
    known = preset_names()
    if name not in known:
        near = " or ".join(get_close_matches(name, known))
        parts = f"{', '.join(FAMILIES)}; and a size, {', '.join(SIZES)}"
        raise ValueError(
            f"preset: got {name!r}, expected {near or f'FAMILY-SIZE or FAMILY-SIZE-hybrid, of {parts}'}"
        )
    recurrent = name.removesuffix("-hybrid")
    family, _, size_name = recurrent.rpartition("-")
    size = SIZES[size_name]
    cell: tuple[MixerConfig, ...] = (_sized(FAMILIES[family], size),)
    if recurrent != name:
        cell = (*cell, _sized(AttentionConfig(window=WINDOW), size))
    return ModelConfig(
        hidden_size=size.hidden_size,
        intermediate_size=_mlp_width(cell, size),
        num_hidden_layers=size.num_hidden_layers,
        cell=cell,
    )


def _sized(mixer: MixerConfig, size: Size) -> MixerConfig:
    match mixer:
        case DeltaConfig():
            return replace(
                mixer,
                num_heads=size.num_heads,
                key_head_dim=size.head_dim,
                value_head_dim=size.head_dim,
                gate_rank=None if mixer.gate_rank is None else size.head_dim,
            )
        case AttentionConfig():
            heads = size.hidden_size // size.head_dim
            return replace(mixer, num_heads=heads, head_dim=size.head_dim)
        case _:
            return replace(mixer, inner_size=size.inner_size, state_size=size.state_size)


def _mlp_width(cell: tuple[MixerConfig, ...], size: Size) -> int:
    """The multiple that brings the blocks nearest to the size's parameters."""
    width, blocks = size.hidden_size, size.num_hidden_layers
    with torch.device("meta"):
        mixers = [build_mixer(mixer, width) for mixer in cell]
    mixing = sum(p.numel() for mixer in mixers for p in mixer.parameters()) * blocks / len(cell)
    norms, per_column = 2 * width * blocks, 3 * width * blocks
    columns = (size.parameters - mixing - norms) / per_column
    return max(1, round(columns / size.mlp_multiple)) * size.mlp_multiple
