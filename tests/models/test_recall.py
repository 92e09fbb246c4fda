"""A small model of every family learns to look up what it was told.

    k1 v1 k2 v2 k3 v3 k4 v4    k3 v3 k1 v1 k1 v1 k2 v2
                               └─ predict the value of each key asked for

Guessing among the four values told costs log 4.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gdn2.layers.config import AttentionConfig, DeltaConfig, MixerConfig
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import FAMILIES

PAIRS, KEYS = 4, 16
LEARNED = 0.6 * math.log(PAIRS)


def draw(rows: int, rand: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and as targets the values of the keys asked for."""
    keys = torch.rand(rows, KEYS, generator=rand).argsort(1)[:, :PAIRS]
    values = KEYS + torch.randint(KEYS, keys.shape, generator=rand)
    asked = torch.randint(PAIRS, keys.shape, generator=rand)
    told = torch.stack([keys, values], 2)
    ids = torch.cat([told, told.gather(1, asked[..., None].expand_as(told))], 1).flatten(1)
    targets = torch.full_like(ids, -100)
    targets[:, 2 * PAIRS :: 2] = ids[:, 2 * PAIRS + 1 :: 2]
    return ids, targets


def small(mixer: MixerConfig) -> MixerConfig:
    match mixer:
        case DeltaConfig():
            rank = None if mixer.gate_rank is None else 16
            grouped = replace(mixer, num_heads=2, num_value_heads=4, gate_rank=rank)
            return replace(grouped, key_head_dim=16, value_head_dim=16)
        case AttentionConfig():
            return replace(mixer, num_heads=4, head_dim=16)
        case _:
            return replace(mixer, inner_size=64, head_dim=16, state_size=16)


def learn(*cell: MixerConfig, steps: int, rate: float = 3e-3, rows: int = 32) -> float:
    """The running mean of the loss when it is low enough, or after all steps."""
    config = ModelConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        cell=tuple(map(small, cell)),
        vocab_size=2 * KEYS,
    )
    model, rand = LanguageModel(config), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.param_groups(0.1), lr=rate, betas=(0.9, 0.95))
    mean = math.log(KEYS)
    for _ in range(steps):
        ids, targets = draw(rows, rand)
        loss = model(ids, targets=targets).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        mean += 0.1 * (loss.item() - mean)
        if mean < LEARNED:
            break
    return mean


def test_gated_deltanet_2_learns_recall() -> None:
    assert learn(FAMILIES["gdn2"], steps=400) < LEARNED


@pytest.mark.slow
@pytest.mark.parametrize("family", [n for n in FAMILIES if n not in ("gdn2", "transformer")])
def test_every_family_learns_recall(family: str) -> None:
    rate = 1e-2 if "mamba" in family else 3e-3
    assert learn(FAMILIES[family], steps=800, rate=rate) < LEARNED


@pytest.mark.slow
def test_a_hybrid_learns_recall() -> None:
    assert learn(FAMILIES["gdn2"], AttentionConfig(window=8), steps=800) < LEARNED


@pytest.mark.slow
def test_a_transformer_learns_recall() -> None:
    """It first has to find the token before, which takes many examples."""
    assert learn(FAMILIES["transformer"], steps=2000, rate=1e-3, rows=128) < LEARNED
