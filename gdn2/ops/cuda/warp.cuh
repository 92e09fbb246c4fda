// What a warp does together, and bf16 in pairs: the instructions the kernels are made of.
#pragma once

#define DEVICE __device__ __forceinline__

using u32 = unsigned int;
using i64 = long long;

struct alignas(8) Pair2 { u32 x, y; };
struct alignas(16) Pair4 { u32 x, y, z, w; };
struct alignas(8) Float2 { float v[2]; };
struct alignas(16) Float4 { float v[4]; };

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
// A register holds two bf16, the first in its lower half.
DEVICE float first(u32 pair) { return as_float(pair << 16); }
DEVICE float second(u32 pair) { return as_float(pair & 0xffff0000u); }

DEVICE u32 pack(float a, float b) {  // rounds to nearest even
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}

// Loads of what no program writes.
DEVICE Pair2 read2(const void* p) {
    Pair2 x;
    asm("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}

DEVICE Pair4 read4(const void* p) {
    Pair4 x;
    asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What is no number stays none.
DEVICE float at_least(float x, float least) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
    return y;
}

// d += a b for 16 rows, 8 columns and 16 products each.
DEVICE void mma(
    float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

DEVICE void load_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// The opposite, and matrices to where the rows of their transposes are.
DEVICE void store_matrices(void* row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
        :: "r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void store_transposed(void* row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
        :: "r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE float from_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }
// x of the lane `by` lower, or zero.
DEVICE float lower(float x, int by) {
    float y = 0.0f;
    asm volatile(
        "{.reg .f32 r; .reg .pred p; shfl.sync.up.b32 r|p, %1, %2, 0, 0xffffffff; @p mov.f32 %0, r;}"
        : "+f"(y) : "f"(x), "r"(by));
    return y;
}

// x plus that of the lane `by` lower, where there is one.
DEVICE float add_lower(float x, int by) {
    float y = x;
    asm volatile(
        "{.reg .f32 r; .reg .pred p; shfl.sync.up.b32 r|p, %1, %2, 0, 0xffffffff; @p add.f32 %0, %1, r;}"
        : "+f"(y) : "f"(x), "r"(by));
    return y;
}
DEVICE float from_other(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// 16 bytes to shared memory without registers, or zeros.
DEVICE void copy_async(void* to, const void* from, bool known = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(shared_address(to)), "l"(from), "r"(known ? 16 : 0) : "memory");
}

DEVICE void copy_eight(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

DEVICE void wait_for_copies() {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

// Bring bytes, a multiple of 16, to the second-level cache.
DEVICE void prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

#define SHARED_MEMORY(name) extern __shared__ __align__(1024) char name[]

// The same number, which compilers do not know: what is made of it is made again instead of being kept.
DEVICE float forgotten(float x) {
    asm volatile("" : "+f"(x));
    return x;
}
DEVICE u32 forgotten(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
