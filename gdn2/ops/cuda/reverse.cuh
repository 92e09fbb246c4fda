// Gradients of residuals and states of a sequence (Eqs. 53-63) by one program: the forward scan mirrored.
//
// dR = K_tail dS + A_qk^T dO and dS = gamma_C dS + Q_gamma^T dO - Y^T dR from the last chunk to the first, all turned.
#pragma once
#include "scan.cuh"

namespace reverse {
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

struct Arguments {
    Factors f;
    Chunks chunks;
    const void* d_out;
    const float* d_final;
    float* d_state;
    void *ends, *dR;
};

DEVICE void run(char* memory, const Row& row, const Arguments& a) {
    const i64 last = a.chunks.first[row.sequence + 1] - 1;
    const int count = static_cast<int>(last + 1 - a.chunks.first[row.sequence]);
    if (threadIdx.x < BUFFERS) make_signal(memory + AT_SIGNALS + 8 * threadIdx.x, 1 + GROUP);
    __syncthreads();
    if (threadIdx.x < GROUP) {
        State dS;
        load_state(dS, a.d_final + row.state());
        __syncthreads();
        for (int step = 0; step < count; step++) advance(dS, memory, step);
        store_state(dS, a.d_state + row.state());
        return;
    }
    i64 token = 0;
    int known = 0;
    const auto locate = [&](int step) {  // before it is needed
        if (step >= count) return;
        token = a.chunks.start[last - step], known = static_cast<int>(a.chunks.length[last - step]);
    };
    locate(0);
    const auto fetch_step = [&](int step) {
        char *to = memory + step % BUFFERS * TILES, *signal = memory + AT_SIGNALS + 8 * (step % BUFFERS);
        alone([&]() {
            const i64 chunk = row.shared(last - step);
            announce(signal, AT_DO + DECAYS);
            fetch(to + AT_K_TAIL, a.f.K_tail, chunk, TILE, signal);
            fetch(to + AT_Y, a.f.Y, chunk, TILE, signal);
            fetch(to + AT_Q, a.f.Q_gamma, chunk, TILE, signal);
            fetch(to + AT_A_QK, a.f.A_qk, chunk, BLOCK, signal);
            fetch(memory + AT_DECAYS + step % BUFFERS * DECAYS, a.f.gamma_C, chunk, DECAYS, signal);
        });
        fetch_rows(to + AT_DO, static_cast<const char*>(a.d_out) + row.tokens(token), 2 * HEADS * D, known);
        announce_own(signal);
        locate(step + 1);
    };
    const auto take = [&](int step) {
        alone([&]() { store_staged(memory + AT_STAGED, a.ends, a.dR, row.chunk(last - step), row.part); });
    };
    move(count, fetch_step, take, wait_until_read<0>, [](int) {});
    wait_until_read<0>();
}
}  // namespace reverse
