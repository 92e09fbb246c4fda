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
static_assert(G_WIDTH == D || B_WIDTH != D, "erase gates leave their place to sums of decays' gradients");
constexpr int AT_DECAYED = AT_B;
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
DEVICE int own_token() { return 8 * (threadIdx.x & 3); }  // the first of the eight

// Where 16 bytes of a row are in a tile that is read with tokens in that order: eight such lie in different banks.
DEVICE int turned_at(int row, int chunk) { return row * 128 + ((chunk ^ (((row >> 2) & 6) | (row & 1))) << 4); }

// Known anew each time: what is made of it for every chunk would take more registers than there are.
DEVICE u32 own_thread() { return forgotten(static_cast<u32>(threadIdx.x)); }
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

// A thread's eight channels of four rows of a tile: where the first is, and how many rows later the others are. These
// are constants, so that an address is made for the first alone.
struct ValueRows {  // each warp has 16 rows of its group's 64 value channels, in four series
    int at, row, channel;
    DEVICE explicit ValueRows(u32 thread) : row(thread / 32 % 4 * 16 + thread % 32 / 8), channel(thread / 128 * 64) {
        at = thread / 128 * BLOCK + block_at(row, thread % 8), channel += thread % 8 * 8;
    }
    static DEVICE constexpr int later(int i) { return 4 * i; }
    DEVICE int place(int i) const { return (at ^ (i % 2 * 64)) + 128 * later(i); }
};

struct KeyRows {  // each warp has its 16 key channels of all rows; eight lanes read or write different banks
    int at, row, channel;
    DEVICE explicit KeyRows(u32 thread) : row((thread & 6) * 4 + thread % 32 / 8), channel(thread / 128 * 64) {
        const int eight = thread / 32 % 4 * 2 + (thread & 1);
        at = thread / 128 * BLOCK + turned_at(row, eight), channel += 8 * eight;
    }
    static DEVICE constexpr int later(int i) { return (i & 2) * 16 + (i & 1) * 4; }
    DEVICE int place(int i) const { return at + 128 * later(i); }
};

template <int N> constexpr int ROW = 2 * N * D;  // bytes from a token to the next one

// Of an operand of so many heads.
template <int N, class Rows>
DEVICE void fetch_rows(char* tile, const void* from, const Part& chunk, const Rows& rows) {
    const char* first = chunk.at<char, 2, N>(from, rows.row, rows.channel);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        copy_async(tile + rows.place(i), first + ROW<N> * rows.later(i), rows.row + rows.later(i) < chunk.length);
    }
}

// A tile of results to where they belong.
template <class Rows> DEVICE void drain(void* to, const char* tile, const Part& chunk) {
    const Rows rows(own_thread());
    char* first = chunk.at<char>(to, rows.row, rows.channel);
    Pair4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = *reinterpret_cast<const Pair4*>(tile + rows.place(i));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool known = rows.row + rows.later(i) < chunk.length;
        if (known) *reinterpret_cast<Pair4*>(first + ROW<HEADS> * rows.later(i)) = x[i];
    }
}

DEVICE void fetch_values(char* memory, const Part& chunk, const Inputs& x) {
    const ValueRows rows(own_thread());
    fetch_rows<HEADS>(memory + AT_V, x.v, chunk, rows);
    if (W_WIDTH == D) fetch_rows<HEADS>(memory + AT_W, x.w, chunk, rows);
}

DEVICE void fetch_inverse(char* memory, const Part& chunk, const Inputs& x) {
    const u32 thread = own_thread();
    const char* from = static_cast<const char*>(x.A) + in_common<F_HEADS>(chunk.index) * BLOCK + 16 * thread;
    char* to = memory + AT_A + block_at(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < C * 8 / THREADS; i++) copy_async(to + 16 * THREADS * i, from + 16 * THREADS * i);
}

DEVICE void fetch_keys(char* memory, const Part& chunk, const Inputs& x) {
    const KeyRows rows(own_thread());
    fetch_rows<K_HEADS>(memory + AT_K, x.k, chunk, rows);
    fetch_rows<K_HEADS>(memory + AT_Q, x.q, chunk, rows);
    if (B_WIDTH == D) fetch_rows<B_HEADS>(memory + AT_B, x.b, chunk, rows);
}

// Gradients of outputs and residuals with tokens in the order of columns; gradients of residuals as they are.
DEVICE void fetch_tokens(char* memory, const Part& chunk, const Inputs& x) {
    const u32 thread = own_thread(), column = thread / 16, eight = thread % 16;
    const int token = exchanged(column);
    const int to = eight / 8 * BLOCK + block_at(column, eight % 8), from = stored_at<C>(token, 8 * eight);
    const char* d_out = chunk.at<char>(x.d_out, token, 8 * eight);
    const char* R = static_cast<const char*>(x.R) + chunk.index * TILE;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        constexpr int ROWS = THREADS / 16;
        const int later = (i & 2) * 16 + (i & 1) * 4, at = to + 128 * ROWS * i;  // exchanged(ROWS * i)
        copy_async(memory + AT_DO + at, d_out + ROW<HEADS> * later, token + later < chunk.length);
        copy_async(memory + AT_R + at, R + (from ^ (i % 2 * 64)) + 128 * later);
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

// Where a thread finds what it has put aside. Its place is known anew each time where gates of each channel take the
// registers that would keep it.
template <class T> DEVICE T& aside(char* memory, int slot) {
    return reinterpret_cast<T*>(memory + AT_ASIDE)[slot * THREADS + (B_WIDTH == D ? own_thread() : threadIdx.x)];
}
