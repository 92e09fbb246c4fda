"""However rows are batched, cut, forked or streamed, each gets the tokens it would get alone from whole forwards."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gdn2.layers.config import MixerConfig
from gdn2.models import decode
from gdn2.models.decode import Steps
from gdn2.models.generate import Completion, Stop, collect, generate, go_on, stream
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import prefill
from gdn2.models.sampling import GREEDY, Sampling
from gdn2.models.state import ModelState
from gdn2.models.text import TextStream
from tests.closeness import assert_close
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import config, make, tokens
from tests.models.test_sampling import literal_probabilities, literal_sample, literal_uniform

EXACT = 1e-10
RAGGED = [7, 1, 12, 4]
WARM = Sampling(temperature=0.8, top_k=15, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
MIXED = config(DELTA, *(MIXERS[name] for name in ("mamba2", "mamba3", "window", "attention")))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make()


def prompts(*lengths: int) -> list[Tensor]:
    return [tokens(1, length, seed=length)[0] for length in lengths]


def naive(
    model: LanguageModel, prompt: Tensor, count: int, sampling: Sampling, seed: int
) -> list[int]:
    """A whole forward for each token, and the literal sampler."""
    ids = prompt.tolist()
    for step in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits
        assert isinstance(logits, Tensor)
        if sampling.temperature == 0:
            ids.append(int(logits[0, -1].argmax()))
        else:
            p = literal_probabilities(logits[0, -1].tolist(), set(ids), sampling)
            ids.append(literal_sample(p, literal_uniform(seed, step)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), WARM], ids=["greedy", "plain", "warm"])
def test_a_ragged_batch_is_each_row_alone(model: LanguageModel, sampling: Sampling) -> None:
    rows, stop = prompts(*RAGGED), Stop(max_tokens=9)
    seeds = [5, 17, 17, -3]
    found = generate(model, rows, sampling=sampling, stop=stop, seed=seeds)
    for row, prompt in enumerate(rows):
        expected = naive(model, prompt, 9, sampling, seeds[row])
        assert found[row] == Completion(expected, "", "length")
        alone = generate(model, [prompt], sampling=sampling, stop=stop, seed=seeds[row])
        assert alone == [found[row]]


def test_one_seed_counts_up_over_the_rows(model: LanguageModel) -> None:
    rows, stop = prompts(5, 5, 5), Stop(max_tokens=8)
    found = generate(model, rows, stop=stop, seed=30)
    assert found == generate(model, rows, stop=stop, seed=[30, 31, 32])
    assert found[0].tokens != found[1].tokens


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_prefill_in_chunks_is_one_call(model: LanguageModel, chunk: int) -> None:
    rows = prompts(*RAGGED)
    ready = prefill(model, rows, chunk=chunk)
    assert ready.state.seen.tolist() == RAGGED
    for row, prompt in enumerate(rows):
        with torch.no_grad():
            logits, _, state = model(prompt[None], model.new_state(1))
        assert_close(f"row {row}", ready.logits[row], logits[0, -1], EXACT)
        own = ready.state.select([row])
        assert_close("memory", own.layers[0][0], state.layers[0][0], EXACT)


def test_a_call_holds_no_more_than_a_chunk(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    whole = model.next_token_logits

    def counted(ids: Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(ids.numel())
        return whole(ids, *rest, **options)

    monkeypatch.setattr(model, "next_token_logits", counted)
    prefill(model, prompts(*RAGGED), chunk=8)
    assert max(sizes) <= 8
    assert sum(sizes) == sum(RAGGED)


def test_going_on_from_a_state(model: LanguageModel) -> None:
    """A conversation in two turns is one prompt, and the state of the first turn stays as it was."""
    first, second = prompts(6, 3), prompts(2, 8)
    state = prefill(model, first).state
    kept = state.clone()
    stop = Stop(max_tokens=5)
    found = generate(model, second, state=state, stop=stop, sampling=GREEDY)
    whole = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    assert found == generate(model, whole, stop=stop, sampling=GREEDY)
    for own, old in zip(state.tensors(), kept.tensors(), strict=True):
        assert torch.equal(own, old)


def test_a_fork_of_64_is_64_prefills() -> None:
    model, prompt = make(MIXED), prompts(11)[0]
    stop, seeds = Stop(max_tokens=6), list(range(100, 164))
    ready = prefill(model, [prompt]).fork(64)
    history = [prompt] * 64
    forked = collect(go_on(model, ready, history, sampling=WARM, stop=stop, seed=seeds), 64)
    assert forked == generate(model, history, sampling=WARM, stop=stop, seed=seeds)
    assert len({tuple(row.tokens) for row in forked}) > 32
    for seed in (100, 131, 163):
        alone = generate(model, [prompt], sampling=WARM, stop=stop, seed=seed)
        assert alone[0] == forked[seed - 100]


def test_rows_that_end_leave_the_batch(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, stop = prompts(*RAGGED), Stop(max_tokens=12)
    free = [completion.tokens for completion in generate(model, rows, stop=stop, seed=2)]
    ids = sorted({free[0][3], free[2][5]})
    sizes: list[int] = []
    plain = decode.advance

    def counted(model: LanguageModel, sampling: Sampling, now: decode.Decoding) -> None:
        sizes.append(len(now.tokens))
        plain(model, sampling, now)

    monkeypatch.setattr(decode, "advance", counted)
    found = generate(model, rows, stop=Stop(max_tokens=12, ids=ids), seed=2)
    lengths = []
    for completion, tokens_alone in zip(found, free, strict=True):
        places = [i for i, token in enumerate(tokens_alone) if token in ids]
        length = places[0] + 1 if places else 12
        lengths.append(length)
        assert completion.tokens == tokens_alone[:length]
        assert completion.end == ("stop" if places else "length")
    assert min(lengths) < max(lengths)
    assert sizes == [sum(n > step for n in lengths) for step in range(1, max(lengths))]


def test_events_come_step_by_step(model: LanguageModel) -> None:
    rows = prompts(3, 5)
    events = stream(model, rows, stop=Stop(max_tokens=3), sampling=GREEDY, decode=letters)
    assert isinstance(events, Iterator)
    seen = list(events)
    assert [(event.row, event.end) for event in seen] == [
        (0, None), (1, None), (0, None), (1, None), (0, "length"), (1, "length"),
    ]  # fmt: skip
    assert all(event.text == letters([event.token]) for event in seen)
    assert collect(iter(seen), 2)[1].text == letters([e.token for e in seen if e.row == 1])


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def test_stops_may_come_from_anywhere() -> None:
    stop = Stop(ids=(i for i in (1, 2)), strings=(s for s in "ab"))  # type: ignore[arg-type]
    assert (stop.ids, stop.strings) == ((1, 2), ("a", "b"))


def test_strings_end_a_row_and_are_not_in_its_text(model: LanguageModel) -> None:
    rows, stop = prompts(*RAGGED), Stop(max_tokens=12)
    free = generate(model, rows, stop=stop, decode=letters, seed=6)
    wanted = [free[0].text[2:5], free[1].text[4:6], "#"]
    found = generate(model, rows, stop=Stop(max_tokens=12, strings=wanted), decode=letters, seed=6)
    for completion, whole in zip(found, free, strict=True):
        text, length = text_before(whole.text, wanted)
        assert (completion.text, completion.tokens) == (text, whole.tokens[:length])
        assert completion.end == ("stop" if length < 12 or text != whole.text else "length")
    assert found[0].end == "stop"


def text_before(text: str, stops: Sequence[str]) -> tuple[str, int]:
    """The text in front of the stop that is complete first, and how long the text is then."""
    for length in range(len(text) + 1):
        places = [text[:length].find(stop) for stop in stops if stop in text[:length]]
        if places:
            return text[: min(places)], length
    return text, len(text)


def utf8(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve 漢字 🙂 end", "", "é"])
@pytest.mark.parametrize("stops", [(), ("zzz",), ("字", "end"), (" 🙂 en", "n")])
def test_text_comes_in_whole_characters(text: str, stops: tuple[str, ...]) -> None:
    out = TextStream(utf8, stops)
    pieces: list[str] = []
    for byte in text.encode():
        pieces.append(out.push(byte))
        if out.stopped:
            break
    pieces.append(out.finish())
    assert out.stopped == any(stop in text for stop in stops)
    assert "".join(pieces) == text_before(text, stops)[0]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_bytes_that_make_no_character_do_not_hold_the_text_up() -> None:
    out = TextStream(utf8)
    assert (
        "".join(out.push(0xFF) for _ in range(9)) + out.finish() == "\N{REPLACEMENT CHARACTER}" * 9
    )


def test_a_space_before_a_word_is_kept() -> None:
    """Some tokenizers drop the space of the first token they decode."""

    def decoded(ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids).removeprefix(" ")

    out = TextStream(decoded)
    assert [out.push(i) for i in (1, 2, 3)] == ["w1", " w2", " w3"]


def test_a_space_after_what_has_no_text_is_kept() -> None:
    """Such as a token between two documents."""

    def decoded(ids: list[int]) -> str:
        return "".join(f" w{i}" if i else "" for i in ids).removeprefix(" ")

    ids = [0, 1, 0, 0, 2, 3, 0]
    out = TextStream(decoded)
    assert "".join(map(out.push, ids)) + out.finish() == decoded(ids) == "w1 w2 w3"


def test_tokens_without_text_are_not_read_again_and_again() -> None:
    """Such as a model's that has more tokens than its tokenizer."""
    lengths: list[int] = []

    def decoded(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "".join(f" w{i}" if i else "" for i in ids).removeprefix(" ")

    for ids in ([1, *[0] * 300, 2], [*[0] * 300, 1, 2]):
        out = TextStream(decoded)
        assert "".join(map(out.push, ids)) + out.finish() == "w1 w2"
    assert max(lengths) <= 3


@pytest.mark.parametrize("cell", [(DELTA,), (DELTA, MIXERS["window"])], ids=["recurrent", "hybrid"])
@pytest.mark.parametrize("context", [8192, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_memory_of_decoding_does_not_grow_with_the_context(
    cell: tuple[MixerConfig, ...], context: int
) -> None:
    """The state's bytes, and what steps allocate, after 1K and up to 1M tokens read in chunks."""
    model = LanguageModel(config(*cell))
    near = prefill(model, tokens(1, 1024)).state
    far = prefill(model, tokens(1, context - 1024), near).state
    assert far.seen.tolist() == [context]
    assert near.nbytes == far.nbytes
    assert bytes_of_steps(model, near.clone()) == bytes_of_steps(model, far.clone())


def bytes_of_steps(model: LanguageModel, state: ModelState) -> int:
    """All that three steps in place allocate, freed or not."""
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(3):
            model.next_token_logits(tokens(1, 1), state, inplace=True)
    return sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())


loose: Any = generate  # takes what types forbid
loose_stop: Any = Stop


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: generate(m, []), r"^prompts: got none, expected at least one$"),
        (
            lambda m: loose(m, "hi"),
            r"^prompts: got 'hi', expected a list of token ids for each$",
        ),
        (lambda m: loose(m, ["hi"]), r"^prompts\[0\]: got 'hi', expected token ids$"),
        (lambda m: loose(m, [[1]], seed=1.5), r"^seed: got 1\.5, expected an integer$"),
        (lambda m: loose(m, [[1]], seed=[1.5]), r"^seed: got 1\.5, expected an integer$"),
        (lambda m: loose_stop(max_tokens=2.5), r"^max_tokens: got 2\.5, expected an integer$"),
        (lambda m: loose_stop(ids=5), r"^ids: got 5, expected a list of token ids$"),
        (lambda m: loose_stop(ids=[1.5]), r"^ids: got 1\.5, expected an integer$"),
        (lambda m: generate(m, [[1], []]), r"^prompts\[1\]: got no tokens, expected at least one$"),
        (lambda m: generate(m, [[1, 23]]), r"^prompts\[0\]: got token 23, expected 0 to 22$"),
        (lambda m: generate(m, [[1], [-1]]), r"^prompts\[1\]: got token -1, expected 0 to 22$"),
        (
            lambda m: generate(m, torch.tensor([[0.5]])),
            r"^prompts\[0\]: got torch\.float32, expected integers$",
        ),
        (
            lambda m: generate(m, torch.tensor([[[1]]])),
            r"^prompts\[0\]: got shape \(1, 1\), expected \[length\]$",
        ),
        (
            lambda m: generate(m, [[1]], seed=[1, 2]),
            r"^seed: got 2 numbers, expected 1, one per row$",
        ),
        (lambda m: generate(m, [[1]], chunk=0), r"^chunk: got 0, expected at least 1$"),
        (
            lambda m: generate(m, [[1]], state=m.new_state(2)),
            r"^state\.rows: got 2, expected 1, one per prompt$",
        ),
        (
            lambda m: generate(m, [[1]], stop=Stop(strings=["x"])),
            r"^decode: got None, expected a function for stop\.strings$",
        ),
        (
            lambda m: generate(m, [[1]], stop=Stop(ids=[23])),
            r"^stop\.ids: got 23, expected 0 to 22$",
        ),
        (lambda m: Stop(max_tokens=0), r"^max_tokens: got 0, expected at least 1$"),
        (lambda m: Stop(strings="end"), r"^strings: got 'end', expected a list of strings$"),
        (lambda m: Stop(strings=["a", 5]), r"^strings: got 5, expected a list of strings$"),  # type: ignore[list-item]
        (lambda m: Stop(strings=None), r"^strings: got None, expected a list of strings$"),  # type: ignore[arg-type]
        (lambda m: Stop(strings=[""]), r"^strings: got an empty one, expected at least one"),
        (
            lambda m: go_on(m, prefill(m, [[1]]), sampling=WARM),
            r"^history: got 0 rows, expected 1, for the repetition penalty$",
        ),
        (
            lambda m: generate(m, [[1]], sampling={"top_k": 1}),  # type: ignore[arg-type]
            r"^sampling: got \{'top_k': 1\}, expected a Sampling$",
        ),
        (
            lambda m: generate(m, [[1]], stop=5),  # type: ignore[arg-type]
            r"^stop: got 5, expected a Stop$",
        ),
        (
            lambda m: generate(m, [[1]], max_tokens=3, foo=3),  # type: ignore[call-arg]
            r"^options: got foo, max_tokens, expected some of chunk, decode, prefixes, sampling, "
            r"seed, state, steps, stop$",
        ),
        (
            lambda m: go_on(m, prefill(m, [[1]]), temperature=0),  # type: ignore[call-arg]
            r"^options: got temperature, expected some of decode, sampling, seed, steps, stop$",
        ),
        (
            lambda m: generate(m, [[1]], steps=Steps(make())),
            r"^steps: got those of another model, expected of this model$",
        ),
    ],
)
def test_mistakes_are_named(
    model: LanguageModel, call: Callable[[LanguageModel], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_any_bytes_stream_as_they_decode(seed: int) -> None:
    """Bytes that are no text, characters around them, and the character that stands for such bytes."""
    rand = random.Random(seed)
    pieces = [b"\xff", b"\xf0\x9f", "🙂".encode(), "\ufffd".encode(), b"a", "é".encode(), b"\x80"]
    ids = [*b"".join(rand.choices(pieces, k=12))]
    out = TextStream(utf8)
    assert "".join(map(out.push, ids)) + out.finish() == utf8(ids)
    stopped = TextStream(utf8, ["🙂"])
    found = ""
    for token in ids:
        found += stopped.push(token)
        if stopped.stopped:
            break
    found += stopped.finish()
    assert stopped.stopped == ("🙂" in utf8(ids))
    assert found == utf8(ids).partition("🙂")[0]


def test_a_penalty_needs_to_know_what_a_state_has_seen() -> None:
    model = make(config(DELTA))
    ready = prefill(model, tokens(1, 5))
    with pytest.raises(
        ValueError, match=r"repetition_penalty: got 2\.0 beside a state, expected 1"
    ):
        generate(model, [[1]], state=ready.state, sampling=Sampling(repetition_penalty=2.0))


def test_prompts_of_any_library_are_the_same() -> None:
    model, rows = make(), [[1, 2], [3, 4]]
    expected = generate(model, rows, stop=Stop(max_tokens=3))
    for prompts in (tuple(rows), torch.tensor(rows), np.array(rows), [np.array(x) for x in rows]):
        assert loose(model, prompts, stop=Stop(max_tokens=3)) == expected


def test_seeds_of_any_library_are_the_same() -> None:
    model, prompts = make(), [[1, 2], [3]]
    expected = generate(model, prompts, seed=[5, 6], stop=Stop(max_tokens=4))
    for seed in (5, np.int64(5), torch.tensor(5), torch.tensor([5, 6]), np.array([5, 6])):
        assert loose(model, prompts, seed=seed, stop=Stop(max_tokens=4)) == expected
