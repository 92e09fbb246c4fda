// What `warp.cuh` offers, on the CPU: the threads of a program are fibers that wait for each other where a warp or a
// program acts together.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define DEVICE inline
#define SHARED_MEMORY(name) char* name = shared

using u32 = unsigned int;
using i64 = long long;
struct alignas(8) Pair2 { u32 x, y; };
struct alignas(16) Pair4 { u32 x, y, z, w; };
struct alignas(8) Float2 { float v[2]; };
struct alignas(16) Float4 { float v[4]; };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
};
struct Index { int x; };
struct Barrier { int arrived = 0, generation = 0; };

alignas(1024) static char shared[256 * 1024];
static Fiber fibers[1024];
static ucontext_t scheduler;
static int threads, current, any;
static Index blockIdx, gridDim;
static Barrier warps[32], program;
static char exchange[32][32][64];  // of each warp and lane
static std::function<void()> body;
#define threadIdx (Index{current})

inline void wait(Barrier& barrier, int all) {
    const int generation = barrier.generation;
    if (++barrier.arrived == all) {
        barrier.arrived = 0, barrier.generation++;
    } else {
        while (barrier.generation == generation) swapcontext(&fibers[current].context, &scheduler);
    }
}
inline void __syncwarp() { wait(warps[current / 32], 32); }
inline void __syncthreads() { wait(program, threads); }
inline int __syncthreads_or(int value) {
    __syncthreads();
    any = 0;
    __syncthreads();
    any |= value != 0;
    __syncthreads();
    return any;
}

template <class T> void give(const T& x) {
    memcpy(exchange[current / 32][current % 32], &x, sizeof(T));
    __syncwarp();
}
template <class T> T take(int lane) {
    T x;
    memcpy(&x, exchange[current / 32][lane], sizeof(T));
    return x;
}

inline float as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float first(u32 pair) { return as_float(pair << 16); }
inline float second(u32 pair) { return as_float(pair & 0xffff0000u); }
inline u32 rounded(float x) { u32 bits; memcpy(&bits, &x, 4); return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }
inline u32 pack(float a, float b) { return rounded(a) | (rounded(b) << 16); }
inline float exp2_fast(float x) { const float y = exp2f(x); return y < 1.17549435e-38f ? 0.0f : y; }
inline float at_least(float x, float least) { return x < least ? least : x; }
inline Pair2 read2(const void* p) { Pair2 x; memcpy(&x, p, 8); return x; }
inline Pair4 read4(const void* p) { Pair4 x; memcpy(&x, p, 16); return x; }

struct Operand { u32 a[4], b[2]; };
inline void mma(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0, u32 b1) {
    give(Operand{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int group = current % 32 / 4, place = current % 4;
    float* d[4] = {&d0, &d1, &d2, &d3};
    for (int r = 0; r < 4; r++) {
        const int row = group + 8 * (r / 2), column = 2 * place + r % 2;
        for (int k = 0; k < 16; k++) {
            const u32 x = take<Operand>(row % 8 * 4 + k % 8 / 2).a[row / 8 + 2 * (k / 8)];
            const u32 y = take<Operand>(column * 4 + k % 8 / 2).b[k / 8];
            *d[r] += k % 2 ? second(x) * second(y) : first(x) * first(y);
        }
    }
    __syncwarp();
}

inline void load_matrices(u32 (&r)[4], const void* row) {
    give(row);
    for (int i = 0; i < 4; i++) memcpy(&r[i], take<const char*>(8 * i + current % 32 / 4) + 4 * (current % 4), 4);
    __syncwarp();
}
inline void load_transposed(u32 (&r)[4], const void* row) {
    give(row);
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int x = 0; x < 2; x++) {
            memcpy(&pair[x], take<const char*>(8 * i + 2 * (current % 4) + x) + 2 * (current % 32 / 4), 2);
        }
        r[i] = pair[0] | (u32(pair[1]) << 16);
    }
    __syncwarp();
}
inline void store_transposed(void* row, u32 a, u32 b, u32 c, u32 d) {
    give(static_cast<char*>(row));
    const u32 pairs[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        for (int x = 0; x < 2; x++) {
            const uint16_t one = static_cast<uint16_t>(x ? pairs[i] >> 16 : pairs[i]);
            memcpy(take<char*>(8 * i + 2 * (current % 4) + x) + 2 * (current % 32 / 4), &one, 2);
        }
    }
    __syncwarp();
}
inline void store_matrices(void* row, u32 a, u32 b, u32 c, u32 d) {
    give(static_cast<char*>(row));
    const u32 pairs[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) memcpy(take<char*>(8 * i + current % 32 / 4) + 4 * (current % 4), &pairs[i], 4);
    __syncwarp();
}
inline float from_lane(float x, int lane) {
    give(x);
    const float y = take<float>(lane);
    __syncwarp();
    return y;
}
inline float from_other(float x, int mask) { return from_lane(x, current % 32 ^ mask); }
inline float lower(float x, int by) {
    const int lane = current % 32;
    const float y = from_lane(x, lane >= by ? lane - by : lane);
    return lane >= by ? y : 0.0f;
}
inline float add_lower(float x, int by) { return x + lower(x, by); }

