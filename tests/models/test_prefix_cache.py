"""Prompts that begin alike are read once, and what follows is the same."""

import pytest
import torch
from torch import Tensor

from gdn2.models.generate import Stop, generate
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import prefill
from gdn2.models.prefix_cache import PrefixCache
from gdn2.models.sampling import Sampling
from tests.closeness import assert_close
from tests.models.cases import make, tokens

EXACT = 1e-10


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make()


def prompt(length: int, changed_at: int | None = None) -> Tensor:
    ids = tokens(1, length)[0]
    if changed_at is not None:
        ids = ids.clone()
        ids[changed_at] = (ids[changed_at] + 1) % 23
    return ids


@pytest.mark.parametrize(
    ("second", "reused"),
    [
        (prompt(13), 13),  # the same
        (prompt(17), 13),  # longer
        (prompt(13, changed_at=11), 10),  # parts behind a place that was kept
        (prompt(13, changed_at=9), 5),
        (prompt(13, changed_at=2), 0),
        (prompt(12), 10),
        (prompt(3), 0),
    ],
)
def test_the_longest_known_beginning_is_reused(
    model: LanguageModel, second: Tensor, reused: int
) -> None:
    cache = PrefixCache(model, every=5)
    cache.prefill([prompt(13)])
    assert (cache.reused, cache.computed) == (0, 13)
    found = cache.prefill([second])
    assert cache.reused == reused
    assert cache.computed == 13 + len(second) - reused
    expected = prefill(model, [second])
    assert_close("logits", found.logits, expected.logits, EXACT)
    assert found.state.seen.tolist() == [len(second)]
    more = tokens(1, 2, seed=3)
    with torch.no_grad():
        logits = model(more, found.state).logits
        assert_close("continued", logits, model(more, expected.state).logits, EXACT)


def test_generation_is_the_same_and_leaves_the_cache_intact(model: LanguageModel) -> None:
    """Twice: decoding overwrites states, but never those that are kept."""
    cache = PrefixCache(model, every=4)
    prompts = [prompt(9), prompt(11, changed_at=6), prompt(9)]
    stop, sampling = Stop(max_tokens=6), Sampling(temperature=0.8)
    expected = generate(model, prompts, stop=stop, sampling=sampling, seed=4)
    for _ in range(2):
        found = generate(model, prompts, stop=stop, sampling=sampling, seed=4, prefixes=cache)
        assert found == expected
    assert cache.computed == 9 + 7
    assert cache.reused == 4 + 9 + 9 + 11 + 9


def test_the_least_recently_used_is_dropped(model: LanguageModel) -> None:
    cache = PrefixCache(model, entries=2)
    first, second, third = prompt(4), prompt(5, changed_at=0), prompt(6, changed_at=1)
    cache.prefill([first])
    cache.prefill([second])
    size = cache.nbytes
    cache.prefill([first])  # so the second is older
    cache.prefill([third])
    assert len(cache) == 2
    before = cache.computed
    cache.prefill([first])
    assert cache.computed == before
    cache.prefill([second])
    assert cache.computed == before + 5
    assert cache.nbytes >= size > 0
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_mistakes_are_named(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"^entries: got 0, expected at least 1$"):
        PrefixCache(model, entries=0)
    with pytest.raises(ValueError, match=r"^every: got 0, expected at least 1$"):
        PrefixCache(model, every=0)
    with pytest.raises(ValueError, match=r"^prompts\[0\]: got no tokens, expected at least one$"):
        PrefixCache(model).prefill([[]])
    with pytest.raises(ValueError, match=r"^prefixes: got a cache of another model"):
        generate(model, [[1]], prefixes=PrefixCache(make()))
    with pytest.raises(ValueError, match=r"^state: got one beside a prefix cache, expected None$"):
        generate(model, [[1]], prefixes=PrefixCache(model), state=model.new_state(1))
