"""Prompts that begin alike are prefilled once.

A recurrent state cannot be cut back to an earlier token, so states are kept at the places where prompts may part: at
the end of each prompt and at every so many tokens of it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import Prefilled, Prompts, prefill, read_prompts
from gdn2.models.state import ModelState
from gdn2.ops.arguments import require


class PrefixCache:
    """The states after the beginnings of earlier prompts; the least recently used is dropped.

    A prompt goes on from its longest known beginning. Where states grow with their tokens, as those of full attention
    do, every entry holds all of its own. Call `clear` when the model's weights have changed.
    """

    def __init__(self, model: LanguageModel, entries: int = 64, every: int = 1024) -> None:
        require(entries >= 1, "entries", entries, "at least 1")
        require(every >= 1, "every", every, "at least 1")
        self.model, self.entries, self.every = model, entries, every
        self.reused = self.computed = 0  # tokens of prompts so far
        self._known: OrderedDict[tuple[int, ...], Prefilled] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def nbytes(self) -> int:
        return sum(entry.state.nbytes + entry.logits.nbytes for entry in self._known.values())

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def prefill(self, prompts: Prompts, *, chunk: int | None = None) -> Prefilled:
        """Logits and state after each prompt, in memory of their own."""
        rows = read_prompts(prompts, self.model.config.vocab_size)
        ready = [self._prefill_one(row, chunk) for row in rows]
        logits = torch.cat([logits for logits, _ in ready])
        return Prefilled(logits, ModelState.join([state for _, state in ready]))

    def _prefill_one(self, row: Tensor, chunk: int | None) -> Prefilled:
        tokens = tuple(row.tolist())
        known = self._longest(tokens)
        place, now = len(known), self._known.get(known)
        self.reused += place
        self.computed += len(tokens) - place
        while place < len(tokens):
            end = min(len(tokens), (place // self.every + 1) * self.every)
            past = None if now is None else now.state
            now = prefill(self.model, [row[place:end]], past, chunk=chunk)
            self._remember(tokens[:end], now)
            place = end
        assert now is not None
        return now

    def _longest(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The longest known beginning, now the most recently used; empty if there is none."""
        fitting = [known for known in self._known if tokens[: len(known)] == known]
        longest = max(fitting, key=len, default=())
        if fitting:
            self._known.move_to_end(longest)
        return longest

    def _remember(self, tokens: tuple[int, ...], reached: Prefilled) -> None:
        self._known[tokens] = reached
        while len(self._known) > self.entries:
            self._known.popitem(last=False)
