// gated_activation_bf16: y[t, f] = act(gate[t, f]) * up[t, f]
//
// x       [T, 2F] bf16: alternating groups of G columns of gate and up, gate first (G = F is [gate | up])
// y       [T, F]  bf16
// act     silu: x / (1 + exp(-x)); gelu, exact and tanh form; relu and its square   (Shazeer 2020, GLU variants)
// maths   fp32, one rounding on store
// launch  grid (T, ceil(F / 8 / 256)), block 256; 16-byte loads
// needs   F % 8 == 0, G % 8 == 0, F % G == 0, pointers 16-byte aligned: checked in gated_activation.rs before launch
// bound   memory, 6*T*F bytes
// test    tests/cuda_ops.rs: within one bf16 ulp of fp32, plus 1e-6 of the operands for the fast exponential
// archs: 80 90a 100a ptx
#include "activation.cuh"

template <float (*ACT)(float)>
__device__ __forceinline__ void gated_rows(bf16* y, const bf16* x, u32 cols, u32 group) {
    const u64 t = blockIdx.x;
    const u32 f = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    pdl_launch();
    pdl_wait();
    if (f >= cols) return;
    const bf16* gate = x + t * 2 * cols + f / group * 2 * group + f % group;
    const bf16x8 g = load8(gate), u = load8(gate + group);
    bf16x8 out;
#pragma unroll
    for (int j = 0; j < 8; ++j) out.v[j] = to_bf16(ACT(to_f32(g.v[j])) * to_f32(u.v[j]));
    store8(y + t * cols + f, out);
}

extern "C" __global__ void __launch_bounds__(256) silu_gated_bf16(bf16* y, const bf16* x, u32 cols, u32 group) {
    gated_rows<silu>(y, x, cols, group);
}

extern "C" __global__ void __launch_bounds__(256) gelu_tanh_gated_bf16(bf16* y, const bf16* x, u32 cols, u32 group) {
    gated_rows<gelu_tanh>(y, x, cols, group);
}

extern "C" __global__ void __launch_bounds__(256) gelu_gated_bf16(bf16* y, const bf16* x, u32 cols, u32 group) {
    gated_rows<gelu>(y, x, cols, group);
}

extern "C" __global__ void __launch_bounds__(256) relu_gated_bf16(bf16* y, const bf16* x, u32 cols, u32 group) {
    gated_rows<relu>(y, x, cols, group);
}

extern "C" __global__ void __launch_bounds__(256) relu_squared_gated_bf16(bf16* y, const bf16* x, u32 cols, u32 group) {
    gated_rows<relu_squared>(y, x, cols, group);
}
