"""Tokens from a model: prefill, then step by step until each row has its end."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from gdn2.models.decode import Batch, Decoding, Steps
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import Prefilled, Prompts, prefill, read_prompts
from gdn2.models.prefix_cache import PrefixCache
from gdn2.models.sampling import Draws, Sampling, sample
from gdn2.models.state import ModelState
from gdn2.models.text import Decode, TextStream
from gdn2.ops.arguments import require, whole

End = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a row ends: after so many tokens, at one of these tokens, or at one of these strings in its text."""

    max_tokens: int = 256
    ids: Sequence[int] = ()
    strings: Sequence[str] = ()

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens)
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        listed = isinstance(self.ids, Iterable)
        require(listed, "ids", repr(self.ids), "a list of token ids")
        object.__setattr__(self, "ids", tuple(whole("ids", token) for token in self.ids))
        listed = isinstance(self.strings, Iterable) and not isinstance(self.strings, str)
        require(listed, "strings", repr(self.strings), "a list of strings")
        object.__setattr__(self, "strings", tuple(self.strings))
        for string in self.strings:
            require(isinstance(string, str), "strings", repr(string), "a list of strings")
        require("" not in self.strings, "strings", "an empty one", "at least one character each")


@dataclass(frozen=True)
class Event:
    """A row has a new token."""

    row: int
    token: int
    text: str  # what is certain now and was not before; empty without a decoder
    end: End | None  # why this was the row's last, if it was


@dataclass
class Completion:
    """All that followed a prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: End | None = None


class Options(TypedDict, total=False):
    """How rows go on and when they end.

    sampling: how tokens are chosen; by default in proportion to their probability.
    stop: when a row ends. A token that ends it is its last, but no part of the text, and no string is that ends it.
    seed: one per row, or a number s for s, s + 1, …: what a row draws depends on its seed alone.
    decode: from token ids to text, for events with text and for strings that end a row.
    steps: of an earlier generation by this model, to use its CUDA graphs again.
    """

    sampling: Sampling
    stop: Stop
    seed: int | Sequence[int]
    decode: Decode
    steps: Steps


class PromptOptions(Options, total=False):
    """How prompts are read as well.

    state: what came before them, one row each; it is left as it is.
    prefixes: states of earlier prompts to go on from, and to be added to.
    chunk: tokens in one call of the prefill.
    """

    state: ModelState
    prefixes: PrefixCache
    chunk: int


def generate(
    model: LanguageModel, prompts: Prompts, **options: Unpack[PromptOptions]
) -> list[Completion]:
    """What follows each prompt, token ids of at least one token, whose lengths may differ."""
    return collect(stream(model, prompts, **options), len(prompts))


def collect(events: Iterator[Event], rows: int) -> list[Completion]:
    """The events of so many rows, joined row by row."""
    completions = [Completion() for _ in range(rows)]
    for event in events:
        completion = completions[event.row]
        completion.tokens.append(event.token)
        completion.text += event.text
        completion.end = event.end
    return completions


def stream(
    model: LanguageModel,
    prompts: Prompts,
    *,
    state: ModelState | None = None,
    prefixes: PrefixCache | None = None,
    chunk: int | None = None,
    **options: Unpack[Options],
) -> Iterator[Event]:
    """Prefill the prompts at once, and return an iterator of an event for each row and step."""
    _check_options(model, options, PromptOptions.__optional_keys__)  # before a long prefill
    rows = read_prompts(prompts, model.config.vocab_size)
    sampling = options.get("sampling", Sampling())
    fits = state is None or not sampling.penalises
    penalty = f"{sampling.repetition_penalty} beside a state"
    expected = "1: which tokens a state has seen is not known, `go_on` takes them as its history"
    require(fits, "repetition_penalty", penalty, expected)
    if prefixes is None:
        ready = prefill(model, rows, state, chunk=chunk)
    else:
        require(prefixes.model is model, "prefixes", "a cache of another model", "of this model")
        require(state is None, "state", "one beside a prefix cache", "None")
        ready = prefixes.prefill(rows, chunk=chunk)
    return go_on(model, ready, rows, **options)


@torch.no_grad()
def go_on(
    model: LanguageModel,
    ready: Prefilled,
    history: Sequence[Tensor] | None = None,
    **options: Unpack[Options],
) -> Iterator[Event]:
    """An iterator of events from where a prefill ended, perhaps forked since.

    `history` are the tokens [length] already in each row, for a repetition penalty.
    """
    _check_options(model, options, Options.__optional_keys__)
    sampling, stop = options.get("sampling", Sampling()), options.get("stop", Stop())
    seed, decode = options.get("seed", 0), options.get("decode")
    rows, vocabulary = ready.logits.shape
    seeds = _read_seeds(seed, rows)
    require(not stop.strings or decode is not None, "decode", None, "a function for stop.strings")
    for token in stop.ids:
        require(0 <= token < vocabulary, "stop.ids", token, f"0 to {vocabulary - 1}")
    known = 0 if history is None else len(history)
    fits = known == rows or not sampling.penalises
    require(fits, "history", f"{known} rows", f"{rows}, for the repetition penalty")
    draws = Draws.start(seeds, sampling, vocabulary, history or (), ready.logits.device)
    first = sample(ready.logits, sampling, draws)
    # Steps overwrite the state: a copy, since others may hold it, with room for what full attention will add.
    state = model.reserve(ready.state, stop.max_tokens)
    steps = options.get("steps") or Steps(model)
    batch = Batch(steps, Decoding(first, state, draws), sampling)
    texts = [TextStream(decode, stop.strings) if decode else None for _ in range(rows)]
    return _events(batch, texts, stop)


def _read_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """One seed for each row."""
    if not isinstance(seed, Iterable) or (isinstance(seed, Tensor) and seed.ndim == 0):
        return [whole("seed", seed) + row for row in range(rows)]
    seeds = [whole("seed", each) for each in seed]
    require(len(seeds) == rows, "seed", f"{len(seeds)} numbers", f"{rows}, one per row")
    return seeds


def _check_options(model: LanguageModel, options: Options, known: Iterable[str]) -> None:
    unknown = sorted(options.keys() - set(known))
    require(not unknown, "options", ", ".join(unknown), f"some of {', '.join(sorted(known))}")
    for name, kind in (("sampling", Sampling), ("stop", Stop)):
        fits = isinstance(options.get(name, kind()), kind)
        require(fits, name, repr(options.get(name)), f"a {kind.__name__}")
    steps = options.get("steps")
    own = steps is None or steps.model is model
    require(own, "steps", "those of another model", "of this model")


def _events(batch: Batch, texts: list[TextStream | None], stop: Stop) -> Iterator[Event]:
    for taken in range(1, stop.max_tokens + 1):
        ended = []
        for row, token in batch.tokens().items():
            event = _event(row, token, texts[row], stop, taken)
            if event.end is not None:
                ended.append(row)
            yield event
        if len(ended) == len(batch):
            return
        batch.step(ended)


def _event(row: int, token: int, text: TextStream | None, stop: Stop, taken: int) -> Event:
    end: End | None = "length" if taken == stop.max_tokens else None
    if token in stop.ids:
        end = "stop"
    if text is None:
        return Event(row, token, "", end)
    piece = "" if token in stop.ids else text.push(token)
    if end is not None:
        piece += text.finish()
    return Event(row, token, piece, "stop" if text.stopped else end)
