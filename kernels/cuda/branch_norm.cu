// branch_norm_bf16: r[t, :] = r[t, :] + rms_norm(p[t, :]) * wp; y[t, :] = rms_norm(r[t, :]) * wn     (norms behind a branch: Ding et al. 2021)
// add_bf16:         x[i] = x[i] + y[i]
//
// p, r, y  [T, E] bf16, row-major, contiguous; without y (null) the second norm is left out
// wp, wn   [E]    bf16
// maths    fp32 sums and scales; the second norm is of the fp32 sum; r is rounded on store
// launch   branch_norm: grid T, block E / 8 rounded up to a warp, at most 1024, a row stays in registers; add: grid
//          ceil(n / 8 / 256), block 256; 16-byte loads
// needs    E % 8 == 0, E <= 32768, n % 8 == 0, pointers 16-byte aligned: checked in branch_norm.rs before launch
// bound    memory, 8*T*E bytes, add 6*n bytes
// test     tests/cuda_decoder_ops.rs: each element within two bf16 ulps of fp32
// archs: 80 90a 100a ptx
#include "common.cuh"

constexpr int MAX_CHUNKS = 4;

extern "C" __global__ void __launch_bounds__(1024)
branch_norm_bf16(bf16* y, bf16* r, const bf16* p, const bf16* wp, const bf16* wn, u32 cols, float eps) {
    __shared__ float scratch[32];
    pdl_launch();
    const u64 row = (u64)blockIdx.x * cols;
    const u32 stride = blockDim.x * 8;
    float x[MAX_CHUNKS][8];
    float sum = 0.0f;
    pdl_wait();
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        const bf16x8 a = load8(p + row + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[c][j] = to_f32(a.v[j]);
            sum += x[c][j] * x[c][j];
        }
    }
    const float scale = rsqrtf(block_sum(sum, scratch) / cols + eps);
    sum = 0.0f;
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        const bf16x8 g = load8(wp + i);
        bf16x8 a = load8(r + row + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[c][j] = to_f32(a.v[j]) + x[c][j] * scale * to_f32(g.v[j]);
            sum += x[c][j] * x[c][j];
            a.v[j] = to_bf16(x[c][j]);
        }
        store8(r + row + i, a);
    }
    if (y == nullptr) return;
    __syncthreads();
    const float next = rsqrtf(block_sum(sum, scratch) / cols + eps);
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        const bf16x8 g = load8(wn + i);
        bf16x8 out;
#pragma unroll
        for (int j = 0; j < 8; ++j) out.v[j] = to_bf16(x[c][j] * next * to_f32(g.v[j]));
        store8(y + row + i, out);
    }
}

extern "C" __global__ void __launch_bounds__(256) add_bf16(bf16* x, const bf16* y, u64 eighths) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch();
    pdl_wait();
    if (i >= eighths) return;
    bf16x8 a = load8(x + i * 8);
    const bf16x8 b = load8(y + i * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) a.v[j] = to_bf16(to_f32(a.v[j]) + to_f32(b.v[j]));
    store8(x + i * 8, a);
}
