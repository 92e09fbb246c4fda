// How tensors that pass from kernel to kernel lie in memory.
#pragma once
#include "block.cuh"

// Byte offset of a channel in a tile of so many rows: in rows of D channels, or in blocks of 64 if BLOCKS.
template <int ROWS> DEVICE int stored_at(int row, int channel) {
    if (BLOCKS) return channel / 64 * (ROWS * 128) + block_at(row, channel / 8 % 8) + channel % 8 * 2;
    return 2 * (row * D + channel);
}
