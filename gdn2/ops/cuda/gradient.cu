// Gradients of all operands of a chunk by the short backward (Eqs. 53-82), in one kernel for Hopper and its successors.
//
// A program works on one chunk of 64 tokens and one value head. Along the value channels it makes dZ = A^T dR, dV, dW
// and the score gradients dA_qk = dO R^T, dT = -dZ R^T (values.cuh). Along the key channels a warp owns 16 channels of
// all tokens and needs no other: sums over tokens stay inside it. Gradients of queries, erase rows and keys come
// through the states at both ends of the chunk (states.cuh), from the other half of the chunk and from the own half
// (keys.cuh), with decays measured as in gdn2/ops/triton/tiles.py. Deep rows are left to the Triton kernel for them.
#include "keys.cuh"
#include "states.cuh"
#include "values.cuh"

struct Arguments {
    Operands x;
    const void *v, *w, *d_out, *A, *R, *dR, *starts, *ends;
    const char* deep;
    float *dA_qk, *dT;
    void *dv, *dw;
};

// Sums over a warp's channels, one for each token.
DEVICE void place_sums(float* sums, const float (&x)[4], int half, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float sum = over_channels(x[i]);
        if ((lane & 3) == 0) sums[HALF * half + 4 * (lane >> 2) + i] = sum;
    }
}

// Those of all warps, which lie so many bytes apart.
DEVICE float over_warps(const char* sums, int apart) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; w++) sum += reinterpret_cast<const float*>(sums + apart * w)[threadIdx.x];
    return sum;
}

// Gradients of gates and decays for all channels of a head: sums over the warps, always in the same order.
template <bool FULL>
DEVICE void store_sums(
    char* memory, const Chunk<FULL>& chunk, const Arguments& a, const Sums (&all)[2], int warp, int lane) {
    if (B_WIDTH != 1 && W_WIDTH != 1 && G_WIDTH != 1) return;
    constexpr int SUMS = C * 4;
    __syncwarp();  // nobody reads the warp's own memory any more
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const auto at = [&](int sums) { return reinterpret_cast<float*>(memory + sums); };
        if (B_WIDTH == 1) place_sums(at(AT_ERASED + SUMS * warp), all[half].erased, half, lane);
        if (G_WIDTH == 1) place_sums(at(AT_OWN + OWN * warp), all[half].decayed, half, lane);
    }
    __syncthreads();
    const int token = threadIdx.x;
    if (token >= C) return;
    if (B_WIDTH == 1) chunk.store_gate(a.x.db, token, over_warps(memory + AT_ERASED, SUMS));
    if (W_WIDTH == 1) chunk.store_gate(a.dw, token, over_warps(memory + AT_WRITTEN, SUMS));
    if (G_WIDTH == 1) chunk.store_decay(a.x.dg, token, over_warps(memory + AT_OWN, OWN));
}

template <bool FULL>
DEVICE void chunk_gradients(char* memory, const Chunk<FULL>& chunk, const Arguments& a) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char* deep = a.deep + chunk.index * C;
    for (int n = threadIdx.x; n < C * C / 8; n += THREADS) {
        const char* from = static_cast<const char*>(a.A) + 2 * (in_common<F_HEADS>(chunk.index) * C * C + 8 * n);
        copy_async(memory + AT_A + block_at(n / 8, n % 8), from);
    }
    for (int n = threadIdx.x; n < C * D / 8; n += THREADS) {
        const int token = n / (D / 4) * 2, four = n % (D / 4);
        const char* rows = static_cast<const char*>(a.R) + chunk.index * (C * D * 2);
        const Pair2 x = chunk.template load<Pair2>(a.d_out, token, 4 * four);
        const Pair2 y = chunk.template load<Pair2>(a.d_out, token + 1, 4 * four);
        const Pair2 r = read2(rows + stored_at<C>(token, 4 * four));
        const Pair2 s = read2(rows + stored_at<C>(token + 1, 4 * four));
        *reinterpret_cast<Pair4*>(memory + AT_DO + value_at(token, four)) = {x.x, y.x, x.y, y.y};
        *reinterpret_cast<Pair4*>(memory + AT_R + value_at(token, four)) = {r.x, s.x, r.y, s.y};
    }
    chunk.fetch(a.v);
    if (W_WIDTH == D) chunk.fetch(a.w);
    if (threadIdx.x == 0) prefetch(static_cast<const char*>(a.starts) + 2 * (chunk.index * D * D), 2 * D * D);
    wait_for_copies();
    __syncthreads();
    value_gradients(memory, chunk, a.dR, a.v, a.w, a.dv, a.dw, warp, lane);
    const bool any = __syncthreads_or(deep[threadIdx.x % C]);
    chunk.template fetch<2, K_HEADS>(a.x.k), chunk.template fetch<2, K_HEADS>(a.x.q);
    if (G_WIDTH == D) chunk.template fetch<4, G_HEADS>(a.x.g);
    if (B_WIDTH == D) chunk.template fetch<2, B_HEADS>(a.x.b);
    if (threadIdx.x == 0) prefetch(static_cast<const char*>(a.ends) + 2 * (chunk.index * D * D), 2 * D * D);
    Pair4 S[2][D / 32];
    load_state(S, a.starts, chunk.index, warp, lane);
    const i64 halves = chunk.index * C * HALF;
    score_gradients(memory, deep, any ? a.dA_qk + halves : nullptr, any ? a.dT + halves : nullptr, warp, lane);
    const Own own(memory, warp, lane);
    {
        Tile<8> tails = {};
        float d_state[2];
        state_gradients(tails, d_state, memory, S, a.ends, chunk.index, warp, lane);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float even = from_lane(d_state[j], 8 * (lane & 3)), odd = from_lane(d_state[j], 8 * (lane & 3) + 4);
            if (lane < 4) own.channel[4 * (D_STATE + j)] = {{even, odd}};
        }
        __syncthreads();
        keep(memory, 2, tails);
    }
    Sums all[2] = {};
#pragma unroll 1
    for (int j = 0; j < 2; j++) {
        const int channel = 16 * warp + 8 * j + 2 * (lane & 3);
        Inputs in;
        load_inputs(in, own, a.x, chunk, channel, lane);
        Between between;
        meet_halves(between, memory, in.K[0], own, j, lane);
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            half_gradients(memory, a.x, chunk, in, between, own, all[half], j, half, channel, lane);
        }
    }
    store_sums(memory, chunk, a, all, warp, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) gradient(
    const void* q, const void* k, const void* v, const float* g, const void* b, const void* w, const void* d_out,
    const void* A, const void* R, const void* dR, const void* starts, const void* ends, const char* deep,
    const i64* start, const i64* length, float* dA_qk, float* dT,
    void* dq, void* dk, void* dv, float* dg, void* db, void* dw, float scale) {
    SHARED_MEMORY(memory);
    const i64 index = blockIdx.x, first = (start[index / HEADS] * HEADS + index % HEADS) * D;
    const int tokens = static_cast<int>(length[index / HEADS]);
    const Arguments a = {
        {q, k, b, g, dq, dk, db, dg, scale}, v, w, d_out, A, R, dR, starts, ends, deep, dA_qk, dT, dv, dw};
    if (tokens == C) {
        chunk_gradients(memory, Chunk<true>{index, first, C}, a);
    } else {
        chunk_gradients(memory, Chunk<false>{index, first, tokens}, a);
    }
}
