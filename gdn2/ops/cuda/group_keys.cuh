// Along the key channels: what comes through the states, from the other half and from the own half of the chunk.
//
// A thread holds two channels, lane / 4 and that plus eight of its warp's 16, and eight tokens next to each other of
// either half: results and terms of products, whose rows are channels, lie so.
#pragma once
#include "group_values.cuh"

struct Each { float v[4][4]; };  // of a half: [pair of tokens][channel, token of the pair]

DEVICE u32 pair_of(const Each& x, int n, int r) { return pack(x.v[n][2 * r], x.v[n][2 * r + 1]); }

// Numbers as two bf16 each.
DEVICE void split(const Each& x, Pairs& high, Pairs& low) {
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 pair = pair_of(x, n, r);
            high.v[n][r] = pair;
            low.v[n][r] = pack(x.v[n][2 * r] - first(pair), x.v[n][2 * r + 1] - second(pair));
        }
}

// Where a lane reads or writes a half's tokens and its warp's channels, for two pairs from n on.
DEVICE int pairs_at(int half, int n) {
    const int lane = threadIdx.x % 32, i = lane & 7, token = 8 * (i >> 1) + 2 * (lane >> 4) + (i & 1);
    const int own = own_group() * BLOCK + turned_at(token, 2 * own_warp() + ((lane >> 3) & 1));
    return own + 128 * (HALF * half + 2 * n);
}

DEVICE Pairs load_pairs(const char* tile, int half) {
    Pairs to;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        u32 x[4];
        load_transposed(x, tile + pairs_at(half, n));
        to.v[n][0] = x[0], to.v[n][1] = x[1], to.v[n + 1][0] = x[2], to.v[n + 1][1] = x[3];
    }
    return to;
}

DEVICE void store_pairs(char* tile, int half, const Each& x) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        store_transposed(
            tile + pairs_at(half, n), pair_of(x, n, 0), pair_of(x, n, 1), pair_of(x, n + 1, 0), pair_of(x, n + 1, 1));
    }
}

// A quarter of a square of score gradients as an operand: columns of the result are its rows, readers, or its columns.
// What a lane's place has of the lane is made once: quarters begin where that and constants have no bit in common.
struct Quarter { u32 v[2][2][4]; };

DEVICE Quarter readers(const char* square, int row, int column) {
    const int lane = threadIdx.x % 32, own = block_at((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    Quarter to;
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            load_matrices(to.v[k][n], square + 128 * (row + 16 * n) + (own ^ (2 * column + 32 * k)));
        }
    return to;
}

DEVICE Quarter keys(const char* square, int row, int column) {
    const int lane = threadIdx.x % 32, own = block_at(lane & 15, lane >> 4);
    Quarter to;
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            load_transposed(to.v[k][n], square + 128 * (row + 16 * k) + (own ^ (2 * column + 32 * n)));
        }
    return to;
}

DEVICE void multiply(Each& to, const Pairs& a, const Quarter& b) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const u32 terms[4] = {a.v[2 * k][0], a.v[2 * k][1], a.v[2 * k + 1][0], a.v[2 * k + 1][1]};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float(&x)[4] = to.v[n];
            mma(x[0], x[1], x[2], x[3], terms, b.v[k][n / 2][n % 2 * 2], b.v[k][n / 2][n % 2 * 2 + 1]);
        }
    }
}

// Sums over the tokens of a half that come before each of a thread, and over all of them.
DEVICE float before_lanes(float x, float& all) {
    const int lane = threadIdx.x % 32;
    float sum = x;
#pragma unroll
    for (int by = 1; by < 4; by *= 2) {
        const float other = from_lane(sum, lane - by < 0 ? lane : lane - by);
        if ((lane & 3) >= by) sum += other;
    }
    all = from_lane(sum, lane | 3);
    const float other = from_lane(sum, lane == 0 ? 0 : lane - 1);
    return (lane & 3) > 0 ? other : 0.0f;
}

