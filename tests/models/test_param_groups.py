"""Every parameter is in one group, and nothing decays that should not."""

import re

import pytest
import torch
from torch import nn

from gdn2.models.language_model import LanguageModel
from gdn2.models.param_groups import group_of
from tests.models.cases import EVERYTHING, config


@pytest.mark.parametrize("tied", [False, True])
def test_groups_partition_the_parameters(tied: bool) -> None:
    model = LanguageModel(config(*EVERYTHING.cell, tied=tied))
    grouped = [p for group in model.param_groups(0.1) for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped})
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}


def test_a_decay_is_no_growth() -> None:
    with pytest.raises(ValueError, match=r"^weight_decay: got -1, expected at least 0$"):
        LanguageModel(EVERYTHING).param_groups(-1)


def test_each_parameter_is_where_it_belongs() -> None:
    names: dict[str, set[str]] = {"matrices": set(), "tables": set(), "vectors": set()}
    for name, parameter in LanguageModel(EVERYTHING).named_parameters():
        kind = re.sub(r"^blocks\.\d+\.(mixer\.)?", "", name)
        names[group_of(name, parameter)].add(kind)
    maps = {f"{n}_proj.weight" for n in ("q", "k", "v", "erase", "write", "gate", "out")}
    maps |= {f"gate_proj.{n}.weight" for n in ("down", "up")}
    maps |= {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert names["matrices"] == maps
    assert names["tables"] == {
        *("embedding.weight", "head.weight", "in_proj.weight", "beta_proj.weight", "conv.weight"),
        *(f"{n}_conv.weight" for n in "qkv"),
        *("decay_proj.weight", "decay_proj.down.weight", "decay_proj.up.weight"),
    }
    assert names["vectors"] == {
        *("norm.weight", "mixer_norm.weight", "mlp_norm.weight"),
        *("key_norm.weight", "query_norm.weight", "conv.bias", "gate_proj.up.bias"),
        *("decay_log_rate", "decay_bias", "step_bias", "skip", "key_bias", "query_bias"),
        *("mimo_value", "mimo_gate", "mimo_out"),
    }


def test_decay_by_group() -> None:
    model = LanguageModel(EVERYTHING)
    decays = {group["name"]: group["weight_decay"] for group in model.param_groups(0.1)}
    assert decays == {"matrices": 0.1, "tables": 0.1, "vectors": 0.0}
    every = model.param_groups(0.1, decay_all=True)
    assert [group["weight_decay"] for group in every] == [0.1] * 3
    assert [group["name"] for group in every if group["muon"]] == ["matrices"]


def test_an_optimiser_takes_the_groups() -> None:
    """Without gradients a step of AdamW shrinks what decays, by lr · weight decay, and moves nothing else."""
    model = LanguageModel(EVERYTHING)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(model.param_groups(0.5), lr=0.1).step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if group_of(name, nn.Parameter(before[name])) == "vectors" else 0.95
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
