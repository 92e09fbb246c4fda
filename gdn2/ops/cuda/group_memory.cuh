// The shared memory of the gradients' kernel for Hopper, and how chunks come into it and leave it.
//
// A program goes through many chunks. Each part of its memory is filled for the next chunk as soon as the one at work
// is done with it, so that nobody waits for loads: values while keys are at work, keys while values are.
#pragma once
#include "group.cuh"
#include "layout.cuh"
#include "stored.cuh"

static_assert(D == 128, "a group for either half of the channels");
constexpr int TILE = 2 * BLOCK, STATE = D * D * 2;
constexpr int AT_A = 0, AT_V = BLOCK, AT_W = AT_V + TILE;               // then their gradients
constexpr int AT_DZ = AT_W + TILE;                                      // dR, then dZ
constexpr int AT_DO = AT_DZ + TILE, AT_R = AT_DO + TILE, AT_S = AT_R + TILE, AT_DS = AT_S + STATE;
constexpr int AT_HIGH = AT_DS + STATE, AT_LOW = AT_HIGH + 2 * BLOCK;    // score gradients as two bf16
constexpr int AT_K = AT_LOW + BLOCK, AT_Q = AT_K + TILE, AT_B = AT_Q + TILE;  // then their gradients
constexpr int AT_DIAGONAL = AT_B + TILE, AT_ERASED = AT_DIAGONAL + C * 4, AT_WRITTEN = AT_ERASED + WARPS * C * 4;
constexpr int AT_SIGNALS = AT_WRITTEN + 2 * C * 4, AT_PARTS = AT_SIGNALS + 16, PARTS = 4;
constexpr int MEMORY = AT_PARTS + PARTS * 16;
constexpr int AT_ASIDE = AT_S;  // what threads put aside, in the place of states
static_assert(16 * THREADS * 16 <= 2 * STATE, "there is room for it");

using Part = Chunk<false>;

struct Inputs {
    const void *q, *k, *v;
    const float* g;
    const void *b, *w, *d_out, *A, *R, *dR, *starts, *ends;
    const char* deep;
    const i64 *start, *length;
    float scale;
};

struct Outputs {
    float *dA_qk, *dT;
    void *dq, *dk, *dv;
    float* dg;
    void *db, *dw;
};

// Columns of products along tokens: of a half a thread holds eight next to each other, 8 (lane % 4) on, as pairs in
// four tiles of eight columns. The column of a token, and the token of a column.
DEVICE int exchanged(int x) { return (x & 33) | ((x & 6) << 2) | ((x >> 2) & 6); }

// Where 16 bytes of a row are in a tile that is read with tokens in that order: eight such lie in different banks.
DEVICE int turned_at(int row, int chunk) { return row * 128 + ((chunk ^ (((row >> 2) & 6) | (row & 1))) << 4); }

// Known anew each time: what is made of it for every chunk would take more registers than there are.
DEVICE int own_thread() { return forgotten(static_cast<int>(threadIdx.x)); }
DEVICE int own_group() { return threadIdx.x / 128; }
DEVICE int own_warp() { return threadIdx.x / 32 % 4; }

// Where a chunk's tokens are comes long before the chunk: its program's so many-th.
DEVICE void fetch_part(char* memory, int turn, int index, const Inputs& x) {
    if (threadIdx.x != 0) return;
    char* to = memory + AT_PARTS + turn % PARTS * 16;
    copy_eight(to, x.start + index / HEADS);
    copy_eight(to + 8, x.length + index / HEADS);
}

DEVICE Part part(const char* memory, int turn, int index) {
    const i64* from = reinterpret_cast<const i64*>(memory + AT_PARTS + turn % PARTS * 16);
    return {index, (from[0] * HEADS + index % HEADS) * D, static_cast<int>(from[1])};
}

// Eight channels of a token, and where they are in a tile.
struct Place { int at, row, channel; };

// Each warp has 16 rows of its group's 64 value channels, in four series.
DEVICE Place value_place(int thread, int i) {
    const int row = thread / 32 % 4 * 16 + 4 * i + thread % 32 / 8, eight = thread % 8, group = thread / 128;
    return {group * BLOCK + block_at(row, eight), row, 64 * group + 8 * eight};
}

