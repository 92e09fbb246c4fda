// Outputs of a sequence, or its states and residuals if STATES (Eqs. 23, 24), by one program.
//
// R = U - Y S, O = Q_gamma S + A_qk R and S = gamma_C S + K_tail^T R, all turned: S^T, R^T and O^T have a program's 64
// value channels as rows.
#pragma once
#include "scan.cuh"

namespace forward {
// Shared memory: tiles of three steps, what two have staged, outputs or states and residuals, then decays and signals.
constexpr int ROOMS = 2, AT_Y = 0, AT_K_TAIL = TILE, AT_U = 2 * TILE, AT_A_QK = AT_U + BLOCK, AT_Q = AT_A_QK + BLOCK;
constexpr int TILES = STATES ? AT_A_QK : AT_Q + TILE, STAGED = STATES ? TILE + BLOCK : BLOCK;
constexpr int AT_STAGED = BUFFERS * TILES, AT_DECAYS = AT_STAGED + ROOMS * STAGED;
constexpr int AT_SIGNALS = AT_DECAYS + BUFFERS * DECAYS, MEMORY = AT_SIGNALS + SIGNALS;
DEVICE char* staged_at(char* memory, int step) { return memory + AT_STAGED + step % ROOMS * STAGED; }

DEVICE void advance(State& S, char* memory, int step) {
    const char* tiles = memory + step % BUFFERS * TILES;
    char* staged = staged_at(memory, step);
    StateTerms state = as_terms(S);
    wait_for_signal(memory + AT_SIGNALS + 8 * (step % BUFFERS), step / BUFFERS & 1);
    const Terms U = turned(tiles + AT_U);
    Product R, O;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 x[4] = {U.v[k].x, U.v[k].y, U.v[k].z, U.v[k].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float* to = &R.v[2 * k + i / 2][i % 2 * 2];
            to[0] = first(x[i]), to[1] = second(x[i]);
        }
    }
    decay(S, memory + AT_DECAYS + step % BUFFERS * DECAYS);  // compilers let nobody touch it while products run
    begin_products();
    times_rows<-1>(R, state, tiles + AT_Y);
    end_products();
    if constexpr (!STATES) {
        times_rows<1>(O, state, tiles + AT_Q, false);
        end_products();
    }
    wait_for_products<STATES ? 0 : 1>();
    settle(R);
    Terms residuals = as_terms(R);
    begin_products();
    times_columns<1>(S, residuals, tiles + AT_K_TAIL);
    end_products();
    if constexpr (!STATES) {
        times_rows<1>(O, residuals, tiles + AT_A_QK);
        end_products();
    }
    await<ROOM_BARRIER>(THREADS);
    if constexpr (STATES) {
        stage(staged, state);
        stage(staged + TILE, residuals);
    }
    wait_for_products<0>();
    settle(S), settle(state), settle(residuals);
    if constexpr (!STATES) {
        settle(O);
        stage(staged, as_terms(O));
    }
    if constexpr (STATES) publish();
    arrive<STAGED_BARRIER>(THREADS);
}

struct Arguments {
    Factors f;
    Chunks chunks;
    const float* state;
    void* o;
    float* final_state;
    void *starts, *R;
};

DEVICE void run(char* memory, const Row& row, const Arguments& a) {
    const i64 begin = a.chunks.first[row.sequence];
    const int count = static_cast<int>(a.chunks.first[row.sequence + 1] - begin);
    if (threadIdx.x < BUFFERS) make_signal(memory + AT_SIGNALS + 8 * threadIdx.x, 1);
    __syncthreads();
    if (threadIdx.x < GROUP) {
        State S;
        load_state(S, a.state + row.state());
        __syncthreads();
        for (int step = 0; step < count; step++) advance(S, memory, step);
        if (!STATES) store_state(S, a.final_state + row.state());
        return;
    }
    const auto fetch_alone = [&](int step) {
        const i64 chunk = row.shared(begin + step);
        char *to = memory + step % BUFFERS * TILES, *signal = memory + AT_SIGNALS + 8 * (step % BUFFERS);
        announce(signal, TILES + DECAYS);
        fetch(to + AT_Y, a.f.Y, chunk, TILE, signal);
        fetch(to + AT_K_TAIL, a.f.K_tail, chunk, TILE, signal);
        fetch(to + AT_U, a.f.U, row.chunk(begin + step) * HALVES + row.part / 64, BLOCK, signal);
        fetch(memory + AT_DECAYS + step % BUFFERS * DECAYS, a.f.gamma_C, chunk, DECAYS, signal);
        if (STATES) return;
        fetch(to + AT_Q, a.f.Q_gamma, chunk, TILE, signal);
        fetch(to + AT_A_QK, a.f.A_qk, chunk, BLOCK, signal);
    };
    const auto fetch_step = [&](int step) { alone([&]() { fetch_alone(step); }); };
    if constexpr (STATES) {
        const auto take = [&](int step) {
            alone([&]() { store_staged(staged_at(memory, step), a.starts, a.R, row.chunk(begin + step), row.part); });
        };
        move(count, fetch_step, take, wait_until_read<ROOMS - 1>, [](int) {});
        wait_until_read<0>();
    } else {
        Rows outputs;
        const auto take = [&](int step) { outputs.take(staged_at(memory, step)); };
        i64 token = 0;
        int known = 0;
        const auto locate = [&](int step) {  // before it is needed
            if (step >= count) return;
            token = a.chunks.start[begin + step], known = static_cast<int>(a.chunks.length[begin + step]);
        };
        locate(0);
        const auto put = [&](int step) {
            outputs.store(static_cast<char*>(a.o) + row.tokens(token), 2 * HEADS * D, known);
            locate(step + 1);
        };
        move(count, fetch_step, take, []() {}, put);
    }
}
}  // namespace forward
