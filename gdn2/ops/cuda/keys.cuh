// Along the key channels: what comes through the states, from the other half and from the own half of the chunk.
#pragma once
#include "memory.cuh"
#include "states.cuh"

struct Operands {
    const void *q, *k, *b;
    const float* g;
    void *dq, *dk, *db;
    float* dg;
    float scale;
};

// A warp's own memory for eight of its channels: log-decays since the half's start, the half's keys and readers as two
// bf16, and a few numbers per channel.
enum { WHOLE, LAST = WHOLE + 2, D_SECOND = LAST + 2, D_STATE };
struct Own {
    Float2* logs;     // [2 halves][4][32]
    char *keys, *rows;  // twice [32 tokens][8 channels] each, of the half at work
    Float2* channel;  // [7][4], of this thread's two channels
    DEVICE Own(char* memory, int warp, int lane)
        : logs(reinterpret_cast<Float2*>(memory + AT_OWN + warp * OWN) + lane),
          keys(memory + AT_OWN + warp * OWN + C * 8 * 4),
          rows(keys + 2 * HALF * 8 * 2),
          channel(reinterpret_cast<Float2*>(memory + AT_CHANNELS + warp * CHANNELS) + (lane & 3)) {}
    DEVICE Float2 log(int half, int i) const { return logs[128 * half + 32 * i]; }
    DEVICE Float2 per_channel(int which) const { return channel[4 * which]; }
};

// Two channels of token i of a thread into a tile of keys or readers, as two bf16 each.
DEVICE void store_split(char* tile, int i, float x, float y, int lane) {
    const u32 pair = pack(x, y);
    u32* at = reinterpret_cast<u32*>(tile) + 32 * i + lane;
    at[0] = pair;
    at[HALF * 4] = pack(x - first(pair), y - second(pair));
}

// What a thread has of eight channels: keys, queries and erase gates of four tokens of either half.
struct Inputs { Four K[2], Q[2], B[2]; };

// Loads all of it at once, and the log-decays, which are summed since the start of their half, in powers of two; 2^-185
// is nothing, however often it is passed.
template <bool FULL> DEVICE void load_inputs(
    Inputs& in, const Own& own, const Operands& x, const Chunk<FULL>& chunk, int channel, int lane) {
    Narrow L[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int mine = HALF * half + 4 * (lane >> 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Float2 g = chunk.template decays<G_WIDTH, Float2>(x.g, mine + i, channel);
            L[half].v[i][0] = g.v[0], L[half].v[i][1] = g.v[1];
        }
        in.K[half] = chunk.template load_pairs<K_HEADS>(x.k, mine, channel);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int mine = HALF * half + 4 * (lane >> 2);
        in.Q[half] = chunk.template load_pairs<K_HEADS>(x.q, mine, channel);
#pragma unroll
        for (int i = 0; i < 4; i++) in.B[half].v[i] = chunk.template gate<B_WIDTH, B_HEADS>(x.b, mine + i, channel);
    }
    __syncwarp();  // nobody reads what was there before
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) L[half].v[i][e] = at_least(L[half].v[i][e] * LOG2E, -185.0f);
        sums_until(L[half]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            own.logs[128 * half + 32 * i] = {{L[half].v[i][0], L[half].v[i][1]}};
        }
        if (lane >= 28) {
            own.channel[4 * (LAST + half)] = {{L[half].v[3][0], L[half].v[3][1]}};
            own.channel[4 * (WHOLE + half)] = {{exp2_fast(L[half].v[3][0]), exp2_fast(L[half].v[3][1])}};
        }
    }
    __syncwarp();
}

// Products with a half's own keys: readers below the diagonal, their score gradients and the keys as two bf16 each.
DEVICE void from_own_half(
    Narrow& to, const char* high, const char* low, const char* keys, int first, const Lane& places) {
    u32 key[4], key_rest[4];
    load_transposed(key, keys);
    load_transposed(key_rest, keys + HALF * 16);
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            u32 a[4], a_rest[4];
            places.square(a, high, first + 16 * m, first + 16 * k);
            places.low(a_rest, low, first + 16 * m, 16 * k);
            multiply(to, m, a_rest, key[2 * k], key[2 * k + 1]);
            multiply(to, m, a, key_rest[2 * k], key_rest[2 * k + 1]);
            multiply(to, m, a, key[2 * k], key[2 * k + 1]);
        }
    }
}

// What two halves share: the first one's keys as columns of products, lowered, and what its whole decay gets from the
// second one's readers.
struct Between {
    u32 keys[4];
    float d_first[2];
};

// One kind of reader, queries or erase rows, of a thread's four tokens in a half: a product of two, before any decay.
struct Reader {
    Four x;
    bool erase;
    float scale;
    DEVICE Float2 operator()(u32 key, int i) const {
        return {{first(x.v[i]) * (erase ? first(key) : scale), second(x.v[i]) * (erase ? second(key) : scale)}};
    }
};

