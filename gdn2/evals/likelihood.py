"""How likely continuations are; a context that several share is read once and its state forked."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.evals.prefixes import Batching, Tokens, batches, prefill_all
from gdn2.layers.layout import Layout
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import Prefilled

# Forks are copied, read once and dropped: on a CPU up to a third slower where all of them are more than this.
FORK_BYTES = {"cpu": 2**27, "cuda": 2**33}


class Pair(NamedTuple):
    """Tokens, at least one of each."""

    context: Tokens
    continuation: Tokens


class Likelihood(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest."""

    log: float
    is_greedy: bool


def log_likelihoods(
    model: LanguageModel, pairs: Sequence[Pair], rows: int | None = None
) -> Iterator[tuple[int, Likelihood]]:
    """The number of each pair with its likelihood, as they are found; `rows` at once, or as many as fit."""
    by_context: dict[Tokens, list[int]] = {}
    for number, pair in enumerate(pairs):
        by_context.setdefault(pair.context, []).append(number)
    contexts = list(by_context)
    longest = max((len(a) + len(b) for a, b in pairs), default=0)
    batching = Batching.of(model, longest, rows, FORK_BYTES)
    for numbers, ready in prefill_all(model, contexts, batching):
        found = [(row, i) for row, n in enumerate(numbers) for i in by_context[contexts[n]]]
        lengths = [len(pairs[i].continuation) for _, i in found]
        for batch in batches(range(len(found)), lengths, batching):
            parents, here = zip(*(found[j] for j in batch), strict=True)
            texts = [pairs[i].continuation for i in here]
            found_here = _go_through(model, ready, parents, texts, batching.tokens)
            yield from zip(here, found_here, strict=True)


@torch.no_grad()
def _go_through(
    model: LanguageModel,
    ready: Prefilled,
    parents: Sequence[int],
    texts: Sequence[Tokens],
    most: int,
) -> list[Likelihood]:
    """The likelihood of each text after a row of `ready`; its first token's is in the logits, the others' come after.

    A row is copied only for the texts that go on.
    """
    device = ready.logits.device
    first = torch.tensor([text[0] for text in texts], device=device)
    logs, misses = _look_up(ready.logits[list(parents)], first)
    going = [row for row, text in enumerate(texts) if len(text) > 1]
    if going:
        state = ready.state.select([parents[row] for row in going])
        columns = max(1, most // len(going))
        for start in range(0, max(map(len, texts)) - 1, columns):
            pieces = [texts[row][start : start + columns + 1] for row in going]
            inputs = [piece[:-1] for piece in pieces]
            lengths = torch.tensor([len(piece) for piece in inputs], device=device)
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            ids = _joined(inputs, device)
            found = model(ids.unsqueeze(0), state, Layout.packed(ends, len(ids)))
            state = found.state
            log, missed = _look_up(found.logits[0], _joined([p[1:] for p in pieces], device))
            rows = torch.tensor(going, device=device).repeat_interleave(lengths)
            logs.index_add_(0, rows, log)
            misses.index_add_(0, rows, missed)
    pairs = zip(logs.tolist(), misses.tolist(), strict=True)
    return [Likelihood(log, missed == 0) for log, missed in pairs]


def _look_up(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [tokens] in fp64, and 1 where another token is the likeliest, else 0."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log = logits.to(wide).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return log.double(), (logits.argmax(-1) != tokens).long()


def _joined(pieces: Sequence[Tokens], device: torch.device) -> Tensor:
    return torch.tensor([token for piece in pieces for token in piece], device=device)
