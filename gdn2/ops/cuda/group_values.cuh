// Along the value channels: dZ, dV, dW, the gradients of both score matrices, and what comes through the states.
#pragma once
#include "group_memory.cuh"

// dZ = A^T dR for a group's 64 value channels, tokens as rows.
DEVICE void inverse_gradient(Product& dZ, const char* memory) {
    const Described A = memory + AT_A, dR = memory + AT_DZ + own_group() * BLOCK;
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) group_product<true, true, 1>(dZ, A.later(2048 * k), dR.later(2048 * k), k > 0);
    end_products();
    wait_for_products<0>();
    settle(dZ);
}

// Where a lane reads or writes its warp's 16 rows and two chunks from the given one on, as four matrices.
DEVICE int matrix_row() { return 16 * own_warp() + (threadIdx.x & 15); }
DEVICE int matrix_chunk(int chunk) { return chunk + ((threadIdx.x >> 4) & 1); }

// dV = W dZ and dW = V dZ in the place of V and W; where there is one gate a head, its sum over the group's channels.
DEVICE void value_gradients(char* memory, const Product& dZ, const Part& chunk, const Inputs& x) {
    const int lane = threadIdx.x % 32;
    float written[2] = {0.0f, 0.0f};
    u32 gate[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 16 * own_warp() + lane / 4 + 8 * r;
        gate[r] = W_WIDTH == D ? 0u : chunk.gate<W_WIDTH>(x.w, row, 0);
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        const int at = own_group() * BLOCK + block_at(matrix_row(), matrix_chunk(n));
        u32 V[4], W[4], dV[4], dW[4];
        load_matrices(V, memory + AT_V + at);
        if (W_WIDTH == D) load_matrices(W, memory + AT_W + at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = dZ.v[n + i / 2][i % 2 * 2], b = dZ.v[n + i / 2][i % 2 * 2 + 1];
            const u32 w = W_WIDTH == D ? W[i] : gate[i % 2];
            dV[i] = pack(a * first(w), b * second(w));
            dW[i] = pack(a * first(V[i]), b * second(V[i]));
            written[i % 2] += a * first(V[i]) + b * second(V[i]);
        }
        store_matrices(memory + AT_V + at, dV[0], dV[1], dV[2], dV[3]);
        if (W_WIDTH == D) store_matrices(memory + AT_W + at, dW[0], dW[1], dW[2], dW[3]);
    }
    if (W_WIDTH == 1) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = over_channels(written[r]);
            const int row = 16 * own_warp() + lane / 4 + 8 * r;
            if ((lane & 3) == 0) reinterpret_cast<float*>(memory + AT_WRITTEN)[C * own_group() + row] = sum;
        }
    }
}

// dZ in the place of dR, with tokens in the order of columns.
DEVICE void place_dZ(char* memory, const Product& dZ) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        const int at = own_group() * BLOCK + block_at(exchanged(matrix_row()), matrix_chunk(n));
        store_matrices(
            memory + AT_DZ + at, pack(dZ.v[n][0], dZ.v[n][1]), pack(dZ.v[n][2], dZ.v[n][3]),
            pack(dZ.v[n + 1][0], dZ.v[n + 1][1]), pack(dZ.v[n + 1][2], dZ.v[n + 1][3]));
    }
}

// to = SIGN a b^T along all value channels, whose blocks of a have so many rows.
template <int SIGN>
DEVICE void along_values(Product& to, const Described& a, int rows, const Described& b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const int block = k / 4, terms = k % 4 * 32;
        group_product<false, false, SIGN>(
            to, a.later(block * (rows * 128) + terms), b.later(block * BLOCK + terms), k > 0);
    }
}

// Score gradients inside the halves as they are, for deep rows.
DEVICE void store_scores(float* out, float sign, const Product& x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int row = 16 * own_warp() + lane / 4 + 8 * r, key = exchanged(8 * n + 2 * (lane & 3));
            float* at = out + exchanged(row) * HALF + key % HALF;  // the next column is the next key
            if (row / HALF != n / 4) continue;
            *reinterpret_cast<Float2*>(at) = {{sign * x.v[n][2 * r], sign * x.v[n][2 * r + 1]}};
        }
}

// The token of a thread's first or second row of score gradients.
DEVICE int score_token(int r) { return exchanged(16 * own_warp() + threadIdx.x % 32 / 4 + 8 * r); }

