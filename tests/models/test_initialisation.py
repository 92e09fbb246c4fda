"""One seed gives the same bits everywhere, and the values the models were published with."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from gdn2.layers.config import DeltaConfig, Mamba2Config, Mamba3Config
from gdn2.layers.initialisation import InitScheme, initial_value
from gdn2.layers.mixers import build_mixer
from gdn2.models.initialisation import initialise, parameter_value
from gdn2.models.language_model import LanguageModel
from tests.closeness import assert_close
from tests.models.cases import EVERYTHING, config, tokens

schemes = pytest.mark.parametrize("scheme", get_args(InitScheme))


@schemes
def test_meta_and_cpu_agree_to_the_bit(scheme: InitScheme) -> None:
    chosen = replace(EVERYTHING, init_scheme=scheme)
    expected = dict(LanguageModel(chosen, seed=3).named_parameters())
    with torch.device("meta"):
        model = LanguageModel(chosen, seed=3)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(99)
    model.to_empty(device="cpu")
    initialise(model, chosen, seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@schemes
def test_a_shard_holds_its_part_of_the_same_values(scheme: InitScheme) -> None:
    """Rows 1 and 3 of every parameter, as one of two ranks would hold them."""
    chosen = replace(EVERYTHING, init_scheme=scheme)
    whole = dict(LanguageModel(chosen, seed=3).named_parameters())
    with torch.device("meta"):
        model = LanguageModel(chosen)
    shards: dict[int, Tensor] = {}

    def keep_odd_rows(parameter: nn.Parameter, value: Tensor) -> None:
        shards[id(parameter)] = value[1::2]

    initialise(model, chosen, seed=3, place=keep_odd_rows)
    for name, parameter in model.named_parameters():
        assert torch.equal(shards[id(parameter)], whole[name][1::2]), name


def test_global_randomness_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    LanguageModel(EVERYTHING)
    assert torch.equal(torch.rand(3), expected)


def bound_of(x: Tensor) -> float:
    """Half the range that uniform values fill."""
    assert x.numel() > 500
    assert abs(float(x.mean())) < 0.1 * float(x.abs().max())
    assert float(x.std()) == pytest.approx(float(x.abs().max()) / math.sqrt(3), rel=0.05)
    return float(x.abs().max())


def test_values_are_the_published_ones() -> None:
    delta = DeltaConfig(
        num_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=16, gate_rank=24
    )
    mamba = Mamba2Config(inner_size=128, head_dim=32, state_size=32)
    chosen = config(delta, mamba, layers=8)
    p = {n: x.detach() for n, x in LanguageModel(chosen).named_parameters()}
    xavier = 2**-2.5

    def close(name: str, bound: float) -> None:
        assert bound_of(p[name]) == pytest.approx(bound, rel=0.02), name

    for name, outputs in (("q_proj", 128), ("write_proj", 128), ("out_proj", 10)):
        inputs = 128 if name == "out_proj" else 10
        close(f"blocks.0.mixer.{name}.weight", xavier * math.sqrt(6 / (inputs + outputs)))
    close("blocks.0.mixer.decay_proj.up.weight", xavier * math.sqrt(6 / (24 + 128)))
    close("blocks.0.mixer.k_conv.weight", 0.5)
    close("blocks.1.mixer.in_proj.weight", 10**-0.5)
    close("blocks.1.mixer.out_proj.weight", 128**-0.5 / 4)  # √(2 · 8 blocks)
    assert float(p["embedding.weight"].std()) == pytest.approx(0.02, rel=0.15)
    assert p["head.weight"].abs().max() == pytest.approx(10**-0.5, rel=0.05)
    assert p["blocks.0.mlp.down_proj.weight"].abs().max() == pytest.approx(14**-0.5 / 4, rel=0.05)
    assert not p["blocks.0.mixer.gate_proj.up.bias"].any()
    for name in ("blocks.0.mixer.norm.weight", "blocks.0.mlp_norm.weight", "blocks.1.mixer.skip"):
        assert bool((p[name] == 1).all()), name


def spread(x: Tensor, low: float, high: float) -> bool:
    return (
        low <= float(x.min()) < low + 0.1 * (high - low)
        and high - 0.1 * (high - low) < float(x.max()) <= high + 1e-3
    )


@pytest.mark.parametrize("decay", ["channel", "head"])
def test_decays_start_in_their_range(decay: str) -> None:
    heads = DeltaConfig(num_heads=200, key_head_dim=2, value_head_dim=2, decay=decay)  # type: ignore[arg-type]
    mixer = build_mixer(heads, 4).requires_grad_(False)
    rates, steps = mixer.decay_log_rate.exp(), softplus(mixer.decay_bias)  # type: ignore[operator, arg-type]
    assert spread(rates, 1.0 if decay == "channel" else 0.0, 16.0)
    assert spread(steps.log(), math.log(1e-3), math.log(1e-1))
    assert bool(rates.isfinite().all())


def test_mimo_maps_start_as_a_mean() -> None:
    mixer = build_mixer(Mamba3Config(inner_size=8, head_dim=4, state_size=4, rank=4), 6)
    p = dict(mixer.named_parameters())
    assert bool((p["mimo_value"] == 0.25).all())
    assert bool((p["mimo_out"] == 0.25).all())
    for name in ("mimo_gate", "key_bias", "query_bias", "skip"):
        assert bool((p[name] == 1).all()), name


def test_a_mixer_alone_begins_as_in_a_model() -> None:
    """With its own names, so with other numbers, but by the same rules."""
    model = LanguageModel(EVERYTHING).requires_grad_(False)
    for mixer, chosen in zip(model.mixers, EVERYTHING.mixers, strict=True):
        alone = build_mixer(chosen, EVERYTHING.hidden_size).state_dict()
        for name, parameter in mixer.named_parameters():
            assert bool(alone[name].isfinite().all())
            if parameter.numel() > 50 and "out_proj" not in name:
                ratio = float(alone[name].std() / parameter.std())
                assert 0.6 < ratio < 1.6 or not parameter.std(), name


def test_values_depend_on_name_and_seed_alone() -> None:
    shape = torch.Size((5, 7))
    a = parameter_value("blocks.0.mlp.up_proj.weight", shape, EVERYTHING, 0)
    assert torch.equal(a, parameter_value("blocks.0.mlp.up_proj.weight", shape, EVERYTHING, 0))
    assert not torch.equal(a, parameter_value("blocks.1.mlp.up_proj.weight", shape, EVERYTHING, 0))
    assert not torch.equal(a, parameter_value("blocks.0.mlp.up_proj.weight", shape, EVERYTHING, 1))
    assert float(a[0, 0]) == pytest.approx(0.10652044, abs=1e-7)  # for ever


@schemes
def test_the_default_device_does_not_matter(scheme: InitScheme) -> None:
    shape = torch.Size([3, 2])
    names = ("embedding.weight", "mlp.down_proj.weight", "norm.weight")
    plain = [initial_value(name, shape, seed=1, scheme=scheme) for name in names]
    with torch.device("meta"):
        values = [initial_value(name, shape, seed=1, scheme=scheme) for name in names]
    assert all(torch.equal(x, y) for x, y in zip(values, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    right = dict(LanguageModel(EVERYTHING).named_parameters())
    torch.set_default_dtype(dtype)
    try:
        found = LanguageModel(EVERYTHING)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in found.named_parameters():
        exact = name.endswith(("decay_log_rate", "decay_bias", "step_bias"))
        expected = torch.promote_types(dtype, torch.float32) if exact else dtype
        assert parameter.dtype == expected, name
        assert torch.equal(parameter, right[name].to(expected)), name


def test_decays_move_where_a_model_begins_in_bf16() -> None:
    """A step of usual size is less than half of what bf16 tells apart there."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LanguageModel(EVERYTHING)
    finally:
        torch.set_default_dtype(torch.float32)
    exact = {n: x for n, x in model.named_parameters() if x.dtype == torch.float32}
    before = {name: x.detach().clone() for name, x in exact.items()}
    loss = model(tokens(2, 9), targets=tokens(2, 9, seed=1)).loss
    assert loss is not None
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-20, weight_decay=0).step()
    kinds = {"decay_log_rate", "decay_bias", "step_bias"}
    assert {name.rpartition(".")[2] for name in exact} == kinds
    for name, x in exact.items():
        moved = (x.detach() - before[name]).abs()
        assert_close(name, moved, torch.full_like(moved, 1e-4), 1e-2)