DEVICE float over_tokens_of_half(float x) {
    x += from_other(x, 1);
    return x + from_other(x, 2);
}

// The first of a thread's two channels.
DEVICE int own_channel() { return 64 * own_group() + 16 * own_warp() + threadIdx.x % 32 / 4; }

DEVICE float inverse(float log) { return log > DEEPEST ? exp2_fast(-58.0f - log) : 0.0f; }

// Log-decays of a half since its start, in powers of two, and those of both halves, of a thread's two channels.
DEVICE void load_decays(Each& to, const Part& chunk, const float* g, int half) {
    const int token = HALF * half + own_token(), room = chunk.length - token;
    const float* from = G_WIDTH == D ? chunk.at<float, 4, G_HEADS>(g, token, own_channel())
                                     : chunk.head<float, G_HEADS>(g) + G_HEADS * token;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int later = G_WIDTH == D ? G_HEADS * D * i + 8 * r : G_HEADS * i;
            to.v[i / 2][2 * r + i % 2] = i < room ? from[later] : 0.0f;
        }
}

DEVICE void sum_decays(Each& L, float (&last)[2]) {
#pragma unroll
    for (int r = 0; r < (G_WIDTH == D ? 2 : 1); r++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float& x = L.v[i / 2][2 * r + i % 2];
            sum += at_least(x * LOG2E, -185.0f);
            x = sum;
        }
        const float before = before_lanes(sum, last[r]);
#pragma unroll
        for (int i = 0; i < 8; i++) L.v[i / 2][2 * r + i % 2] += before;
    }
    if (G_WIDTH == D) return;
#pragma unroll
    for (int i = 0; i < 8; i++) L.v[i / 2][2 + i % 2] = L.v[i / 2][i % 2];
    last[1] = last[0];
}

DEVICE void put_logs_aside(char* memory, const Each& L) {
#pragma unroll
    for (int n = 0; n < 4; n++) aside<Float4>(memory, LOGS + n) = {{L.v[n][0], L.v[n][1], L.v[n][2], L.v[n][3]}};
}

DEVICE void take_logs_back(Each& L, char* memory) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const Float4 x = aside<Float4>(memory, LOGS + n);
#pragma unroll
        for (int e = 0; e < 4; e++) L.v[n][e] = x.v[e];
    }
}

// What two halves share: the first one's keys as the second one's readers meet them, lowered; what the decays of the
// halves get; and what the second one's readers give to the first one's keys.
struct Between {
    Pairs keys;
    Each from_second;
    float last[2][2], whole[2][2], d_second[2], d_state[2];
};

// What a kind of readers of the second half gives to the decay of the first, by a thread's own tokens. It waits in the
// place of what has been taken back: left in registers, compilers would sum it up at the very end and keep all terms.
DEVICE Float4& read_before(char* memory, int kind) { return aside<Float4>(memory, 4 * kind + 2); }

// So do the sums of the first half's log-decays, which the second half does not need.
DEVICE Float4& last_of_first(char* memory) { return aside<Float4>(memory, 4 * QUERIES + 3); }

DEVICE void meet_halves(Between& to, char* memory, const Each& L) {
    const Pairs K = load_pairs(memory + AT_K, 0), tails = take_back(memory, TAILS, 0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float a = first(K.v[n][r]) * exp2_fast(to.last[0][r] - L.v[n][2 * r]);
            const float b = second(K.v[n][r]) * exp2_fast(to.last[0][r] - L.v[n][2 * r + 1]);
            sum += first(tails.v[n][r]) * a + second(tails.v[n][r]) * b;
            to.keys.v[n][r] = pack(a * LOWER, b * LOWER);
        }
        to.d_second[r] = over_tokens_of_half(sum);
    }
    to.from_second = {};
}

