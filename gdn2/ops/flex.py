"""FlexAttention: compiled attention that needs no mask in memory."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gdn2.ops.packing import sequence_ids

FLEX_BLOCK = 128


def flex_spares_a_mask(length: int, window: int | None, packed: bool) -> bool:
    """Whether "auto" would choose FlexAttention on a GPU, unless a window divides the length."""
    if packed:
        return is_compiling() or torch.is_grad_enabled()
    return window is not None and window < length


def causal_block_mask(
    length: int,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Return FlexAttention's mask of a window within packed sequences, on the device of those.

    It is built from the borders of the blocks; `create_block_mask` evaluates all length² pairs.
    """
    reach = length if window is None else window
    ids = torch.zeros(length, dtype=torch.int64, device=device)
    if cu_seqlens is not None:
        ids = sequence_ids(cu_seqlens, length)
    first = torch.arange(0, length, FLEX_BLOCK, device=ids.device)
    last = (first + FLEX_BLOCK - 1).clamp(max=length - 1)
    # Ids never fall, so two blocks touch where their nearest tokens do, and agree throughout where their farthest do.
    touch = (first[:, None] >= first) & (first[:, None] - last < reach)
    touch &= ids[first][:, None] <= ids[last]
    whole = (first[:, None] >= last) & (last[:, None] - first < reach)
    whole &= (ids[last][:, None] == ids[first]) & (first + FLEX_BLOCK <= length)[:, None]

    def allowed(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < reach) & (ids[query] == ids[key])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1).int()[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(touch & ~whole),
        *listed(whole),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=allowed,
        seq_lengths=(length, length),
    )


def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, scale: float) -> Tensor:
    """Return attention to what the mask lets through."""
    length = q.shape[1]
    if block_mask.seq_lengths != (length, length):
        raise ValueError(f"block_mask is for {block_mask.seq_lengths}, expected {length} tokens")
    run = flex_attention if is_compiling() else _compiled()
    y: Tensor = run(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True if q.shape[2] != k.shape[2] else False,  # noqa: SIM210 (as in `attention`)
        # Left to itself, torch 2.11 takes its decoding kernel below 128 tokens and fails to find a configuration.
        kernel_options={"BACKEND": "TRITON"},
    )
    return y.transpose(1, 2)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
