// The sums of a matrix product in registers, on their way to rows of memory. A thread has two columns of each eight.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float2 bias_of(const bf16* bias, u32 n, u32 count) {
    if (!bias || n >= count) return make_float2(0.0f, 0.0f);
    const u32 pair = *reinterpret_cast<const u32*>(bias + n);
    return make_float2(unpack_lo(pair), unpack_hi(pair));
}

// Four lanes have the same row; each has one pair of columns of four blocks of eight columns. Afterwards, each has all pairs
// of one block: a transpose of 4 x 4.
__device__ __forceinline__ void gather_block(u32 (&v)[4], u32 t) {
#pragma unroll
    for (int d = 1; d <= 2; d <<= 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & d) continue;
            const u32 sent = t & d ? v[i] : v[i + d], got = __shfl_xor_sync(FULL_WARP, sent, d);
            if (t & d) v[i] = got;
            else v[i + d] = got;
        }
    }
}