// Each warp has its 16 key channels of all rows; eight lanes next to each other read or write different banks.
DEVICE Place key_place(int thread, int i) {
    const int lane = thread % 32, group = thread / 128, row = (i & 2) * 16 + (lane & 6) * 4 + (i & 1) * 4 + lane / 8;
    const int eight = thread / 32 % 4 * 2 + (lane & 1);
    return {group * BLOCK + turned_at(row, eight), row, 64 * group + 8 * eight};
}

DEVICE void fetch(char* tile, const void* from, const Part& chunk, const Place& to) {
    const bool known = chunk.knows(to.row);
    copy_async(tile + to.at, chunk.at<char>(from, known ? to.row : 0, to.channel), known);
}

// A tile of results to where they belong.
template <Place (*PLACE)(int, int)> DEVICE void drain(void* to, const char* tile, const Part& chunk) {
    const int thread = own_thread();
    Pair4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = *reinterpret_cast<const Pair4*>(tile + PLACE(thread, i).at);
#pragma unroll
    for (int i = 0; i < 4; i++) chunk.store<Pair4>(to, PLACE(thread, i).row, PLACE(thread, i).channel, x[i]);
}

DEVICE void fetch_values(char* memory, const Part& chunk, const Inputs& x) {
    const int thread = own_thread();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        fetch(memory + AT_V, x.v, chunk, value_place(thread, i));
        if (W_WIDTH == D) fetch(memory + AT_W, x.w, chunk, value_place(thread, i));
    }
}

DEVICE void fetch_inverse(char* memory, const Part& chunk, const Inputs& x) {
    const int thread = own_thread();
#pragma unroll
    for (int i = 0; i < C * 8 / THREADS; i++) {
        const int n = thread + THREADS * i;
        const char* from = static_cast<const char*>(x.A) + chunk.index * BLOCK + 16 * n;
        copy_async(memory + AT_A + block_at(n / 8, n % 8), from);
    }
}

DEVICE void fetch_keys(char* memory, const Part& chunk, const Inputs& x) {
    const int thread = own_thread();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        fetch(memory + AT_K, x.k, chunk, key_place(thread, i));
        fetch(memory + AT_Q, x.q, chunk, key_place(thread, i));
        if (B_WIDTH == D) fetch(memory + AT_B, x.b, chunk, key_place(thread, i));
    }
}

// Gradients of outputs and residuals with tokens in the order of columns; gradients of residuals as they are.
DEVICE void fetch_tokens(char* memory, const Part& chunk, const Inputs& x) {
    const int thread = own_thread();
#pragma unroll
    for (int i = 0; i < C * 16 / THREADS; i++) {
        const int n = thread + THREADS * i, column = n / 16, eight = n % 16, token = exchanged(column);
        const int at = eight / 8 * BLOCK + block_at(column, eight % 8);
        const bool known = chunk.knows(token);
        copy_async(memory + AT_DO + at, chunk.at<char>(x.d_out, known ? token : 0, 8 * eight), known);
        copy_async(
            memory + AT_R + at, static_cast<const char*>(x.R) + chunk.index * TILE + stored_at<C>(token, 8 * eight));
    }
    if (threadIdx.x == 0) {
        char* signal = memory + AT_SIGNALS;
        announce(signal, TILE);
        copy_many(memory + AT_DZ, static_cast<const char*>(x.dR) + chunk.index * TILE, TILE, signal);
    }
}

DEVICE void fetch_states(char* memory, i64 index, const Inputs& x) {
    if (threadIdx.x == 0) {
        char* signal = memory + AT_SIGNALS + 8;
        announce(signal, 2 * STATE);
        copy_many(memory + AT_S, static_cast<const char*>(x.starts) + index * STATE, STATE, signal);
        copy_many(memory + AT_DS, static_cast<const char*>(x.ends) + index * STATE, STATE, signal);
    }
}

// Where a thread finds what it has put aside.
template <class T> DEVICE T& aside(char* memory, int slot) {
    return reinterpret_cast<T*>(memory + AT_ASIDE)[slot * THREADS + threadIdx.x];
}
