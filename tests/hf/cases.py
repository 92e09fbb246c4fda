"""Native models and their twins in transformers."""

from typing import Any

import torch
from torch import Tensor

from gdn2.hf import Gdn2Config, Gdn2ForCausalLM
from gdn2.models.language_model import LanguageModel
from tests.models.cases import make, tokens

LENGTHS = (7, 1, 4)


def twin(native: LanguageModel) -> Any:
    """The same weights under transformers, ready for inference."""
    model: Any = Gdn2ForCausalLM(Gdn2Config.from_native(native.config))
    own = dict(model.named_parameters())
    for name, parameter in native.named_parameters():
        own.pop(name).data = parameter.data.clone()  # in its dtype
    assert not own
    return model.eval()


def prompts() -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask [rows, longest]; padding is a token like any other, so that a leak would show."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), 9)
    mask = torch.zeros_like(ids)
    for row, (own, seen) in zip(rows, zip(ids, mask, strict=True), strict=True):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        own[place], seen[place] = torch.tensor(row), 1
    return ids, mask


__all__ = ["make", "padded", "prompts", "tokens", "twin"]
