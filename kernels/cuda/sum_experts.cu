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

constexpr u32 MAX_CHOICES = 32, NO_ROW = 0xffffffffu;

struct ExpertSum {
    const bf16* y;
    const u32* places;
    const u32* experts;
    const float* probabilities;
    u32 top_k, first, local;
    const bf16* also;
    const float* also_factors;
};

// The experts of a token, in shared memory.
struct TokenExperts {
    static constexpr bool IS_ADDED = true;
    const ExpertSum& p;
    const u32* rows;  // NO_ROW for experts of other workers
    const float* probabilities;

    __device__ void add(float (&x)[8], u64 token, u32 column, u32 cols) const {
        constexpr u32 AHEAD = 8;  // routes whose loads do not wait for each other
        float sum[8] = {};
        for (u32 begin = 0; begin < p.top_k; begin += AHEAD) {
            u32 at[AHEAD];
            bf16x8 row[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                at[i] = begin + i < p.top_k ? rows[begin + i] : NO_ROW;
                if (at[i] != NO_ROW) row[i] = load8(p.y + (u64)at[i] * cols + column);
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                if (at[i] == NO_ROW) continue;
                const float probability = probabilities[begin + i];
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += probability * to_f32(row[i].v[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += sum[j];
        if (!p.also) return;
        const float factor = p.also_factors ? p.also_factors[token] : 1.0f;
        const bf16x8 other = load8(p.also + token * cols + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += factor * to_f32(other.v[j]);
    }
};

// By all threads: the experts of token blockIdx.x. This does not wait for earlier kernels: the first product of the experts lets later kernels
// start only when the routes are complete, and the second one is between it and the sum.
struct SharedExperts {
    u32 rows[MAX_CHOICES];
    float probabilities[MAX_CHOICES];

    __device__ TokenExperts load(const ExpertSum& p) {
        if (threadIdx.x < p.top_k) {
            const u64 route = (u64)blockIdx.x * p.top_k + threadIdx.x;
            rows[threadIdx.x] = p.experts[route] - p.first < p.local ? p.places[route] : NO_ROW;
            probabilities[threadIdx.x] = p.probabilities[route];
        }
        __syncthreads();
        return {p, rows, probabilities};
    }
};

extern "C" __global__ void __launch_bounds__(128) sum_experts_bf16(bf16* out, const ExpertSum p, u32 cols) {
    __shared__ SharedExperts shared;
    pdl_launch();
    const TokenExperts experts = shared.load(p);
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
sum_experts_add_norm_bf16(bf16* out, bf16* residual, const ExpertSum p, const bf16* gain, u32 cols, float eps) {
    __shared__ SharedExperts shared;
    pdl_launch();
    norm_chunks<TokenExperts, 1>(out, residual, shared.load(p), gain, cols, eps);
}
