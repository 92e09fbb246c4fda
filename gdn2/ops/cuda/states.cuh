// Through the states at both ends of a chunk.
#pragma once
#include "memory.cuh"
#include "stored.cuh"

// Values times a state transposed, for a warp's 16 key channels.
DEVICE void through_state(
    Tile<8>& to, const char* values, const Pair4 (&state)[2][D / 32], int lane) {
#pragma unroll
    for (int t = 0; t < D / 32; t++) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
            u32 a[2][4];
            value_rows(a, values, 16 * m, t, lane);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                multiply(to, m, a[0], j, state[j][t].x, state[j][t].y);
                multiply(to, m, a[1], j, state[j][t].z, state[j][t].w);
            }
        }
    }
}

DEVICE void load_state(Pair4 (&to)[2][D / 32], const void* states, i64 chunk, int warp, int lane) {
    const int group = lane >> 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int channel = 16 * warp + 8 * j + group;
        const char* state = static_cast<const char*>(states) + chunk * (D * D * 2);
#pragma unroll
        for (int t = 0; t < D / 32; t++) to[j][t] = read4(state + stored_at<D>(channel, 32 * t + 8 * (lane & 3)));
    }
}

DEVICE float dot(u32 a, u32 b) { return first(a) * first(b) + second(a) * second(b); }

// Where a thread keeps what came through the states to queries, erase rows or keys of one half, for channels 8 j on.
DEVICE Pair4* kept(char* memory, int which, int j, int half) {
    const int at = which == 2 ? AT_KEYS : AT_READERS + which * VALUES;
    return reinterpret_cast<Pair4*>(memory + at + ((2 * j + half) * THREADS + threadIdx.x) * 16);
}

DEVICE void keep(char* memory, int which, const Tile<8>& x) {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            *kept(memory, which, j, i / 4) = {
                pack(x.v[i][2 * j], x.v[i][2 * j + 1]), pack(x.v[i + 1][2 * j], x.v[i + 1][2 * j + 1]),
                pack(x.v[i + 2][2 * j], x.v[i + 2][2 * j + 1]), pack(x.v[i + 3][2 * j], x.v[i + 3][2 * j + 1])};
        }
}

// What comes through the states: dO S^T, -dZ S^T, which are kept, R dS^T, and rowsum(S dS) of channels lane / 4 + 8 j.
DEVICE void state_gradients(
    Tile<8>& tails, float (&d_state)[2], char* memory, const Pair4 (&S)[2][D / 32], const void* ends, i64 chunk,
    int warp, int lane) {
    {
        Tile<8> dQ = {};
        through_state(dQ, memory + AT_DO, S, lane);
        keep(memory, 0, dQ);
    }
    Pair4 dS[2][D / 32];
    load_state(dS, ends, chunk, warp, lane);
    {
        Tile<8> dE = {};
        through_state(dE, memory + AT_DZ, S, lane);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) dE.v[i][e] = -dE.v[i][e];
        keep(memory, 1, dE);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < D / 32; t++) {
            const Pair4 a = S[j][t], b = dS[j][t];
            sum += dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
        }
        sum += from_other(sum, 1);
        d_state[j] = sum + from_other(sum, 2);
    }
    through_state(tails, memory + AT_R, dS, lane);
}
