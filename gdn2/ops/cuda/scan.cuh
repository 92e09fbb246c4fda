// What both scans share: who moves tiles, the state as terms of products, and how results are turned.
//
// A program works on 64 value channels of one head of a sequence, chunk by chunk. One group of four warps holds the
// state as S^T [64, D] in registers, as products leave it: rounded in pairs it is an operand again, so that nothing but
// tiles passes through shared memory. The other group fetches tiles, which lie in blocks, two steps ahead and stores
// what the first has staged.
#pragma once
#include "block.cuh"
#include "group.cuh"

constexpr int C = 64, GROUP = 128, THREADS = 2 * GROUP, HALVES = D / 64, AHEAD = 2, BUFFERS = AHEAD + 1;
constexpr int TILE = HALVES * BLOCK, DECAYS = D * 4, SIGNALS = 8 * BUFFERS;

struct Factors {  // of all chunks, in blocks
    const void *Q_gamma, *K_tail;
    const float* gamma_C;
    const void *A_qk, *Y, *U;
};
struct Chunks { const i64 *start, *length, *first; };  // of tokens, and the first chunk of each sequence

// What a program works on: a head of a sequence, and the first of its value channels.
struct Row {
    i64 number, sequence, head;
    int part;
    DEVICE explicit Row(i64 program)
        : number(program / HALVES), sequence(number / HEADS), head(number % HEADS),
          part(static_cast<int>(program % HALVES) * 64) {}
    DEVICE i64 state() const { return number * D * D + part; }
    DEVICE i64 chunk(i64 index) const { return index * HEADS + head; }
    // Of what value heads share: all factors but U.
    DEVICE i64 shared(i64 index) const { return index * F_HEADS + head / (HEADS / F_HEADS); }
    DEVICE i64 tokens(i64 token) const { return 2 * ((token * HEADS + head) * D + part); }  // bytes
};

struct State { Product half[HALVES]; };
struct StateTerms { Terms half[HALVES]; };

DEVICE int mover() { return threadIdx.x - GROUP; }

// One mover does it, and its warp waits for it.
template <class Work> DEVICE void alone(const Work& work) {
    if (mover() == 0) work();
    __syncwarp();
}

// One mover: bytes of a chunk, which has as many in all.
DEVICE void fetch(char* to, const void* from, i64 chunk, int bytes, char* signal) {
    copy_many(to, static_cast<const char*>(from) + chunk * bytes, bytes, signal);
}

// Movers: 64 rows to a block, the given distance apart; zeros after those that are known.
DEVICE void fetch_rows(char* to, const char* from, i64 distance, int known) {
#pragma unroll
    for (int n = mover(); n < C * 8; n += GROUP) {
        const int row = n / 8, chunk = n % 8;
        copy_async(to + block_at(row, chunk), from + row * distance + 16 * chunk, row < known);
    }
}

// Movers: staged rows of 64 tokens on their way to where they belong, the given distance apart, as many as are known.
struct Rows {
    Pair4 v[C * 8 / GROUP];
    DEVICE void take(const char* staged) {
#pragma unroll
        for (int i = 0; i < C * 8 / GROUP; i++) {
            const int n = i * GROUP + mover();
            v[i] = *reinterpret_cast<const Pair4*>(staged + block_at(n / 8, n % 8));
        }
    }
    DEVICE void store(char* to, i64 distance, int known) const {
#pragma unroll
        for (int i = 0; i < C * 8 / GROUP; i++) {
            const int n = i * GROUP + mover(), row = n / 8;
            if (row < known) *reinterpret_cast<Pair4*>(to + row * distance + 16 * (n % 8)) = v[i];
        }
    }
};

// One mover: a part of a staged state and of the rows after it to where they belong, which lie in blocks too.
DEVICE void store_staged(const char* staged, void* states, void* rows, i64 chunk, int part) {
    store_many(static_cast<char*>(states) + chunk * (D * D * 2) + part * (D * 2), staged, TILE);
    store_many(static_cast<char*>(rows) + chunk * TILE + part * (C * 2), staged + TILE, BLOCK);
    end_stores();
}

