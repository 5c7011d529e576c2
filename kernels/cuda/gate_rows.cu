// gate_rows_bf16: out[t, :] *= sigmoid(x[t, :] . gate)
//
// out     [T, C] bf16
// x       [T, E] bf16
// gate    [E]    bf16
// maths   fp32, one rounding on store
// launch  grid T, block 256
// needs   C % 8 == 0, E % 8 == 0, pointers 16-byte aligned: checked in gate_rows.rs
// bound   memory, T (4 C + 2 E) bytes
// test    tests/cuda_experts.rs
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) gate_rows_bf16(bf16* out, const bf16* x, const bf16* gate, u32 cols, u32 width) {
    __shared__ float scratch[32];
    pdl_launch();
    pdl_wait();
    const u64 token = blockIdx.x;
    float dot = 0.0f;
    for (u32 i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
        const bf16x8 a = load8(x + token * width + i), b = load8(gate + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) dot += to_f32(a.v[j]) * to_f32(b.v[j]);
    }
    const float factor = 1.0f / (1.0f + expf(-block_sum(dot, scratch)));
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
        bf16x8 row = load8(out + token * cols + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) row.v[j] = to_bf16(to_f32(row.v[j]) * factor);
        store8(out + token * cols + i, row);
    }
}
