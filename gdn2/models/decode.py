"""Decoding step by step: the state is overwritten, on a GPU by the replay of a captured graph."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.models.language_model import LanguageModel
from gdn2.models.sampling import Draws, Sampling, sample
from gdn2.models.state import ModelState
from gdn2.ops.backends import in_force


class Decoding(NamedTuple):
    """Rows on their way: the last token of each, and what chooses the next."""

    tokens: Tensor  # [rows]
    state: ModelState
    draws: Draws

    def map(self, change: Callable[[Tensor], Tensor]) -> "Decoding":
        """The same with `change` applied to every tensor."""
        return Decoding(change(self.tokens), self.state.map(change), self.draws.map(change))

    def select(self, rows: Sequence[int]) -> "Decoding":
        """Copies of these rows."""
        index = torch.tensor(rows, device=self.tokens.device)
        return self.map(lambda x: x.index_select(0, index))

    def tensors(self) -> list[Tensor]:
        return [self.tokens, *self.state.tensors(), *self.draws]


@torch.no_grad()
def advance(model: LanguageModel, sampling: Sampling, now: Decoding) -> None:
    """One more token for each row, everything in place."""
    logits, _ = model.next_token_logits(now.tokens.unsqueeze(1), now.state, inplace=True)
    now.tokens.copy_(sample(logits, sampling, now.draws))


class EagerSteps:
    """Steps of one batch, one operation after the other."""

    def __init__(self, model: LanguageModel, sampling: Sampling, start: Decoding) -> None:
        self.model, self.sampling, self.now = model, sampling, start

    def step(self) -> None:
        advance(self.model, self.sampling, self.now)


def casts_anew(kind: str) -> torch.autocast:
    """Autocast as it is, but keeping no weights that it has cast: those go when its block ends, a graph does not."""
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of a GPU: torch's own is of the GPU on which anything was captured first, and sees no work of others."""
    return torch.cuda.Stream(device)


class GraphSteps:
    """Steps captured once in buffers of their own, then replayed."""

    def __init__(self, model: LanguageModel, sampling: Sampling, start: Decoding) -> None:
        with torch.inference_mode(False):  # whatever mode comes next may write to them
            self.now = start.map(torch.clone)
        self._graph = torch.cuda.CUDAGraph()
        device = start.tokens.device
        with torch.cuda.device(device), casts_anew("cuda"):
            main, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(main)
            captured = torch.cuda.graph(
                self._graph,
                stream=capture_stream(device),
                # what other threads do meanwhile, such as copies of a loader, is not captured and no mistake
                capture_error_mode="thread_local",
            )
            try:
                with torch.cuda.stream(aside):  # a capture that fails leaves its own stream behind
                    # compiles kernels, which a graph cannot hold
                    advance(model, sampling, self.now)
                    with captured:
                        advance(model, sampling, self.now)
            finally:  # nothing is given back while the other stream may use it
                main.wait_stream(aside)

    def load(self, start: Decoding) -> None:
        """Go on from other rows of the same shapes."""
        for own, new in zip(self.now.tensors(), start.tensors(), strict=True):
            own.copy_(new)

    def step(self) -> None:
        self._graph.replay()


class Steps:
    """How a model's batches step: by a graph for each batch size on a GPU, else eagerly, and then why.

    Kept from one generation to the next it captures each size once. Its buffers serve one generation at a time.
    """

    most_graphs = 8  # each has the buffers of a batch; the caches of full attention differ from prompt to prompt

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.eager_because = why_eager(model)
        self._graphs: dict[Hashable, GraphSteps] = {}

    def start(self, start: Decoding, sampling: Sampling) -> EagerSteps | GraphSteps:
        """Steps from here on; `start` is not to be used again."""
        if self.eager_because is None:
            key = self._key(start, sampling)
            try:
                if key not in self._graphs:
                    while len(self._graphs) >= self.most_graphs:
                        del self._graphs[next(iter(self._graphs))]
                    self._graphs[key] = GraphSteps(self.model, sampling, start)
            except RuntimeError as failure:
                self.eager_because = f"no CUDA graph: {str(failure).strip().partition(chr(10))[0]}"
                warnings.warn(f"gdn2 decodes eagerly, {self.eager_because}", stacklevel=2)
            else:
                self._graphs[key].load(start)
                return self._graphs[key]
        return EagerSteps(self.model, sampling, start)

    def _key(self, start: Decoding, sampling: Sampling) -> Hashable:
        """What a graph is of: its kernels, its buffers, what autocast makes of them, and the weights where they lie."""
        kind = start.tokens.device.type
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        buffers = tuple((x.shape, x.dtype) for x in start.tensors())
        weights = chain(self.model.parameters(), self.model.buffers())
        return in_force(), sampling, cast_to, buffers, tuple(x.data_ptr() for x in weights)


def why_eager(model: LanguageModel) -> str | None:
    """The reason why a model's steps are not captured; None if they are."""
    device = model.embedding.weight.device
    return None if device.type == "cuda" else f"CUDA graphs need a CUDA GPU, not {device.type}"


class Batch:
    """Rows decoded together, by the number each had at the start; those that end leave.

    Eager steps drop a row at once. A captured batch keeps its size until half of it has ended: an idle row costs less
    than another capture.
    """

    def __init__(self, steps: Steps, start: Decoding, sampling: Sampling) -> None:
        self._steps, self._sampling, self._now = steps, sampling, start
        self._lines = {row: row for row in range(len(start.tokens))}  # where each row lies
        # Nothing is captured before it is needed: a first token may be the last.
        self._running: EagerSteps | GraphSteps | None = None

    def __len__(self) -> int:
        return len(self._lines)

    def tokens(self) -> dict[int, int]:
        """The last token of each row."""
        values = self._now.tokens.tolist()
        return {row: values[line] for row, line in self._lines.items()}

    def step(self, ended: Sequence[int]) -> None:
        """One more token for every row but those that have ended."""
        for row in ended:
            del self._lines[row]
        size = len(self._now.tokens)
        most = size // 2 if isinstance(self._running, GraphSteps) else size - 1
        if len(self) <= most:
            self._now, self._running = self._now.select(list(self._lines.values())), None
            self._lines = {row: line for line, row in enumerate(self._lines)}
        if self._running is None:
            self._running = self._steps.start(self._now, self._sampling)
            self._now = self._running.now
        self._running.step()
