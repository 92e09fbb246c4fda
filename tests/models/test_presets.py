"""The thirteen rows of the paper's tables have their parameters, FLOPs and states; smaller ones the same shape."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gdn2.cli import app
from gdn2.layers.config import DeltaConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import FAMILIES, SIZES, preset, preset_names
from gdn2.models.summary import forward_flops, in_bytes, summarise

# name: MLP width, parameters of the blocks, forward GFLOP a token at 4096
ROWS = {
    "gdn2-1.3b": (6208, 1_302_638_112, 2.804),
    "kda-1.3b": (7552, 1_300_647_456, 2.800),
    "gdn-1.3b": (7040, 1_302_417_216, 2.804),
    "mamba2-1.3b": (6272, 1_298_448_000, 2.781),
    "mamba3-siso-1.3b": (6208, 1_296_152_064, 2.777),
    "mamba3-mimo-1.3b": (6080, 1_297_479_168, 2.900),
    "gdn2-1.3b-hybrid": (6784, 1_300_314_384, 2.901),
    "kda-1.3b-hybrid": (7488, 1_303_300_368, 2.907),
    "gdn-1.3b-hybrid": (7168, 1_296_222_624, 2.893),
    "mamba2-1.3b-hybrid": (6848, 1_302_200_640, 2.898),
    "mamba3-siso-1.3b-hybrid": (6784, 1_297_071_360, 2.888),
    "mamba3-mimo-1.3b-hybrid": (6720, 1_297_734_912, 2.949),
    "transformer-1.3b": (7360, 1_297_990_656, 3.083),
}
MIXERS = {
    "gdn2": 29_454_480,
    "kda": 20_054_160,
    "gdn": 23_691_424,
    "mamba2": 28_779_328,
    "mamba3-siso": 29_094_144,
    "mamba3-mimo": 30_052_608,
    "transformer": 21_233_664,
}
# forward GFLOP a token at 2048, 4096, 8192 and 16384
BY_LENGTH = {
    "transformer-1.3b": (2.913, 3.083, 3.423, 4.102),
    "mamba2-1.3b-hybrid": (2.855, 2.898, 2.919, 2.929),
    "gdn2-1.3b-hybrid": (2.859, 2.901, 2.922, 2.933),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_papers_rows(name: str) -> None:
    width, blocks, gflop = ROWS[name]
    summary = summarise(preset(name))
    assert summary.config.intermediate_size == width
    assert summary.block_parameters == blocks
    assert summary.mixer_parameters[0] == MIXERS[name.partition("-1.3b")[0]]
    assert summary.parameters == blocks + 2 * 32000 * 2304 + 2304
    assert summary.flops / 1e9 == pytest.approx(gflop, abs=6e-4)


def test_released_totals() -> None:
    assert summarise(preset("gdn2-1.3b")).parameters == 1_450_096_416
    assert summarise(preset("gdn2-1.3b-hybrid")).parameters == 1_447_772_688


@pytest.mark.parametrize("name", BY_LENGTH)
def test_flops_by_length(name: str) -> None:
    with torch.device("meta"):
        model = LanguageModel(preset(name))
    for length, gflop in zip((2048, 4096, 8192, 16384), BY_LENGTH[name], strict=True):
        assert forward_flops(model, length) / 1e9 == pytest.approx(gflop, abs=6e-4)


@pytest.mark.parametrize("name", ["gdn2-1m", "gdn2-1m-hybrid", "mamba2-1m", "mamba3-siso-1m"])
def test_flops_are_those_counted(name: str) -> None:
    """Torch's counter sees the same linear maps and rule, and attention without its causal half."""
    config = preset(name)
    with torch.device("meta"):
        model = LanguageModel(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 256).long())
    ours = forward_flops(model, 256) * 256
    # Attention counts both triangles there; Mamba-3's products beside the rule are not all products of matrices.
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02 if "hybrid" in name else 5e-3)


