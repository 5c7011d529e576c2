// Rows in e4m3 as quantize_rows.cu describes them: codes and scales of a slice.
#pragma once
#include "common.cuh"

constexpr u32 SLICE = 128;  // columns with the same scale

// Two values as e4m3, the first in the low byte.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    u16 r = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
#endif
    return r;
}

// The exponent bits of the least power of two that is not below `size / 448`.
__device__ __forceinline__ u32 scale_exponent(float size) {
    const u32 bits = __float_as_uint(size * (1.0f / 448.0f));
    return min(max((bits >> 23) + ((bits & 0x7fffff) != 0), 1u), 253u);
}

// A lane's four values of a slice: those of its word in the order of codes, word `lane % 4` of chunk `lane / 4` (quantized.cuh).
struct SliceValues {
    u32 pairs[2];

    __device__ __forceinline__ void load(const bf16* row, u32 slice, u32 k) {
        const u32 lane = threadIdx.x % 32, step = lane / 4 % 2 * 4 + lane % 4, first = slice * SLICE + step * 16 + 2 * (lane / 8);
        const u32* from = reinterpret_cast<const u32*>(row + first);
        pairs[0] = first < k ? from[0] : 0;
        pairs[1] = first + 8 < k ? from[4] : 0;
    }

    // One warp: stores the slice of row `row` of codes [rows, 128 slices] and scales [slices, pitch].
    __device__ __forceinline__ void store(u8* codes, float* scales, u64 row, u32 slice, u32 slices, u32 pitch) const {
        const u32 lane = threadIdx.x % 32;
        const float a = unpack_lo(pairs[0]), b = unpack_hi(pairs[0]), c = unpack_lo(pairs[1]), d = unpack_hi(pairs[1]);
        const float size = warp_max(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
        const u32 exponent = scale_exponent(size);
        const float inverse = __uint_as_float((254 - exponent) << 23);
        const u32 word = e4m3_pair(a * inverse, c * inverse) | e4m3_pair(b * inverse, d * inverse) << 16;
        reinterpret_cast<u32*>(codes + (row * slices + slice) * SLICE)[lane] = word;
        if (lane == 0) scales[(u64)slice * pitch + row] = __uint_as_float(exponent << 23);
    }
};
