// scale_bf16:            x[i] *= factor
// multiply_columns_bf16: x[t, c] *= y[t, first + c]
// put_columns_bf16:      y[t, first + c] = x[t, c]
//
// x       [n] bf16, n % 8 == 0; for columns [T, C]
// y       [T, W] bf16
// maths   fp32, one rounding on store
// launch  scale: grid ceil(n / 8 / 256), block 256; columns: grid T, block min(C / 8, 256); 16-byte loads
// needs   C % 8 == 0, W % 8 == 0, first % 8 == 0, first + C <= W, pointers 16-byte aligned: checked in scale.rs before launch
// bound   memory, 4*n bytes, multiply_columns 6*n bytes, put_columns 4*n bytes
// test    tests/cuda_decoder_ops.rs, each element is the rounded product, or a copy
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) scale_bf16(bf16* x, float factor, u64 eighths) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch();
    pdl_wait();
    if (i >= eighths) return;
    bf16x8 v = load8(x + i * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) v.v[j] = to_bf16(to_f32(v.v[j]) * factor);
    store8(x + i * 8, v);
}

extern "C" __global__ void __launch_bounds__(256) multiply_columns_bf16(bf16* x, const bf16* y, u32 cols, u32 width, u32 first) {
    pdl_launch();
    pdl_wait();
    bf16* to = x + (u64)blockIdx.x * cols;
    const bf16* from = y + (u64)blockIdx.x * width + first;
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
        bf16x8 a = load8(to + i);
        const bf16x8 b = load8(from + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) a.v[j] = to_bf16(to_f32(a.v[j]) * to_f32(b.v[j]));
        store8(to + i, a);
    }
}

extern "C" __global__ void __launch_bounds__(256) put_columns_bf16(bf16* y, const bf16* x, u32 cols, u32 width, u32 first) {
    pdl_launch();
    pdl_wait();
    bf16* to = y + (u64)blockIdx.x * width + first;
    const bf16* from = x + (u64)blockIdx.x * cols;
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) store8(to + i, load8(from + i));
}
