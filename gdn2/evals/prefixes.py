"""Prompts into states, those that begin alike once, in calls of bounded size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import CHUNKS, Prefilled, prefill
from gdn2.models.state import ModelState
from gdn2.ops.arguments import require

Tokens: TypeAlias = tuple[int, ...]

WORTH = 64  # tokens that prompts must share before another call for them pays: a chunk of the rule
STATE_BYTES = {"cpu": 2**30, "cuda": 2**33}
LOGIT_BYTES = 2**31  # of all tokens of a call
MOST_ROWS = 512


@dataclass(frozen=True)
class Batching:
    """What one call of a model may hold."""

    tokens: int
    rows: int

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        longest: int,
        rows: int | None = None,
        state_bytes: Mapping[str, int] = STATE_BYTES,
    ) -> "Batching":
        """So many rows, or as many as states of `longest` tokens have room; tokens by what logits take."""
        require(rows is None or rows >= 1, "batch_size", rows, "at least 1")
        device = model.embedding.weight.device.type
        tokens = min(
            CHUNKS.get(device, CHUNKS["cpu"]), LOGIT_BYTES // (4 * model.config.vocab_size)
        )
        if rows is None:
            most = state_bytes.get(device, state_bytes["cpu"])
            room = most // model.new_state(1, longest).nbytes
            return cls(max(1, tokens), max(1, min(room, MOST_ROWS)))
        return cls(max(rows, tokens), rows)


@dataclass(frozen=True)
class Node:
    """Tokens after those of the nodes above it, the prompt that ends with them, and how others go on."""

    tokens: Tokens
    prompt: int | None
    children: list["Node"]


def prefill_all(
    model: LanguageModel, prompts: Sequence[Tokens], batching: Batching
) -> Iterator[tuple[list[int], Prefilled]]:
    """Some prompts at a time, by their numbers, with where decoding begins; all must differ and hold a token."""
    numbers = sorted(range(len(prompts)), key=lambda i: prompts[i])
    return _descend(model, _grow(prompts, numbers, 0), None, batching)


def _grow(prompts: Sequence[Tokens], numbers: list[int], start: int) -> list[Node]:
    """A tree of prompts in their order, from token `start` on, which has a node where enough is shared."""
    nodes = []
    for beginning, alike in groupby(numbers, key=lambda i: prompts[i][start : start + WORTH]):
        group = list(alike)
        if len(group) == 1 or len(beginning) < WORTH:
            nodes += [Node(prompts[i][start:], i, []) for i in group]
            continue
        first, last = prompts[group[0]], prompts[group[-1]]  # in order, so they differ soonest
        pairs = enumerate(zip(first, last, strict=False))
        end = next((i for i, (a, b) in pairs if a != b), len(first))
        whole = group.pop(0) if len(first) == end else None
        nodes.append(Node(first[start:end], whole, _grow(prompts, group, end)))
    return nodes


def _descend(
    model: LanguageModel, nodes: Sequence[Node], above: ModelState | None, batching: Batching
) -> Iterator[tuple[list[int], Prefilled]]:
    """`above` has a row for each node, or there is nothing above."""
    order = sorted(range(len(nodes)), key=lambda i: -len(nodes[i].tokens))
    for batch in batches(order, [len(node.tokens) for node in nodes], batching):
        here = [nodes[i] for i in batch]
        past = None if above is None else above.select(batch)
        ready = prefill(model, [n.tokens for n in here], past, chunk=batching.tokens)
        ends = [row for row, node in enumerate(here) if node.prompt is not None]
        if ends:
            numbers = [number for node in here if (number := node.prompt) is not None]
            yield numbers, select(ready, ends)
        parents = [row for row, node in enumerate(here) for _ in node.children]
        if parents:
            children = [child for node in here for child in node.children]
            yield from _descend(model, children, ready.state.select(parents), batching)


def batches(
    order: Sequence[int], lengths: Sequence[int], batching: Batching
) -> Iterator[list[int]]:
    """The items in their order, in lists of one item or of no more rows and tokens than a call may hold."""
    batch: list[int] = []
    tokens = 0
    for i in order:
        if batch and (len(batch) == batching.rows or tokens + lengths[i] > batching.tokens):
            yield batch
            batch, tokens = [], 0
        batch.append(i)
        tokens += lengths[i]
    if batch:
        yield batch


def select(ready: Prefilled, rows: list[int]) -> Prefilled:
    """These rows; itself where they are all in order."""
    if rows == list(range(ready.state.rows)):
        return ready
    return Prefilled(ready.logits[rows], ready.state.select(rows))
