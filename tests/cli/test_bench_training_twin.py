"""The benchmark's twin, built from a peer's parts, is our model; where there is none, a line says why."""

import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

from gdn2.bench import (
    trainers,
    training,
    training_peer,
)
from gdn2.bench.trainers import RECIPE, Shape, Trainer, TwinTrainer, random_batch
from gdn2.bench.training_peer import Parts, Twin, why_no_twin
from gdn2.layers.config import AttentionConfig, DeltaConfig, Mamba2Config
from gdn2.layers.delta import DeltaMixer
from gdn2.layers.layout import Layout
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import preset
from gdn2.ops.rotary import apply_rotary, rotary_table
from gdn2.training.world import World
from tests.cli.test_bench_training import (
    CPU,
    SMALL,
    rendered,
    small,  # noqa: F401 (a fixture)
    tiny_plan,
)
from tests.closeness import assert_close


class FakeLayer(nn.Module):
    """Our mixer behind the arguments of fla's layer."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        heads, width = sizes["num_heads"], sizes["head_dim"]
        config = DeltaConfig(
            num_heads=heads,
            num_value_heads=sizes["num_v_heads"],
            key_head_dim=width,
            value_head_dim=width,
            gate_rank=width,
            conv_width=sizes["conv_size"],
            erase_range=2 if sizes["allow_neg_eigval"] else 1,
        )
        self.inner = DeltaMixer(config, sizes["hidden_size"], sizes["norm_eps"])

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        y, _ = self.inner(x, None, Layout.dense(*x.shape[:2]))
        return y, None, None


class FakeRotary(nn.Module):
    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.width, self.base = width, base

    def forward(self, q: Tensor, k: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
        table = rotary_table(torch.arange(max_seqlen), self.width, self.base, torch.float32)
        return apply_rotary(q, *table), apply_rotary(k, *table)


class FakeLoss(nn.Module):
    def forward(self, x: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(linear(x, weight), targets)


class FakeMlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, **settings: Any) -> None:
        super().__init__()
        assert settings == {"hidden_act": "swish", "fuse_swiglu": True}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


FAKES = Parts(FakeLayer, nn.RMSNorm, FakeMlp, FakeRotary, FakeLoss)


def test_the_twin_is_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With our layers in place of fla's and our weights its loss is ours."""
    monkeypatch.setattr(training_peer, "_flex", lambda: flex_attention)
    own, twin = LanguageModel(SMALL, seed=1), Twin(SMALL, FAKES)
    weights = {}
    for name, weight in own.state_dict().items():
        path = name.split(".")
        is_delta = path[0] == "blocks" and int(path[1]) % 2 == 0 and path[2] == "mixer"
        weights[".".join([*path[:3], "inner", *path[3:]]) if is_delta else name] = weight
    for i in (1, 3):
        parts = [weights.pop(f"blocks.{i}.mixer.{part}_proj.weight") for part in "qkv"]
        weights[f"blocks.{i}.mixer.qkv_proj.weight"] = torch.cat(parts)
    twin.load_state_dict(weights)
    batch = random_batch(Shape(2, 13), SMALL.vocab_size, CPU)
    with torch.no_grad():
        expected = own(batch.ids, targets=batch.targets).loss
        loss = twin(batch.ids, layout=Layout.dense(2, 13), targets=batch.targets).loss
    assert_close("loss", loss, expected, 1e-6)
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in own.parameters())


def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    """In place of FlexAttention, which has no gradients on a CPU."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.usefixtures("small")
def test_the_twin_takes_turns_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_peer, "_flex", lambda: attend)
    monkeypatch.setattr(training_peer, "EXACT", ("decay_log_rate", "decay_bias"))
    monkeypatch.setattr(trainers, "find_parts", lambda device: FAKES)
    twin = training_peer.build_twin(SMALL, FAKES, CPU, seed=0)
    dtypes = {name: parameter.dtype for name, parameter in twin.named_parameters()}
    assert dtypes["blocks.0.mixer.inner.decay_bias"] == torch.float32
    assert dtypes["blocks.1.mixer.qkv_proj.weight"] == torch.bfloat16
    groups = twin.param_groups(0.1)
    assert sum(len(group["params"]) for group in groups) == len(dtypes)
    result = training.run(tiny_plan(Shape(2, 13), Shape(1, 4), peers=True))
    assert [row.variant for row in result.rows] == ["gdn2 fp32", "fla bf16"] * 2
    assert [row.failure for row in result.rows] == [None] * 4
    printed = rendered(result)
    ours, theirs = (row.tokens_per_second or 0.0 for row in result.rows[:2])
    assert f"{ours / theirs:.2f}×" in printed
    assert "vs fla" in printed


def test_a_step_of_the_twin_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the weights as a step of ours does, clipped."""
    monkeypatch.setattr(training_peer, "_flex", lambda: attend)
    monkeypatch.setattr(trainers, "RECIPE", replace(RECIPE, lr=0.01, clip=0.1))
    twin = Twin(SMALL, FAKES)
    other = deepcopy(twin)
    batch = random_batch(Shape(2, 13), SMALL.vocab_size, CPU)
    stepped = TwinTrainer(twin)
    ours = Trainer(cast(LanguageModel, other), World(0, 1, CPU, None))
    losses = [(stepped.step(batch), ours.step(batch)) for _ in range(3)]
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-6)
    assert losses[2][0] < losses[0][0]
    for (name, x), y in zip(twin.named_parameters(), other.parameters(), strict=True):
        assert_close(name, x, y, 1e-6)
    with torch.no_grad():
        twin.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="loss nan, gradient norm nan"):
        stepped.step(batch)


def test_which_models_have_a_twin() -> None:
    for name in ("gdn2-1.3b", "gdn2-1.3b-hybrid", "gdn2-1m-hybrid", "gdn2-erase-range-2-15m"):
        assert why_no_twin(preset(name)) is None
    not_ours = "its mixers are not those of Gated DeltaNet-2"
    gates = "its gates or head sizes are not those of fla's layer"
    reasons = {"transformer-1.3b": not_ours, "mamba2-1.3b-hybrid": not_ours}
    reasons |= {"kda-1.3b-hybrid": gates, "gdn-15m": gates, "gdn2-scalar-write-15m": gates}
    for name, reason in reasons.items():
        assert why_no_twin(preset(name)) == reason
    tied = replace(SMALL, tie_word_embeddings=True)
    assert why_no_twin(tied) == "its head is tied to the embedding"
    mixed = replace(SMALL, cell=(SMALL.cell[0], Mamba2Config()))
    assert why_no_twin(mixed) == not_ours
    grouped = replace(SMALL, cell=(SMALL.cell[0], AttentionConfig(num_kv_heads=1)))
    assert why_no_twin(grouped) == "its attention shares keys among heads"


def test_a_missing_peer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fla", "fla.layers", "fla.modules"):
        monkeypatch.setitem(sys.modules, module, None)
    found = training_peer.find_parts(torch.device("cuda"))
    assert isinstance(found, str)
    assert found.startswith("no peers: ")
    assert "\n" not in found
    assert "pip install flash-linear-attention" in found


@pytest.mark.usefixtures("small")
def test_a_preset_without_a_twin_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "find_parts", lambda device: FAKES)
    monkeypatch.setattr(trainers, "why_no_twin", lambda config: "it is small")
    result = training.run(tiny_plan(peers=True))
    assert result.notes == ("no peer of tiny-a: it is small",)
    assert [row.variant for row in result.rows] == ["gdn2 fp32"]
