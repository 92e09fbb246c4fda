"""Where the tokens of a call lie: which sequence each belongs to and at which position.

A model builds one layout per call and gives it to convolution, rule and attention alike, so that no two of them can
disagree about where a sequence begins. Inside a model tokens are dense [batch, length] or packed [1, tokens]; padding
is dropped on the way in (`pack`) and comes back on the way out (`unpack`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from gdn2.ops.arguments import require
from gdn2.ops.flex import causal_block_mask, flex_spares_a_mask
from gdn2.ops.packing import check_cu_seqlens, kept, positions, sequence_ids
from gdn2.ops.rotary import rotary_table

_INTEGERS = (torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, *_INTEGERS)


class _Tables:
    """What layers make once of a layout, and share.

    It is no field: a copy begins with none. FSDP2 makes one for each block by what it casts fields to, which positions
    in bf16 would not survive.
    """

    _shared: dict[Any, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shared", {})


@dataclass(frozen=True)
class Layout(_Tables):
    """Made by `dense`, `packed`, `from_positions` or `from_mask`."""

    batch: int  # of what is packed, as the caller holds it
    length: int
    rows: int  # sequences, and rows of every state
    # [rows + 1], unless the sequences are the rows of a dense batch.
    cu_seqlens: Tensor | None = None
    # [tokens] places in the flattened batch, unless all of them are tokens.
    tokens: Tensor | None = None
    past: Tensor | None = None  # [rows] tokens of each sequence before this call

    @classmethod
    def dense(cls, batch: int, length: int) -> "Layout":
        """Each row of the batch is a sequence."""
        return cls(batch, length, batch)

    @classmethod
    def packed(cls, cu_seqlens: Tensor, length: int) -> "Layout":
        """A batch of one holds sequences of cumulative lengths `cu_seqlens` [N + 1], `length` tokens in all."""
        check_cu_seqlens(cu_seqlens, 1, length)
        return cls(1, length, cu_seqlens.shape[0] - 1, cu_seqlens)

    @classmethod
    def from_positions(cls, position_ids: Tensor) -> "Layout":
        """A sequence begins with each row of position_ids [batch, length] and wherever the count does not go on."""
        _check_table("position_ids", position_ids, _INTEGERS, "integers")
        batch, length = position_ids.shape
        require(batch * length > 0, "position_ids", ("shape", position_ids), "at least one token")
        begins = torch.ones_like(position_ids, dtype=torch.bool)
        begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
        starts = begins.flatten().nonzero()[:, 0]
        cu_seqlens = torch.cat([starts, starts.new_tensor([batch * length])])
        return cls(batch, length, starts.shape[0], cu_seqlens)

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Layout":
        """Tokens are where the mask [batch, length] is nonzero: a stretch of each row, padded left, right or both."""
        _check_table("mask", mask, _MASKS, "bool or integers")
        batch, length = mask.shape
        real = mask != 0
        if bool(real.all()):
            return cls.dense(batch, length)
        begins = (real & ~pad(real, (1, 0))[:, :-1]).sum(1)
        for row in (begins > 1).nonzero()[:1].flatten().tolist():
            require(False, "mask", f"a gap in row {row}", "padding at the ends")
        ends = real.sum(1).cumsum(0)
        tokens = real.flatten().nonzero()[:, 0]
        return cls(batch, length, batch, torch.cat([ends.new_zeros(1), ends]), tokens)

    def after(self, past: Tensor) -> "Layout":
        """The same tokens behind `past` [rows] earlier ones of their sequences."""
        require(tuple(past.shape) == (self.rows,), "past", ("shape", past), (self.rows,))
        return replace(self, past=past)

    @property
    def is_step(self) -> bool:
        """Whether this is one more token for each sequence."""
        return self.cu_seqlens is None and self.length == 1

    @property
    def lengths(self) -> Tensor | int:
        """Tokens of each sequence, as a number where all agree."""
        return self.length if self.cu_seqlens is None else self.cu_seqlens.diff()

    def pack(self, x: Tensor) -> Tensor:
        """From [batch, length, …] to what the layers see."""
        if self.cu_seqlens is None:
            return x
        flat = x.flatten(0, 1)
        return (flat if self.tokens is None else flat.index_select(0, self.tokens)).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """Back to [batch, length, …], zero where there is padding."""
        if self.cu_seqlens is None:
            return x
        flat = x.squeeze(0)
        if self.tokens is not None:
            whole = flat.new_zeros(self.batch * self.length, *flat.shape[1:])
            flat = whole.index_copy(0, self.tokens, flat)
        return flat.unflatten(0, (self.batch, self.length))

    def last(self, x: Tensor, before: Tensor) -> Tensor:
        """Each sequence's last token of packed x, or its row of `before` [rows, …] where it has none; may be a view."""
        if self.cu_seqlens is None:
            return x[:, -1] if self.length else before
        if x.shape[1] == 0:
            return before
        found = x[0, (self.cu_seqlens[1:] - 1).clamp(min=0)]
        empty = (self.cu_seqlens.diff() == 0).unflatten(0, (-1, *[1] * (before.ndim - 1)))
        return torch.where(empty, before, found)

    def rotary(
        self, width: int, base: float, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens' positions, made once for all layers that ask alike."""
        key = ("rotary", width, base, dtype, device)
        if key not in self._shared:
            with kept():
                self._shared[key] = rotary_table(self._positions(device), width, base, dtype)
        return self._shared[key]

    def block_mask(self, window: int | None, device: torch.device) -> BlockMask | None:
        """FlexAttention's mask, made once for all layers of a window; None where it spares none."""
        packed = self.cu_seqlens is not None
        if device.type != "cuda" or not flex_spares_a_mask(self.length, window, packed):
            return None
        key = ("block_mask", window, device)
        if key not in self._shared:
            length = self.length if self.cu_seqlens is None else self._packed_length
            with kept():
                mask = causal_block_mask(length, window, self.cu_seqlens, device=device)
            self._shared[key] = mask
        return self._shared[key]

    def _positions(self, device: torch.device) -> Tensor:
        """[length], or [batch, length] of what the layers see."""
        if self.cu_seqlens is None:
            here = torch.arange(self.length, device=device)
            return here if self.past is None else self.past[:, None] + here
        here = positions(self.cu_seqlens, self._packed_length)
        if self.past is None:
            return here
        return here + self.past[sequence_ids(self.cu_seqlens, self._packed_length)]

    @property
    def _packed_length(self) -> int:
        return self.batch * self.length if self.tokens is None else self.tokens.shape[0]


def _check_table(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], kind: str) -> None:
    require(isinstance(x, Tensor), name, type(x).__name__, "a tensor")
    require(x.dtype in dtypes, name, x.dtype, kind)
    require(x.ndim == 2, name, ("shape", x), "[batch, length]")
