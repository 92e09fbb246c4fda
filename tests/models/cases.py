"""Small language models, a hybrid of every mixer there is, and maps as quantisation leaves them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gdn2.layers.config import MixerConfig
from gdn2.layers.layout import Layout
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from tests.layers.cases import MIXERS, WIDTH, scramble

VOCABULARY = 23


def config(*cell: MixerConfig, layers: int | None = None, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        hidden_size=WIDTH,
        intermediate_size=14,
        num_hidden_layers=layers or len(cell),
        cell=cell,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )


EVERYTHING = config(*MIXERS.values())


def make(chosen: ModelConfig = EVERYTHING) -> LanguageModel:
    """In fp64, with random parameters of a size at which every block has a say."""
    model = LanguageModel(chosen).double()
    scramble(model, size=0.4)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    rand = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=rand)


def logits_of(model: LanguageModel, ids: Tensor, layout: Layout | None = None) -> Tensor:
    found = model(ids, layout=layout).logits
    assert isinstance(found, Tensor)
    return found


def gradients(model: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


class Int8Linear(nn.Linear):
    """A map that keeps integers and a scale, as libraries of quantisation have them."""

    def __init__(self, map_: nn.Linear) -> None:
        super().__init__(map_.in_features, map_.out_features, bias=False, device="meta")
        self.scale = map_.weight.detach().abs().max() / 127
        whole = (map_.weight.detach() / self.scale).round().to(torch.int8)
        self.weight, self.bias = nn.Parameter(whole, requires_grad=False), map_.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.scale.to(x.dtype) * self.weight.to(x.dtype), self.bias)


def quantise(model: nn.Module) -> None:
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))


def rounded(model: LanguageModel) -> LanguageModel:
    """What the quantised model computes, by dense weights."""
    dense = make(model.config)
    for map_ in dense.modules():
        if isinstance(map_, nn.Linear):
            scale = map_.weight.detach().abs().max() / 127
            map_.weight.data = (map_.weight.detach() / scale).round() * scale
    return dense
