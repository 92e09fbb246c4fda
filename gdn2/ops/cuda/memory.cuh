// The shared memory of the gradients' kernel, and how products read it.
#pragma once
#include "layout.cuh"

// A warp's 16 channels of 64 tokens as columns of products, turned on their way through 2 KiB of shared memory: a
// thread's four channels are two columns of either tile of eight.
struct Columns {
    char* tile;
    DEVICE int at(int row, int chunk) const { return row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4); }
    DEVICE void store(int row, Pair2 x, int lane) const {
        *reinterpret_cast<u32*>(tile + at(row, 0) + 4 * (lane & 3)) = x.x;
        *reinterpret_cast<u32*>(tile + at(row, 1) + 4 * (lane & 3)) = x.y;
    }
    DEVICE void load(u32 (&b)[4], int k, int lane) const {
        load_transposed(b, tile + at(16 * k + (lane & 15), lane >> 4));
    }
};
constexpr int COLUMNS = C * 16 * 2;

// Shared memory: three tiles of values, later each warp's own and the keys' gradients through the states; dR, later
// score gradients as two bf16 each, the lower only inside the halves; A, later the readers' gradients through the
// states.
constexpr int VALUES = C * D * 2, SQUARE = C * C * 2, OWN = C * 8 * 4 + 2 * HALF * 8 * 4;
constexpr int AT_DO = 0, AT_R = VALUES, AT_DZ = 2 * VALUES, AT_HIGH = 3 * VALUES, AT_LOW = AT_HIGH + 2 * SQUARE;
constexpr int AT_DIAGONAL = AT_LOW + SQUARE, AT_A = AT_DIAGONAL + C * 4, AT_READERS = AT_A;
constexpr int AT_CHANNELS = AT_READERS + 2 * VALUES, CHANNELS = 7 * 8 * 4;
constexpr int AT_ERASED = AT_CHANNELS + WARPS * CHANNELS, AT_WRITTEN = AT_ERASED + WARPS * C * 4;
constexpr int MEMORY = AT_WRITTEN + WARPS * C * 4;  // with sums over each warp's channels for gates that have only one
constexpr int AT_KEYS = 0, AT_OWN = VALUES, AT_COLUMNS = AT_HIGH;
static_assert(WARPS * OWN <= 2 * VALUES && SQUARE <= 2 * VALUES, "what comes later fits");
static_assert(WARPS * COLUMNS <= 2 * SQUARE, "so does what comes earlier");

// Byte offsets. Values of two tokens lie together, four channels in 16 bytes: channels 0 and 1 of the first and of the
// second, then 2 and 3, as products want their rows. Of squares 16 bytes of eight rows are read at a time.
DEVICE int value_at(int token, int four) {
    return (token >> 1) * (D * 4) + ((four ^ ((token >> 2) & 1)) << 4) + ((token & 1) << 2);
}
DEVICE int low_at(int row, int chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4); }

template <int N> struct Tile { float v[N][4]; };  // 8 N tokens of a warp's channels

template <int N> DEVICE void multiply(Tile<N>& to, int m, const u32 (&a)[4], int j, u32 b0, u32 b1) {
    mma(to.v[2 * m][2 * j], to.v[2 * m][2 * j + 1], to.v[2 * m + 1][2 * j], to.v[2 * m + 1][2 * j + 1], a, b0, b1);
}

// Where a lane reads squares of score gradients, for 16 rows of a product from m on and 16 of its terms from k on:
// rows, and columns for the transpose. Steps of 16 along a row are bits that no lane sets.
struct Lane {
    int rows, columns, low_rows, low_columns;
    DEVICE explicit Lane(int lane)
        : rows(block_at(lane & 15, lane >> 4)),
          columns(block_at((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)),
          low_rows(low_at(lane & 15, lane >> 4)),
          low_columns(low_at((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)) {}
    DEVICE void square(u32 (&a)[4], const char* from, int m, int k) const {
        load_matrices(a, from + (rows ^ (2 * k)) + 128 * m);
    }
    DEVICE void flipped(u32 (&a)[4], const char* from, int m, int k) const {
        load_transposed(a, from + (columns ^ (2 * m)) + 128 * k);
    }
    DEVICE void low(u32 (&a)[4], const char* from, int m, int k) const {
        load_matrices(a, from + (low_rows ^ (2 * k)) + 64 * m);
    }
    DEVICE void low_flipped(u32 (&a)[4], const char* from, int m, int k) const {
        load_transposed(a, from + (low_columns ^ (2 * m)) + 64 * k);
    }
};

// Rows of values for products along the value channels: 16 rows from m on, for two products along 32 channels.
DEVICE void value_rows(u32 (&a)[2][4], const char* values, int m, int t, int lane) {
    const int token = token_of(m + (lane >> 2)), four = 8 * t + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const Pair4 x = *reinterpret_cast<const Pair4*>(values + value_at(token, four + n));
        a[n][0] = x.x, a[n][1] = x.y, a[n][2] = x.z, a[n][3] = x.w;
    }
}
