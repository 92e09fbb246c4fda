"""Keys and values kept for later tokens: a ring for sliding-window attention, a row that grows for full attention."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gdn2.ops.arguments import require
from gdn2.ops.packing import positions, sequence_ids


class KVCache(NamedTuple):
    """The keys and values [rows, capacity, kv heads, d] that later tokens may attend to.

    Position p of a row lies in slot p mod capacity: one slot per token for full attention, and for sliding-window
    attention until there are as many as the window has, which are a ring from then on. `seen` [rows] int64 counts the
    tokens of each row, since rows of a ragged batch differ.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    @classmethod
    def empty(cls, rows: int, capacity: int, like: Tensor) -> "KVCache":
        """Return a cache without tokens for keys such as `like` [batch, length, kv heads, d]."""
        keys = like.new_zeros(rows, capacity, *like.shape[2:])
        return cls(keys, torch.zeros_like(keys), keys.new_zeros(rows, dtype=torch.int64))

    def reserve(self, tokens: int) -> "KVCache":
        """Return a copy with `tokens` more slots, which would tear a ring that has gone round."""
        require(tokens >= 0, "tokens", tokens, "at least 0")
        room = (0, 0, 0, 0, 0, tokens)
        return KVCache(pad(self.keys, room), pad(self.values, room), self.seen.clone())

    def slot_positions(self) -> Tensor:
        """Return the position [rows, capacity] that each slot holds, negative where it is empty."""
        last = self.seen[:, None] - 1
        slots = torch.arange(self.capacity, device=last.device)
        return last - (last - slots).remainder(max(self.capacity, 1))

    def append(
        self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, inplace: bool = False
    ) -> "KVCache":
        """Return the cache after k and v, a row of it per batch row or per packed sequence."""
        length = k.shape[1]
        added: Tensor | int
        if cu_seqlens is None:
            # What survives of a dense batch is a slice: a step never waits to learn a count.
            added, kept = length, min(length, self.capacity)
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            offsets = torch.arange(length - kept, length, device=k.device)
            k, v = k[:, length - kept :], v[:, length - kept :]
        else:
            rows, offsets = sequence_ids(cu_seqlens, length), positions(cu_seqlens, length)
            added = cu_seqlens.diff()
            kept_tokens = (offsets >= added[rows] - self.capacity).nonzero()[:, 0]
            rows, offsets = rows[kept_tokens], offsets[kept_tokens]
            k, v = k[0, kept_tokens], v[0, kept_tokens]
        slots = (self.seen[rows] + offsets).remainder(max(self.capacity, 1))
        put = Tensor.index_put_ if inplace else Tensor.index_put
        keys, values = put(self.keys, (rows, slots), k), put(self.values, (rows, slots), v)
        return KVCache(keys, values, self.seen.add_(added) if inplace else self.seen + added)
