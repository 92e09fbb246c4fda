// Outputs of a sequence without an erase gate and with one decay a head, as in Mamba-2 (Eq. 4), in one kernel.
//
// Nothing is read before it is written, so no chunk has factors: with L the log-decay since the chunk's start,
// O = exp(L) Q S + (exp(L - L') Q K^T, causal) W V and S = exp(L_C) S + (exp(L_C - L') K)^T W V. A program works on one
// sequence, one head and VALUES of its value channels. Carriers make the states; those who follow make a chunk's scores
// while the carriers are at it, and its outputs one step later.
#include "plain.cuh"

// Shared memory, three times: a chunk's queries, keys, values and decays; twice its scores and what carriers leave.
constexpr int AT_Q = 0, AT_K = TILE, AT_V = 2 * TILE, AT_LOGS = AT_V + PART, AT_WRITE = AT_LOGS + C * 4;
constexpr int CARRIED = AT_WRITE + C * 4, AT_SCORES = 3 * CARRIED, AT_LEFT = AT_SCORES + 2 * SQUARE;
constexpr int LEFT = CARRIERS * STATE, MEMORY = AT_LEFT + 2 * LEFT;
static_assert(STATE >= C * 32, "outputs are turned where their state was left");
constexpr float LOG2E = 1.4426950408889634f;

struct Token { float log, write; };  // the log-decay and the write gate of a token

DEVICE float gate(const void* w, i64 at) {
    return W_BYTES == 4 ? static_cast<const float*>(w)[at] : first(static_cast<const unsigned short*>(w)[at]);
}

// A lane's two tokens of a chunk; nothing after those that are known.
DEVICE void load_tokens(Token (&to)[2], const float* g, const void* w, i64 start, int length, int head, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = 2 * lane + i;
        const bool known = token < length;
        const i64 at = start + (known ? token : 0);
        const float log = g[at * G_HEADS + head / (HEADS / G_HEADS)];
        const float write = W_BYTES ? gate(w, at * HEADS + head) : 1.0f;
        to[i] = {known ? at_least(log * LOG2E, -185.0f) : 0.0f, known ? write : 0.0f};
    }
}

// Sums of log-decays up to each token, in powers of two, and the write gates.
DEVICE void store_tokens(char* chunk, const Token (&x)[2], int lane) {
    float total = x[0].log + x[1].log;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) total = add_lower(total, by);
    const float before = lower(total, 1);
    float* logs = reinterpret_cast<float*>(chunk + AT_LOGS) + 2 * lane;
    float* write = reinterpret_cast<float*>(chunk + AT_WRITE) + 2 * lane;
    logs[0] = before + x[0].log, logs[1] = before + x[0].log + x[1].log;
    write[0] = x[0].write, write[1] = x[1].write;
}

DEVICE Float2 pair_of(const char* numbers, int token) { return *reinterpret_cast<const Float2*>(numbers + 4 * token); }

DEVICE u32 scaled(u32 pair, float a, float b) { return pack(first(pair) * a, second(pair) * b); }

DEVICE void carry(Result<D / 8>& S, const char* chunk, char* left, int carrier, int lane) {
    leave(left, as_factor(S), lane);
    const float last = reinterpret_cast<const float*>(chunk + AT_LOGS)[C - 1], whole = exp2_fast(last);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) S.v[n][e] *= whole;
    Factor<C / 8> V = turned(chunk + AT_V, carrier, lane);
#pragma unroll
    for (int k = 0; k < C / 16; k++) {
        float by[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 16 * k + 8 * i + 2 * (lane & 3);
            const Float2 log = pair_of(chunk + AT_LOGS, token), write = pair_of(chunk + AT_WRITE, token);
#pragma unroll
            for (int e = 0; e < 2; e++) by[i][e] = exp2_fast(last - log.v[e]) * write.v[e];
        }
        V.v[k] = {scaled(V.v[k].x, by[0][0], by[0][1]), scaled(V.v[k].y, by[0][0], by[0][1]),
                  scaled(V.v[k].z, by[1][0], by[1][1]), scaled(V.v[k].w, by[1][0], by[1][1])};
    }
    times_columns<2 * D>(S, V, chunk + AT_K, lane);
}

// 16 rows of scores: what each token reads of those up to it, with their write gates.
DEVICE void score_rows(char* scores, const char* chunk, int row, float scale, int lane) {
    Result<C / 8> P = {};
    Factor<D / 8> Q;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[4];
        load_matrices(a, chunk + AT_Q + by_rows<2 * D>(row, 2 * k, lane));
        Q.v[k] = {a[0], a[1], a[2], a[3]};
    }
    times_rows<false, 2 * D>(P, Q, chunk + AT_K, lane);
    const float* logs = reinterpret_cast<const float*>(chunk + AT_LOGS);
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        const int key = 8 * n + 2 * (lane & 3);
        const Float2 log = pair_of(chunk + AT_LOGS, key), write = pair_of(chunk + AT_WRITE, key);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int token = row + (lane >> 2) + 8 * r;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float decay = exp2_fast(logs[token] - log.v[e]) * write.v[e] * scale;
                x[e] = key + e <= token ? P.v[n][2 * r + e] * decay : 0.0f;
            }
            *reinterpret_cast<u32*>(scores + row_at<2 * C>(token, n) + 4 * (lane & 3)) = pack(x[0], x[1]);
        }
    }
}

