// Common parts of the kernels of attention over latent vectors (DeepSeek-V2, 2024): the sizes of a row, and its rotated part.
#pragma once
#include "query_scale.cuh"

// A row has a latent vector of RANK elements, 256 or 512, and the rotated ones behind it.
constexpr int ROTARY = 64;
constexpr int UNITS = ROTARY / 8;   // units of four pairs

template <int RANK>
constexpr int WIDTH = RANK + ROTARY;

// Cosines and sines of all positions, and which elements form pairs.
struct Rotation {
    const float* cos;  // [max_positions, ROTARY / 2]
    const float* sin;
    const u32* positions;  // [T]
    u32 interleaved;       // pairs are (2i, 2i + 1), otherwise (i, i + ROTARY / 2)
    QueryScale scale;      // of whole queries

    __device__ float factor(u32 t) const { return scale.beta != 0.0f ? scale.at(positions[t]) : 1.0f; }
};

__device__ __forceinline__ u32 rotated_low(u32 pair, u32 other, float c0, float s0, float c1, float s1) {
    return pack_bf16x2(__fmaf_rn(unpack_lo(pair), c0, -__fmul_rn(unpack_lo(other), s0)),
                       __fmaf_rn(unpack_hi(pair), c1, -__fmul_rn(unpack_hi(other), s1)));
}

__device__ __forceinline__ u32 rotated_high(u32 pair, u32 other, float c0, float s0, float c1, float s1) {
    return pack_bf16x2(__fmaf_rn(unpack_lo(pair), c0, __fmul_rn(unpack_lo(other), s0)),
                       __fmaf_rn(unpack_hi(pair), c1, __fmul_rn(unpack_hi(other), s1)));
}

// A pair of neighbours.
__device__ __forceinline__ u32 rotated_pair(u32 pair, float c, float s) {
    const float a = unpack_lo(pair), b = unpack_hi(pair);
    return pack_bf16x2(__fmaf_rn(a, c, -__fmul_rn(b, s)), __fmaf_rn(b, c, __fmul_rn(a, s)));
}

__device__ __forceinline__ float4 operator*(const float4& x, float factor) {
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

// Rotates the four pairs of unit `unit` of the ROTARY elements at `from` by the angles of token `t`, and multiplies them by `factor`.
__device__ __forceinline__ void rotate_unit(bf16* to, const bf16* from, u32 unit, const Rotation& r, u32 t, float factor) {
    const u64 at = (u64)r.positions[t] * (ROTARY / 2) + 4 * unit;
    const float4 c = *reinterpret_cast<const float4*>(r.cos + at) * factor, s = *reinterpret_cast<const float4*>(r.sin + at) * factor;
    if (r.interleaved) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + 8 * unit);
        *reinterpret_cast<uint4*>(to + 8 * unit) = make_uint4(rotated_pair(x.x, c.x, s.x), rotated_pair(x.y, c.y, s.y),
                                                              rotated_pair(x.z, c.z, s.z), rotated_pair(x.w, c.w, s.w));
        return;
    }
    const uint2 lo = *reinterpret_cast<const uint2*>(from + 4 * unit);
    const uint2 hi = *reinterpret_cast<const uint2*>(from + ROTARY / 2 + 4 * unit);
    *reinterpret_cast<uint2*>(to + 4 * unit) = make_uint2(rotated_low(lo.x, hi.x, c.x, s.x, c.y, s.y),
                                                          rotated_low(lo.y, hi.y, c.z, s.z, c.w, s.w));
    *reinterpret_cast<uint2*>(to + ROTARY / 2 + 4 * unit) = make_uint2(rotated_high(hi.x, lo.x, c.x, s.x, c.y, s.y),
                                                                       rotated_high(hi.y, lo.y, c.z, s.z, c.w, s.w));
}
