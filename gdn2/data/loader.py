"""Rows of text: windows of a stream of tokens in an order that the seed decides, epoch after epoch.

The stream is cut every length + 1 tokens, as the released code cuts it; the first `length` of a window are the ids, the
last `length` the targets. Each epoch has cuts and an order of its own.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gdn2.data.batch import IGNORED, Batch, check_rows, pack
from gdn2.data.checks import require
from gdn2.data.shuffle import draw, permute
from gdn2.data.stream import Stream

Documents = Literal["run_on", "apart"]


class Windows:
    """Windows of a stream, or of its tokens begin … end − 1.

    Documents run on into each other, as in the paper, or are kept apart: then a sequence ends where its document does,
    and no token has to be predicted from the document before. Without shuffling every epoch is the stream in order.
    """

    def __init__(
        self,
        stream: Stream,
        length: int,
        *,
        seed: int,
        begin: int = 0,
        end: int | None = None,
        documents: Documents = "run_on",
        shuffle: bool = True,
    ) -> None:
        self._stream, self._begin, self._seed = stream, begin, seed
        self._documents, self._shuffle = documents, shuffle
        self.length, self.vocab_size = length, stream.vocab_size
        tokens, window = (stream.tokens if end is None else end) - begin, length + 1
        require(
            tokens >= window, "length", length, f"at most {tokens - 1}: there are {tokens} tokens"
        )
        # One window less than fits leaves room to move the cuts, and all epochs are equally long.
        self.count = max(1, tokens // window - 1) if shuffle else tokens // window
        self._room = tokens - self.count * window

    def batch(self, first: int, rows: int) -> Batch:
        check_rows(first, rows)
        starts = self._starts(first + np.arange(rows)).tolist()
        windows = np.empty((rows, self.length + 1), np.int64)
        for window, start in zip(windows, starts, strict=True):
            window[:] = self._stream.read(start, self.length + 1)
        tokens = torch.from_numpy(windows)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self._documents == "run_on":
            return Batch(ids, targets)
        begins = self._begins(starts)
        counted = targets.masked_fill(begins[:, 1:], IGNORED)  # a copy: of one row, both are views
        return pack(ids, counted, begins[:, :-1])

    def _starts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place in the stream of the first token of each row."""
        epochs, places = np.divmod(rows, self.count)
        moves = np.zeros_like(places)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                places[here] = permute(places[here], self.count, self._seed, epoch)
                moves[here] = draw(self._room + 1, self._seed, epoch)
        return self._begin + moves + places * (self.length + 1)

    def _begins(self, starts: list[int]) -> Tensor:
        """Whether a document begins with each token [rows, length + 1] of the windows."""
        begins = torch.zeros(len(starts), self.length + 1, dtype=torch.bool)
        for row, start in zip(begins, starts, strict=True):
            row[torch.from_numpy(self._stream.starts(start, self.length + 1))] = True
        return begins
