"""What each scheme of initialisation touches: linear maps, and nothing else."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gdn2.layers.config import AttentionConfig, DeltaConfig, Mamba2Config, Mamba3Config
from gdn2.layers.initialisation import InitScheme
from gdn2.models.config import ModelConfig
from gdn2.models.folder import load_config, load_model, save_model
from gdn2.models.language_model import LanguageModel
from tests.models.cases import EVERYTHING, make

SCHEMES: tuple[InitScheme, ...] = ("released", "paper", "normal")
# Wide enough that the spread of each map is known to a few percent.
WIDE = ModelConfig(
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=8,
    vocab_size=128,
    initializer_range=0.03,
    cell=(
        DeltaConfig(num_heads=2, key_head_dim=20, value_head_dim=32, gate_rank=24),
        Mamba2Config(inner_size=64, head_dim=16, state_size=24),
        Mamba3Config(inner_size=64, head_dim=16, state_size=24, rank=2),
        AttentionConfig(num_heads=2, head_dim=28),
    ),
)


def values(chosen: ModelConfig, scheme: InitScheme) -> dict[str, Tensor]:
    model = LanguageModel(replace(chosen, init_scheme=scheme), seed=3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def linear_maps(chosen: ModelConfig) -> set[str]:
    """The names of their weights."""
    with torch.device("meta"):
        modules = LanguageModel(chosen).named_modules()
    return {f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear)}


def test_the_papers_is_xavier_in_all_linear_maps() -> None:
    found, maps = values(WIDE, "paper"), linear_maps(WIDE)
    assert "head.weight" in maps
    random = torch.Generator().manual_seed(0)
    for name in sorted(maps):
        x = found[name]
        reference = nn.init.xavier_uniform_(torch.empty_like(x), 2**-2.5, generator=random)
        assert float(x.abs().max()) == pytest.approx(float(reference.abs().max()), rel=0.02), name
        assert float(x.std()) == pytest.approx(float(reference.std()), rel=0.08), name


def test_the_normal_one_is_normal_in_all_linear_maps_and_the_embedding() -> None:
    found = values(WIDE, "normal")
    for name in {*linear_maps(WIDE), "embedding.weight"}:
        x = found[name] / 0.03
        assert float(x.std()) == pytest.approx(1, rel=0.08), name
        assert abs(float(x.mean())) < 0.08, name
        assert float((x.abs() < 1).float().mean()) == pytest.approx(0.683, abs=0.04), name
        assert 2.5 < float(x.abs().max()) < 6, name


@pytest.mark.parametrize("scheme", ["paper", "normal"])
def test_nothing_else_depends_on_the_scheme(scheme: InitScheme) -> None:
    released, found = values(EVERYTHING, "released"), values(EVERYTHING, scheme)
    changed = {name for name, value in found.items() if not torch.equal(value, released[name])}
    maps = linear_maps(EVERYTHING)
    if scheme == "paper":  # which the released code follows inside delta mixers
        for i, mixer in enumerate(EVERYTHING.mixers):
            if isinstance(mixer, DeltaConfig):
                maps = {name for name in maps if not name.startswith(f"blocks.{i}.mixer.")}
    assert changed == maps


def test_a_tied_head_is_the_embedding() -> None:
    chosen = replace(EVERYTHING, tie_word_embeddings=True)
    released, paper = values(chosen, "released"), values(chosen, "paper")
    assert torch.equal(paper["embedding.weight"], released["embedding.weight"])


def test_unknown_schemes_are_refused_in_a_line() -> None:
    message = r"^init_scheme: got 'papre', expected one of 'released', 'paper', 'normal'$"
    with pytest.raises(ValueError, match=message):
        replace(EVERYTHING, init_scheme="papre")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**EVERYTHING.to_dict(), "init_scheme": "papre"})


def test_what_does_not_say_begins_as_released(tmp_path: Path) -> None:
    save_model(make(), tmp_path / "m")
    file = tmp_path / "m/config.json"
    data = json.loads(file.read_text())
    assert data.pop("init_scheme") == "released"
    file.write_text(json.dumps(data))
    assert load_config(tmp_path / "m") == load_model(tmp_path / "m").config == EVERYTHING


def test_digests_are_those_of_configs_that_do_not_say() -> None:
    plain = EVERYTHING.to_dict()
    del plain["init_scheme"]
    expected = sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    assert EVERYTHING.digest == expected
    assert len({replace(EVERYTHING, init_scheme=scheme).digest for scheme in SCHEMES}) == 3
