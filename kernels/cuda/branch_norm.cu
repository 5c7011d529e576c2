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

// Row blockIdx.x. Each thread has CHUNKS chunks of 8 elements. With one chunk, the weights are read before the wait, because no
// kernel writes them, and the residual together with the branch.
template <int CHUNKS>
__device__ __forceinline__ void norm_chunks(bf16* y, bf16* r, const bf16* p, const bf16* wp, const bf16* wn, u32 cols, float eps) {
    __shared__ float scratch[32];
    const u64 row = (u64)blockIdx.x * cols;
    const u32 stride = blockDim.x * 8;
    float x[CHUNKS][8];
    float sum = 0.0f;
    bf16x8 gain = {}, next_gain = {}, old = {};
    const bool is_early = CHUNKS == 1 && threadIdx.x * 8 < cols;
    if (is_early) {
        gain = load8(wp + threadIdx.x * 8);
        if (y) next_gain = load8(wn + threadIdx.x * 8);
    }
    pdl_wait();
    if (is_early) old = load8(r + row + threadIdx.x * 8);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
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
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        if (CHUNKS > 1) gain = load8(wp + i), old = load8(r + row + i);
        bf16x8 stored;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[c][j] = to_f32(old.v[j]) + x[c][j] * scale * to_f32(gain.v[j]);
            sum += x[c][j] * x[c][j];
            stored.v[j] = to_bf16(x[c][j]);
        }
        store8(r + row + i, stored);
    }
    if (!y) return;
    const float next = rsqrtf(block_sum(sum, scratch) / cols + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        if (CHUNKS > 1) next_gain = load8(wn + i);
        bf16x8 out;
#pragma unroll
        for (int j = 0; j < 8; ++j) out.v[j] = to_bf16(x[c][j] * next * to_f32(next_gain.v[j]));
        store8(y + row + i, out);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
branch_norm_bf16(bf16* y, bf16* r, const bf16* p, const bf16* wp, const bf16* wn, u32 cols, float eps) {
    pdl_launch();
    if (cols <= blockDim.x * 8) {
        norm_chunks<1>(y, r, p, wp, wn, cols, eps);
    } else {
        norm_chunks<4>(y, r, p, wp, wn, cols, eps);
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
