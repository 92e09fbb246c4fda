"""Where the tokens of a call lie, from what transformers says about it."""

import torch
from torch import Tensor

from gdn2.layers.layout import Layout
from gdn2.ops.arguments import require


def layout_of(
    batch: int,
    length: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Layout:
    """The layout of a call [batch, length].

    Packed sequences are told by cumulative lengths, by their numbers or by positions that begin again, as
    `DataCollatorWithFlattening` gives them; padding, on any side, by the mask's last `length` columns. Positions count
    for nothing else: a token's position is the number of tokens before it.
    """
    real = _real(attention_mask, batch, length)
    if cu_seq_lens is not None or seq_idx is not None:
        fits = real is None
        require(fits, "attention_mask", "padding beside packed sequences", "none: leave it out")
    if cu_seq_lens is not None:
        require(batch == 1, "cu_seq_lens_q", f"one beside {batch} rows", "one row")
        return Layout.packed(cu_seq_lens, length)
    for name, table in {"position_ids": position_ids, "seq_idx": seq_idx}.items():
        # One row may stand for all, as the positions do that transformers makes.
        fits = table is None or tuple(table.shape) in ((batch, length), (1, length))
        require(fits, name, None if table is None else ("shape", table), (batch, length))
    if seq_idx is not None:
        return _packed(seq_idx[:, 1:] != seq_idx[:, :-1], batch, length)
    if real is not None:
        return _padded(real, position_ids)
    if position_ids is not None:
        return _packed(position_ids[:, 1:] != position_ids[:, :-1] + 1, batch, length)
    return Layout.dense(batch, length)


def _real(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Where tokens are, if there is padding."""
    if mask is None:
        return None
    fits = mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= length
    require(fits, "attention_mask", ("shape", mask), f"({batch}, at least {length})")
    real = mask[:, mask.shape[1] - length :] != 0
    return None if bool(real.all()) else real


def _packed(begins: Tensor, batch: int, length: int) -> Layout:
    """A sequence begins with each row and, at column i + 1, where begins[:, i] is."""
    if not bool(begins.any()):
        return Layout.dense(batch, length)
    first = begins.new_ones(begins.shape[0], 1)
    starts = torch.cat([first, begins], 1).expand(batch, length).flatten().nonzero()[:, 0]
    cu_seqlens = torch.cat([starts, starts.new_tensor([batch * length])])
    return Layout(batch, length, starts.shape[0], cu_seqlens)


def _padded(real: Tensor, position_ids: Tensor | None) -> Layout:
    """Tokens where `real` is, a sequence in each row, or several where position 0 comes again.

    Text that was generated after right padding leaves gaps in the rows, which are dropped as well.
    """
    batch, length = real.shape
    ends = real.sum(1).cumsum(0)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends])
    tokens = real.flatten().nonzero()[:, 0]
    if position_ids is not None:
        begins = (position_ids.expand(batch, length) == 0).flatten()[tokens].nonzero()[:, 0]
        starts = torch.cat([begins, cu_seqlens[:-1][real.any(1)]]).unique()
        if starts.shape[0] > int(real.any(1).sum()):
            cu_seqlens = torch.cat([starts, ends[-1:]])
    return Layout(batch, length, cu_seqlens.shape[0] - 1, cu_seqlens, tokens)
