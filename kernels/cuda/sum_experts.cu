// sum_experts_bf16:          out[t, :] = sum over t's routes, in order of the experts, of probability * y[row of the route, :]
// sum_experts_add_norm_bf16: residual[t, :] += that sum, out[t, :] = rms_norm(residual[t, :])
//
// y             [R, E] bf16, rows sorted by expert
// also          [T, E] bf16, added to the sum, or null; may be `out`
// also_factors  [T]    f32, which multiply `also`, or null
// places        [T, K] u32: the row of each route
// experts       [T, K] u32, ascending; routes to experts outside first .. first + L are left out
// probabilities [T, K] f32
// out, residual [T, E] bf16
// gain          [E]    bf16
// maths         fp32, one rounding on store; the norm uses the sum before it is rounded
// launch        sum: grid (T, ceil(E / 8 / 128)), block 128; add_norm: as rms_norm.cu
// needs         E % 8 == 0, E <= 8192 for add_norm, buffers 16-byte aligned: checked in sum_experts.rs
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
    const float* also_factors;

    __device__ void add(float (&x)[8], u64 token, u32 column, u32 cols) const {
        constexpr u32 AHEAD = 4;  // routes whose loads do not wait for each other
        float sum[8] = {};
        for (u32 begin = 0; begin < top_k; begin += AHEAD) {
            bool is_local[AHEAD];
            float probability[AHEAD];
            u32 place[AHEAD];
            bf16x8 row[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                const u64 route = token * top_k + min(begin + i, top_k - 1);
                is_local[i] = begin + i < top_k && experts[route] - first < local;
                probability[i] = probabilities[route];
                place[i] = places[route];
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                if (is_local[i]) row[i] = load8(y + (u64)place[i] * cols + column);
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                if (!is_local[i]) continue;
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += probability[i] * to_f32(row[i].v[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += sum[j];
        if (!also) return;
        const float factor = also_factors ? also_factors[token] : 1.0f;
        const bf16x8 other = load8(also + token * cols + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += factor * to_f32(other.v[j]);
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
    pdl_launch();
    norm_chunks<ExpertSum, 1>(out, residual, experts, gain, cols, eps);
}