// A step is staged when it is done with its tiles; there is room for another once movers have taken it.
constexpr int STAGED_BARRIER = 1, ROOM_BARRIER = 2;

// Movers through all steps: `take` what a step has staged, be done with `reading` before there is to be room again, and
// `put` it where it belongs.
template <class Fetch, class Take, class Reading, class Put>
DEVICE void move(int count, Fetch fetch_step, Take take, Reading reading, Put put) {
    for (int step = 0; step < AHEAD && step < count; step++) fetch_step(step);
    __syncthreads();
    for (int step = 0; step < count; step++) {
        if (step + AHEAD < count) fetch_step(step + AHEAD);
        reading();
        arrive<ROOM_BARRIER>(THREADS);
        if (step > 0) put(step - 1);
        await<STAGED_BARRIER>(THREADS);
        take(step);
    }
    if (count > 0) put(count - 1);
}

DEVICE Terms as_terms(const Product& x) {
    Terms to;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float(&a)[4] = x.v[2 * k], (&b)[4] = x.v[2 * k + 1];
        to.v[k] = {pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])};
    }
    return to;
}

DEVICE StateTerms as_terms(const State& S) {
    StateTerms to;
#pragma unroll
    for (int h = 0; h < HALVES; h++) to.half[h] = as_terms(S.half[h]);
    return to;
}

// to = keep to + SIGN a B^T: the rows of block B are columns of the result.
template <int SIGN> DEVICE void times_rows(Product& to, const Terms& a, const Described& block, bool keep = true) {
#pragma unroll
    for (int k = 0; k < 4; k++) group_product<false, SIGN>(to, a.v[k], block.later(32 * k), keep || k > 0);
}

template <int SIGN> DEVICE void times_rows(Product& to, const StateTerms& a, const Described& tile, bool keep = true) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) times_rows<SIGN>(to, a.half[h], tile.later(h * BLOCK), keep || h > 0);
}

// to += SIGN a B.
template <int SIGN> DEVICE void times_columns(Product& to, const Terms& a, const Described& block) {
#pragma unroll
    for (int k = 0; k < 4; k++) group_product<true, SIGN>(to, a.v[k], block.later(16 * 128 * k), true);
}

template <int SIGN> DEVICE void times_columns(State& to, const Terms& a, const Described& tile) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) times_columns<SIGN>(to.half[h], a, tile.later(h * BLOCK));
}

// Where a lane reads or writes 16 rows of a block and its warp's 16 channels, as four matrices to turn.
DEVICE int turn_at(int row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return block_at(row + (lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
}

// A block [tokens, channels], turned.
DEVICE Terms turned(const char* block) {
    Terms to;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 x[4];
        load_transposed(x, block + turn_at(16 * k));
        to.v[k] = {x[0], x[1], x[2], x[3]};
    }
    return to;
}

DEVICE void stage(char* block, const Terms& x) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        store_transposed(block + turn_at(16 * k), x.v[k].x, x.v[k].y, x.v[k].z, x.v[k].w);
    }
}

DEVICE void stage(char* blocks, const StateTerms& x) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) stage(blocks + h * BLOCK, x.half[h]);
}

// S^T times a decay for each column.
DEVICE void decay(State& S, const char* decays) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const Float2 by = *reinterpret_cast<const Float2*>(decays + 4 * (64 * h + 8 * n + 2 * (threadIdx.x & 3)));
#pragma unroll
            for (int e = 0; e < 4; e++) S.half[h].v[n][e] *= by.v[e & 1];
        }
}

// Where an element of S^T is in [D, D], whose columns are value channels, from the program's first on.
DEVICE int state_at(int h, int n, int e) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (64 * h + 8 * n + 2 * (lane & 3) + (e & 1)) * D + 16 * warp + (lane >> 2) + 8 * (e >> 1);
}

DEVICE void load_state(State& S, const float* from) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) S.half[h].v[n][e] = from[state_at(h, n, e)];
}

DEVICE void store_state(const State& S, float* to) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) to[state_at(h, n, e)] = S.half[h].v[n][e];
}

DEVICE void settle(State& S) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) settle(S.half[h]);
}

DEVICE void settle(StateTerms& x) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) settle(x.half[h]);
}
