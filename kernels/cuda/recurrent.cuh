// What the kernels of layers with a recurrent state have in common: their convolution's history, and the slots of states.
//
// slots   of a layer: the history [4, C] bf16, where the input of position p is in row p % 4; then, behind 3 C words, matrices in f32
#pragma once
#include "common.cuh"

constexpr u32 CONV_TAPS = 4;

// States of one layer; slots are `pitch` floats apart.
struct RecurrentStates {
    float* base;
    u64 pitch;
    const u32* slots;

    __device__ bf16* history(u32 slot) const { return reinterpret_cast<bf16*>(base + slot * pitch); }
    __device__ float* matrices(u32 slot, u32 channels) const { return base + slot * pitch + 3 * channels; }
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
