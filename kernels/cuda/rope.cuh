// Rotates pairs (e, e + D / 2) of a head by the angles of a position. Every kernel that rotates uses these functions,
// with the same roundings, so that all give the same bits.
#pragma once
#include "common.cuh"

// Cosines and sines for eight pairs.
struct Angles {
    float c[8], s[8];
};

__device__ __forceinline__ void load_floats8(float (&out)[8], const float* p) {
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

__device__ __forceinline__ Angles load_angles(const float* cos, const float* sin) {
    Angles x;
    load_floats8(x.c, cos);
    load_floats8(x.s, sin);
    return x;
}

// Two pairs: the elements of `lo` are rotated with those of `hi`; j is the index of the first pair among the eight.
__device__ __forceinline__ void rotate2(u32& lo, u32& hi, const Angles& x, int j) {
    const float a0 = unpack_lo(lo), a1 = unpack_hi(lo), b0 = unpack_lo(hi), b1 = unpack_hi(hi);
    const float c0 = x.c[j], c1 = x.c[j + 1], s0 = x.s[j], s1 = x.s[j + 1];
    lo = pack_bf16x2(__fmaf_rn(a0, c0, -__fmul_rn(b0, s0)), __fmaf_rn(a1, c1, -__fmul_rn(b1, s1)));
    hi = pack_bf16x2(__fmaf_rn(b0, c0, __fmul_rn(a0, s0)), __fmaf_rn(b1, c1, __fmul_rn(a1, s1)));
}

// Eight pairs.
__device__ __forceinline__ void rotate8(uint4& lo, uint4& hi, const Angles& x) {
    rotate2(lo.x, hi.x, x, 0);
    rotate2(lo.y, hi.y, x, 2);
    rotate2(lo.z, hi.z, x, 4);
    rotate2(lo.w, hi.w, x, 6);
}