inline void copy_async(void* to, const void* from, bool known = true) {
    known ? memcpy(to, from, 16) : memset(to, 0, 16);
}
inline void copy_eight(void* to, const void* from) { memcpy(to, from, 8); }
inline void wait_for_copies() {}
inline void prefetch(const void*, int) {}

// What `group.cuh` offers; products and copies are done at once.
struct Product { float v[8][4]; };
struct Terms { Pair4 v[4]; };

struct Described {
    const char* at;
    Described(const char* operand) : at(operand) {}
    Described later(int bytes) const { return at + bytes; }
};

// An element of an operand in a block.
inline float block_element(const Described& from, bool terms_are_rows, int row, int term) {
    int at = from.at - shared + (terms_are_rows ? term * 128 + row * 2 : row * 128 + term * 2);
    at ^= (at >> 7 & 7) << 4;
    uint16_t bits;
    memcpy(&bits, shared + at, 2);
    return first(bits);
}

template <bool TERMS_ARE_ROWS> void add_products(Product& to, const float (&rows)[2][16], const Described& b, bool keep) {
    for (int n = 0; n < 8; n++) {
        for (int e = 0; e < 4; e++) {
            const int column = 8 * n + 2 * (current % 4) + e % 2;
            float sum = keep ? to.v[n][e] : 0.0f;
            for (int k = 0; k < 16; k++) sum += rows[e / 2][k] * block_element(b, TERMS_ARE_ROWS, column, k);
            to.v[n][e] = sum;
        }
    }
}

template <bool TERMS_ARE_ROWS_A, bool TERMS_ARE_ROWS_B, int SIGN>
void group_product(Product& to, const Described& a, const Described& b, bool keep) {
    float rows[2][16];
    for (int r = 0; r < 2; r++) {
        const int row = current / 32 % 4 * 16 + current % 32 / 4 + 8 * r;
        for (int k = 0; k < 16; k++) rows[r][k] = SIGN * block_element(a, TERMS_ARE_ROWS_A, row, k);
    }
    add_products<TERMS_ARE_ROWS_B>(to, rows, b, keep);
}

template <bool TERMS_ARE_ROWS, int SIGN>
void group_product(Product& to, const Pair4& a, const Described& b, bool keep) {
    give(a);
    const int group = current % 32 / 4;
    float rows[2][16];
    for (int k = 0; k < 16; k++) {
        const Pair4 x = take<Pair4>(group * 4 + k % 8 / 2);
        const u32 pairs[2] = {k < 8 ? x.x : x.z, k < 8 ? x.y : x.w};
        for (int r = 0; r < 2; r++) rows[r][k] = SIGN * (k % 2 ? second(pairs[r]) : first(pairs[r]));
    }
    __syncwarp();
    add_products<TERMS_ARE_ROWS>(to, rows, b, keep);
}
inline void begin_products() {}
inline void end_products() {}
template <int LAST> void wait_for_products() {}
inline void settle(Product&) {}
inline void settle(Terms&) {}
static Barrier numbered[16];
template <int NUMBER> void await(int threads) { wait(numbered[NUMBER], threads); }
template <int NUMBER> void arrive(int threads) {
    Barrier& barrier = numbered[NUMBER];
    if (++barrier.arrived == threads) barrier.arrived = 0, barrier.generation++;
}
struct Signal { int parity = 0, expected = 0, arrived = 0; };
static std::map<char*, Signal> signals;
inline void await_group() { wait(numbered[current / 128 + 1], 128); }
inline void end_copies() {}
inline float forgotten(float x) { return x; }
inline u32 forgotten(u32 x) { return x; }
template <int LAST> void wait_for_series() {}
inline void make_signal(char* signal, int threads) { signals[signal] = {0, threads, 0}; }
inline void announce_own(char* signal) {
    Signal& s = signals[signal];
    if (++s.arrived == s.expected) s.arrived = 0, s.parity ^= 1;
}
inline void announce(char* signal, int) { announce_own(signal); }
inline void copy_many(char* to, const void* from, int bytes, char*) { memcpy(to, from, bytes); }
inline void wait_for_signal(char* signal, int parity) {
    while (signals[signal].parity == parity) swapcontext(&fibers[current].context, &scheduler);
}
inline void publish() {}
inline void store_many(void* to, const char* from, int bytes) { memcpy(to, from, bytes); }
inline void end_stores() {}
template <int LAST> void wait_until_read() {}

inline void enter() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

// Run one program of so many threads to its end; what shared memory holds at first is no number.
inline void run_program(int index, int count, const std::function<void()>& work) {
    threads = count, blockIdx.x = index, body = work;
    memset(shared, 0xff, sizeof shared);
    for (int t = 0; t < threads; t++) {
        Fiber& fiber = fibers[t];
        fiber.stack.resize(256 * 1024);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.done = false;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool busy = true; busy;) {
        busy = false;
        for (int t = 0; t < threads; t++) {
            if (fibers[t].done) continue;
            current = t, busy = true;
            swapcontext(&scheduler, &fibers[t].context);
        }
    }
}
