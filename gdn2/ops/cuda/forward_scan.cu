// Outputs and final states of sequences, in one kernel for Hopper.
constexpr bool STATES = false;
#include "forward.cuh"
constexpr int MEMORY = forward::MEMORY;

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_scan(
    const void* Q_gamma, const void* K_tail, const float* gamma_C, const void* A_qk, const void* Y, const void* U,
    const float* state, void* o, float* final_state, const i64* start, const i64* length, const i64* first) {
    SHARED_MEMORY(memory);
    const Factors f = {Q_gamma, K_tail, gamma_C, A_qk, Y, U};
    forward::run(memory, Row(blockIdx.x), {f, {start, length, first}, state, o, final_state, nullptr, nullptr});
}
