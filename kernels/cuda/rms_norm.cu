// rms_norm_bf16:     y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * w           (Zhang & Sennrich 2019)
// add_rms_norm_bf16: r[t, :] = r[t, :] + p[t, :]; y[t, :] = rms_norm(r[t, :])
//
// x, y, r, p  [T, E] bf16, row-major, contiguous; y may be x; y may not be r
// w           [E]    bf16
// maths       fp32 sum and scale; add_rms_norm normalizes the fp32 sum and rounds r on store
// launch      grid T, block E / 8 rounded up to a warp, at most 1024; 16-byte loads; a row stays in registers
// needs       E % 8 == 0, E <= 32768, pointers 16-byte aligned: checked in rms_norm.rs before launch
// bound       memory, 4*T*E bytes (add: 8*T*E)
// test        tests/cuda_ops.rs: each element within one bf16 ulp (relative 2^-7) of fp32
// archs: 80 90a 100a ptx
#include "common.cuh"

// Each thread has CHUNKS chunks of 8 elements. With one chunk, the weight is read before the wait, because no kernel
// writes it.
template <bool ADD, int CHUNKS>
__device__ __forceinline__ void norm_row(bf16* y, bf16* r, const bf16* p, const bf16* w, u32 cols, float eps) {
    __shared__ float scratch[32];
    const u64 row = (u64)blockIdx.x * cols;
    const u32 stride = blockDim.x * 8;
    float x[CHUNKS][8];
    float sum = 0.0f;
    bf16x8 g = {};
    if (CHUNKS == 1 && threadIdx.x * 8 < cols) g = load8(w + threadIdx.x * 8);
    pdl_wait();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        bf16x8 a = load8(r + row + i);
        bf16x8 b;
        if (ADD) b = load8(p + row + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[c][j] = to_f32(a.v[j]) + (ADD ? to_f32(b.v[j]) : 0.0f);
            sum += x[c][j] * x[c][j];
            if (ADD) a.v[j] = to_bf16(x[c][j]);
        }
        if (ADD) store8(r + row + i, a);
    }
    const float scale = rsqrtf(block_sum(sum, scratch) / cols + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        if (CHUNKS > 1) g = load8(w + i);
        bf16x8 out;
#pragma unroll
        for (int j = 0; j < 8; ++j) out.v[j] = to_bf16(x[c][j] * scale * to_f32(g.v[j]));
        store8(y + row + i, out);
    }
}

template <bool ADD>
__device__ __forceinline__ void norm(bf16* y, bf16* r, const bf16* p, const bf16* w, u32 cols, float eps) {
    pdl_launch();
    if (cols <= blockDim.x * 8) {
        norm_row<ADD, 1>(y, r, p, w, cols, eps);
    } else {
        norm_row<ADD, 4>(y, r, p, w, cols, eps);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_bf16(bf16* y, const bf16* x, const bf16* w, u32 cols, float eps) {
    norm<false>(y, const_cast<bf16*>(x), nullptr, w, cols, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm_bf16(bf16* y, bf16* r, const bf16* p, const bf16* w, u32 cols, float eps) {
    norm<true>(y, r, p, w, cols, eps);
}
