"""Tensors in blocks, as CUDA kernels pass them on (`stored.cuh`): factors, states, residuals and gradients of these."""

import torch
from torch import Tensor

EIGHT = torch.arange(8)


def to_blocks(rows: Tensor) -> Tensor:
    """Reorder [M, H, rows, d]: blocks of 64 columns, in each row 16 bytes exchanged by the row's number."""
    chunks = rows.unflatten(-1, (-1, 8, 8)).transpose(2, 3)  # [M, H, blocks, rows, 8, 8]
    return exchanged(chunks).reshape(rows.shape)


def to_rows(blocks: Tensor) -> Tensor:
    """The opposite."""
    M, H, C, d = blocks.shape
    return exchanged(blocks.view(M, H, d // 64, C, 8, 8)).transpose(2, 3).reshape(blocks.shape)


def exchanged(chunks: Tensor) -> Tensor:
    """Each row's chunk i in the place of i xor the row's number; done twice, it changes nothing."""
    places = (EIGHT[:, None] ^ EIGHT).repeat(chunks.shape[3] // 8, 1).to(chunks.device)
    return chunks.gather(4, places[..., None].expand(chunks.shape))
