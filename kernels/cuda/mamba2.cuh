// What the kernels of a layer of Mamba-2 (Dao and Gu 2024) behind its projections have in common.
//
// conv    x[t, c] = silu(bias[c] + sum over j of w[j, c] * in[t - 3 + j, c]) for the channels C | B | x
// gates   d = softplus(dt + dt_bias), g = exp(decay * d), decay = -exp(A_log)
// state   S = g S + B (d x)^T;  o = S^T C + skip x;  neighbouring value heads share C and B
// out     y = o * silu(z);  y * rsqrt(mean(y^2) + eps) * norm, where the mean is over neighbouring value heads
//
// inputs  [T, N + V D] bf16: C of K key heads, B, x of V value heads, z;  N = 256 K + V D channels
// dt      [T, V] bf16
// out     [T, V D] bf16
// slots   of a layer, as recurrent.cuh says: the history, and S^T [V, D, 128] f32
// weights conv [4, N], conv_bias [N] or null, decay [V], dt_bias [V], skip [V], norm [V D], all f32
#pragma once
#include "recurrent.cuh"

constexpr u32 MAMBA_KEYS = 128;  // elements of C and B of a head

struct MambaShape {
    u32 key_heads, value_heads, value_dim;

    __device__ u32 group() const { return value_heads / key_heads; }
    __device__ u32 width() const { return value_heads * value_dim; }
    __device__ u32 channels() const { return 2 * key_heads * MAMBA_KEYS + width(); }
    __device__ u32 stride() const { return channels() + width(); }
};

struct MambaWeights {
    const float *conv, *conv_bias, *decay, *dt_bias, *skip, *norm;
};

// S^T of a value head.
__device__ __forceinline__ float* mamba_head_state(const RecurrentStates& states, const MambaShape& shape, u32 slot, u32 head) {
    return states.matrices(slot, shape.channels()) + (u64)head * shape.value_dim * MAMBA_KEYS;
}
