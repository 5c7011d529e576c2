// gate_bf16: x[i] *= sigmoid(gates[i])
//
// x, gates [n] bf16, n % 8 == 0
// maths   fp32, one rounding on store
// launch  grid ceil(n / 8 / 256), block 256; 16-byte loads
// needs   pointers 16-byte aligned: checked in gate.rs before launch
// bound   memory, 6 n bytes
// test    tests/cuda_gated_delta.rs
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) gate_bf16(bf16* x, const bf16* gates, u64 eighths) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch();
    pdl_wait();
    if (i >= eighths) return;
    bf16x8 a = load8(x + i * 8);
    const bf16x8 b = load8(gates + i * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) a.v[j] = to_bf16(to_f32(a.v[j]) / (1.0f + expf(-to_f32(b.v[j]))));
    store8(x + i * 8, a);
}