// The transposed products: what readers, as two bf16, give to keys of their half. Those of the second are kept for the
// keys of the first, where what came to them through the state was.
DEVICE void to_keys(
    Narrow& d_keys, const Reader& reader, const Four& K, const Narrow& lifted, const Own& own, Pair4* keep_at,
    const char* high, const char* low, int half, const Lane& places, int lane) {
    const int first_token = HALF * half;
    __syncwarp();  // nobody reads the rows before any more
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Float2 X = reader(K.v[i], i);
        store_split(own.rows, i, X.v[0] * lifted.v[i][0], X.v[1] * lifted.v[i][1], lane);
    }
    __syncwarp();
    u32 row[4], row_rest[4];
    load_transposed(row, own.rows + 16 * lane);
    load_transposed(row_rest, own.rows + HALF * 16 + 16 * lane);
    if (half == 1) *keep_at = {row[0], row[1], row[2], row[3]};
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            u32 a[4], a_rest[4];
            places.flipped(a, high, first_token + 16 * m, first_token + 16 * k);
            places.low_flipped(a_rest, low, 16 * m, first_token + 16 * k);
            multiply(d_keys, m, a_rest, row[2 * k], row[2 * k + 1]);
            multiply(d_keys, m, a, row_rest[2 * k], row_rest[2 * k + 1]);
            multiply(d_keys, m, a, row[2 * k], row[2 * k + 1]);
        }
    }
}

// What the second half's readers give to keys of the first.
DEVICE void to_keys_before(Narrow& d_keys, char* memory, int j, const Lane& places) {
#pragma unroll
    for (int kind = 0; kind < 2; kind++) {
        const Pair4 x = *kept(memory, kind, j, 1);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            u32 a[4];
            places.flipped(a, memory + AT_HIGH + kind * SQUARE, 16 * m, HALF);
            multiply(d_keys, m, a, x.x, x.y);
            places.flipped(a, memory + AT_HIGH + kind * SQUARE, 16 * m, HALF + 16);
            multiply(d_keys, m, a, x.z, x.w);
        }
    }
}

// Gradient of one kind of reader of a half, without that of its own token's score.
DEVICE void reader_gradient(
    Narrow& dX, Narrow& d_keys, Between& between, const Reader& reader, const Four& K, const Narrow& lifted,
    const Own& own, char* memory, int j, int half, int lane) {
    const char* high = memory + AT_HIGH + (reader.erase ? SQUARE : 0);
    const char* low = memory + AT_LOW + (reader.erase ? SQUARE / 2 : 0);
    const Lane places(lane);
    Pair4* const keep_at = kept(memory, reader.erase, j, half);
    const Pair4 outside = *keep_at;
    to_keys(d_keys, reader, K, lifted, own, keep_at, high, low, half, places, lane);
    const Four out = {{outside.x, outside.y, outside.z, outside.w}};
#pragma unroll
    for (int i = 0; i < 4; i++) dX.v[i][0] = first(out.v[i]) * LOWER, dX.v[i][1] = second(out.v[i]) * LOWER;
    if (half == 1) {
        const Float2 first_half = own.per_channel(WHOLE);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Float2 X = reader(K.v[i], i);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                between.d_first[e] += dX.v[i][e] * X.v[e] * lifted.v[i][e];
                dX.v[i][e] *= first_half.v[e];
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            u32 a[4];
            places.square(a, high, HALF + 16 * m, 0);
            multiply(dX, m, a, between.keys[0], between.keys[1]);
            places.square(a, high, HALF + 16 * m, 16);
            multiply(dX, m, a, between.keys[2], between.keys[3]);
        }
    }
    from_own_half(dX, high, low, own.keys + 16 * lane, HALF * half, places);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) dX.v[i][e] *= lifted.v[i][e];
}

DEVICE float inverse(float log) { return log > DEEPEST ? exp2_fast(-58.0f - log) : 0.0f; }

// Sums over a thread's channels for its tokens of a half, of gradients that a head has one of.
struct Sums { float erased[4], decayed[4]; };

// Gradients of queries, erase gates, keys and log-decays of one half, for eight of a warp's channels; those of gates and
// decays for all channels are added to the sums.
template <bool FULL> DEVICE void half_gradients(
    char* memory, const Operands& x, const Chunk<FULL>& chunk, const Inputs& in, Between& between, const Own& own,
    Sums& all, int j, int half, int channel, int lane) {
    const int group = lane >> 2, mine = HALF * half + 4 * group;
    const Float4 diagonal = *reinterpret_cast<const Float4*>(memory + AT_DIAGONAL + 4 * mine);
    Narrow dX, lifted, sums = {}, d_keys = {};  // lifted are decays since the half's start
    const Four& K = in.K[half];
    __syncwarp();  // nobody reads the other half's keys any more
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Float2 log = own.log(half, i);
        store_split(own.keys, i, first(K.v[i]) * inverse(log.v[0]), second(K.v[i]) * inverse(log.v[1]), lane);
        lifted.v[i][0] = exp2_fast(log.v[0]) * LIFT, lifted.v[i][1] = exp2_fast(log.v[1]) * LIFT;
    }
    __syncwarp();

    Reader reader;
    reader.scale = x.scale;
