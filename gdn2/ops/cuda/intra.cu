// Everything a chunk can compute on its own (Eqs. 18-22, 25), in one kernel for Hopper and its successors.
//
// A program works on one chunk of 64 tokens and one head, which several value heads may share. First each warp takes 32
// channels of one half, sums their log-decays and makes Q_gamma, K_tail, E_bar and gamma_C, and what queries, erase rows
// and keys are in their half (factors.cuh). Then each takes rows of scores (scores.cuh), all together invert I + T
// (inverse.cuh), and each takes 32 channels of Y = A E_bar or of U = A (W V). Decays are measured as in
// gdn2/ops/triton/tiles.py.
#include "inverse.cuh"
#include "scores.cuh"

constexpr int VALUES = V_HEADS / HEADS;  // value heads of a head
constexpr bool ONE_GATE = VALUES == 1 && D == 128 && B_WIDTH == 1 && W_WIDTH == 1 && G_WIDTH == D;

// A to where it goes, and as an operand of products.
DEVICE void store_inverse(char* memory, const Factors& to, i64 chunk) {
    for (int n = threadIdx.x; n < C * C / 8; n += THREADS) {
        const int row = n / (C / 8), eight = n % (C / 8);
        const float* from = reinterpret_cast<const float*>(memory + AT_INVERSE) + row * WIDE + 8 * eight;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = from[e];
        const Pair4 A = packed(x);
        *reinterpret_cast<Pair4*>(static_cast<char*>(to.A) + 2 * (chunk * C * C + 8 * n)) = A;
        *reinterpret_cast<Pair4*>(memory + AT_A + block_at(row, eight)) = A;
    }
}

DEVICE void store_scores(const char* memory, const Factors& to, i64 chunk) {
    for (int n = threadIdx.x; n < C * C / 8; n += THREADS) {
        const Pair4 x = *reinterpret_cast<const Pair4*>(memory + AT_A_QK + n / 8 * NARROW_ROW + n % 8 * 16);
        const int at = BLOCKS ? block_at(n / 8, n % 8) : 16 * n;
        *reinterpret_cast<Pair4*>(static_cast<char*>(to.A_qk) + 2 * chunk * C * C + at) = x;
    }
}

// Erase rows or values as columns of products: of a thread's eight channels each two are columns of another tile of
// eight, so that it gets all eight back. Eight rows that are read together, and eight that are written together, lie in
// different banks.
DEVICE int column_at(int row, int chunk) {
    return row * (D * 2) + ((chunk ^ ((row >> 2) & 7) ^ ((row & 3) << 1)) << 4);
}

DEVICE void store_columns(char* tile, const Pair4 (&x)[4], const Place& place) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 pairs[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = column_at(place.token(i), (place.channel & ~31) / 8 + n);
            *reinterpret_cast<u32*>(tile + at + 4 * (place.channel / 8 % 4)) = pairs[n];
        }
    }
}

// 16 rows and 32 channels of a tile as columns of products.
struct Columns { u32 v[2][4]; };
DEVICE Columns load_columns(const char* tile, int row, int first_channel, int lane) {
    Columns to;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        load_transposed(to.v[n], tile + column_at(row + (lane & 15), first_channel / 8 + 2 * n + (lane >> 4)));
    }
    return to;
}

DEVICE void multiply(float (&to)[4][4], const u32 (&rows)[4], const Columns& columns) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float(&x)[4] = to[n];
        mma(x[0], x[1], x[2], x[3], rows, columns.v[n / 2][n % 2 * 2], columns.v[n / 2][n % 2 * 2 + 1]);
    }
}