// Gradient of one kind of reader of a half, given before any decay; what it gives to keys is added to theirs.
template <int HALF_AT, class Reader> DEVICE void reader_gradient(
    Each& dX, Each& d_keys, Between& between, const Reader& X, const Each& lifted, const Pairs& key,
    const Pairs& key_rest, char* memory, int kind) {
    constexpr int AT = HALF * HALF_AT;
    const char *high = memory + AT_HIGH + kind * BLOCK, *low = memory + AT_LOW;
    const int low_column = AT ^ (HALF * kind);
    Pairs row, row_rest;
    {
        const Pairs outside = take_back(memory, kind, HALF_AT);
        Each rows;
        Float4 sums = {};
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                rows.v[n][e] = X(n, e) * lifted.v[n][e];
                dX.v[n][e] = one_of(outside.v[n][e >> 1], e & 1) * LOWER;
                if (HALF_AT == 1) {
                    sums.v[e >> 1] += dX.v[n][e] * rows.v[n][e];
                    dX.v[n][e] *= between.whole[0][e >> 1];
                }
            }
        if (HALF_AT == 1) read_before(memory, kind) = sums;
        split(rows, row, row_rest);
    }
    if (HALF_AT == 1) {
        multiply(dX, between.keys, readers(high, HALF, 0));
        multiply(between.from_second, row, keys(high, HALF, 0));
    }
    {
        const Quarter by = readers(high, AT, AT);
        multiply(dX, key_rest, by);
        multiply(dX, key, by);
    }
    multiply(dX, key, readers(low, AT, low_column));
    {
        const Quarter by = keys(high, AT, AT);
        multiply(d_keys, row_rest, by);
        multiply(d_keys, row, by);
    }
    multiply(d_keys, row, keys(low, AT, low_column));
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dX.v[n][e] *= lifted.v[n][e];
}

// Erase gates of a half: one for each channel, or one a head.
DEVICE Pairs load_gates(const char* memory, const Part& chunk, const Inputs& x, int half) {
    if (B_WIDTH == D) return load_pairs(memory + AT_B, half);
    Pairs to;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int token = HALF * half + 8 * (own_thread() & 3) + 2 * n;  // not kept for later
        const u32 a = chunk.gate<B_WIDTH, B_HEADS>(x.b, token, 0), b = chunk.gate<B_WIDTH, B_HEADS>(x.b, token + 1, 0);
        to.v[n][0] = to.v[n][1] = (a & 0xffffu) | (b << 16);
    }
    return to;
}

// Sums over a warp's channels of gradients that a head has one of.
DEVICE void place_sums(char* sums, const Each& x, int half) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float sum = over_tokens(x.v[i / 2][i % 2] + x.v[i / 2][2 + i % 2]);  // over lanes of other channels
        const int token = HALF * half + own_token() + i;
        const u32 thread = own_thread();
        if (thread % 32 < 4) reinterpret_cast<float*>(sums)[C * (thread / 32) + token] = sum;
    }
}

