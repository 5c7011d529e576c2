// sum_experts_bf16:          out[t, :] = sum over t's routes, in order of the experts, of probability * y[row of the route, :]
// sum_experts_add_norm_bf16: residual[t, :] += that sum, out[t, :] = rms_norm(residual[t, :])
//
// y             [R, E] bf16, rows sorted by expert
// also          [T, E] bf16, added to the sum, or null; may be `out`
// places        [T, K] u32: the row of each route
// experts       [T, K] u32, ascending; routes to experts outside first .. first + L are left out
// probabilities [T, K] f32
// out, residual [T, E] bf16
// gain          [E]    bf16
// maths         fp32, one rounding on store; the norm uses the sum before it is rounded
// launch        sum: grid (T, ceil(E / 8 / 128)), block 128; add_norm: as rms_norm.cu
// needs         E % 8 == 0, E <= 32768 for add_norm, buffers 16-byte aligned: checked in sum_experts.rs
// bound         memory, 2 (K + 1) T E bytes
// test          tests/cuda_experts.rs
// archs: 80 90a 100a ptx
#include "rms_norm.cuh"

struct ExpertSum {
    static constexpr bool IS_ADDED = true;
    const bf16* y;
    const u32* places;
    const u32* experts;
    const float* probabilities;
    u32 top_k, first, local;
    const bf16* also;

    __device__ void add(float (&x)[8], u64 token, u32 column, u32 cols) const {
        float sum[8] = {};
        for (u32 i = 0; i < top_k; ++i) {
            const u64 route = token * top_k + i;
            if (experts[route] - first >= local) continue;
            const float probability = probabilities[route];
            const bf16x8 row = load8(y + (u64)places[route] * cols + column);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += probability * to_f32(row.v[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += sum[j];
        if (!also) return;
        const bf16x8 other = load8(also + token * cols + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += to_f32(other.v[j]);
    }
};

extern "C" __global__ void __launch_bounds__(128) sum_experts_bf16(bf16* out, const ExpertSum experts, u32 cols) {
    pdl_launch();
    pdl_wait();
    const u64 token = blockIdx.x;
    const u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (column >= cols) return;
    float sum[8] = {};
    experts.add(sum, token, column, cols);
    bf16x8 packed;
#pragma unroll
    for (int j = 0; j < 8; ++j) packed.v[j] = to_bf16(sum[j]);
    store8(out + token * cols + column, packed);
}

extern "C" __global__ void __launch_bounds__(1024)
sum_experts_add_norm_bf16(bf16* out, bf16* residual, const ExpertSum experts, const bf16* gain, u32 cols, float eps) {
    norm_row(out, residual, experts, gain, cols, eps);
}
