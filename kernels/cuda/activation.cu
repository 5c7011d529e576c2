// silu_bf16, gelu_tanh_bf16, gelu_bf16, relu_bf16, relu_squared_bf16, xielu_bf16: x[i] = act(x[i]), in place
//
// x       [n] bf16, n % 8 == 0
// act     silu: x / (1 + exp(-x)); gelu, exact and tanh form; relu and its square                                        (Hendrycks & Gimpel 2016)
//         xielu: positive x^2 + slope x above 0, else negative (exp(min(x, edge)) - 1 - x) + slope x          (Huang & Schlag 2024)
// maths   fp32, one rounding on store
// launch  grid ceil(n / 8 / 256), block 256; 16-byte loads
// needs   pointer 16-byte aligned: checked in activation.rs before launch
// bound   memory, 4*n bytes
// test    tests/cuda_decoder_ops.rs: within one bf16 ulp of fp32, plus 1e-6 for the fast exponential and cancellation
// archs: 80 90a 100a ptx
#include "activation.cuh"

template <class Act>
__device__ __forceinline__ void activate_with(bf16* x, u64 eighths, const Act& act) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch();
    pdl_wait();
    if (i >= eighths) return;
    bf16x8 v = load8(x + i * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) v.v[j] = to_bf16(act(to_f32(v.v[j])));
    store8(x + i * 8, v);
}

template <float (*ACT)(float)>
__device__ __forceinline__ void activate(bf16* x, u64 eighths) {
    activate_with(x, eighths, [](float value) { return ACT(value); });
}

extern "C" __global__ void __launch_bounds__(256) silu_bf16(bf16* x, u64 eighths) { activate<silu>(x, eighths); }

extern "C" __global__ void __launch_bounds__(256) gelu_tanh_bf16(bf16* x, u64 eighths) { activate<gelu_tanh>(x, eighths); }

extern "C" __global__ void __launch_bounds__(256) gelu_bf16(bf16* x, u64 eighths) { activate<gelu>(x, eighths); }

extern "C" __global__ void __launch_bounds__(256) relu_bf16(bf16* x, u64 eighths) { activate<relu>(x, eighths); }

extern "C" __global__ void __launch_bounds__(256) relu_squared_bf16(bf16* x, u64 eighths) { activate<relu_squared>(x, eighths); }

extern "C" __global__ void __launch_bounds__(256) xielu_bf16(bf16* x, u64 eighths, const Xielu act) { activate_with(x, eighths, act); }
