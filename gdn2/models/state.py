"""What a model carries from one call to the next, for a batch of sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn2.layers.mixers import MixerState
from gdn2.ops.arguments import require, whole
from gdn2.ops.kv_cache import KVCache


@dataclass(frozen=True)
class ModelState:
    """One state per block, and how many tokens each row has seen. Every tensor has a row per sequence.

    Recurrent mixers carry the same bytes whatever the tokens seen, sliding windows at most a window of them, full
    attention all of them. A call returns a new state and leaves the given one as it was, unless it is `inplace`: so a
    snapshot costs nothing between calls that are not, and is a `clone` between those that are.
    """

    layers: tuple[MixerState, ...]
    seen: Tensor  # [rows] int64
    config: str  # digest of the config of the model it belongs to

    @classmethod
    def join(cls, states: Sequence["ModelState"]) -> "ModelState":
        """The rows of several states of one model, one after the other; caches get the room of the largest."""
        require(len(states) > 0, "states", "none", "at least one")
        first = states[0]
        for state in states:
            state.check_config(first.config)
        layers = zip(*(state.layers for state in states), strict=True)
        seen = torch.cat([state.seen for state in states])
        return cls(tuple(map(_join_layers, layers)), seen, first.config)

    @property
    def rows(self) -> int:
        return self.seen.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, block by block, `seen` last."""
        for layer in self.layers:
            yield from layer
        yield self.seen

    def map(self, change: Callable[[Tensor], Tensor]) -> "ModelState":
        """The state with `change` applied to every tensor: to copy it or to move it."""
        layers = tuple(type(layer)(*map(change, layer)) for layer in self.layers)
        return ModelState(layers, change(self.seen), self.config)

    def clone(self) -> "ModelState":
        """A copy in memory of its own."""
        return self.map(torch.clone)

    def fork(self, copies: int) -> "ModelState":
        """Each row `copies` times in a row, so that one prompt goes on in as many ways."""
        require(copies >= 1, "copies", copies, "at least 1")
        return self.map(lambda x: x.repeat_interleave(copies, 0))

    def select(self, rows: Sequence[int] | Tensor) -> "ModelState":
        """Copies of these rows, in this order."""
        wanted = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        for row in wanted:
            fits = type(row) is not bool and 0 <= whole("rows", row) < self.rows
            require(fits, "rows", row, f"numbers from 0 to {self.rows - 1}")
        index = torch.tensor(wanted, dtype=torch.int64, device=self.seen.device)
        return self.map(lambda x: x.index_select(0, index))

    def rollback(self, snapshot: "ModelState") -> "ModelState":
        """Overwrite every tensor with an earlier clone's, in place, and return itself."""
        snapshot.check_config(self.config)
        pairs = list(zip(self.tensors(), snapshot.tensors(), strict=True))
        for own, old in pairs:
            require(own.shape == old.shape, "snapshot", ("shape", old), ("a clone's", own))
        for own, old in pairs:
            own.copy_(old)
        return self

    def check_config(self, digest: str) -> None:
        """Raise ValueError unless this is a state of the model whose config has this digest."""
        require(self.config == digest, "state", f"one of model {self.config}", f"of model {digest}")


def _join_layers(layers: tuple[MixerState, ...]) -> MixerState:
    first = layers[0]
    if isinstance(first, KVCache):
        caches = [layer for layer in layers if isinstance(layer, KVCache)]
        most = max(cache.capacity for cache in caches)
        layers = tuple(cache.reserve(most - cache.capacity) for cache in caches)
    return type(first)(*map(torch.cat, zip(*layers, strict=True)))
