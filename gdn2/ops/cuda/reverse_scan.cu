// Gradients of residuals and states of a sequence (Eqs. 53-63) in one kernel for Hopper: the forward scan mirrored.
//
// dR = K_tail dS + A_qk^T dO and dS = gamma_C dS + Q_gamma^T dO - Y^T dR from the last chunk to the first, all turned.
#include "scan.cuh"

// Shared memory: tiles of three steps, what is staged, dS at a chunk's end and dR, then decays and signals.
constexpr int AT_K_TAIL = 0, AT_Y = TILE, AT_Q = 2 * TILE, AT_A_QK = 3 * TILE, AT_DO = AT_A_QK + BLOCK;
constexpr int TILES = AT_DO + BLOCK, AT_STAGED = BUFFERS * TILES, AT_DECAYS = AT_STAGED + TILE + BLOCK;
constexpr int AT_SIGNALS = AT_DECAYS + BUFFERS * DECAYS, MEMORY = AT_SIGNALS + SIGNALS;

DEVICE void advance(State& dS, char* memory, int step) {
    const char* tiles = memory + step % BUFFERS * TILES;
    char* staged = memory + AT_STAGED;
    StateTerms state = as_terms(dS);
    wait_for_signal(memory + AT_SIGNALS + 8 * (step % BUFFERS), step / BUFFERS & 1);
    Terms dO = turned(tiles + AT_DO);
    Product dR;
    decay(dS, memory + AT_DECAYS + step % BUFFERS * DECAYS);  // compilers let nobody touch it while products run
    begin_products();
    times_rows<1>(dR, state, tiles + AT_K_TAIL, false);
    times_columns<1>(dR, dO, tiles + AT_A_QK);
    end_products();
    begin_products();
    times_columns<1>(dS, dO, tiles + AT_Q);
    end_products();
    wait_for_products<1>();
    settle(dR);
    Terms residuals = as_terms(dR);
    begin_products();
    times_columns<-1>(dS, residuals, tiles + AT_Y);
    end_products();
    await<ROOM_BARRIER>(THREADS);
    stage(staged, state);
    stage(staged + TILE, residuals);
    wait_for_products<0>();
    settle(dS), settle(state), settle(dO), settle(residuals);
    publish();
    arrive<STAGED_BARRIER>(THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reverse_scan(
    const void* Q_gamma, const void* K_tail, const float* gamma_C, const void* A_qk, const void* Y, const void* d_out,
    const float* d_final, float* d_state, void* ends, void* dR, const i64* start, const i64* length,
    const i64* first_chunk) {
    SHARED_MEMORY(memory);
    const i64 row = blockIdx.x / HALVES, sequence = row / HEADS, head = row % HEADS;
    const int part = static_cast<int>(blockIdx.x % HALVES) * 64;
    const i64 last = first_chunk[sequence + 1] - 1, at_state = row * D * D + part;
    const int count = static_cast<int>(last + 1 - first_chunk[sequence]);
    if (threadIdx.x < BUFFERS) make_signal(memory + AT_SIGNALS + 8 * threadIdx.x, 1 + GROUP);
    __syncthreads();
    if (threadIdx.x < GROUP) {
        State dS;
        load_state(dS, d_final + at_state);
        __syncthreads();
        for (int step = 0; step < count; step++) advance(dS, memory, step);
        store_state(dS, d_state + at_state);
        return;
    }
    i64 token = 0;
    int known = 0;
    const auto locate = [&](int step) {  // before it is needed
        if (step < count) token = start[last - step], known = static_cast<int>(length[last - step]);
    };
    locate(0);
    const auto fetch_step = [&](int step) {
        char *to = memory + step % BUFFERS * TILES, *signal = memory + AT_SIGNALS + 8 * (step % BUFFERS);
        alone([=]() {
            const i64 chunk = (last - step) * HEADS + head;
            announce(signal, AT_DO + DECAYS);
            fetch(to + AT_K_TAIL, K_tail, chunk, TILE, signal);
            fetch(to + AT_Y, Y, chunk, TILE, signal);
            fetch(to + AT_Q, Q_gamma, chunk, TILE, signal);
            fetch(to + AT_A_QK, A_qk, chunk, BLOCK, signal);
            fetch(memory + AT_DECAYS + step % BUFFERS * DECAYS, gamma_C, chunk, DECAYS, signal);
        });
        const char* tokens = static_cast<const char*>(d_out) + 2 * ((token * HEADS + head) * D + part);
        fetch_rows(to + AT_DO, tokens, 2 * HEADS * D, known);
        announce_own(signal);
        locate(step + 1);
    };
    const auto take = [=](int step) {
        const i64 chunk = (last - step) * HEADS + head;
        alone([=]() { store_staged(memory + AT_STAGED, ends, dR, chunk, part); });
    };
    move(count, fetch_step, take, wait_until_read<0>, [](int) {});
    wait_until_read<0>();
}
