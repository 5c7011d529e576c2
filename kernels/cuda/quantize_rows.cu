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
    const u32 row = blockIdx.y * 8 + threadIdx.x / 32, slices = (k + SLICE - 1) / SLICE;
    if (row >= m) return;
    SliceValues values[SLICES];
#pragma unroll
    for (u32 i = 0; i < SLICES; ++i) values[i].load(x + (u64)row * k, blockIdx.x * SLICES + i, k);
#pragma unroll
    for (u32 i = 0; i < SLICES; ++i) {
        const u32 slice = blockIdx.x * SLICES + i;
        if (slice < slices) values[i].store(codes, scales, row, slice, slices, pitch);
    }
}
