"""Likelihoods, windows and generations against a model that reads each request alone, from its first token."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn2.data.byte_tokenizer import ByteTokenizer
from gdn2.data.tokenizers import load_tokenizer
from gdn2.evals import prefixes
from gdn2.evals.encoding import check_vocabulary, encode_pair, first_token, rolling_pairs
from gdn2.evals.likelihood import Likelihood, Pair, _go_through, log_likelihoods
from gdn2.evals.prefixes import Batching, prefill_all
from gdn2.evals.request import Request
from gdn2.evals.requests_file import WINDOW
from gdn2.evals.scoring import Scorer
from gdn2.layers.config import AttentionConfig, DeltaConfig
from gdn2.layers.layout import Layout
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import prefill
from gdn2.models.presets import preset
from tests.data.samples import save_tokenizer
from tests.models.cases import EVERYTHING, VOCABULARY, make

BYTES = ModelConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    cell=(
        DeltaConfig(num_heads=2, key_head_dim=8, value_head_dim=8),
        AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
    ),
    vocab_size=256,
)


def draw(random: Random, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCABULARY) for _ in range(length))


def families(contexts: int = 5, endings: int = 4) -> list[Pair]:
    """Contexts with several continuations each, of odd lengths, and one long beginning that contexts share."""
    random = Random(0)
    shared = draw(random, 70)
    texts = [draw(random, 1 + 13 * i) for i in range(contexts)]
    texts += [shared, *(shared + draw(random, n) for n in (3, 66, 67))]
    texts.append(texts[-1] + draw(random, 65))
    return [
        Pair(text, draw(random, 1 + (3 * i + j) % 7))
        for i, text in enumerate(texts)
        for j in range(endings)
    ]


def alone(model: LanguageModel, pair: Pair) -> Likelihood:
    """From all logits of context and continuation in one call."""
    whole = torch.tensor([pair.context + pair.continuation])
    with torch.no_grad():
        logits = model(whole[:, :-1]).logits[0, len(pair.context) - 1 :]
    targets = whole[0, len(pair.context) :]
    found = logits.log_softmax(-1)[torch.arange(len(targets)), targets].sum()
    return Likelihood(float(found), bool((logits.argmax(-1) == targets).all()))


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_forked_is_unforked(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every mixer, whatever is read together; the smallest calls cut continuations too."""
    model, pairs = make(EVERYTHING), families()
    if rows == 3:
        monkeypatch.setattr(prefixes, "CHUNKS", {"cpu": 5})
    found = dict(log_likelihoods(model, pairs, rows))
    assert sorted(found) == list(range(len(pairs)))
    for i, pair in enumerate(pairs):
        expected = alone(model, pair)
        assert abs(found[i].log - expected.log) < 1e-10
        assert found[i].is_greedy == expected.is_greedy


def test_greedy_continuations_are_known() -> None:
    model, context = make(EVERYTHING), draw(Random(1), 9)
    likeliest = list(context)
    for _ in range(4):
        with torch.no_grad():
            likeliest.append(int(model(torch.tensor([likeliest])).logits[0, -1].argmax()))
    right = tuple(likeliest[9:])
    wrong = (*right[:2], (right[2] + 1) % VOCABULARY, right[3])
    found = dict(
        log_likelihoods(model, [Pair(context, text) for text in (right, wrong, right[:1])])
    )
    assert [found[i].is_greedy for i in range(3)] == [True, False, True]


