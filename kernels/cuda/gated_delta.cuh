// What the kernels of a layer of Gated DeltaNet (Yang et al. 2024) behind its projections have in common.
//
// conv    x[t, c] = silu(sum over j of w[j, c] * in[t - 3 + j, c]) for the channels q | k | v
// heads   q, k = x / sqrt(sum x^2 + 1e-6), q = q / sqrt(128); neighbouring value heads share a key head
// gates   beta = sigmoid(b), g = exp(decay * softplus(a + dt_bias)), decay = -exp(A_log)
// state   S = g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q
// out     o * rsqrt(mean(o^2) + eps) * norm * silu(z)
//
// qkvz    [T, C + 128 V] bf16: q of K key heads, k, v of V value heads, z;  C = 256 K + 128 V
// ba      [T, 2 V] bf16: b, a
// out     [T, 128 V] bf16
// slots   of a layer, as recurrent.cuh says: the history, and S [V, 128, 128] f32
// weights conv [4, C], decay [V], dt_bias [V], norm [128], all f32
#pragma once
#include "recurrent.cuh"

constexpr u32 DELTA_DIM = 128;
constexpr float DELTA_QUERY_SCALE = 0.08838834764831845f;  // 1 / sqrt(128)

struct DeltaShape {
    u32 key_heads, value_heads;

    __device__ u32 group() const { return value_heads / key_heads; }
    __device__ u32 channels() const { return (2 * key_heads + value_heads) * DELTA_DIM; }
    __device__ u32 stride() const { return channels() + value_heads * DELTA_DIM; }
};

struct DeltaWeights {
    const float *conv, *decay, *dt_bias, *norm;
    float eps;
};

// S of a value head.
__device__ __forceinline__ float* delta_head_state(const RecurrentStates& states, const DeltaShape& shape, u32 slot, u32 head) {
    return states.matrices(slot, shape.channels()) + (u64)head * DELTA_DIM * DELTA_DIM;
}

// The channel of element `i` of q | k | v of a value head.
__device__ __forceinline__ u32 delta_channel(const DeltaShape& shape, u32 head, u32 i) {
    const u32 key_head = head / shape.group(), part = i / DELTA_DIM, own = i % DELTA_DIM;
    if (part == 2) return (2 * shape.key_heads + head) * DELTA_DIM + own;
    return (part * shape.key_heads + key_head) * DELTA_DIM + own;
}
