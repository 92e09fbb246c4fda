// Along the value channels: dZ, dV, dW and the gradients of both score matrices.
#pragma once
#include "memory.cuh"
#include "stored.cuh"

// dZ = A^T dR for a warp's 16 value channels, dV and dW; dZ goes to shared memory.
template <bool FULL> DEVICE void value_gradients(
    char* memory, const Chunk<FULL>& chunk, const void* dR, const void* v, const void* w, void* dv, void* dw, int warp,
    int lane) {
    const int group = lane >> 2, channel = 16 * warp + 4 * (lane & 3);
    const Lane places(lane);
    const Columns columns = {memory + AT_COLUMNS + warp * COLUMNS};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const char* rows = static_cast<const char*>(dR) + chunk.index * (C * D * 2);
        columns.store(8 * i + group, read2(rows + stored_at<C>(8 * i + group, channel)), lane);
    }
    __syncwarp();
    Tile<8> dZ = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 b[4];
        columns.load(b, k, lane);
#pragma unroll
        for (int m = 0; m <= k; m++) {
            u32 a[4];
            places.flipped(a, memory + AT_A, 16 * m, 16 * k);
            multiply(dZ, m, a, 0, b[0], b[1]);
            multiply(dZ, m, a, 1, b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = 8 * i + group;
        float V[4], W[4];
        unpack(V, chunk.template load<Pair2>(v, row, channel));
        unpack(W, chunk.template gates<W_WIDTH>(w, row, channel));
#pragma unroll
        for (int e = 0; e < 4; e++) V[e] *= dZ.v[i][e], W[e] *= dZ.v[i][e];
        if (W_WIDTH == D) chunk.store(dw, row, channel, packed(V));
        if (W_WIDTH == 1) {
            const float sum = over_channels(V[0] + V[1] + V[2] + V[3]);
            if ((lane & 3) == 0) reinterpret_cast<float*>(memory + AT_WRITTEN)[C * warp + row] = sum;
        }
        chunk.store(dv, row, channel, packed(W));
        const Pair2 z = packed(dZ.v[i]);
        u32* to = reinterpret_cast<u32*>(memory + AT_DZ + value_at(row, channel >> 2));
        to[0] = z.x, to[2] = z.y;
    }
}

// One row strip of 16 times 32 of dA_qk or dT, as two bf16 each; deep rows are left out inside their half.
DEVICE void store_scores(
    char* memory, int which, int m, int n, const float (&x)[4][4], const char* deep, float* out, int lane) {
    const bool inside = (m < HALF) == (n < HALF);
    char* high = memory + AT_HIGH + which * SQUARE;
    char* low = memory + AT_LOW + which * (SQUARE / 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = m + (lane >> 2) + 8 * r, column = n + 8 * j + 2 * (lane & 3);
            const int token = token_of(row), key = token_of(column);  // the next column is key + 4
            float a = x[j][2 * r], b = x[j][2 * r + 1];
            if (inside && out != nullptr) {
                float* at = out + token * HALF + (key & (HALF - 1));
                at[0] = a, at[4] = b;
            }
            if (which == 0 && column == (row & ~1)) {
                reinterpret_cast<float*>(memory + AT_DIAGONAL)[token] = row & 1 ? b : a;
            }
            if (inside) {
                const bool leave = deep[token] != 0;
                if (leave || key >= token) a = 0.0f;
                if (leave || key + 4 >= token) b = 0.0f;
            }
            const u32 pair = pack(a, b);
            *reinterpret_cast<u32*>(high + block_at(row, column >> 3) + 2 * (column & 7)) = pair;
            if (inside) {
                const int within = column & (HALF - 1);
                *reinterpret_cast<u32*>(low + low_at(row, within >> 3) + 2 * (within & 7)) =
                    pack(a - first(pair), b - second(pair));
            }
        }
    }
}

DEVICE void score_gradients(
    char* memory, const char* deep, float* dA_out, float* dT_out, int warp, int lane) {
    for (int unit = warp; unit < 8; unit += WARPS) {
        const int m = 16 * (unit & 3), n = HALF * (unit >> 2);
        if (m < n) continue;  // all of it above the diagonal
        float dA[4][4] = {}, dT[4][4] = {};
#pragma unroll
        for (int t = 0; t < D / 32; t++) {
            u32 a[2][4], z[2][4];
            value_rows(a, memory + AT_DO, m, t, lane);
            value_rows(z, memory + AT_DZ, m, t, lane);
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                u32 keys[2][4];  // of two tokens: columns of two tiles
                value_rows(keys, memory + AT_R, n + 8 * j, t, lane);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 k0 = keys[i >> 1][i & 1], k1 = keys[i >> 1][2 + (i & 1)];
                    float(&A)[4] = dA[j + (i & 1)], (&T)[4] = dT[j + (i & 1)];
                    mma(A[0], A[1], A[2], A[3], a[i >> 1], k0, k1);
                    mma(T[0], T[1], T[2], T[3], z[i >> 1], k0, k1);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) dT[j][r] = -dT[j][r];
        store_scores(memory, 0, m, n, dA, deep, dA_out, lane);
        store_scores(memory, 1, m, n, dT, deep, dT_out, lane);
    }
}
