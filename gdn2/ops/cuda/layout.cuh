// Where tokens and channels lie in registers and in the operands, and sums over tokens.
//
// Products do not mind how tokens and channels are numbered. Along the key channels a thread holds four tokens next to
// each other of a half, 4 (lane / 4) + i, so that sums over tokens are mostly its own; as rows of a product these are
// 8 i + lane / 4. Which channels it holds differs from kernel to kernel.
#pragma once
#include "block.cuh"

constexpr int C = 64, HALF = 32, WARPS = D / 16, THREADS = 32 * WARPS;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LIFT = 288230376151711744.0f, LOWER = 1.0f / LIFT;  // 2^58: see gdn2/ops/triton/tiles.py
constexpr float DEEPEST = -122.0f;  // log2 below which no row is left that meets a key in its half

// The token that is row (or column) p of a product.
DEVICE int token_of(int p) { return (p & HALF) + 4 * (p & 7) + ((p >> 3) & 3); }

DEVICE void unpack(float (&to)[4], Pair2 from) {
    to[0] = first(from.x), to[1] = second(from.x), to[2] = first(from.y), to[3] = second(from.y);
}

DEVICE Pair2 packed(const float (&x)[4]) { return {pack(x[0], x[1]), pack(x[2], x[3])}; }

// Four tokens and a few channels of a thread in one half.
template <int E> struct Tokens { float v[4][E]; };
using Narrow = Tokens<2>;
struct Four { u32 v[4]; };  // of two channels, as bf16

DEVICE float one_of(u32 pair, int e) { return e == 0 ? first(pair) : second(pair); }

DEVICE void multiply(Narrow& to, int m, const u32 (&a)[4], u32 b0, u32 b1) {
    mma(to.v[2 * m][0], to.v[2 * m][1], to.v[2 * m + 1][0], to.v[2 * m + 1][1], a, b0, b1);
}

// Sums over the tokens of a half that come before each; nothing is added and taken away again.
template <int E> DEVICE void sums_before(Tokens<E>& x) {
#pragma unroll
    for (int e = 0; e < E; e++) {
        float total = x.v[0][e] + x.v[1][e] + x.v[2][e] + x.v[3][e];
#pragma unroll
        for (int by = 4; by < 32; by *= 2) total = add_lower(total, by);
        float before = lower(total, 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float own = x.v[i][e];
            x.v[i][e] = before;
            before += own;
        }
    }
}

// Sums up to each and with it.
template <int E> DEVICE void sums_until(Tokens<E>& x) {
    const Tokens<E> each = x;
    sums_before(x);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < E; e++) x.v[i][e] += each.v[i][e];
}

DEVICE float over_tokens(float x) {
    x += from_other(x, 4);
    x += from_other(x, 8);
    return x + from_other(x, 16);
}

DEVICE float over_channels(float x) {
    x += from_other(x, 1);
    return x + from_other(x, 2);
}

// Of a chunk and head, the chunk and the one of N heads that it has in common with others.
template <int N> DEVICE i64 in_common(i64 index) { return N == HEADS ? index : index / (HEADS / N); }

