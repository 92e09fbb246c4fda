"""Quantised linear maps under transformers, as natively."""

import pytest
import torch

from tests.closeness import assert_close
from tests.hf.cases import make, tokens, twin
from tests.layers.cases import MIXERS
from tests.models.cases import config, logits_of, quantise, rounded


@pytest.mark.parametrize("name", MIXERS)
def test_int8_weights_leave_the_cache_as_it_was(name: str) -> None:
    native, ids = make(config(MIXERS[name])), tokens(2, 9)
    model, expected = twin(native), logits_of(rounded(native), ids)
    quantise(model)
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True)
        parts, cache = [first.logits], first.past_key_values
        parts += [model(column, past_key_values=cache).logits for column in ids[:, 5:].split(1, 1)]
    assert_close("cached", torch.cat(parts, 1), expected, 1e-10)
