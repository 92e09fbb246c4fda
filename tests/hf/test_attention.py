"""Any of transformers' names for attention is taken, and layers choose their kernels all the same."""

# mypy: disable-error-code="no-untyped-call"
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gdn2.hf import Gdn2Config
from tests.hf.cases import make, tokens, twin
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import config, logits_of

SMALL = config(DELTA, MIXERS["window"])
NAMES = [None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_the_same_whatever_attention_is_asked_for(
    name: str | None, tmp_path: Path
) -> None:
    native, ids = make(SMALL), tokens(2, 9)
    twin(native).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = logits_of(native, ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    if name is not None:
        loaded.set_attn_implementation(name)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, expected)
    made = AutoModelForCausalLM.from_config(loaded.config, attn_implementation=name)
    assert made.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["spda", "paged|sdpa", "kernels-community/flash-attn"])
def test_attention_that_nobody_has_is_refused_in_a_line(name: str) -> None:
    expected = rf"^attn_implementation: got '{re.escape(name)}', expected one of eager, sdpa, .*;"
    with pytest.raises(ValueError, match=expected):
        AutoModelForCausalLM.from_config(Gdn2Config.from_native(SMALL), attn_implementation=name)
