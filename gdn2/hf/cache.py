"""What generation carries from call to call, as transformers holds it."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from gdn2.models.state import ModelState
from gdn2.ops.arguments import require


class Moment(NamedTuple):
    """All that later calls depend on."""

    state: ModelState
    last: Tensor  # [rows, width] the hidden state of each row's last token

    def select(self, indices: Tensor) -> "Moment":
        """These rows, in this order."""
        state = self.state.map(lambda x: _rows(x, indices))
        return Moment(state, _rows(self.last, indices))


class Gdn2Cache(Cache):
    """A ModelState that the model replaces at every call; empty at first.

    transformers' own layers hold one convolution each and one length for all rows. Ours have up to three, Mamba-3 a
    key, a value and an angle besides, and each row counts its own tokens, so that padding on either side costs nothing.
    `state` can be saved, forked and joined like any other; its length here counts columns, padding included, since
    that is how transformers cuts what it has already read.

    A recurrent memory cannot forget its last tokens. Where they may have to be taken back, as in assisted decoding,
    `activate_past_recording` keeps the moment before each call; `crop` then goes back to it, and the tokens of that
    call that stay are read again at the beginning of the next.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.now: Moment | None = None
        self.again: Tensor | None = None  # inputs that the next call has to read first
        self._columns = 0
        self._recording = False
        self._calls: list[tuple[Moment | None, Tensor]] = []  # what was before each, and its inputs

    @property
    def state(self) -> ModelState | None:
        """The model's, without what is still to be read again."""
        return None if self.now is None else self.now.state

    def advance(self, now: Moment, inputs: Tensor) -> None:
        """Take the moment after a call; `inputs` [rows, columns, width] begin with those that were read again."""
        self._columns += inputs.shape[1] - self._columns_again
        if self._recording:
            self._calls.append((self.now, inputs))
        self.now, self.again = now, None

    def activate_past_recording(self) -> None:
        self._recording = True

    def deactivate_past_recording(self) -> None:
        """What was read until now stays."""
        self._recording = False
        self._calls.clear()

    @property
    def is_recording(self) -> bool:
        return self._recording

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −tokens_to_remove columns of the calls since the last crop, which was final."""
        removed = -int(tokens_to_remove)  # older versions of transformers count in tensors
        known = self._columns_again + sum(inputs.shape[1] for _, inputs in self._calls)
        expected = f"{-known} to 0, columns read since activate_past_recording() or the last crop"
        require(0 <= removed <= known, "tokens_to_remove", tokens_to_remove, expected)
        self._columns -= removed
        while removed > 0:
            if self.again is None:
                self.now, self.again = self._calls.pop()
            kept = max(self.again.shape[1] - removed, 0)
            removed -= self.again.shape[1] - kept
            self.again = self.again[:, :kept] if kept else None
        self._calls.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # any

    @property
    def batch_size(self) -> int:
        if self.now is not None:
            return self.now.state.rows
        return -1 if self.again is None else self.again.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.now is not None

    def reset(self) -> None:
        """Forget everything."""
        self.now, self.again, self._columns = None, None, 0
        self._calls.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, as beam search wants them."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.now = None if self.now is None else self.now.select(indices)
        self.again = None if self.again is None else _rows(self.again, indices)
        self._calls = [
            (None if before is None else before.select(indices), _rows(inputs, indices))
            for before, inputs in self._calls
        ]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(max(self.batch_size, 0))  # none of an empty cache
        self.batch_select_indices(rows.repeat_interleave(repeats))

    @property
    def _columns_again(self) -> int:
        return 0 if self.again is None else self.again.shape[1]


def _rows(x: Tensor, indices: Tensor) -> Tensor:
    return x.index_select(0, indices.to(x.device))
