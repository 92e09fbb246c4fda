// The first part of a chunk's own work: decays, and what queries, erase rows and keys are in their half.
#pragma once
#include "layout.cuh"
#include "stored.cuh"

// Shared memory: queries, erase rows and keys of all tokens, and keys of the first half as the second meets them; later
// T, its inverse and a matrix on the way there in fp32, A_qk and A as operands of products; then erase rows and values
// in the place of T and of the matrix on the way. Rows are padded to spread them over the banks.
constexpr int READERS = C * D * 2, AT_QUERIES = 0, AT_ERASE = 2 * READERS, AT_KEYS = 4 * READERS;
constexpr int AT_BEFORE = 6 * READERS;
constexpr int WIDE = C + 8, WIDE_ROW = WIDE * 4, NARROW_ROW = (C + 8) * 2;
constexpr int AT_T = 0, AT_INVERSE = C * WIDE_ROW, AT_WORK = 2 * C * WIDE_ROW;
constexpr int AT_A_QK = 3 * C * WIDE_ROW, AT_A = AT_A_QK + C * NARROW_ROW;
constexpr float DEEP = -115.415f;  // log2 of about 2e-35, as DEEP in gdn2/ops/triton/tiles.py
constexpr int AT_DEEP = AT_A + C * C * 2 > 7 * READERS ? AT_A + C * C * 2 : 7 * READERS, MEMORY = AT_DEEP + C * 4;
static_assert(READERS <= C * WIDE_ROW, "erase rows and values fit where T was");
constexpr bool RESTS = D == 128;  // there is room for what rounding leaves of values
constexpr int AT_REST = 6 * READERS;
static_assert(!RESTS || AT_REST >= AT_A + C * C * 2, "nothing else is there");

// A warp works on 32 channels of one half, a thread on eight of them and four tokens next to each other.
struct Place {
    int half, group, channel;  // token = HALF half + 4 group + i
    DEVICE explicit Place(int warp, int lane)
        : half(warp & 1), group(lane >> 2), channel(32 * (warp >> 1) + 8 * (lane & 3)) {}
    DEVICE int token(int i) const { return HALF * half + 4 * group + i; }
    DEVICE int row(int i) const { return HALF * half + 8 * i + group; }
};

// Log-decays of eight channels: one for each, or one for all.
constexpr int DECAYS = G_WIDTH == D ? 8 : 1;

DEVICE void unpack(float (&to)[8], const Pair4& from) {
    const u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int e = 0; e < 8; e++) to[e] = one_of(pairs[e / 2], e & 1);
}

DEVICE Pair4 packed(const float (&x)[8]) {
    return {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}

// Where eight channels of a row are: eight rows that are read together, and two that are written together, lie in
// different banks.
DEVICE int tile_at(int row, int chunk) {
    return row * (D * 2) + ((chunk ^ ((row >> 1) & 3) ^ ((row & 1) << 2)) << 4);
}

// Eight channels of a row of a tile of so many rows, as two bf16 each; the rest of all follows the rows.
DEVICE void store_split(char* tile, int rows, int row, int channel, const float (&x)[8]) {
    Pair4* at = reinterpret_cast<Pair4*>(tile + tile_at(row, channel >> 3));
    const Pair4 high = packed(x);
    float rest[8];
    unpack(rest, high);
#pragma unroll
    for (int e = 0; e < 8; e++) rest[e] = x[e] - rest[e];
    at[0] = high;
    at[rows * D / 8] = packed(rest);
}

struct Inputs {
    const void *q, *k, *v, *g, *b, *w;
    const i64 *start, *length;
    float scale;
    DEVICE Chunk<false> chunk(i64 index) const {
        const i64 first = (start[index / HEADS] * HEADS + index % HEADS) * D;
        return {index, first, static_cast<int>(length[index / HEADS])};
    }
};
struct Factors { void *Q_gamma, *K_tail; float* gamma_C; void *A_qk, *A, *Y, *U; char* deep; };

// Where a warp leaves the whole log-decay of its half for the warp of the same channels in the other half: among the
// queries which that other one is going to write.
DEVICE float* whole_decay(char* memory, int half, int channel) {
    const int row = HALF * (1 - half) + 8 * ((channel >> 4) & 1);
    return reinterpret_cast<float*>(memory + AT_QUERIES + row * (D * 2) + (channel & ~31) * 2) + (channel & 15);
}

// All that one token of a thread's channels becomes, given its log-decay since the start of its half, that of the half
// and the decay of the other half.
template <bool FULL> DEVICE Pair4 token_factors(
    char* memory, const Chunk<FULL>& chunk, const Factors& to, const Pair4 (&inputs)[3], const float (&log)[DECAYS],
    const float (&last)[DECAYS], const float (&other)[DECAYS], const Place& place, int i, float scale) {
    const int row = place.row(i), channel = place.channel;
    const i64 at = chunk.index * (C * D * 2) + stored_at<C>(place.token(i), channel);
    float since[DECAYS], K[8], x[8], y[8];
    bool deep = false;
    unpack(K, inputs[1]);
    unpack(x, inputs[0]);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if (e < DECAYS) {
            deep |= log[e] < DEEP;
            since[e] = exp2_fast(log[e]);
        }
        x[e] *= scale * since[e % DECAYS];
        y[e] = x[e] * LIFT;
    }
    store_split(memory + AT_QUERIES, C, row, channel, y);
    if (place.half == 1) {
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] *= other[e % DECAYS];
    }
    *reinterpret_cast<Pair4*>(static_cast<char*>(to.Q_gamma) + at) = packed(x);
    unpack(x, inputs[2]);
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] *= K[e] * since[e % DECAYS], y[e] = x[e] * LIFT;
    store_split(memory + AT_ERASE, C, row, channel, y);
    if (place.half == 1) {
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] *= other[e % DECAYS];
    }
    const Pair4 E_bar = packed(x);
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = log[e % DECAYS] > DEEPEST ? K[e] * exp2_fast(-58.0f - log[e % DECAYS]) : 0.0f;
    store_split(memory + AT_KEYS, C, row, channel, x);
