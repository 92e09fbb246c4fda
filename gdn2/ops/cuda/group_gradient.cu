// Gradients of all operands by the short backward (Eqs. 53-82), in one kernel for Hopper.
//
// A program goes through chunks of 64 tokens and one value head. Along the value channels each group of four warps makes
// dZ = A^T dR, dV and dW for 64 of them; then one makes the score gradients dA_qk = dO R^T, the other dT = -dZ R^T, and
// each what comes through the states at both ends of the chunk to 64 key channels (group_values.cuh). Then a warp owns
// 16 key channels of all tokens and needs no other (group_keys.cuh). Decays are measured as in
// gdn2/ops/triton/tiles.py, and deep rows are left to the Triton kernel for them.
#include "group_keys.cuh"

// Gradients of gates and decays for all channels of a head: sums over so many warps or groups, always in the same order.
template <int OF> DEVICE float summed(const char* memory, int at) {
    const float* parts = reinterpret_cast<const float*>(memory + at) + threadIdx.x;
    float sum = 0.0f;
    for (int i = 0; i < OF; i++) sum += parts[C * i];
    return sum;
}

DEVICE void store_sums(const char* memory, const Part& chunk, const Outputs& out) {
    const int token = threadIdx.x;
    if (token >= C) return;
    if (B_WIDTH == 1) chunk.store_gate(out.db, token, summed<WARPS>(memory, AT_ERASED));
    if (W_WIDTH == 1) chunk.store_gate(out.dw, token, summed<2>(memory, AT_WRITTEN));
    if (G_WIDTH == 1) chunk.store_decay(out.dg, token, summed<WARPS>(memory, AT_DECAYED));
}

DEVICE void chunk_gradients(char* memory, int turn, int index, int chunks, const Inputs& x, const Outputs& out) {
    const int following = index + gridDim.x, after = following + gridDim.x;
    const bool more = following < chunks;
    wait_for_series<2>();  // values, of those before tokens and keys
    publish();
    wait_for_signal(memory + AT_SIGNALS, turn & 1);
    __syncthreads();
    char deep[2];  // of a thread's rows
#pragma unroll
    for (int r = 0; r < 2; r++) deep[r] = x.deep[static_cast<i64>(index) * C + score_token(r)];
    {
        const Part chunk = part(memory, turn, index);
        Product dZ;
        inverse_gradient(dZ, memory);
        value_gradients(memory, dZ, chunk, x);
        __syncwarp();
        drain<ValueRows>(out.dv, memory + AT_V, chunk);
        if (W_WIDTH == D) drain<ValueRows>(out.dw, memory + AT_W, chunk);
        __syncwarp();
        if (more) fetch_values(memory, part(memory, turn + 1, following), x);
        await_group();  // nobody of the group reads dR any more
        place_dZ(memory, dZ);
    }
    wait_for_series<1>();  // tokens, of those before keys
    publish();
    wait_for_signal(memory + AT_SIGNALS + 8, turn & 1);
    const bool any = __syncthreads_or(deep[0] | deep[1]);
    if (more) fetch_inverse(memory, part(memory, turn + 1, following), x);
    if (after < chunks) fetch_part(memory, turn + 2, after, x);
    end_copies();
    const int until[2] = {deep[0] ? 0 : score_token(0), deep[1] ? 0 : score_token(1)};
    const i64 halves = static_cast<i64>(index) * C * HALF;
    Between between;
    Each L[2];
    load_decays(L[0], part(memory, turn, index), x.g, 0);  // while products run
    load_decays(L[1], part(memory, turn, index), x.g, 1);
    state_gradients(memory, until, any ? out.dA_qk + halves : nullptr, any ? out.dT + halves : nullptr, between.d_state);
    if (more) fetch_tokens(memory, part(memory, turn + 1, following), x);
    end_copies();
    wait_for_series<2>();  // keys, of those before the next values and tokens
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum_decays(L[half], between.last[half]);
#pragma unroll
        for (int r = 0; r < 2; r++) between.whole[half][r] = exp2_fast(between.last[half][r]);
    }
    meet_halves(between, memory, L[0]);
    put_logs_aside(memory, L[0]);
    half_gradients<1>(memory, part(memory, turn, index), x, out, L[1], between);
    take_logs_back(L[0], memory);
    half_gradients<0>(memory, part(memory, turn, index), x, out, L[0], between);
    __syncwarp();
    const Part chunk = part(memory, turn, index);
    drain<KeyRows>(out.dk, memory + AT_K, chunk);
    drain<KeyRows>(out.dq, memory + AT_Q, chunk);
    if (B_WIDTH == D) drain<KeyRows>(out.db, memory + AT_B, chunk);
    __syncwarp();
    if (more) fetch_keys(memory, part(memory, turn + 1, following), x);
    end_copies();
    publish();
    __syncthreads();  // nothing is put aside any more
    if (more) fetch_states(memory, following, x);
    store_sums(memory, chunk, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) group_gradient(
    const void* q, const void* k, const void* v, const float* g, const void* b, const void* w, const void* d_out,
    const void* A, const void* R, const void* dR, const void* starts, const void* ends, const char* deep,
    const i64* start, const i64* length, float* dA_qk, float* dT,
    void* dq, void* dk, void* dv, float* dg, void* db, void* dw, float scale, int chunks) {
    SHARED_MEMORY(memory);
    const Inputs x = {q, k, v, g, b, w, d_out, A, R, dR, starts, ends, deep, start, length, scale};
    const Outputs out = {dA_qk, dT, dq, dk, dv, dg, db, dw};
    const int first = blockIdx.x, second = first + gridDim.x;
    if (threadIdx.x < 2) make_signal(memory + AT_SIGNALS + 8 * threadIdx.x, 1);
    fetch_part(memory, 0, first, x);
    if (second < chunks) fetch_part(memory, 1, second, x);
    end_copies();
    wait_for_series<0>();
    __syncthreads();
    const Part chunk = part(memory, 0, first);
    fetch_values(memory, chunk, x);
    fetch_inverse(memory, chunk, x);
    end_copies();
    fetch_tokens(memory, chunk, x);
    end_copies();
    fetch_keys(memory, chunk, x);
    end_copies();
    fetch_states(memory, first, x);
    for (int index = first, turn = 0; index < chunks; index += gridDim.x, turn++) {
        chunk_gradients(memory, turn, index, chunks, x, out);
    }
}
