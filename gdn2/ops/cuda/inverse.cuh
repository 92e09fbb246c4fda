// The third part: (I + T)^-1 of a strictly lower triangle by blocks (Eq. 21), in fp32 in shared memory.
#pragma once
#include "factors.cuh"

// Diagonal blocks of 16 by substitution, a column a lane.
DEVICE void invert_block(char* memory, int block, int lane) {
    const float* T = reinterpret_cast<const float*>(memory + AT_T) + 16 * block * (WIDE + 1);
    float* inverse = reinterpret_cast<float*>(memory + AT_INVERSE) + 16 * block * (WIDE + 1);
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < i; k++) x[i] -= T[i * WIDE + k] * x[k];
        if (lane < 16) inverse[i * WIDE + lane] = x[i];
    }
}

// Two numbers as two bf16 each.
DEVICE void split(u32& high, u32& rest, float x, float y) {
    high = pack(x, y);
    rest = pack(x - first(high), y - second(high));
}

// Z = sign X Y for blocks of N rows on the diagonal of blocks of 2 N, tiles of 16 x 8 over the warps, by three products
// of bf16 each.
template <int N> DEVICE void multiply_blocks(float* Z, const float* X, const float* Y, float sign, int warp, int lane) {
    const int row = lane >> 2, column = 2 * (lane & 3);
    for (int tile = warp; tile < C / 2 / N * (N / 16) * (N / 8); tile += WARPS) {
        const int at = tile / (N * N / 128) * 2 * N * (WIDE + 1), m = tile % (N * N / 128) / (N / 8) * 16, n = tile % (N / 8) * 8;
        float sum[4] = {};
#pragma unroll
        for (int k = 0; k < N; k += 16) {
            u32 a[4], a_rest[4], b[2], b_rest[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Float2 x = *reinterpret_cast<const Float2*>(
                    X + at + (m + row + 8 * (i & 1)) * WIDE + k + column + 8 * (i >> 1));
                split(a[i], a_rest[i], x.v[0], x.v[1]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float* y = Y + at + (k + column + 8 * i) * WIDE + n + row;
                split(b[i], b_rest[i], y[0], y[WIDE]);
            }
            mma(sum[0], sum[1], sum[2], sum[3], a_rest, b[0], b[1]);
            mma(sum[0], sum[1], sum[2], sum[3], a, b_rest[0], b_rest[1]);
            mma(sum[0], sum[1], sum[2], sum[3], a, b[0], b[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            *reinterpret_cast<Float2*>(Z + at + (m + row + 8 * i) * WIDE + n + column) = {{
                sign * sum[2 * i], sign * sum[2 * i + 1]}};
        }
    }
}

// The lower left block of each pair: - A_22 T_21 A_11.
template <int N> DEVICE void merge_blocks(char* memory, int warp, int lane) {
    float* inverse = reinterpret_cast<float*>(memory + AT_INVERSE);
    float* work = reinterpret_cast<float*>(memory + AT_WORK);
    const float* T = reinterpret_cast<const float*>(memory + AT_T);
    multiply_blocks<N>(work, T + N * WIDE, inverse, 1.0f, warp, lane);
    __syncthreads();
    multiply_blocks<N>(inverse + N * WIDE, inverse + N * (WIDE + 1), work, -1.0f, warp, lane);
    __syncthreads();
}

DEVICE void invert(char* memory, int warp, int lane) {
    float* inverse = reinterpret_cast<float*>(memory + AT_INVERSE);
    for (int n = threadIdx.x; n < C * C / 4; n += THREADS) {  // blocks above the diagonal
        const int row = n / (C / 4), column = n % (C / 4) * 4;
        if (column / 16 > row / 16) *reinterpret_cast<Float4*>(inverse + row * WIDE + column) = {};
    }
    if (warp < 4) invert_block(memory, warp, lane);
    __syncthreads();
    merge_blocks<16>(memory, warp, lane);
    merge_blocks<32>(memory, warp, lane);
}