def test_shared_beginnings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that reach the model are those of the tree of prompts, and what it says is what it says to each."""
    model, random = make(EVERYTHING), Random(2)
    stem = draw(random, 100)
    prompts = [stem, stem + draw(random, 80), draw(random, 30)]
    prompts += [prompts[1] + draw(random, 5), prompts[1][:170] + draw(random, 6)]
    seen: list[int] = []
    real = model.next_token_logits

    def counted(ids: Tensor, *rest: Any) -> Any:
        seen.append(ids.numel())
        return real(ids, *rest)

    monkeypatch.setattr(model, "next_token_logits", counted)
    found: dict[int, Tensor] = {}
    for numbers, ready in prefill_all(model, prompts, Batching(4096, 8)):
        found |= dict(zip(numbers, ready.logits, strict=True))
    assert sum(seen) == 100 + 30 + 70 + (10 + 15 + 6)  # ten more are too few to share
    for number, prompt in enumerate(prompts):
        assert torch.allclose(found[number], prefill(model, [prompt]).logits[0], atol=1e-10, rtol=0)


def bytes_model() -> LanguageModel:
    """One that reads bytes, far from uniform."""
    model = LanguageModel(BYTES).double()
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.data += 0.3 * noise
    return model


def answers(scorer: Scorer, requests: list[Request]) -> list[object]:
    found = dict(scorer.answers(requests))
    return [found[i] for i in range(len(requests))]


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_windows_are_lm_evals(window: int, tmp_path: Path) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, "json"))
    for text in ("", "x", "word1 number 1," * 5, "a line\n" * 64):
        tokens = tokenizer.encode(text)
        rolled = utils.get_rolling_token_windows(tokens, first_token(tokenizer), window, 1)
        expected = [Pair(*map(tuple, utils.make_disjoint_window(pair))) for pair in rolled]
        assert rolling_pairs(tokenizer, text, window) == expected


@pytest.mark.parametrize("kind", ["json", "sentencepiece", "bytes"])
@pytest.mark.parametrize(
    ("context", "continuation"),
    [("The state", " forgets"), ("The state  ", "writes"), ("word1", "7"), ("", " x"), ("  ", "x")],
)
def test_pairs_part_where_the_context_ends(
    kind: str, context: str, continuation: str, tmp_path: Path
) -> None:
    """Together they are the whole text's tokens, and the context's are those of its words."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, kind))
    pair = encode_pair(tokenizer, context, continuation)
    words = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    opened = [] if whole[:1] == [first_token(tokenizer)] else [first_token(tokenizer)]
    assert [*pair.context, *pair.continuation] == (whole if words else opened + whole)
    assert pair.context == (tuple(tokenizer.encode(words)) or (first_token(tokenizer),))


def test_what_adds_no_token_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="continuation: got '' after 'abc', expected one that"):
        encode_pair(ByteTokenizer(), "abc", "")


def test_a_text_in_windows_and_in_one_piece() -> None:
    model, text = bytes_model(), "Rolling, " * 21
    tokens = tuple(text.encode())
    scorer = Scorer(model, ByteTokenizer(), batch_size=2)
    requests = [
        Request("t", i, "rolling", text, metadata={WINDOW: w}) for i, w in enumerate((None, 50))
    ]
    carried, windowed, nothing = answers(
        scorer, [*requests, Request("t", 2, "rolling", "", metadata={WINDOW: 3})]
    )
    assert nothing == 0
    assert abs(float(str(carried)) - alone(model, Pair((10,), tokens)).log) < 1e-10
    pairs = [
        Pair((10,), tokens[:50]),
        Pair(tokens[49:50], tokens[50:100]),
        Pair(tokens[99:100], tokens[100:150]),
    ]
    pairs.append(Pair(tokens[138:150], tokens[150:]))
    expected = sum(alone(model, pair).log for pair in pairs)
    assert abs(float(str(windowed)) - expected) < 1e-10
    assert abs(expected - float(str(carried))) > 0.1


