// Where tokens and channels lie: in registers, in shared memory and in the operands.
//
// Products do not mind how tokens and channels are numbered. Along the key channels a thread holds four tokens next to
// each other of either half, 4 (lane / 4) + i, so that sums over tokens are mostly its own; as rows of a product these
// are 8 i + lane / 4. Of each eight channels it holds two, 2 (lane % 4) + e.
#pragma once
#include "warp.cuh"

constexpr int C = 64, HALF = 32, WARPS = D / 16, THREADS = 32 * WARPS;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LIFT = 288230376151711744.0f, LOWER = 1.0f / LIFT;  // 2^58: see gdn2/ops/triton/tiles.py
constexpr float DEEPEST = -122.0f;  // log2 below which no row is left that meets a key in its half

// Shared memory: three tiles of values, later each warp's own and the keys' gradients through the states; score
// gradients as two bf16 each, the lower only inside the halves; A, later the readers' gradients through the states.
constexpr int VALUES = C * D * 2, SQUARE = C * C * 2, OWN = C * 8 * 4 + 2 * HALF * 8 * 4;
constexpr int AT_DO = 0, AT_R = VALUES, AT_DZ = 2 * VALUES, AT_HIGH = 3 * VALUES, AT_LOW = AT_HIGH + 2 * SQUARE;
constexpr int AT_DIAGONAL = AT_LOW + SQUARE, AT_A = AT_DIAGONAL + C * 4, AT_READERS = AT_A;
constexpr int AT_CHANNELS = AT_READERS + 2 * VALUES, CHANNELS = 7 * 8 * 4, MEMORY = AT_CHANNELS + WARPS * CHANNELS;
constexpr int AT_KEYS = 0, AT_OWN = VALUES;
static_assert(WARPS * OWN <= 2 * VALUES && SQUARE <= 2 * VALUES, "what comes later fits");

// Byte offsets. Values of two tokens lie together, four channels in 16 bytes: channels 0 and 1 of the first and of the
// second, then 2 and 3, as products want their rows. Of squares 16 bytes of eight rows are read at a time.
DEVICE int value_at(int token, int four) {
    return (token >> 1) * (D * 4) + ((four ^ ((token >> 2) & 1)) << 4) + ((token & 1) << 2);
}
DEVICE int square_at(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
DEVICE int low_at(int row, int chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4); }

// The token that is row (or column) p of a product.
DEVICE int token_of(int p) { return (p & HALF) + 4 * (p & 7) + ((p >> 3) & 3); }

template <int N> struct Tile { float v[N][4]; };  // 8 N tokens of a warp's channels
template <int N> struct Packed { Pair2 v[N]; };

template <int N> DEVICE void multiply(Tile<N>& to, int m, const u32 (&a)[4], int j, u32 b0, u32 b1) {
    mma(to.v[2 * m][2 * j], to.v[2 * m][2 * j + 1], to.v[2 * m + 1][2 * j], to.v[2 * m + 1][2 * j + 1], a, b0, b1);
}

DEVICE void unpack(float (&to)[4], Pair2 from) {
    to[0] = first(from.x), to[1] = second(from.x), to[2] = first(from.y), to[3] = second(from.y);
}

DEVICE Pair2 packed(const float (&x)[4]) { return {pack(x[0], x[1]), pack(x[2], x[3])}; }

// Four tokens and two channels of a thread in one half.
struct Narrow { float v[4][2]; };
struct Four { u32 v[4]; };  // the same as bf16

DEVICE float one_of(u32 pair, int e) { return e == 0 ? first(pair) : second(pair); }

DEVICE void multiply(Narrow& to, int m, const u32 (&a)[4], u32 b0, u32 b1) {
    mma(to.v[2 * m][0], to.v[2 * m][1], to.v[2 * m + 1][0], to.v[2 * m + 1][1], a, b0, b1);
}

// Sums over the tokens of a half that come before each; nothing is added and taken away again.
DEVICE void sums_before(Narrow& x) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float total = x.v[0][e] + x.v[1][e] + x.v[2][e] + x.v[3][e];
#pragma unroll
        for (int by = 4; by < 32; by *= 2) total = add_lower(total, by);
        float before = lower(total, 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float own = x.v[i][e];
            x.v[i][e] = before;
            before += own;
        }
    }
}

DEVICE float over_tokens(float x) {
    x += from_other(x, 4);
    x += from_other(x, 8);
    return x + from_other(x, 16);
}

// Where a lane reads squares of score gradients, for 16 rows of a product from m on and 16 of its terms from k on:
// rows, and columns for the transpose. Steps of 16 along a row are bits that no lane sets.
struct Lane {
    int rows, columns, low_rows, low_columns;
    DEVICE explicit Lane(int lane)
        : rows(square_at(lane & 15, lane >> 4)),
          columns(square_at((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)),
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

// A chunk of one head; FULL if it has all its tokens.
template <bool FULL> struct Chunk {
    i64 index, first;  // of chunk and head, and of its first token's first channel in [L, HEADS, D]
    int length;

    DEVICE bool knows(int token) const { return FULL || token < length; }
    // Where a token's channel is, in an operand of elements of so many bytes.
    template <class T, int BYTES = 2> DEVICE T* at(const void* operand, int token, int channel) const {
        const char* chunk = static_cast<const char*>(operand) + BYTES * first;
        return reinterpret_cast<T*>(const_cast<char*>(chunk + BYTES * (token * (HEADS * D) + channel)));
    }
    template <class T, int BYTES = 2> DEVICE T load(const void* operand, int token, int channel) const {
        return knows(token) ? *at<T, BYTES>(operand, token, channel) : T{};
    }
    template <class T, int BYTES = 2> DEVICE void store(void* operand, int token, int channel, T x) const {
        if (knows(token)) *at<T, BYTES>(operand, token, channel) = x;
    }
    DEVICE Four load_pairs(const void* operand, int token, int channel) const {
        Four to;
#pragma unroll
        for (int i = 0; i < 4; i++) to.v[i] = load<u32>(operand, token + i, channel);
        return to;
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