def test_ablations_keep_every_parameter() -> None:
    full = summarise(preset("gdn2-1.3b"))
    for name in ("gdn2-scalar-erase-1.3b", "gdn2-scalar-write-1.3b", "gdn2-erase-range-2-1.3b"):
        ablated = summarise(preset(name))
        assert ablated.parameters == full.parameters
        assert ablated.config != full.config


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_what_it_says(size: str) -> None:
    target = SIZES[size].parameters
    states = set()
    for family in FAMILIES:
        for kind in ("", "-hybrid"):
            if family == "transformer" and kind:
                continue
            config = preset(f"{family}-{size}{kind}")
            summary = summarise(config)
            assert summary.block_parameters == pytest.approx(target, rel=0.015)
            assert len(config.cell) == 1 + bool(kind)
            assert config.layer_types[1::2] == config.layer_types[-1:] * (len(config.mixers) // 2)
            if not kind and family != "transformer":
                with torch.device("meta"):
                    state = LanguageModel(config).new_state(1)
                states.add(state.layers[0].memory.numel())  # type: ignore[union-attr]
    assert len(states) == 1  # as large for every family


def test_hybrids_attend_to_2048_tokens() -> None:
    config = preset("gdn2-1.3b-hybrid")
    assert config.layer_types == ["linear_attention", "sliding_attention"] * 9
    delta, attention = config.cell
    assert delta == DeltaConfig()
    assert attention.type == "attention"
    assert (attention.window, attention.num_heads, attention.head_dim) == (2048, 18, 128)


def test_names_are_unique() -> None:
    assert len(set(preset_names())) == len(preset_names()) == 6 * (2 * 10 + 1)


def test_states_at_any_length() -> None:
    recurrent = summarise(preset("gdn2-1.3b"))
    memory, conv = 4 * 262_144, 2 * 3 * 6_144
    assert recurrent.state_bytes == (18 * (memory + conv) + 8,) * 3
    transformer = summarise(preset("transformer-1.3b"))
    assert transformer.transformer_bytes == tuple(
        18 * 2 * 2304 * 2 * tokens for tokens in (4096, 65536, 1 << 20)
    )
    counters = 18 * 8 + 8
    assert transformer.state_bytes == tuple(x + counters for x in transformer.transformer_bytes)
    hybrid = summarise(preset("gdn2-1.3b-hybrid"))
    ring = 2 * 2048 * 2304 * 2 + 8
    assert hybrid.state_bytes == (9 * (memory + conv + ring) + 8,) * 3


def test_show(tmp_path: Path) -> None:
    target = tmp_path / "model.json"
    shown = CliRunner().invoke(app, ["show", "gdn2-1.3b-hybrid", "--json", str(target)])
    assert shown.exit_code == 0, shown.output
    for number in ("29,454,480", "1,300,314,384", "1,447,772,688", "2.901", "171.3 MiB", "162 GiB"):
        assert number in shown.output, number
    record = json.loads(target.read_text())
    assert record["block_parameters"] == 1_300_314_384
    assert record["state_bytes"]["65536"] == summarise(preset("gdn2-1.3b-hybrid")).state_bytes[1]
    assert record["layer_types"] == ["linear_attention", "sliding_attention"] * 9


def test_show_every_mixer_and_all_names(tmp_path: Path) -> None:
    for name, words in {
        "mamba3-mimo-1m": "rank 4",
        "mamba2-1m": "state 32",
        "transformer-1m": "full attention",
        "kda-1m": "tied gates",
    }.items():
        shown = CliRunner().invoke(app, ["show", name])
        assert shown.exit_code == 0, shown.output
        assert words in shown.output, name
    listed = CliRunner().invoke(app, ["show", "--json", str(tmp_path / "names.json")])
    assert json.loads((tmp_path / "names.json").read_text()) == {"presets": [*preset_names()]}
    assert listed.output.split() == preset_names()


def test_show_answers_an_unknown_name() -> None:
    shown = CliRunner().invoke(app, ["show", "gdn2-1.3"])
    assert shown.exit_code == 2
    assert "preset: got 'gdn2-1.3', expected gdn2-1.3b or" in shown.output + shown.stderr


@pytest.mark.parametrize(
    ("count", "words"), [(12, "12 B"), (1536, "1.5 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5 GiB")]
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert in_bytes(count) == words
