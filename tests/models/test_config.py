"""Configs refuse what cannot be, and survive JSON; a mistake in a file is found by its path."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gdn2.layers.config import AttentionConfig, DeltaConfig, Mamba2Config, Mamba3Config
from gdn2.models.config import ModelConfig
from gdn2.models.presets import preset, preset_names
from tests.layers.cases import MIXERS

CONFIG = ModelConfig(
    hidden_size=10, intermediate_size=14, num_hidden_layers=28, cell=tuple(MIXERS.values())
)


def test_a_config_survives_json() -> None:
    for config in (CONFIG, *map(preset, preset_names())):
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_defaults_may_be_left_out() -> None:
    data = {
        "hidden_size": 8,
        "intermediate_size": 9,
        "num_hidden_layers": 2,
        "cell": [{"type": "delta"}],
    }
    config = ModelConfig.from_dict(data)
    assert config.cell == (DeltaConfig(),)
    assert (config.vocab_size, config.rms_norm_eps, config.tie_word_embeddings) == (
        32000,
        1e-5,
        False,
    )


def test_a_cell_may_be_written_as_in_a_file() -> None:
    data = {"hidden_size": 8, "intermediate_size": 9, "num_hidden_layers": 2}
    config = ModelConfig(**data, cell=[{"type": "delta", "num_heads": 2}])  # type: ignore[arg-type]
    assert config.cell == (DeltaConfig(num_heads=2),)
    with pytest.raises(
        ValueError, match=r"^cell\[0\]\.num_headz: unknown name, expected num_heads"
    ):
        ModelConfig(**data, cell=[{"type": "delta", "num_headz": 2}])  # type: ignore[arg-type]


def test_layer_types_are_hugging_faces() -> None:
    expected = ["linear_attention"] * 12 + ["full_attention", "sliding_attention"]
    assert CONFIG.layer_types == expected * 2
    assert CONFIG.mixers == CONFIG.cell * 2


def changed(*path: Any, value: Any) -> dict[str, Any]:
    """The config as a dict with one value replaced."""
    data = CONFIG.to_dict()
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


def without(name: str) -> dict[str, Any]:
    data = CONFIG.to_dict()
    del data[name]
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed("hidden_sise", value=1), r"^hidden_sise: unknown name, expected hidden_size$"),
        (
            changed("cell", 0, "num_head", value=1),
            r"^cell\[0\]\.num_head: unknown name, expected num_heads or num_value_heads$",
        ),
        (
            changed("cell", 0, "qqq", value=1),
            r"^cell\[0\]\.qqq: unknown name, expected conv_width or",
        ),
        (without("hidden_size"), r"^hidden_size: missing, expected an integer$"),
        (without("cell"), r"^cell: missing, expected a list$"),
        (changed("hidden_size", value="8"), r"^hidden_size: got '8', expected an integer$"),
        (changed("hidden_size", value=8.0), r"^hidden_size: got 8\.0, expected an integer$"),
        (changed("vocab_size", value=True), r"^vocab_size: got True, expected an integer$"),
        (changed("rms_norm_eps", value="x"), r"^rms_norm_eps: got 'x', expected a number$"),
        (changed("tie_word_embeddings", value=1), r"^tie_.*: got 1, expected true or false$"),
        (changed("cell", value={}), r"^cell: got \{\}, expected a list$"),
        (changed("cell", 3, value=None), r"^cell\[3\]\.type: got None, expected one of delta"),
        (changed("cell", 3, value=7), r"^cell\[3\]\.type: got None, expected one of delta, mamba2"),
        (
            changed("cell", 3, "type", value=[1]),
            r"^cell\[3\]\.type: got \[1\], expected one of delta",
        ),
        (changed("cell", 3, "type", value="gdn"), r"^cell\[3\]\.type: got 'gdn', expected one of"),
        (
            changed("cell", 1, "decay", value="chanel"),
            r"^cell\[1\]\.decay: got 'chanel', expected one of 'channel', 'head', 'none'$",
        ),
        (
            changed("cell", 0, "num_heads", value=0),
            r"^cell\[0\]\.num_heads: got 0, expected at least 1$",
        ),
        (
            changed("cell", 13, "window", value=2.5),
            r"^cell\[13\]\.window: got 2\.5, expected an integer$",
        ),
        (changed("num_hidden_layers", value=5), r"^num_hidden_layers: got 5, expected a multiple"),
        ([], r"^config: got \[\], expected a table$"),
    ],
)
def test_mistakes_in_a_file_are_found(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_dict(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeltaConfig(num_heads=0), r"^num_heads: got 0, expected at least 1$"),
        (
            lambda: DeltaConfig(num_value_heads=24),
            r"^num_value_heads: got 24, expected a multiple of 16",
        ),
        (
            lambda: DeltaConfig(num_value_heads=0),
            r"^num_value_heads: got 0, expected None or at least 1",
        ),
        (
            lambda: DeltaConfig(key_head_dim=257),
            r"^key_head_dim: got 257, expected at most 256, the",
        ),
        (lambda: DeltaConfig(erase_range=1.5), r"^erase_range: got 1\.5, expected 1 or 2$"),
        (lambda: DeltaConfig(decay="both"), r"^decay: got 'both', expected one of 'channel', "),  # type: ignore[arg-type]
        (
            lambda: DeltaConfig(gates="tied", erase_gate="mean"),
            r"^erase_gate: got 'mean', expected 'channel' where gates is 'tied'$",
        ),
        (lambda: DeltaConfig(gate_rank=0), r"^gate_rank: got 0, expected None or at least 1$"),
        (lambda: DeltaConfig(conv_width=0), r"^conv_width: got 0, expected at least 1$"),
        (
            lambda: Mamba2Config(inner_size=100),
            r"^inner_size: got 100, expected a multiple of head_dim 64$",
        ),
        (lambda: Mamba2Config(state_size=300), r"^state_size: got 300, expected at most 256"),
        (lambda: Mamba3Config(rank=0), r"^rank: got 0, expected at least 1$"),
        (
            lambda: Mamba3Config(rotary_fraction=1.5),
            r"^rotary_fraction: got 1\.5, expected a part of 64",
        ),
        (
            lambda: Mamba3Config(state_size=3),
            r"^rotary_fraction: got 0\.5, expected a part of 3 channels",
        ),
        (
            lambda: AttentionConfig(num_kv_heads=5),
            r"^num_kv_heads: got 5, expected a divisor of 18 heads$",
        ),
        (lambda: AttentionConfig(head_dim=63), r"^head_dim: got 63, expected an even number$"),
        (lambda: AttentionConfig(window=0), r"^window: got 0, expected None or at least 1$"),
        (lambda: AttentionConfig(rotary_base=0), r"^rotary_base: got 0, expected more than 0 and"),
        (lambda: replace(CONFIG, hidden_size=-1), r"^hidden_size: got -1, expected at least 1$"),
        (
            lambda: replace(CONFIG, rms_norm_eps=0.0),
            r"^rms_norm_eps: got 0\.0, expected more than 0 and finite$",
        ),
        (
            lambda: replace(CONFIG, rms_norm_eps=math.inf),
            r"^rms_norm_eps: got inf, expected more than 0 and finite$",
        ),
        (
            lambda: replace(CONFIG, initializer_range=math.inf),
            r"^initializer_range: got inf, expected more than 0 and finite$",
        ),
        (
            lambda: replace(CONFIG, initializer_range=math.nan),
            r"^initializer_range: got nan, expected more than 0 and finite$",
        ),
        (lambda: replace(CONFIG, cell=()), r"^cell: got no mixers, expected at least one$"),
        (lambda: preset("gdn2-1.3B"), r"^preset: got 'gdn2-1\.3B', expected gdn2-1\.3b or "),
        (
            lambda: preset("transformer-1.3b-hybrid"),
            r"^preset: got .*, expected transformer-1\.3b or",
        ),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
