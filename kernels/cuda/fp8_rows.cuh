// Rows in e4m3 as quantize_rows.cu describes them: codes and scales of a slice.
#pragma once
#include "common.cuh"

constexpr u32 SLICE = 128;  // columns with the same scale

// Two values as e4m3, the first in the low byte.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

// The exponent bits of the least power of two that is not below `size / 448`.
__device__ __forceinline__ u32 scale_exponent(float size) {
    const u32 bits = __float_as_uint(size * (1.0f / 448.0f));
    return min(max((bits >> 23) + ((bits & 0x7fffff) != 0), 1u), 253u);
}
