"""Our models under other people's names."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdn2.hf.importing import Unsaid
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.models.language_model import LanguageModel
from tests.models.cases import config, make, tokens

Tensors = dict[str, Tensor]
LAYER = DeltaConfig(num_heads=2, key_head_dim=5, value_head_dim=4, gate_rank=3)
WINDOW = AttentionConfig(num_heads=5, head_dim=2, window=5)
OFFICIAL = Unsaid(head_dim=2, window=5)
FLA = Unsaid(head_dim=2, window=5, output_gate="sigmoid")


def layer(model: LanguageModel, i: int) -> Tensors:
    """The names of the layer's parameters in the released code and in fla."""
    own = model.get_submodule(f"blocks.{i}.mixer").state_dict()
    return {
        **{f"{x}_proj.weight": own[f"{x}_proj.weight"] for x in "qkv"},
        **{f"{x}_conv1d.weight": own[f"{x}_conv.weight"][:, None] for x in "qkv"},
        "b_proj.weight": own["erase_proj.weight"],
        "w_proj.weight": own["write_proj.weight"],
        "f_proj.0.weight": own["decay_proj.down.weight"],
        "f_proj.1.weight": own["decay_proj.up.weight"],
        "A_log": own["decay_log_rate"],
        "dt_bias": own["decay_bias"],
        "g_proj.0.weight": own["gate_proj.down.weight"],
        "g_proj.1.weight": own["gate_proj.up.weight"],
        "g_proj.1.bias": own["gate_proj.up.bias"],
        "o_norm.weight": own["norm.weight"],
        "o_proj.weight": own["out_proj.weight"],
    }


def official(model: LanguageModel) -> Tensors:
    """As the released code names them; attention's rows are grouped by head: its q, k and v, then the next head's."""
    own = model.state_dict()
    found = {
        "transformer.wte.weight": own["embedding.weight"],
        "transformer.ln_f.weight": own["norm.weight"],
        "lm_head.weight": own["head.weight"],
    }
    for i, mixer in enumerate(model.config.mixers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        found[f"{theirs}.norm_1.weight"] = own[f"{ours}.mixer_norm.weight"]
        found[f"{theirs}.norm_2.weight"] = own[f"{ours}.mlp_norm.weight"]
        for theirs_mlp, name in (("w1", "gate_proj"), ("w2", "up_proj"), ("w3", "down_proj")):
            found[f"{theirs}.mlp.swiglu.{theirs_mlp}.weight"] = own[f"{ours}.mlp.{name}.weight"]
        if isinstance(mixer, DeltaConfig):
            found |= {f"{theirs}.attn.{name}": x for name, x in layer(model, i).items()}
            continue
        assert isinstance(mixer, AttentionConfig)
        rows = [
            own[f"{ours}.mixer.{x}_proj.weight"][head * 2 : head * 2 + 2]
            for head in range(mixer.num_heads)
            for x in "qkv"
        ]
        found[f"{theirs}.attn.attn.weight"] = torch.cat(rows)
        found[f"{theirs}.attn.proj.weight"] = own[f"{ours}.mixer.out_proj.weight"]
    return found


def around_fla(model: LanguageModel) -> Tensors:
    """As fla names a model around its layers."""
    own = model.state_dict()
    found = {
        "model.embeddings.weight": own["embedding.weight"],
        "model.norm.weight": own["norm.weight"],
        "lm_head.weight": own["head.weight"],
    }
    for i, mixer in enumerate(model.config.mixers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        found[f"{theirs}.attn_norm.weight"] = own[f"{ours}.mixer_norm.weight"]
        found[f"{theirs}.mlp_norm.weight"] = own[f"{ours}.mlp_norm.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"{theirs}.mlp.{name}.weight"] = own[f"{ours}.mlp.{name}.weight"]
        if isinstance(mixer, DeltaConfig):
            found |= {f"{theirs}.attn.{name}": x for name, x in layer(model, i).items()}
        else:
            for name, x in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
                found[f"{theirs}.attn.{name}_proj.weight"] = own[f"{ours}.mixer.{x}_proj.weight"]
    return found


def hybrid(**changes: Any) -> LanguageModel:
    return make(config(replace(LAYER, **changes), WINDOW, layers=4)).float()


def assert_same(found: LanguageModel, model: LanguageModel) -> None:
    assert found.config == model.config
    ids = tokens(2, 9)
    ours, theirs = model(ids).logits, found(ids).logits
    assert ours is not None
    assert theirs is not None
    assert torch.equal(theirs, ours)
