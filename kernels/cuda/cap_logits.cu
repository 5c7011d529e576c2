// cap_logits_f32: x[i] = cap * tanh(x[i] / cap)                                              (Gemma 2, 2024)
//
// x       [n] f32, n % 4 == 0
// maths   fp32
// launch  grid ceil(n / 4 / 256), block 256; 16-byte loads
// needs   pointer 16-byte aligned: checked in cap_logits.rs before launch
// bound   memory, 8*n bytes
// test    tests/cuda_decoder_ops.rs: relative error below 2^-20
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) cap_logits_f32(float4* x, u64 fourths, float cap) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch();
    pdl_wait();
    if (i >= fourths) return;
    const float inverse = 1.0f / cap;
    float4 v = x[i];
    v.x = cap * tanhf(v.x * inverse), v.y = cap * tanhf(v.y * inverse);
    v.z = cap * tanhf(v.z * inverse), v.w = cap * tanhf(v.w * inverse);
    x[i] = v;
}