// A times 32 channels from a first one on; of what rounding leaves of them, if there is that, only what is near the
// diagonal counts.
DEVICE void times_inverse(
    const char* memory, const char* tile, const char* rests, void* to, i64 chunk, int first_channel, int lane) {
    float found[4][4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const Columns columns = load_columns(tile, 16 * k, first_channel, lane);
#pragma unroll
        for (int m = k; m < 4; m++) {
            u32 rows[4];
            load_matrices(rows, memory + AT_A + block_at(16 * m + (lane & 15), 2 * k + (lane >> 4)));
            multiply(found[m], rows, columns);
            if (m == k && rests != nullptr) multiply(found[m], rows, load_columns(rests, 16 * k, first_channel, lane));
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
            const int at = stored_at<C>(16 * m + 4 * r + (lane >> 2), first_channel + 8 * (lane & 3));
            *reinterpret_cast<Pair4*>(static_cast<char*>(to) + chunk * (C * D * 2) + at) = {
                pack(found[m][0][r], found[m][0][r + 1]), pack(found[m][1][r], found[m][1][r + 1]),
                pack(found[m][2][r], found[m][2][r + 1]), pack(found[m][3][r], found[m][3][r + 1])};
        }
}

// W V of the head's n-th value head, rounded; what that leaves of it goes to shared memory.
template <bool FULL> DEVICE void written_values(
    Pair4 (&to)[4], char* memory, const Chunk<FULL>& chunk, const Inputs& x, const Place& place, int n) {
    Pair4 gates[4], rests[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i] = chunk.template load<Pair4, 2, V_HEADS>(x.v, place.token(i), place.channel, n);
        gates[i] = chunk.template eight_gates<W_WIDTH, V_HEADS>(x.w, place.token(i), place.channel, n);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float V[8], W[8];
        unpack(V, to[i]);
        unpack(W, gates[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) V[e] *= W[e];
        to[i] = packed(V);
        unpack(W, to[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) V[e] -= W[e];
        rests[i] = packed(V);
    }
    if (RESTS) store_columns(memory + AT_REST, rests, place);
}

template <bool FULL> DEVICE void chunk_factors(
    char* memory, const Chunk<FULL>& chunk, const Inputs& x, const Factors& to, int ahead) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place place(warp, lane);
    int* deep = reinterpret_cast<int*>(memory + AT_DEEP);
    if (threadIdx.x < C) deep[threadIdx.x] = 0;
    Pair4 E_bar[4], values[4];
    channel_factors(E_bar, memory, chunk, x, to, place);
#pragma unroll
    for (int n = 0; n < VALUES; n++) {
        chunk.template fetch<2, V_HEADS>(x.v, n);
        if (W_WIDTH == D) chunk.template fetch<2, V_HEADS>(x.w, n);
    }
    __syncthreads();
    // what the program waits for first that will have this one's place
    if (G_WIDTH == D && chunk.index + ahead < gridDim.x) x.chunk(chunk.index + ahead).template fetch<4, G_HEADS>(x.g);
    // What is made of the thread's number is made anew instead of keeping registers, where the compiler needs that.
    const u32 number = threadIdx.x, scorer = ONE_GATE ? forgotten(number) : number;
    Scores P[TASKS] = {};
#pragma unroll
    for (int n = 0; n < TASKS; n++) score_tiles(P[n], memory, Task(scorer / 32 + WARPS * n), scorer % 32);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TASKS; n++) place_tiles(memory, P[n], Task(scorer / 32 + WARPS * n), deep, scorer % 32);
    if (threadIdx.x < C) to.deep[chunk.index * C + threadIdx.x] = static_cast<char>(deep[threadIdx.x]);
    if (__syncthreads_or(deep[threadIdx.x % C])) {
        for (int token = warp; token < C; token += WARPS) {
            if (deep[token] != 0) deep_row(memory, chunk, x, token, lane);
        }
        __syncthreads();
    }
    const u32 thread = ONE_GATE ? number : forgotten(number);
    const Place again(thread / 32, thread % 32);
    written_values(values, memory, chunk, x, again, 0);
    invert(memory, warp, lane);
    store_columns(memory + AT_T, E_bar, again);
    store_columns(memory + AT_WORK, values, again);
    store_inverse(memory, to, chunk.index);
    store_scores(memory, to, chunk.index);
    __syncthreads();
    const bool writes = warp >= WARPS / 2;
    const char* rests = RESTS && writes ? memory + AT_REST : nullptr;
    times_inverse(
        memory, memory + (writes ? AT_WORK : AT_T), rests, writes ? to.U : to.Y,
        writes ? VALUES * chunk.index : chunk.index, 32 * (warp % (WARPS / 2)), lane);
#pragma unroll 1
    for (int n = 1; n < VALUES; n++) {
        __syncthreads();
        const u32 other = forgotten(number);
        const Place own(other / 32, other % 32);
        written_values(values, memory, chunk, x, own, n);
        store_columns(memory + AT_WORK, values, own);
        __syncthreads();
        if (!writes) continue;
        times_inverse(
            memory, memory + AT_WORK, rests, to.U, VALUES * chunk.index + n, 32 * (warp % (WARPS / 2)), lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) intra(
    const void* q, const void* k, const void* v, const void* g, const void* b, const void* w, const i64* start,
    const i64* length, void* Q_gamma, void* K_tail, float* gamma_C, void* A_qk, void* A, void* Y, void* U, char* deep,
    float scale, int ahead) {
    SHARED_MEMORY(memory);
    const Inputs x = {q, k, v, g, b, w, start, length, scale};
    const Factors to = {Q_gamma, K_tail, gamma_C, A_qk, A, Y, U, deep};
    const Chunk<false> chunk = x.chunk(blockIdx.x);
    if (chunk.length == C) {
        chunk_factors(memory, Chunk<true>{chunk.index, chunk.first, C}, x, to, ahead);
    } else {
        chunk_factors(memory, chunk, x, to, ahead);
    }
}
