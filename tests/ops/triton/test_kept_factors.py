"""A model whose rule runs by the kernels, interpreted, has the same gradients whether factors are kept or not."""

import pytest
import torch
from torch import Tensor

from gdn2.layers.config import DeltaConfig, Mamba2Config, Mamba3Config, MixerConfig
from gdn2.models.language_model import LanguageModel
from tests.closeness import assert_close
from tests.models.cases import config, make, tokens

MIXERS: list[MixerConfig] = [
    DeltaConfig(num_heads=1, key_head_dim=16, value_head_dim=16, gate_rank=3),
    Mamba2Config(inner_size=16, head_dim=16, state_size=16, conv_width=3),
    Mamba3Config(inner_size=16, head_dim=16, state_size=16),
]


def differentiated(model: LanguageModel) -> tuple[list[Tensor], int]:
    """The loss and all gradients, and how many numbers were kept for them."""
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens(1, 33), targets=tokens(1, 33, seed=1)).loss
    assert loss is not None
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], sum(sizes)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.type)
def test_kept_or_computed_again(mixer: MixerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(config(mixer))
    expected, _ = differentiated(model)  # by the torch backend
    monkeypatch.setattr("gdn2.ops.rule.choose", lambda *arguments: "triton")
    again, few = differentiated(model)
    model.recompute_factors(False)
    kept, many = differentiated(model)
    erases = isinstance(mixer, DeltaConfig)
    assert many > few if erases else many == few  # without an erase gate there are no factors
    for i, (a, b, right) in enumerate(zip(again, kept, expected, strict=True)):
        assert torch.equal(a, b), i
        assert_close(f"result {i}", a, right, 1e-9)
