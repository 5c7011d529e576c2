// head_squares_bf16: s[t, 0] = sum of q[t, :]^2, s[t, 1] = sum of k[t, :]^2, over this worker's heads
// scale_heads_bf16:  q[t, :] = q[t, :] * rsqrt(sum over workers of s[t, 0] / Nq + eps) * wq; the same for k
//
// qkv     [T, (H + 2K) D] bf16; the v heads are not changed
// s       [G, T, 2] f32: a part for each worker
// wq, wk  [H D], [K D] bf16, this worker's heads
// Nq, Nk  elements of q and of k that the workers count together
// maths   fp32; the sums of workers are added in rank order; one rounding on store
// launch  grid (T, 2), block 256; y = 0 for q, 1 for k
// needs   D % 8 == 0, pointers 16-byte aligned: checked in wide_head_norm.rs before launch
// bound   memory, 6 T (H + K) D bytes
// test    tests/cuda_decoder_ops.rs: each element within one bf16 ulp (relative 2^-7) of fp32
// archs: 80 90a 100a ptx
#include "common.cuh"

// The elements of q or of k in a row of qkv.
struct Part {
    u32 start, width;
    __device__ Part(u32 heads, u32 kv_heads, u32 dim)
        : start(blockIdx.y == 0 ? 0 : heads * dim), width((blockIdx.y == 0 ? heads : kv_heads) * dim) {}
};

extern "C" __global__ void __launch_bounds__(256)
head_squares_bf16(float* sums, const bf16* qkv, u32 heads, u32 kv_heads, u32 dim) {
    __shared__ float scratch[32];
    const Part part(heads, kv_heads, dim);
    const bf16* x = qkv + (u64)blockIdx.x * (heads + 2 * kv_heads) * dim + part.start;
    pdl_launch();
    pdl_wait();
    float sum = 0.0f;
    for (u32 i = threadIdx.x * 8; i < part.width; i += blockDim.x * 8) {
        const bf16x8 v = load8(x + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += to_f32(v.v[j]) * to_f32(v.v[j]);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x * 2 + blockIdx.y] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
scale_heads_bf16(bf16* qkv, const float* sums, const bf16* wq, const bf16* wk, u32 heads, u32 kv_heads, u32 dim, u32 workers,
                 float num_q, float num_k, float eps) {
    const Part part(heads, kv_heads, dim);
    bf16* x = qkv + (u64)blockIdx.x * (heads + 2 * kv_heads) * dim + part.start;
    const bf16* w = blockIdx.y == 0 ? wq : wk;
    pdl_launch();
    pdl_wait();
    float sum = 0.0f;
    for (u32 g = 0; g < workers; ++g) sum += sums[((u64)g * gridDim.x + blockIdx.x) * 2 + blockIdx.y];
    const float scale = rsqrtf(sum / (blockIdx.y == 0 ? num_q : num_k) + eps);
    for (u32 i = threadIdx.x * 8; i < part.width; i += blockDim.x * 8) {
        bf16x8 v = load8(x + i);
        const bf16x8 g = load8(w + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) v.v[j] = to_bf16(to_f32(v.v[j]) * scale * to_f32(g.v[j]));
        store8(x + i, v);
    }
}
