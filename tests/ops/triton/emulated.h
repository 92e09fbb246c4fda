// What `warp.cuh` and `group.cuh` offer, on the CPU: the threads of a program are fibers that wait for each other where a
// warp, a group or a program acts together.
//
// By schedule 0 threads take turns in order, and copies and products are done at once. By others the order changes, warps
// fall behind, and copies and products are done as late as they can be (odd schedules) or at any time (even ones): the
// bits are the same then, unless a barrier or a wait is missing.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
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
static char published[sizeof shared];  // the same as products and large copies see it
struct Written { size_t at; int bytes; };
static std::vector<Written> unpublished[1024];  // of each thread
static Fiber fibers[1024];
static ucontext_t scheduler;
static int threads, current, any;
static Index blockIdx, gridDim;
static Barrier warps[32], program;
static char exchange[32][2][32][64];  // of each warp's last two exchanges and each lane
static int exchanges[1024];  // of each thread
static const char* wrong;  // what went wrong, if anything
static std::function<void()> body;
#define threadIdx (Index{current})

static u32 schedule, dice;
inline bool as_late_as_can_be() { return schedule % 2 == 1; }
inline bool at_any_time() { return schedule > 0 && schedule % 2 == 0; }

// Random numbers, the same for the same schedule.
inline int draw(int below) {
    dice ^= dice << 13, dice ^= dice >> 17, dice ^= dice << 5;
    return static_cast<int>(dice % static_cast<u32>(below));
}
struct Dice {
    using result_type = u32;
    static constexpr u32 min() { return 0; }
    static constexpr u32 max() { return 0x7fffffff; }
    u32 operator()() const { return draw(0x40000000) | (draw(2) << 30); }
};

static bool moved;  // whether anybody has gone on

inline void arrive(Barrier& barrier, int all) {
    moved = true;
    if (++barrier.arrived == all) barrier.arrived = 0, barrier.generation++;
}
inline void wait(Barrier& barrier, int all) {
    const int generation = barrier.generation;
    arrive(barrier, all);
    while (barrier.generation == generation) swapcontext(&fibers[current].context, &scheduler);
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

// Lanes give each other what they have when they come; who has taken it goes on at once.
template <class T> void give(const T& x) {
    memcpy(exchange[current / 32][++exchanges[current] % 2][current % 32], &x, sizeof(T));
    __syncwarp();
}
template <class T> T take(int lane) {
    T x;
    memcpy(&x, exchange[current / 32][exchanges[current] % 2][lane], sizeof(T));
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

// What a thread writes that products or large copies may read: they do once it is published, or at any time before.
inline void publish(const Written& x) { memcpy(published + x.at, shared + x.at, x.bytes); }
inline void write(void* to, const void* from, int bytes) {
    memcpy(to, from, bytes);
    const Written written = {static_cast<size_t>(static_cast<char*>(to) - shared), bytes};
    unpublished[current].push_back(written);
    if (at_any_time() && draw(2) == 0) publish(written);
}
inline void publish() {
    for (const Written& x : unpublished[current]) publish(x);
    unpublished[current].clear();
}

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
}

struct MatrixRow { u32 pairs[4]; };
inline void give_row(const void* row) {
    MatrixRow x;
    memcpy(&x, row, sizeof x);
    give(x);
}
inline void load_matrices(u32 (&r)[4], const void* row) {
    give_row(row);
    for (int i = 0; i < 4; i++) r[i] = take<MatrixRow>(8 * i + current % 32 / 4).pairs[current % 4];
}
inline void load_transposed(u32 (&r)[4], const void* row) {
    give_row(row);
    const int group = current % 32 / 4, place = current % 4;
    for (int i = 0; i < 4; i++) {
        u32 one[2];
        for (int x = 0; x < 2; x++) {
            one[x] = take<MatrixRow>(8 * i + 2 * place + x).pairs[group / 2] >> 16 * (group % 2) & 0xffff;
        }
        r[i] = one[0] | one[1] << 16;
    }
}
inline void store_transposed(void* row, u32 a, u32 b, u32 c, u32 d) {
    give(static_cast<char*>(row));
    const u32 pairs[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        for (int x = 0; x < 2; x++) {
            const uint16_t one = static_cast<uint16_t>(x ? pairs[i] >> 16 : pairs[i]);
            write(take<char*>(8 * i + 2 * (current % 4) + x) + 2 * (current % 32 / 4), &one, 2);
        }
    }
}
inline void store_matrices(void* row, u32 a, u32 b, u32 c, u32 d) {
    give(static_cast<char*>(row));
    const u32 pairs[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) write(take<char*>(8 * i + current % 32 / 4) + 4 * (current % 4), &pairs[i], 4);
}
inline float from_lane(float x, int lane) {
    give(x);
    return take<float>(lane);
}
inline float from_other(float x, int mask) { return from_lane(x, current % 32 ^ mask); }
inline float lower(float x, int by) {
    const int lane = current % 32;
    const float y = from_lane(x, lane >= by ? lane - by : lane);
    return lane >= by ? y : 0.0f;
}
inline float add_lower(float x, int by) { return x + lower(x, by); }

// What a thread has begun and not waited for yet, in series.
template <class Work> struct Begun {
    struct Entry { Work work; int series; };
    std::deque<Entry> entries;
    int series = 0;
    void begin(const Work& work) {
        if (schedule == 0) return work();
        entries.push_back({work, series});
    }
    void end() { series++; }
    bool do_one() {
        if (entries.empty()) return false;
        const Work work = entries.front().work;
        entries.pop_front();
        work();
        return true;
    }
    // Until all series that have ended are done but the last few.
    void wait(int last) {
        while (!entries.empty() && entries.front().series < series - last) do_one();
    }
};

struct Signal { int parity = 0, expected = 0, arrived = 0, bytes = 0; };
static std::map<char*, Signal> signals;
inline void change(char* signal, int arrived, int bytes) {
    moved = true;
    Signal& s = signals[signal];
    s.arrived += arrived, s.bytes += bytes;
    if (s.arrived == s.expected && s.bytes == 0) s.arrived = 0, s.parity ^= 1;
}

// A thread's own small copy, of zeros from nowhere; or the announcement that those before it are there.
struct Copy {
    void* to;
    const void* from;
    int bytes, thread;
    char* signal;
    void operator()() const {
        static const char zeros[16] = {};
        if (signal != nullptr) return change(signal, 1, 0);
        current = thread;
        write(to, from == nullptr ? zeros : from, bytes);
    }
};
static Begun<Copy> copies[1024];

inline void copy_async(void* to, const void* from, bool known = true) {
    copies[current].begin({to, known ? from : nullptr, 16, current, nullptr});
}
inline void copy_eight(void* to, const void* from) { copies[current].begin({to, from, 8, current, nullptr}); }
inline void end_copies() { copies[current].end(); }
template <int LAST> void wait_for_series() { copies[current].wait(LAST); }
inline void wait_for_copies() {
    end_copies();
    wait_for_series<0>();
}
inline void prefetch(const void*, int) {}

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
    memcpy(&bits, published + at, 2);
    return first(bits);
}

