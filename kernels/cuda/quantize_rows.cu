// quantize_rows_fp8: rows of bf16 as e4m3 codes, with a scale for each row and slice of 128 columns
// archs: 90a
//
// x        [M, K] bf16
// codes    [M, 128 S] e4m3, S = ceil(K / 128): the columns of a slice in the order of quantized.cuh; columns from K on are 0
// scales   [S, pitch] f32
// maths    scale = the least power of two with max |x| / scale <= 448; code = x / scale, rounded to nearest even. So
//          code * scale is exact in bf16. Slices without a normal number have the scale 2^-126
// launch   grid (ceil(S / 4), ceil(M / 8)), 256 threads; a warp has a row and four slices, one after the other
// needs    K % 8 == 0: checked in quantize_rows.rs
// bound    memory: 3 M K bytes
// test     tests/cuda_fp8_gemm.rs
#include "fp8_rows.cuh"

constexpr u32 SLICES = 4;

extern "C" __global__ void __launch_bounds__(256) quantize_rows_fp8(u8* codes, float* scales, const bf16* x, u32 m, u32 k, u32 pitch) {
    pdl_launch();
    pdl_wait();
    const u32 row = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, slices = (k + SLICE - 1) / SLICE;
    if (row >= m) return;
    // This lane's word of a slice: word `lane % 4` of chunk `lane / 4`, see quantized.cuh.
    const u32 t = lane / 8, step = lane / 4 % 2 * 4 + lane % 4, column = step * 16 + 2 * t;
    u32 pairs[SLICES][2];
#pragma unroll
    for (u32 i = 0; i < SLICES; ++i) {
        const u32 first = (blockIdx.x * SLICES + i) * SLICE + column;
        const u32* from = reinterpret_cast<const u32*>(x + (u64)row * k + first);
        pairs[i][0] = first < k ? from[0] : 0;
        pairs[i][1] = first + 8 < k ? from[4] : 0;
    }
#pragma unroll
    for (u32 i = 0; i < SLICES; ++i) {
        const u32 slice = blockIdx.x * SLICES + i;
        if (slice >= slices) return;
        const float a = unpack_lo(pairs[i][0]), b = unpack_hi(pairs[i][0]), c = unpack_lo(pairs[i][1]), d = unpack_hi(pairs[i][1]);
        const float size = warp_max(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
        const u32 exponent = scale_exponent(size);
        const float inverse = __uint_as_float((254 - exponent) << 23);
        const u32 word = e4m3_pair(a * inverse, c * inverse) | e4m3_pair(b * inverse, d * inverse) << 16;
        reinterpret_cast<u32*>(codes + ((u64)row * slices + slice) * SLICE)[lane] = word;
        if (lane == 0) scales[(u64)slice * pitch + row] = __uint_as_float(exponent << 23);
    }
}