DEVICE void outputs(
    const char* chunk, const char* scores, char* left, char* to, int length, float scale, int carrier, int lane) {
    Result<C / 8> O = {};
    times_rows<false, 2 * D>(O, find<D / 8>(left, lane), chunk + AT_Q, lane);
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        const Float2 log = pair_of(chunk + AT_LOGS, 8 * n + 2 * (lane & 3));
#pragma unroll
        for (int e = 0; e < 4; e++) O.v[n][e] *= exp2_fast(log.v[e & 1]) * scale;
    }
    times_rows<true, 2 * C>(O, turned(chunk + AT_V, carrier, lane), scores, lane);
    store_turned(left, as_factor(O), to, 2 * HEADS * D, length, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) plain_scan(
    const void* q, const void* k, const void* v, const float* g, const void* w, const float* state, void* o,
    float* final_state, const i64* start, const i64* length, const i64* first_chunk, float scale) {
    SHARED_MEMORY(memory);
    constexpr int PARTS = D / VALUES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, carrier = warp % CARRIERS;
    const i64 row = blockIdx.x / PARTS, sequence = row / HEADS;
    const int head = static_cast<int>(row % HEADS), key_head = head / (HEADS / K_HEADS);
    const int part = static_cast<int>(blockIdx.x % PARTS) * VALUES, channel = part + 16 * carrier;
    const i64 begin = first_chunk[sequence];
    const int count = static_cast<int>(first_chunk[sequence + 1] - begin);
    const auto fetch = [&](int step) {
        const i64 token = start[begin + step];
        const int known = static_cast<int>(length[begin + step]);
        char* to = memory + step % 3 * CARRIED;
        const i64 key = 2 * (token * K_HEADS + key_head) * D, value = 2 * ((token * HEADS + head) * D + part);
        copy_rows<C, 2 * D>(to + AT_Q, static_cast<const char*>(q) + key, 2 * K_HEADS * D, known);
        copy_rows<C, 2 * D>(to + AT_K, static_cast<const char*>(k) + key, 2 * K_HEADS * D, known);
        copy_rows<C, 2 * VALUES>(to + AT_V, static_cast<const char*>(v) + value, 2 * HEADS * D, known);
    };
    const auto tokens_of = [&](Token (&to)[2], int step) {
        load_tokens(to, g, w, start[begin + step], static_cast<int>(length[begin + step]), head, lane);
    };
    Result<D / 8> S;
    Token next[2];  // of the chunk after the one at work, held by the first warp
    if (warp < CARRIERS) load_state(S, state + row * D * D + channel, lane);
    if (count > 0) fetch(0);
    if (warp == 0 && count > 0) {
        tokens_of(next, 0);
        store_tokens(memory, next, lane);
        if (count > 1) tokens_of(next, 1);
    }
    for (int step = 0; step <= count; step++) {
        wait_for_copies();
        __syncthreads();
        if (step + 1 < count) fetch(step + 1);
        const char* chunk = memory + step % 3 * CARRIED;
        char* scores = memory + AT_SCORES + (step & 1) * SQUARE;
        char* left = memory + AT_LEFT + (step & 1) * LEFT + carrier * STATE;
        if (warp < CARRIERS) {
            if (warp == 0 && step + 1 < count) {
                store_tokens(memory + (step + 1) % 3 * CARRIED, next, lane);
                if (step + 2 < count) tokens_of(next, step + 2);
            }
            if (step < count) carry(S, chunk, left, carrier, lane);
            continue;
        }
        if (step > 0) {
            const i64 before = begin + step - 1;
            const char* scores_before = memory + AT_SCORES + ((step - 1) & 1) * SQUARE;
            char* left_before = memory + AT_LEFT + ((step - 1) & 1) * LEFT + carrier * STATE;
            char* to = static_cast<char*>(o) + 2 * ((start[before] * HEADS + head) * D + channel);
            outputs(
                memory + (step - 1) % 3 * CARRIED, scores_before, left_before, to, static_cast<int>(length[before]),
                scale, carrier, lane);
        }
        if (step < count) {
            for (int r = 16 * carrier; r < C; r += 16 * CARRIERS) score_rows(scores, chunk, r, scale, lane);
        }
    }
    if (warp < CARRIERS) store_state(S, final_state + row * D * D + channel, lane);
}