// Gradients of queries, erase gates, keys and log-decays of one half.
template <int HALF_AT> DEVICE void half_gradients(
    char* memory, const Part& chunk, const Inputs& x, const Outputs& out, const Each& L, Between& between) {
    const int mine = HALF * HALF_AT + own_token();
    const float* diagonal = reinterpret_cast<const float*>(memory + AT_DIAGONAL) + mine;
    const Pairs K = load_pairs(memory + AT_K, HALF_AT), Q = load_pairs(memory + AT_Q, HALF_AT);
    Each dX, lifted, sums, d_keys = {};
    Pairs key, key_rest;
    {
        Each lowered;
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                lifted.v[n][e] = exp2_fast(L.v[n][e]) * LIFT;
                lowered.v[n][e] = one_of(K.v[n][e >> 1], e & 1) * inverse(L.v[n][e]);
            }
        split(lowered, key, key_rest);
    }
    const auto query = [&](int n, int e) { return one_of(Q.v[n][e >> 1], e & 1) * x.scale; };
    reader_gradient<HALF_AT>(
        dX, d_keys, between, query, lifted, key, key_rest, memory, QUERIES);
    if (B_WIDTH == D && HALF_AT == 1) last_of_first(memory) = {{between.last[0][0], between.last[0][1]}};
    {
        Each dQ;
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float k = one_of(K.v[n][e >> 1], e & 1);
                sums.v[n][e] = query(n, e) * dX.v[n][e];
                dQ.v[n][e] = (dX.v[n][e] + diagonal[2 * n + (e & 1)] * k) * x.scale;
            }
        store_pairs(memory + AT_Q, HALF_AT, dQ);
    }
    const Pairs B = load_gates(memory, chunk, x, HALF_AT);
    const auto erase = [&](int n, int e) { return one_of(B.v[n][e >> 1], e & 1) * one_of(K.v[n][e >> 1], e & 1); };
    reader_gradient<HALF_AT>(
        dX, d_keys, between, erase, lifted, key, key_rest, memory, ERASE_ROWS);
    {
        Each dB;
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sums.v[n][e] += erase(n, e) * dX.v[n][e];
                dB.v[n][e] = dX.v[n][e] * one_of(K.v[n][e >> 1], e & 1);
            }
        if (B_WIDTH == D) store_pairs(memory + AT_B, HALF_AT, dB);
        if (B_WIDTH == 1) place_sums(memory + AT_ERASED, dB, HALF_AT);
    }

    // What a log-decay gets: all that is read from the half's start at its token or later, less what the half's own
    // keys gave to that; what the keys before its token pass on to the half's end; and what passes the whole half.
    const Pairs tails = take_back(memory, TAILS, HALF_AT);
    if (B_WIDTH == D && HALF_AT == 0) {
        const Float4 last = last_of_first(memory);
        between.last[0][0] = last.v[0], between.last[0][1] = last.v[1];
    }
    float total[2] = {0.0f, 0.0f};
    Each dK;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = e >> 1;
            const float k = one_of(K.v[n][r], e & 1), gate = one_of(B.v[n][r], e & 1);
            const float inside = d_keys.v[n][e] * inverse(forgotten(L.v[n][e]));
            float passed = one_of(tails.v[n][r], e & 1);
            if (HALF_AT == 0) passed = passed * between.whole[1][r] + between.from_second.v[n][e] * LOWER;
            passed *= exp2_fast(between.last[HALF_AT][r] - L.v[n][e]);
            const float read = sums.v[n][e] - k * inside;
            total[r] += read;
            sums.v[n][e] = k * passed - read;
            dK.v[n][e] = passed + inside + dX.v[n][e] * gate + diagonal[2 * n + (e & 1)] * query(n, e);
        }
    store_pairs(memory + AT_K, HALF_AT, dK);
    float* dg = chunk.at<float, 4>(out.dg, mine, own_channel());
    Each decayed;
    const int room = chunk.length - mine;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (HALF_AT == 0) {
            const float read = read_before(memory, QUERIES).v[r] + read_before(memory, ERASE_ROWS).v[r];
            total[r] += between.whole[0][r] * read;
        }
        total[r] = over_tokens_of_half(total[r]) + between.whole[0][r] * between.whole[1][r] * between.d_state[r];
        if (HALF_AT == 1) total[r] += between.whole[1][r] * between.d_second[r];
        float sum = 0.0f, all;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += sums.v[i / 2][2 * r + i % 2];
        float before = before_lanes(sum, all) + total[r];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (G_WIDTH == D && i < room) dg[HEADS * D * i + 8 * r] = before;
            decayed.v[i / 2][2 * r + i % 2] = before;
            before += sums.v[i / 2][2 * r + i % 2];
        }
    }
    if (G_WIDTH == 1) place_sums(memory + AT_DECAYED, decayed, HALF_AT);
}