#pragma unroll 1
    for (int kind = 0; kind < 2; kind++) {
        reader.erase = kind == 1;
#pragma unroll
        for (int i = 0; i < 4; i++) reader.x.v[i] = reader.erase ? in.B[half].v[i] : in.Q[half].v[i];
        reader_gradient(dX, d_keys, between, reader, K, lifted, own, memory, j, half, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Float2 X = reader(K.v[i], i);
            float out[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float key = one_of(K.v[i], e);
                sums.v[i][e] += X.v[e] * dX.v[i][e];
                out[e] = reader.erase ? dX.v[i][e] * key : (dX.v[i][e] + diagonal.v[i] * key) * x.scale;
            }
            if (B_WIDTH == D || !reader.erase) {
                chunk.store(reader.erase ? x.db : x.dq, mine + i, channel, pack(out[0], out[1]));
            } else {
                all.erased[i] += out[0] + out[1];
            }
        }
    }

    // What a log-decay gets: all that is read from the half's start at its token or later, less what the half's own
    // keys gave to that; what the keys before its token pass on to the half's end; and what passes the whole half.
    Narrow from_second = {};
    if (half == 0) to_keys_before(from_second, memory, j, Lane(lane));
    const Pair4 tails = *kept(memory, 2, j, half);
    const Four tail = {{tails.x, tails.y, tails.z, tails.w}};
    float total[2] = {0.0f, 0.0f};
    const Float2 first_half = own.per_channel(WHOLE), second_half = own.per_channel(WHOLE + 1);
    const Float2 last = own.per_channel(LAST + half);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Float2 log = own.log(half, i);
        float out[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float key = one_of(K.v[i], e), gate = one_of(in.B[half].v[i], e), query = one_of(in.Q[half].v[i], e);
            const float inside = d_keys.v[i][e] * inverse(log.v[e]);
            out[e] = one_of(tail.v[i], e);
            if (half == 0) out[e] = out[e] * second_half.v[e] + from_second.v[i][e] * LOWER;
            out[e] *= exp2_fast(last.v[e] - log.v[e]);
            const float read = sums.v[i][e] - key * inside;
            total[e] += read;
            sums.v[i][e] = key * out[e] - read;
            out[e] += inside + dX.v[i][e] * gate + diagonal.v[i] * (x.scale * query);
        }
        chunk.store(x.dk, mine + i, channel, pack(out[0], out[1]));
    }
    sums_before(sums);
    const Float2 d_state = own.per_channel(D_STATE + j), d_second = own.per_channel(D_SECOND);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (half == 0) total[e] += first_half.v[e] * between.d_first[e];
        total[e] = over_tokens(total[e]) + first_half.v[e] * second_half.v[e] * d_state.v[e];
        if (half == 1) total[e] += second_half.v[e] * d_second.v[e];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Float2 dg;
#pragma unroll
        for (int e = 0; e < 2; e++) dg.v[e] = total[e] + sums.v[i][e];
        if (G_WIDTH == D) chunk.template store<Float2, 4>(x.dg, mine + i, channel, dg);
        all.decayed[i] += dg.v[0] + dg.v[1];
    }
}

// The first half's keys as the second half's readers meet them, and what its decay gets for what passes to the end.
DEVICE void meet_halves(Between& between, char* memory, const Four& K, const Own& own, int j, int lane) {
    const Pair4 tails = *kept(memory, 2, j, 0);
    const Four tail = {{tails.x, tails.y, tails.z, tails.w}};
    float d_second[2] = {0.0f, 0.0f};
    const Float2 last = own.per_channel(LAST);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Float2 log = own.log(0, i);
        const float a = first(K.v[i]) * exp2_fast(last.v[0] - log.v[0]);
        const float b = second(K.v[i]) * exp2_fast(last.v[1] - log.v[1]);
        d_second[0] += first(tail.v[i]) * a;
        d_second[1] += second(tail.v[i]) * b;
        reinterpret_cast<u32*>(own.rows)[32 * i + lane] = pack(a * LOWER, b * LOWER);
    }
    __syncwarp();
    load_transposed(between.keys, own.rows + 16 * lane);
    const float a = over_tokens(d_second[0]), b = over_tokens(d_second[1]);
    if (lane < 4) own.channel[4 * D_SECOND] = {{a, b}};
    between.d_first[0] = between.d_first[1] = 0.0f;
}
