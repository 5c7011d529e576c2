// dequantize_bf16: out[n, k] = the value of code [n, k], rounded to bf16
// archs: 80 90a 100a ptx
//
// codes    [N, slices * 128] bytes (quantized.cuh)
// scales   as sm90_quantized_gemm.cu describes
// out      [N, K] bf16
// launch   grid ceil(N / 8) * slices, block 256: a warp has one row of a slice, a thread one word
// needs    K % 8 == 0: checked in quantized_gemm.rs
// bound    memory, the codes and 2 N K bytes. 28672 x 4096 in fp8: 352 MB, 79 us at 4.47 TB/s (H200)
// test     tests/cuda_quantized_gemm.rs, equal to the value in fp32 rounded once
#include "quantized.cuh"

__device__ __forceinline__ void store_pair(bf16* row, i32 column, i32 k, float a, float b) {
    if (column < k) *reinterpret_cast<u32*>(row + column) = pack_bf16x2(a, b);
}

// `slice`: of K; `meta`: scales of this tile and slice.
template <int FORMAT>
__device__ __forceinline__ void expand_word(bf16* row, u32 word, i32 n, i32 slice, i32 k, const u8* meta, i32 meta_bytes, bool is_f16,
                                            const float* row_scale) {
    using C = Codes<FORMAT>;
    const int lane = threadIdx.x % 32, chunk = lane / 4, t = chunk / 2, h = chunk % 2, at = lane % 4;
    if constexpr (C::IS_FP8) {
        const float scale = FORMAT == FP8_ROWS ? *row_scale : reinterpret_cast<const float*>(meta)[n % 16 / 8];
        const i32 column = slice * C::COLUMNS + (4 * h + at) * 16 + 2 * t;
        const auto value = [&](int byte) { return e4m3_value(word >> (8 * byte) & 255) * scale; };
        store_pair(row, column, k, value(0), value(2));
        store_pair(row, column + 8, k, value(1), value(3));
    } else if constexpr (C::IS_INT8) {
        const i32 step = 4 * h + at, column = slice * C::COLUMNS + step * 16 + 2 * t;
        i32 zero = 0;
        float scale;
        if constexpr (C::HAS_ROW_SCALES) {
            scale = *row_scale;
        } else {
            constexpr i32 SCALE_BYTES = C::GROUPS * SCALE_TILE * 2;
            const i32 of = step / C::GROUP_STEPS * SCALE_TILE + n % SCALE_TILE;
            scale = group_scale(reinterpret_cast<const u16*>(meta)[of], is_f16);
            if (meta_bytes > SCALE_BYTES) zero = (signed char)meta[SCALE_BYTES + of];
        }
        const auto value = [&](int byte) { return (float)((signed char)(word >> (8 * byte)) - zero) * scale; };
        store_pair(row, column, k, value(0), value(2));
        store_pair(row, column + 8, k, value(1), value(3));
    } else if constexpr (FORMAT == MXFP4 || FORMAT == NVFP4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int step = 8 * h + 2 * at + half;
            float scale;
            if constexpr (FORMAT == NVFP4) {
                scale = e4m3_value(meta[4 * scale_word(step / 4, n % SCALE_TILE) + step % 4]) * *row_scale;
            } else {
                scale = e8m0_value(meta[step / C::GROUP_STEPS * SCALE_TILE + n % SCALE_TILE]);
            }
            const i32 column = slice * C::COLUMNS + step * 16 + 2 * t;
            const auto value = [&](int nibble) { return e2m1_value(word >> (4 * (nibble + 2 * half)) & 15) * scale; };
            store_pair(row, column, k, value(0), value(4));
            store_pair(row, column + 8, k, value(1), value(5));
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int step = 8 * h + 2 * at + half, group = step / C::GROUP_STEPS;
            const float scale = group_scale(reinterpret_cast<const u16*>(meta)[group * SCALE_TILE + n % SCALE_TILE], is_f16);
            constexpr i32 SCALE_BYTES = C::GROUPS * SCALE_TILE * 2;
            const i32 zero = meta_bytes > SCALE_BYTES ? meta[SCALE_BYTES + group * SCALE_TILE + n % SCALE_TILE] : 8;
            const i32 column = slice * C::COLUMNS + step * 16 + 2 * t;
            const auto value = [&](int nibble) { return (float)((i32)(word >> (4 * (nibble + 2 * half)) & 15) - zero) * scale; };
            store_pair(row, column, k, value(0), value(4));
            store_pair(row, column + 8, k, value(1), value(5));
        }
    }
}

template <int FORMAT>
__device__ __forceinline__ void dequantize(bf16* out, const u8* codes, const Meta& scales, i32 n, i32 k) {
    pdl_launch();
    const i32 slices = (k + Codes<FORMAT>::COLUMNS - 1) / Codes<FORMAT>::COLUMNS;
    const i32 slice = blockIdx.x % slices, row = blockIdx.x / slices * 8 + threadIdx.x / 32;
    pdl_wait();
    if (row >= n) return;
    const u32 word = reinterpret_cast<const u32*>(codes + ((i64)row * slices + slice) * 128)[threadIdx.x % 32];
    const u8* meta = tile_scales<FORMAT>(scales, row / SCALE_TILE, slices) + slice * scales.bytes;
    expand_word<FORMAT>(out + (i64)row * k, word, row, slice, k, meta, scales.bytes, scales.is_f16 != 0, row_scale<FORMAT>(scales, row, slices));
}

#define DEQUANTIZE(NAME, FORMAT) \
    extern "C" __global__ void __launch_bounds__(256) dequantize_bf16_##NAME(bf16* out, const u8* codes, const Meta scales, i32 n, i32 k) { \
        dequantize<FORMAT>(out, codes, scales, n, k); \
    }

DEQUANTIZE(fp8_rows, FP8_ROWS)
DEQUANTIZE(fp8_blocks, FP8_BLOCKS)
DEQUANTIZE(int4_g128, INT4_128)
DEQUANTIZE(int4_g32, INT4_32)
DEQUANTIZE(mxfp4, MXFP4)
DEQUANTIZE(nvfp4, NVFP4)
DEQUANTIZE(int8_rows, INT8_ROWS)
DEQUANTIZE(int8_g128, INT8_128)
DEQUANTIZE(int8_g32, INT8_32)
