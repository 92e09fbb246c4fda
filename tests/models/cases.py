"""Small language models, and a hybrid of every mixer there is."""

import torch
from torch import Tensor

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