// A thread's part of a product: rows of the one operand are given or in a block, the other is in a block.
struct Multiplication {
    Product* to;
    const char* a;  // none if rows are given
    float rows[2][16];
    const char* b;
    bool terms_are_rows_a, terms_are_rows_b, keep;
    int sign, thread;
    float row(int r, int k) const {
        const int row = thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * r;
        return a == nullptr ? rows[r][k] : block_element(a, terms_are_rows_a, row, k);
    }
    void operator()() const {
        float left[2][16];
        for (int r = 0; r < 2; r++) {
            for (int k = 0; k < 16; k++) left[r][k] = sign * row(r, k);
        }
        for (int n = 0; n < 8; n++) {
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + 2 * (thread % 4) + e % 2;
                float sum = keep ? to->v[n][e] : 0.0f;
                for (int k = 0; k < 16; k++) sum += left[e / 2][k] * block_element(b, terms_are_rows_b, column, k);
                to->v[n][e] = sum;
            }
        }
    }
};
static Begun<Multiplication> products[1024];

template <bool TERMS_ARE_ROWS_A, bool TERMS_ARE_ROWS_B, int SIGN>
void group_product(Product& to, const Described& a, const Described& b, bool keep) {
    products[current].begin({&to, a.at, {}, b.at, TERMS_ARE_ROWS_A, TERMS_ARE_ROWS_B, keep, SIGN, current});
}

template <bool TERMS_ARE_ROWS, int SIGN>
void group_product(Product& to, const Pair4& a, const Described& b, bool keep) {
    Multiplication product = {&to, nullptr, {}, b.at, false, TERMS_ARE_ROWS, keep, SIGN, current};
    give(a);
    for (int k = 0; k < 16; k++) {
        const Pair4 x = take<Pair4>(current % 32 / 4 * 4 + k % 8 / 2);
        const u32 pairs[2] = {k < 8 ? x.x : x.z, k < 8 ? x.y : x.w};
        for (int r = 0; r < 2; r++) product.rows[r][k] = k % 2 ? second(pairs[r]) : first(pairs[r]);
    }
    products[current].begin(product);
}
inline void begin_products() {}
inline void end_products() { products[current].end(); }
template <int LAST> void wait_for_products() {
    products[current].wait(LAST);
    __syncwarp();  // a warp waits together
}
inline void settle(Product& x) {
    for (const auto& entry : products[current].entries) {
        if (entry.work.to == &x) wrong = "a product settles before it was waited for";
    }
}
inline void settle(Terms&) {}
static Barrier numbered[16];
template <int NUMBER> void await(int threads) { wait(numbered[NUMBER], threads); }
template <int NUMBER> void arrive(int threads) { arrive(numbered[NUMBER], threads); }
inline void await_group() { wait(numbered[current / 128 + 1], 128); }
inline float forgotten(float x) { return x; }
inline u32 forgotten(u32 x) { return x; }
inline void make_signal(char* signal, int threads) { signals[signal] = {0, threads, 0, 0}; }
inline void announce_own(char* signal) { copies[current].begin({nullptr, nullptr, 0, current, signal}); }
inline void announce(char* signal, int bytes) { change(signal, 1, bytes); }

