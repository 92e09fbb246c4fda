// The second part: scores A_qk and T, by tiles of 16 rows, and row by row where rows are deep.
#pragma once
#include "factors.cuh"

// A warp's scores: 16 rows of queries or erase rows, with the keys of their half, in the second half also with those
// before it. Of the warps that share a scheduler one has rows of the second half and one of the first.
struct Task {
    int half, erase, row;
    DEVICE explicit Task(int n) : half(n < 4), erase((n >> 1) & 1), row(HALF * half + 16 * (n & 1)) {}
};
constexpr int TASKS = 8 / WARPS;
struct Scores { float v[2][4][4]; };  // with keys of the own half, and before it

DEVICE void score_tiles(Scores& P, const char* memory, const Task& task, int lane) {
    const int row = task.row + (lane & 15), key = (lane & 7) + ((lane >> 4) << 3);
    const char* rows = memory + (task.erase ? AT_ERASE : AT_QUERIES);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[4], a_rest[4];
        load_matrices(a, rows + tile_at(row, 2 * k + (lane >> 4)));
        load_matrices(a_rest, rows + READERS + tile_at(row, 2 * k + (lane >> 4)));
#pragma unroll
        for (int before = 0; before < 2; before++) {
            if (before && task.half == 0) continue;
            const char* keys = memory + (before ? AT_BEFORE : AT_KEYS + HALF * task.half * (D * 2));
            const int rest = (before ? HALF : C) * (D * 2);
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                u32 b[4], b_rest[4];
                load_matrices(b, keys + tile_at(8 * n + key, 2 * k + ((lane >> 3) & 1)));
                load_matrices(b_rest, keys + rest + tile_at(8 * n + key, 2 * k + ((lane >> 3) & 1)));
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float(&x)[4] = P.v[before][n + j];
                    mma(x[0], x[1], x[2], x[3], a_rest, b[2 * j], b[2 * j + 1]);
                    mma(x[0], x[1], x[2], x[3], a, b_rest[2 * j], b_rest[2 * j + 1]);
                    mma(x[0], x[1], x[2], x[3], a, b[2 * j], b[2 * j + 1]);
                }
            }
        }
    }
}

DEVICE unsigned short bf16(float x) { return static_cast<unsigned short>(pack(x, 0.0f)); }

// Put a row of scores with keys from a first one on where its token is. The same column of four tiles are four keys next
// to each other; odd groups of lanes begin with the other four, for the sake of the banks.
DEVICE void place_row(char* memory, const Task& task, int token, int first_key, float (&x)[2][4], int lane) {
    const int key = first_key + 8 * (lane & 3);
    if (task.erase) {
        float* to = reinterpret_cast<float*>(memory + AT_T + token * WIDE_ROW) + key;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const bool later = n != ((lane >> 2) & 1);
            Float4 four;
#pragma unroll
            for (int i = 0; i < 4; i++) four.v[i] = later ? x[1][i] : x[0][i];
            *reinterpret_cast<Float4*>(to + (later ? 4 : 0)) = four;
        }
    } else {
        *reinterpret_cast<Pair4*>(memory + AT_A_QK + token * NARROW_ROW + 2 * key) = {
            pack(x[0][0], x[0][1]), pack(x[0][2], x[0][3]), pack(x[1][0], x[1][1]), pack(x[1][2], x[1][3])};
    }
}

// Put all of them there, without what is not causal and without deep rows inside their half.
DEVICE void place_tiles(char* memory, const Scores& P, const Task& task, const int* deep, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = token_of(task.row + (lane >> 2) + 8 * r);
        const bool leave = deep[token] != 0;
        float x[2][4];
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int key = HALF * task.half + 8 * (lane & 3) + 4 * e + n;
                x[e][n] = key < token + (1 - task.erase) && !leave ? P.v[0][n][2 * r + e] : 0.0f;
            }
        place_row(memory, task, token, HALF * task.half, x, lane);
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int n = 0; n < 4; n++) x[e][n] = task.half ? P.v[1][n][2 * r + e] : 0.0f;
        place_row(memory, task, token, HALF * (1 - task.half), x, lane);  // nothing above the diagonal
    }
}

// Scores of one deep row inside its half by one warp, each pair of tokens with a decay of its own; row by row upwards.
template <bool FULL>
DEVICE void deep_row(char* memory, const Chunk<FULL>& chunk, const Inputs& x, int token, int lane) {
    constexpr int E = D / 32;
    float Q[E], X[E], decay[E];
    float own = 0.0f;
#pragma unroll
    for (int e = 0; e < E; e++) {
        const int channel = 32 * e + lane;
        const float key = chunk.template number<K_HEADS>(x.k, token, channel);
        const float gate = B_WIDTH == D ? chunk.template number<B_HEADS>(x.b, token, channel)
                                        : first(chunk.template gate<B_WIDTH, B_HEADS>(x.b, token, 0));
        Q[e] = chunk.template number<K_HEADS>(x.q, token, channel) * x.scale, X[e] = gate * key, decay[e] = 0.0f;
        own += Q[e] * key;
    }
    own = over_tokens(over_channels(own));
    unsigned short* A_qk = reinterpret_cast<unsigned short*>(memory + AT_A_QK + token * NARROW_ROW);
    float* T = reinterpret_cast<float*>(memory + AT_T + token * WIDE_ROW);
    if (lane == 0) A_qk[token] = bf16(own);
    for (int key = token - 1; key >= (token & HALF); key--) {
        float q = 0.0f, t = 0.0f;
#pragma unroll
        for (int e = 0; e < E; e++) {
            decay[e] += at_least(chunk.template decays<G_WIDTH, float>(x.g, key + 1, 32 * e + lane) * LOG2E, -185.0f);
            const float met = chunk.template number<K_HEADS>(x.k, key, 32 * e + lane) * exp2_fast(decay[e]);
            q += Q[e] * met, t += X[e] * met;
        }
        q = over_tokens(over_channels(q)), t = over_tokens(over_channels(t));
        if (lane == 0) A_qk[key] = bf16(q), T[key] = t;
    }
}
