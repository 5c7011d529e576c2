// Activation functions of MLPs.
#pragma once
#include "common.cuh"

// An exact division takes as long as a third of a tile's products in sm90_fp8_gemm.cu. This one is within 2 units in the last
// place, and 0 where the denominator exceeds 2^126.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), with tanh computed from exp.
__device__ __forceinline__ float gelu_tanh(float x) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }

__device__ __forceinline__ float relu(float x) { return fmaxf(x, 0.0f); }

__device__ __forceinline__ float relu_squared(float x) {
    const float positive = fmaxf(x, 0.0f);
    return positive * positive;
}

// An activation with four numbers.
struct Xielu {
    float positive, negative, slope, edge;

    __device__ float operator()(float x) const {
        const float curved = x > 0.0f ? positive * x * x : negative * (expm1f(fminf(x, edge)) - x);
        return curved + slope * x;
    }
};

template <float (*ACT)(float)>
__device__ __forceinline__ float4 gated(const float4& gate, const float4& up) {
    return make_float4(ACT(gate.x) * up.x, ACT(gate.y) * up.y, ACT(gate.z) * up.z, ACT(gate.w) * up.w);
}