struct LargeCopy {
    char* to;
    const void* from;
    int bytes;
    char* signal;
    void operator()() const {
        memcpy(to, from, bytes);
        memcpy(published + (to - shared), from, bytes);
        change(signal, 0, -bytes);
    }
};
struct LargeStore {
    void* to;
    const char* from;
    int bytes;
    void operator()() const { memcpy(to, published + (from - shared), bytes); }
};
static Begun<LargeCopy> large_copies;
static Begun<LargeStore> stores[1024];
inline void copy_many(char* to, const void* from, int bytes, char* signal) {
    large_copies.begin({to, from, bytes, signal});
}
inline void wait_for_signal(char* signal, int parity) {
    while (signals[signal].parity == parity) swapcontext(&fibers[current].context, &scheduler);
}
inline void store_many(void* to, const char* from, int bytes) { stores[current].begin({to, from, bytes}); }
inline void end_stores() { stores[current].end(); }
template <int LAST> void wait_until_read() { stores[current].wait(LAST); }

inline void enter() {
    body();
    fibers[current].done = moved = true;
    swapcontext(&fibers[current].context, &scheduler);
}

// Do some of what has been begun, each with the given chance of four.
inline void work_on(int chance) {
    const auto lucky = [=] { return draw(4) < chance; };
    for (int t = 0; t < threads; t++) {
        while (lucky() && copies[t].do_one()) {}
        while (lucky() && stores[t].do_one()) {}
        while (lucky() && products[t].do_one()) {}
    }
    std::shuffle(large_copies.entries.begin(), large_copies.entries.end(), Dice());
    while (lucky() && large_copies.do_one()) {}
}

// How much was begun that nobody has waited for.
inline int undone() {
    size_t count = large_copies.entries.size();
    for (int t = 0; t < threads; t++) {
        count += copies[t].entries.size() + stores[t].entries.size() + products[t].entries.size();
    }
    return static_cast<int>(count);
}

// Until all threads are done; whether they ever are.
inline bool take_turns() {
    constexpr int SEASON = 32;  // rounds of the same chance
    const auto delay = [] { return draw(16) > 0 ? 0 : draw(draw(2) == 0 ? 32 : 1024); };
    std::vector<int> order(threads), behind(threads / 32);
    std::iota(order.begin(), order.end(), 0);
    int chance = 0;
    bool busy = true;
    for (int round = 0; busy; round++) {
        if (schedule != 0) {
            std::shuffle(order.begin(), order.end(), Dice());
            if (round % SEASON == 0) chance = draw(5);
            for (int& rounds : behind) rounds = rounds > 0 ? rounds - 1 : delay();
        }
        busy = moved = false;
        for (int t : order) {
            if (fibers[t].done) continue;
            busy = true;
            if (behind[t / 32] > 0) continue;
            current = t;
            swapcontext(&scheduler, &fibers[t].context);
        }
        const bool all_wait = !moved && std::count(behind.begin(), behind.end(), 0) == threads / 32;
        if (busy && all_wait && undone() == 0) return false;
        if (!moved) std::fill(behind.begin(), behind.end(), 0);
        if (as_late_as_can_be() && all_wait) work_on(1);
        if (at_any_time()) work_on(chance);
    }
    return true;
}

// Run one program of so many threads; what shared memory holds at first is no number. What went wrong, if anything.
inline const char* run_program(int index, int count, const std::function<void()>& work) {
    threads = count, blockIdx.x = index, body = work;
    dice = schedule * 2654435761u + index + 1;
    memset(shared, 0xff, sizeof shared);
    memset(published, 0xff, sizeof published);
    for (int t = 0; t < threads; t++) {
        unpublished[t].clear();
        Fiber& fiber = fibers[t];
        fiber.stack.resize(256 * 1024);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.done = false;
        makecontext(&fiber.context, enter, 0);
    }
    wrong = nullptr;
    if (!take_turns()) return "threads wait for each other";
    return undone() > 0 ? "nobody has waited for a copy or a product" : wrong;
}