#pragma unroll
    for (int e = 0; e < 8; e++) K[e] *= exp2_fast(last[e % DECAYS] - log[e % DECAYS]);
    if (place.half == 0) {
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = K[e] * LOWER, K[e] *= other[e % DECAYS];
        store_split(memory + AT_BEFORE, HALF, row, channel, x);
    }
    *reinterpret_cast<Pair4*>(static_cast<char*>(to.K_tail) + at) = packed(K);
    if (deep) reinterpret_cast<int*>(memory + AT_DEEP)[place.token(i)] = 1;
    return E_bar;
}

// Factors of a warp's tokens and channels; E_bar stays in registers.
template <bool FULL> DEVICE void channel_factors(
    Pair4 (&E_bar)[4], char* memory, const Chunk<FULL>& chunk, const Inputs& x, const Factors& to,
    const Place& place) {
    Tokens<DECAYS> L;
    Pair4 inputs[4][3];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int e = 0; e < DECAYS; e += 4) {
            const Float4 g = chunk.template decays<G_WIDTH, Float4>(x.g, place.token(i), place.channel + e);
#pragma unroll
            for (int n = 0; n < 4 && n < DECAYS; n++) L.v[i][e + n] = at_least(g.v[n] * LOG2E, -185.0f);
        }
        inputs[i][1] = chunk.template load<Pair4, 2, K_HEADS>(x.k, place.token(i), place.channel);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        inputs[i][0] = chunk.template load<Pair4, 2, K_HEADS>(x.q, place.token(i), place.channel);
        inputs[i][2] = chunk.template eight_gates<B_WIDTH, B_HEADS>(x.b, place.token(i), place.channel);
    }
    sums_until(L);
    if (place.group == 7) {
        float* whole = whole_decay(memory, place.half, place.channel);
#pragma unroll
        for (int e = 0; e < DECAYS; e++) whole[e] = L.v[3][e];
    }
    __syncthreads();
    float last[DECAYS], other[DECAYS];
    const float* whole = whole_decay(memory, 1 - place.half, place.channel);
#pragma unroll
    for (int e = 0; e < DECAYS; e++) {
        last[e] = from_lane(L.v[3][e], 28 + (threadIdx.x & 3));
        other[e] = exp2_fast(whole[e]);
    }
    __syncwarp();  // before queries are written there
#pragma unroll
    for (int i = 0; i < 4; i++) {
        E_bar[i] = token_factors(memory, chunk, to, inputs[i], L.v[i], last, other, place, i, x.scale);
    }
    if (place.half == 0 && place.group == 0) {
#pragma unroll
        for (int e = 0; e < 8; e++) {
            to.gamma_C[chunk.index * D + place.channel + e] = exp2_fast(last[e % DECAYS]) * other[e % DECAYS];
        }
    }
}