// A thread's gradients of one kind of scores with the keys of one half, as bf16. Inside their own half rows have keys
// until the given one only, and what rounding leaves is kept too: that of the second kind where the first leaves room.
template <int KEYS, bool INSIDE>
DEVICE void place_quarter(char* memory, int kind, float sign, const Product& x, const int (&until)[2]) {
    const int own = block_at(16 * own_warp() + threadIdx.x % 32 / 4, 4 * KEYS) + 4 * (threadIdx.x & 3);
    char *high = memory + AT_HIGH + kind * BLOCK, *low = memory + AT_LOW;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int key = HALF * KEYS + own_token() + 2 * n, token = score_token(r), at = own ^ (16 * n);
            float a = sign * x.v[4 * KEYS + n][2 * r], b = sign * x.v[4 * KEYS + n][2 * r + 1];
            if (INSIDE) {
                if (kind == 0 && key == (token & ~1)) {
                    reinterpret_cast<float*>(memory + AT_DIAGONAL)[token] = token & 1 ? b : a;
                }
                a = key < until[r] ? a : 0.0f;
                b = key + 1 < until[r] ? b : 0.0f;
            }
            const u32 pair = pack(a, b);
            *reinterpret_cast<u32*>(high + at + 1024 * r) = pair;
            if (INSIDE) {
                *reinterpret_cast<u32*>(low + (at ^ (64 * kind)) + 1024 * r) = pack(a - first(pair), b - second(pair));
            }
        }
}

// All of them; readers of the first half meet no keys of the second.
DEVICE void place_scores(char* memory, int kind, const Product& x, const int (&until)[2], float* out) {
    const float sign = kind == 0 ? 1.0f : -1.0f;
    if (out != nullptr) store_scores(out, sign, x);
    if (own_warp() < 2) {
        place_quarter<0, true>(memory, kind, sign, x, until);
    } else {
        place_quarter<0, false>(memory, kind, sign, x, until);
        place_quarter<1, true>(memory, kind, sign, x, until);
    }
}

// Numbers of two channels of a thread in pairs of tokens of a half: [pair][channel].
struct Pairs { u32 v[4][2]; };

// What comes through the states to queries, erase rows or keys is put aside.
enum { QUERIES, ERASE_ROWS, TAILS, LOGS = 12 };
DEVICE void put_aside(char* memory, int which, const Product& x) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        aside<Pair4>(memory, 4 * which + n / 2) = {
            pack(x.v[n][0], x.v[n][1]), pack(x.v[n][2], x.v[n][3]), pack(x.v[n + 1][0], x.v[n + 1][1]),
            pack(x.v[n + 1][2], x.v[n + 1][3])};
    }
}

DEVICE Pairs take_back(char* memory, int which, int half) {
    __syncwarp();  // compilers take it no earlier
    const Pair4 a = aside<Pair4>(memory, 4 * which + 2 * half), b = aside<Pair4>(memory, 4 * which + 2 * half + 1);
    return {{{a.x, a.y}, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}}};
}

DEVICE float dot(u32 a, u32 b) { return first(a) * first(b) + second(a) * second(b); }

// rowsum(S dS) of a thread's two channels.
DEVICE void state_sums(float (&to)[2], const char* memory) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 64 * own_group() + 16 * own_warp() + lane / 4 + 8 * r;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int chunk = (i % 2 ^ (row & 1)) * 4 + (lane & 3);  // rows next to each other in different banks
            const int at = i / 2 * (D * 128) + block_at(row, chunk);
            const Pair4 a = *reinterpret_cast<const Pair4*>(memory + AT_S + at);
            const Pair4 b = *reinterpret_cast<const Pair4*>(memory + AT_DS + at);
            sum += dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
        }
        to[r] = over_channels(sum);
    }
}

// Score gradients dA_qk = dO R^T and dT = -dZ R^T, a kind for each group, and dO S^T, -dZ S^T, R dS^T of a group's
// keys, which are put aside once nobody needs the states.
DEVICE void state_gradients(
    char* memory, const int (&until)[2], float* dA_out, float* dT_out, float (&d_state)[2]) {
    const int rows = 128 * 64 * own_group();  // bytes
    Product x, y, z;
    begin_products();
    along_values<1>(x, memory + (own_group() == 0 ? AT_DO : AT_DZ), C, memory + AT_R);
    end_products();
    along_values<1>(y, memory + AT_S + rows, D, memory + AT_DO);
    end_products();
    wait_for_products<1>();
    settle(x);
    place_scores(memory, own_group(), x, until, own_group() == 0 ? dA_out : dT_out);
    wait_for_products<0>();
    settle(y);
    begin_products();
    along_values<-1>(x, memory + AT_S + rows, D, memory + AT_DZ);
    along_values<1>(z, memory + AT_DS + rows, D, memory + AT_R);
    end_products();
    state_sums(d_state, memory);
    wait_for_products<0>();
    settle(x), settle(z);
    __syncthreads();
    put_aside(memory, QUERIES, y);
    put_aside(memory, ERASE_ROWS, x);
    put_aside(memory, TAILS, z);
}
