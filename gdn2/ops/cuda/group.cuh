// What four warps, a group, do together: products with an operand in shared memory (wgmma), which only Hopper has.
#pragma once
#include "warp.cuh"

// A group's 64 rows and 64 columns as products leave them, 16 rows a warp; and rounded, as 64 terms of products.
struct Product { float v[8][4]; };
struct Terms { Pair4 v[4]; };

#define FOUR_RESULTS(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define RESULTS(d)                                                                          \
    FOUR_RESULTS(d, 0), FOUR_RESULTS(d, 1), FOUR_RESULTS(d, 2), FOUR_RESULTS(d, 3),         \
        FOUR_RESULTS(d, 4), FOUR_RESULTS(d, 5), FOUR_RESULTS(d, 6), FOUR_RESULTS(d, 7)

// How a product finds an operand in a block; others of the same block are so many bytes later, a multiple of 16.
struct Described {
    u32 low;
    DEVICE Described(const char* operand) : low(shared_address(operand) >> 4 | 1u << 16) {}
    DEVICE Described later(int bytes) const {
        Described other = *this;
        other.low += bytes >> 4;
        return other;
    }
    DEVICE unsigned long long bits() const {
        constexpr unsigned long long EIGHT_ROWS = 1024 >> 4, SWIZZLED = 1;
        return EIGHT_ROWS << 32 | SWIZZLED << 62 | low;
    }
};

// to = keep to + SIGN a b for 16 terms. b [terms, columns] begins at the given row of a block, if TERMS_ARE_ROWS; else
// its transpose at the given column. Blocks begin where 1024 divides the address. The product runs on: nobody may touch
// `to` and `a` before it was waited for.
template <bool TERMS_ARE_ROWS, int SIGN>
DEVICE void group_product(Product& to, const Pair4& a, const Described& b, bool keep) {
    float(&d)[8][4] = to.v;
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, p, %38, 1, %39;}"
        : RESULTS(d)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b.bits()), "r"(static_cast<int>(keep)), "n"(SIGN),
          "n"(TERMS_ARE_ROWS ? 1 : 0));
}

// The same with both operands in shared memory: a [64 rows, terms] begins at the given column of a block, or its
// transpose at the given row if TERMS_ARE_ROWS_A.
template <bool TERMS_ARE_ROWS_A, bool TERMS_ARE_ROWS_B, int SIGN>
DEVICE void group_product(Product& to, const Described& a, const Described& b, bool keep) {
    float(&d)[8][4] = to.v;
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, p, %35, 1, %36, %37;}"
        : RESULTS(d)
        : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(keep)), "n"(SIGN), "n"(TERMS_ARE_ROWS_A ? 1 : 0),
          "n"(TERMS_ARE_ROWS_B ? 1 : 0));
}

// What products read must be ready before they begin; each series is waited for once it has ended.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all series but the last few are done.
template <int LAST> DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LAST) : "memory");
}

// Results and terms of products that were waited for: the compiler moves nothing across.
DEVICE void settle(Product& x) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(x.v[n][e]) :: "memory");
}

DEVICE void settle(Terms& x) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        asm volatile("" : "+r"(x.v[k].x), "+r"(x.v[k].y), "+r"(x.v[k].z), "+r"(x.v[k].w) :: "memory");
    }
}

// Numbered barriers of all threads: those that arrive go on, the others wait for them.
template <int NUMBER> DEVICE void arrive(int threads) {
    asm volatile("bar.arrive %0, %1;" :: "n"(NUMBER), "r"(threads) : "memory");
}
template <int NUMBER> DEVICE void await(int threads) {
    asm volatile("bar.sync %0, %1;" :: "n"(NUMBER), "r"(threads) : "memory");
}

// Copies of many bytes, a multiple of 16, that no thread waits for. A signal, 8 bytes of shared memory, counts them
// and changes its parity each time all are there that so many threads have announced.
DEVICE void make_signal(char* signal, int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;"
        :: "r"(shared_address(signal)), "r"(threads) : "memory");
}

DEVICE void announce(char* signal, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :: "r"(shared_address(signal)), "r"(bytes) : "memory");
}

DEVICE void copy_many(char* to, const void* from, int bytes, char* signal) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(signal)) : "memory");
}

DEVICE void wait_for_signal(char* signal, int parity) {
    asm volatile(
        "{.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;}"
        :: "r"(shared_address(signal)), "r"(parity) : "memory");
}

// The other way: one thread copies what others have published, in series, and waits until all but the last were read.
DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void store_many(void* to, const char* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
        :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

DEVICE void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int LAST> DEVICE void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LAST) : "memory");
}

// Announces a thread's own small copies so far.
DEVICE void announce_own(char* signal) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(shared_address(signal)) : "memory");
}

// A thread's own small copies in series, and until all but the last few are there.
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LAST> DEVICE void wait_for_series() { asm volatile("cp.async.wait_group %0;" :: "n"(LAST) : "memory"); }

// A barrier of one group.
DEVICE void await_group() {
    asm volatile("bar.sync %0, 128;" :: "r"(static_cast<int>(threadIdx.x / 128) + 1) : "memory");
}
