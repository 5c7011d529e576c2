// layer_norm_bf16:     y[t, :] = (x[t, :] - mean) * rsqrt(variance + eps) * w + b           (Ba, Kiros & Hinton 2016)
// add_layer_norm_bf16: r[t, :] = r[t, :] + p[t, :]; y[t, :] = layer_norm(r[t, :])
//
// x, y, r, p  [T, E] bf16, row-major, contiguous; y may be x; y may not be r
// w, b        [E]    bf16
// maths       fp32; the variance is computed from the differences to the mean, which stay in registers; add_layer_norm
//             normalizes the fp32 sum and rounds r on store
// launch      grid T, block E / 8 rounded up to a warp, at most 1024; 16-byte loads
// needs       E % 8 == 0, E <= 32768, pointers 16-byte aligned: checked in layer_norm.rs before launch
// bound       memory, 4*T*E bytes (add: 8*T*E)
// test        tests/cuda_decoder_ops.rs: each element within one bf16 ulp (relative 2^-7) of fp32, plus 1e-5 for
//             cancellation with the bias
// archs: 80 90a 100a ptx
#include "common.cuh"

// Each thread has CHUNKS chunks of 8 elements. With one chunk, weight and bias are read before the wait, because no
// kernel writes them.
template <bool ADD, int CHUNKS>
__device__ __forceinline__ void norm_row(bf16* y, bf16* r, const bf16* p, const bf16* w, const bf16* b, u32 cols, float eps) {
    __shared__ float scratch[32];
    const u64 row = (u64)blockIdx.x * cols;
    const u32 stride = blockDim.x * 8;
    float x[CHUNKS][8];
    float sum = 0.0f;
    bf16x8 gain = {}, shift = {};
    if (CHUNKS == 1 && threadIdx.x * 8 < cols) gain = load8(w + threadIdx.x * 8), shift = load8(b + threadIdx.x * 8);
    pdl_wait();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        bf16x8 a = load8(r + row + i);
        bf16x8 part;
        if (ADD) part = load8(p + row + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[c][j] = to_f32(a.v[j]) + (ADD ? to_f32(part.v[j]) : 0.0f);
            sum += x[c][j];
            if (ADD) a.v[j] = to_bf16(x[c][j]);
        }
        if (ADD) store8(r + row + i, a);
    }
    const float mean = block_sum(sum, scratch) / cols;
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * stride + threadIdx.x * 8 >= cols) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) x[c][j] -= mean, squares += x[c][j] * x[c][j];
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / cols + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        if (CHUNKS > 1) gain = load8(w + i), shift = load8(b + i);
        bf16x8 out;
#pragma unroll
        for (int j = 0; j < 8; ++j) out.v[j] = to_bf16(x[c][j] * scale * to_f32(gain.v[j]) + to_f32(shift.v[j]));
        store8(y + row + i, out);
    }
}

template <bool ADD>
__device__ __forceinline__ void norm(bf16* y, bf16* r, const bf16* p, const bf16* w, const bf16* b, u32 cols, float eps) {
    pdl_launch();
    if (cols <= blockDim.x * 8) {
        norm_row<ADD, 1>(y, r, p, w, b, cols, eps);
    } else {
        norm_row<ADD, 4>(y, r, p, w, b, cols, eps);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
layer_norm_bf16(bf16* y, const bf16* x, const bf16* w, const bf16* b, u32 cols, float eps) {
    norm<false>(y, const_cast<bf16*>(x), nullptr, w, b, cols, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
add_layer_norm_bf16(bf16* y, bf16* r, const bf16* p, const bf16* w, const bf16* b, u32 cols, float eps) {
    norm<true>(y, r, p, w, b, cols, eps);
}
