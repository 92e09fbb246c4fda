"""Linear maps that others replaced by quantised ones: states keep the dtype of the activations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gdn2.layers.joint import lay_side_by_side
from gdn2.layers.norm import RMSNorm
from gdn2.models.language_model import LanguageModel
from tests.closeness import assert_close
from tests.layers.cases import MIXERS
from tests.models.cases import config, logits_of, make, quantise, rounded, tokens

EXACT = 1e-10
mixers = pytest.mark.parametrize("name", MIXERS)


def cached(model: LanguageModel, ids: Tensor, cut: int, capacity: int = 0) -> Tensor:
    """Logits of a prefill up to `cut` and of steps, in place where there is room."""
    with torch.no_grad():
        first, _, state = model(ids[:, :cut], model.new_state(ids.shape[0], capacity))
        parts = [first]
        for column in ids[:, cut:].split(1, 1):
            logits, _, state = model(column, state, inplace=capacity > 0)
            parts.append(logits)
    return torch.cat(parts, 1)


@mixers
@pytest.mark.parametrize("capacity", [0, 9])
def test_int8_weights_leave_states_as_they_were(name: str, capacity: int) -> None:
    model, ids = make(config(MIXERS[name])), tokens(2, 9)
    dense, fresh = rounded(model), model.new_state(2, 9)
    quantise(model)
    expected = logits_of(dense, ids)
    assert_close("whole", logits_of(model, ids), expected, EXACT)
    assert_close("cached", cached(model, ids, 5, capacity), expected, EXACT)
    found = model.new_state(2, 9)
    pairs = zip(found.tensors(), fresh.tensors(), strict=True)
    assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)


@mixers
@pytest.mark.parametrize("capacity", [0, 9])
def test_norms_may_be_wider_than_the_rest(name: str, capacity: int) -> None:
    """As where adapters are trained on quantised weights."""
    model, ids = make(config(MIXERS[name])), tokens(2, 9)
    expected = logits_of(model, ids)
    model.cast(torch.bfloat16)
    for norm in model.modules():
        if isinstance(norm, RMSNorm):
            norm.float()
    assert_close("cached", cached(model, ids, 5, capacity), expected, 0.1)


def test_weights_that_only_their_maps_can_read_are_not_laid_side_by_side() -> None:
    model, ids = make(config(*MIXERS.values())), tokens(1, 9)
    quantise(model)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    expected = logits_of(model, ids)
    lay_side_by_side(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert_close("cached", cached(model, ids, 5), expected, EXACT)


@mixers
@pytest.mark.filterwarnings("ignore")  # of what may come to be removed
def test_quantised_by_torch(name: str) -> None:
    """Whose maps have a method for a weight, and round activations by the range of a call."""
    model, ids = make(config(MIXERS[name])).float(), tokens(1, 9)
    plain = logits_of(model, ids)
    quantised: Any = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert not any(isinstance(module, nn.Linear) for module in quantised.modules())
    lay_side_by_side(quantised)
    by_steps = torch.cat([cached(quantised, ids[:, : t + 1], t)[:, -1:] for t in range(1, 9)], 1)
    assert_close("one call", logits_of(quantised, ids), plain, 0.2)
    assert_close("steps", by_steps, plain[:, 1:], 0.2)
