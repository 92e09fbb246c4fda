// What `plain_scan.cu` is made of: tiles of a chunk in shared memory, states as operands, how results are turned.
//
// A warp owns 16 value channels of the state as S^T [16, D] in registers, as results of products lie there: rounded in
// pairs it is an operand again, so that a step needs no other warp. Half of the warps carry states; the others follow
// one step behind and do what no state waits for.
#pragma once
#include "warp.cuh"

constexpr int C = 64, CARRIERS = VALUES / 16, THREADS = 64 * CARRIERS;
constexpr int TILE = C * D * 2, SQUARE = C * C * 2, PART = C * VALUES * 2;

// Byte offsets in a tile with rows of so many bytes: eight rows that are read together lie in different banks.
template <int BYTES> DEVICE int row_at(int row, int chunk) {
    constexpr int CHUNKS = BYTES / 16 < 8 ? BYTES / 16 : 8;
    return row * BYTES + ((chunk ^ (row / (8 / CHUNKS) & (CHUNKS - 1))) << 4);
}

// Rows of so many bytes, the given distance apart, by all threads; zeros after those that are known.
template <int ROWS, int BYTES>
DEVICE void copy_rows(char* to, const char* from, i64 distance, int known = ROWS) {
    for (int n = threadIdx.x; n < ROWS * (BYTES / 16); n += THREADS) {
        const int row = n / (BYTES / 16), chunk = n % (BYTES / 16);
        copy_async(to + row_at<BYTES>(row, chunk), from + row * distance + 16 * chunk, row < known);
    }
}

// Where a lane reads or writes 16 rows from the given one on and two chunks: as four matrices whose first two are eight
// rows of either chunk, or sixteen rows of the first.
template <int BYTES> DEVICE int by_chunks(int row, int chunk, int lane) {
    return row_at<BYTES>(row + (lane & 7) + ((lane >> 4) << 3), chunk + ((lane >> 3) & 1));
}
template <int BYTES> DEVICE int by_rows(int row, int chunk, int lane) {
    return row_at<BYTES>(row + (lane & 15), chunk + (lane >> 4));
}

// N tiles of 16 rows, the warp's value channels, and 8 columns each, as results of products.
template <int N> struct Result { float v[N][4]; };
// The same rounded, as operands of products along those columns.
template <int N> struct Factor { Pair4 v[N / 2]; };

template <int N> DEVICE Factor<N> as_factor(const Result<N>& x) {
    Factor<N> to;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        to.v[n / 2] = {pack(x.v[n][0], x.v[n][1]), pack(x.v[n][2], x.v[n][3]), pack(x.v[n + 1][0], x.v[n + 1][1]),
                       pack(x.v[n + 1][2], x.v[n + 1][3])};
    }
    return to;
}

DEVICE void multiply(float (&to)[4], const Pair4& a, u32 b0, u32 b1) {
    const u32 rows[4] = {a.x, a.y, a.z, a.w};
    mma(to[0], to[1], to[2], to[3], rows, b0, b1);
}

// to += a B^T for the rows of a tile B, which are columns of the result; only those from 16 k on meet a's columns 16 k
// to 16 k + 15 if B is a lower triangle.
template <bool LOWER, int BYTES, int N, int K>
DEVICE void times_rows(Result<N>& to, const Factor<K>& a, const char* tile, int lane) {
#pragma unroll
    for (int k = 0; k < K / 2; k++)
#pragma unroll
        for (int n = LOWER ? k : 0; n < N / 2; n++) {
            u32 b[4];
            load_matrices(b, tile + by_chunks<BYTES>(16 * n, 2 * k, lane));
            multiply(to.v[2 * n], a.v[k], b[0], b[1]);
            multiply(to.v[2 * n + 1], a.v[k], b[2], b[3]);
        }
}

// to += a B.
template <int BYTES, int N, int K>
DEVICE void times_columns(Result<N>& to, const Factor<K>& a, const char* tile, int lane) {
#pragma unroll
    for (int k = 0; k < K / 2; k++)
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            u32 b[4];
            load_transposed(b, tile + by_rows<BYTES>(16 * k, 2 * n, lane));
            multiply(to.v[2 * n], a.v[k], b[0], b[1]);
            multiply(to.v[2 * n + 1], a.v[k], b[2], b[3]);
        }
}

// A carrier's channels of a part [C, VALUES], turned: an operand along tokens.
DEVICE Factor<C / 8> turned(const char* part, int carrier, int lane) {
    Factor<C / 8> to;
#pragma unroll
    for (int k = 0; k < C / 16; k++) {
        u32 x[4];
        load_transposed(x, part + by_chunks<2 * VALUES>(16 * k, 2 * carrier, lane));
        to.v[k] = {x[0], x[1], x[2], x[3]};
    }
    return to;
}

// S^T from and to [D, D] in fp32, beginning at the warp's first value channel.
DEVICE void load_state(Result<D / 8>& S, const float* from, int lane) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            S.v[n][e] = from[(8 * n + 2 * (lane & 3) + (e & 1)) * D + (lane >> 2) + 8 * (e >> 1)];
        }
}

DEVICE void store_state(const Result<D / 8>& S, float* to, int lane) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            to[(8 * n + 2 * (lane & 3) + (e & 1)) * D + (lane >> 2) + 8 * (e >> 1)] = S.v[n][e];
        }
}

// From a carrier to the warp that follows it: each thread finds what the same lane left.
template <int N> DEVICE void leave(char* at, const Factor<N>& x, int lane) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) reinterpret_cast<Pair4*>(at)[32 * n + lane] = x.v[n];
}

template <int N> DEVICE Factor<N> find(const char* at, int lane) {
    Factor<N> to;
#pragma unroll
    for (int n = 0; n < N / 2; n++) to.v[n] = reinterpret_cast<const Pair4*>(at)[32 * n + lane];
    return to;
}
constexpr int STATE = D / 16 * 512;  // bytes that a state takes so

// Turn a warp's channels of N columns back and store them as rows of 16, the given number of bytes apart, of which so
// many count; through the warp's own part of shared memory.
template <int N> DEVICE void store_turned(char* own, const Factor<N>& x, char* to, i64 distance, int count, int lane) {
    __syncwarp();  // nobody reads what was there before
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        store_transposed(own + by_chunks<32>(16 * n, 0, lane), x.v[n].x, x.v[n].y, x.v[n].z, x.v[n].w);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int row = 16 * i + (lane >> 1), chunk = lane & 1;
        const Pair4 found = *reinterpret_cast<const Pair4*>(own + row_at<32>(row, chunk));
        if (row < count) *reinterpret_cast<Pair4*>(to + row * distance + 16 * chunk) = found;
    }
}
