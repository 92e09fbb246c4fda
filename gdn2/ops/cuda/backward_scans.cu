// What the backward needs of both scans in one kernel for Hopper: states at chunk starts and residuals, and gradients
// of residuals and states. Neither waits for the other: of few sequences twice as many programs are at work.
constexpr bool STATES = true;
#include "forward.cuh"
#include "reverse.cuh"
constexpr int MEMORY = forward::MEMORY > reverse::MEMORY ? forward::MEMORY : reverse::MEMORY;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_scans(
    const void* Q_gamma, const void* K_tail, const float* gamma_C, const void* A_qk, const void* Y, const void* U,
    const float* state, void* starts, void* R, const void* d_out, const float* d_final, float* d_state, void* ends,
    void* dR, const i64* start, const i64* length, const i64* first) {
    SHARED_MEMORY(memory);
    const Factors f = {Q_gamma, K_tail, gamma_C, A_qk, Y, U};
    const Chunks chunks = {start, length, first};
    const Row row(blockIdx.x / 2);
    if (blockIdx.x % 2 == 0) {
        reverse::run(memory, row, {f, chunks, d_out, d_final, d_state, ends, dR});
    } else {
        forward::run(memory, row, {f, chunks, state, nullptr, nullptr, starts, R});
    }
}