// A chunk of one head; FULL if it has all its tokens.
template <bool FULL> struct Chunk {
    i64 index, first;  // of chunk and head, and of its first token's first channel in [L, HEADS, D]
    int length;

    DEVICE bool knows(int token) const { return FULL || token < length; }
    // Where it begins in [L, N, D]: of fewer heads, which several share, or of more, the n-th of those that share this.
    template <int N> DEVICE i64 first_of(int n) const {
        if (N < HEADS) return static_cast<i64>(static_cast<unsigned long long>(first) / (HEADS / N * D)) * D;
        return N == HEADS ? first : first * (N / HEADS) + n * D;
    }
    // Where a token's channel is, in an operand of elements of so many bytes.
    template <class T, int BYTES = 2, int N = HEADS>
    DEVICE T* at(const void* operand, int token, int channel, int n = 0) const {
        const char* chunk = static_cast<const char*>(operand) + BYTES * first_of<N>(n);
        return reinterpret_cast<T*>(const_cast<char*>(chunk + BYTES * (token * (N * D) + channel)));
    }
    template <class T, int BYTES = 2, int N = HEADS>
    DEVICE T load(const void* operand, int token, int channel, int n = 0) const {
        return knows(token) ? *at<T, BYTES, N>(operand, token, channel, n) : T{};
    }
    template <class T, int BYTES = 2> DEVICE void store(void* operand, int token, int channel, T x) const {
        if (knows(token)) *at<T, BYTES>(operand, token, channel) = x;
    }
    // One number of a bf16 operand.
    template <int N> DEVICE float number(const void* operand, int token, int channel) const {
        return ::first(load<unsigned short, 2, N>(operand, token, channel));
    }
    // A gate for two channels: one for each, one for all of a head [L, N, 1], or none.
    template <int WIDTH, int N = HEADS> DEVICE u32 gate(const void* operand, int token, int channel, int n = 0) const {
        if (WIDTH == D) return load<u32, 2, N>(operand, token, channel, n);
        if (WIDTH == 0) return 0x3f803f80u;
        return knows(token) ? head<unsigned short, N>(operand, n)[token * N] * 0x10001u : 0u;
    }
    template <int WIDTH, int N = HEADS>
    DEVICE Pair4 eight_gates(const void* operand, int token, int channel, int n = 0) const {
        if (WIDTH == D) return load<Pair4, 2, N>(operand, token, channel, n);
        const u32 x = gate<WIDTH, N>(operand, token, channel, n);
        return {x, x, x, x};
    }
    template <int WIDTH> DEVICE Pair2 gates(const void* operand, int token, int channel) const {
        if (WIDTH == D) return load<Pair2>(operand, token, channel);
        const u32 x = gate<WIDTH>(operand, token, channel);
        return {x, x};
    }
    DEVICE void store_gate(void* operand, int token, float x) const {
        if (!knows(token)) return;
        head<unsigned short>(operand)[token * HEADS] = static_cast<unsigned short>(pack(x, 0.0f));
    }
    DEVICE void store_decay(float* operand, int token, float x) const {
        if (knows(token)) head<float>(operand)[token * HEADS] = x;
    }
    // Log-decays of as many channels as T has: one for each, or one for all of a head [L, G_HEADS, 1].
    template <int WIDTH, class T> DEVICE T decays(const void* operand, int token, int channel) const {
        if (WIDTH == D) return load<T, 4, G_HEADS>(operand, token, channel);
        const float x = knows(token) ? head<float, G_HEADS>(operand)[token * G_HEADS] : 0.0f;
        T to;
#pragma unroll
        for (int e = 0; e < static_cast<int>(sizeof(T) / 4); e++) reinterpret_cast<float*>(&to)[e] = x;
        return to;
    }
    // The first token's number in an operand [L, N, 1].
    template <class T, int N = HEADS> DEVICE T* head(const void* operand, int n = 0) const {
        return const_cast<T*>(static_cast<const T*>(operand)) + first_of<N>(n) / D;
    }
    // Bring all tokens of an operand to the second-level cache; each warp its share, since lanes do this one by one.
    template <int BYTES = 2, int N = HEADS> DEVICE void fetch(const void* operand, int n = 0) const {
        const int lane = threadIdx.x % 32, token = C / WARPS * (threadIdx.x / 32) + lane;
        if (lane < C / WARPS && knows(token)) prefetch(at<char, BYTES, N>(operand, token, 0, n), BYTES * D);
    }
    template <int N> DEVICE Four load_pairs(const void* operand, int token, int channel) const {
        Four to;
#pragma unroll
        for (int i = 0; i < 4; i++) to.v[i] = load<u32, 2, N>(operand, token + i, channel);
        return to;
    }
};