def test_generations_are_those_of_each_prompt_alone() -> None:
    model, tokenizer = bytes_model(), ByteTokenizer()
    beginning = "A haystack that all of them share, longer than a chunk of the rule is. "
    prompts = ["One", beginning + "two", beginning + "three?", "", "One"]

    def greedy(prompt: str, count: int) -> str:
        ids = list(prompt.encode()) or [10]
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return tokenizer.decode(ids[len(ids) - count :])

    texts = [greedy(prompt, 12) for prompt in prompts]
    stop = texts[1][4:6]
    requests = [Request("t", i, "generate", p, max_tokens=12) for i, p in enumerate(prompts)]
    requests.append(Request("t", 9, "generate", prompts[1], until=(stop,), max_tokens=12))
    found = answers(Scorer(model, tokenizer, batch_size=2), requests)
    assert found == [*texts, texts[1].partition(stop)[0]]
    assert len(set(texts)) > 2


class Sized(ByteTokenizer):
    def __init__(self, size: int) -> None:
        self.vocab_size = size


@pytest.mark.parametrize(("own", "known"), [(256, 400), (257, 256), (32000, 50257), (50257, 32000)])
def test_another_vocabulary_is_a_mistake(own: int, known: int) -> None:
    with pytest.raises(
        ValueError, match=f"tokenizer: got bytes of {own} tokens, expected .* {known}"
    ):
        check_vocabulary(Sized(own), replace(BYTES, vocab_size=known))


@pytest.mark.parametrize(("own", "known"), [(256, 256), (50257, 50304), (50277, 50432)])
def test_a_size_that_was_rounded_up_is_none(own: int, known: int) -> None:
    check_vocabulary(Sized(own), replace(BYTES, vocab_size=known))


def unforked(model: LanguageModel, pairs: list[Pair]) -> list[float]:
    """Every request read whole, many in one call: what a scorer without states does."""
    rows = [pair.context + pair.continuation for pair in pairs]
    ends = torch.tensor([0, *(len(row) - 1 for row in rows)]).cumsum(0)
    ids = torch.tensor([token for row in rows for token in row[:-1]])
    with torch.no_grad():
        logs = (
            model(ids.unsqueeze(0), layout=Layout.packed(ends, len(ids))).logits[0].log_softmax(-1)
        )
    found = []
    for pair, end in zip(pairs, ends[1:].tolist(), strict=True):
        rows_of = logs[end - len(pair.continuation) : end]
        found.append(float(rows_of.gather(1, torch.tensor(pair.continuation)[:, None]).sum()))
    return found


def own_unforked(model: LanguageModel, pairs: list[Pair]) -> list[float]:
    """As the scorer does it, but with the context read again for each ending."""
    ready = prefill(model, [pair.context for pair in pairs])
    texts = [pair.continuation for pair in pairs]
    found = _go_through(model, ready, range(len(pairs)), texts, most=2**20)
    return [likelihood.log for likelihood in found]


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


@pytest.mark.parametrize(
    ("context", "ending", "least"), [(50, 30, 1.4), (28, 5, 1.7)], ids=["hellaswag", "arc"]
)
def test_forks_are_faster(context: int, ending: int, least: float) -> None:
    """Four endings of the mean lengths that a tokenizer of 50,000 gives; 1.8 and 2.1 on a quiet machine."""
    model, random = LanguageModel(replace(preset("gdn2-15m-hybrid"), vocab_size=8000)), Random(0)
    texts = [tuple(random.randrange(8000) for _ in range(context)) for _ in range(12)]
    pairs = [
        Pair(text, tuple(random.randrange(8000) for _ in range(ending)))
        for text in texts
        for _ in range(4)
    ]
    forked = dict(log_likelihoods(model, pairs))
    others = (unforked, own_unforked)
    for other in others:
        assert max(abs(forked[i].log - x) for i, x in enumerate(other(model, pairs))) < 1e-3
    calls: list[Callable[[], object]] = [partial(other, model, pairs) for other in others]
    calls.append(lambda: list(log_likelihoods(model, pairs)))
    turns = [[seconds(call) for call in calls] for _ in range(3)]
    whole, own, fast = (min(column) for column in zip(*turns, strict=True))
    assert min(whole, own) / fast >= least, (whole, own, fast)
