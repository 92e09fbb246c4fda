// Blocks: 64 channels of some rows, as products of four warps read them from shared memory. They lie in memory so too.
#pragma once
#include "warp.cuh"

constexpr int BLOCK = 64 * 128;  // bytes of one with 64 rows

// Where 16 bytes of a row are: those of eight rows lie in different banks.
DEVICE int block_at(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
