// Quantized weights: how their codes lie in memory, and how they become bf16.
//
// codes    e4m3 and i8: one byte a column, a slice is 128 columns; u4 and e2m1: half a byte a column, a slice is 256 columns. A row of
//          a slice is 128 bytes. Its chunk 2 t + h of 16 bytes has what thread t of four in a row of a matrix product
//          needs in one half of the steps of 16 columns: columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each step. An
//          e4m3 or i8 word has one step, its bytes in the order 2 t, 2 t + 8, 2 t + 1, 2 t + 9. A u4 or e2m1 word has two steps, the
//          first in the nibbles 0, 4, 1, 5, the second in 2, 6, 3, 7 (columns in order). packing.rs writes this.
// scales   described by `Format` in quantized_gemm.rs
#pragma once
#include "common.cuh"

enum Format : i32 { FP8_ROWS, FP8_BLOCKS, INT4_128, INT4_32, MXFP4, NVFP4, INT8_ROWS, INT8_128, INT8_32 };

template <int FORMAT>
struct Codes {
    static constexpr bool IS_FP8 = FORMAT == FP8_ROWS || FORMAT == FP8_BLOCKS;
    static constexpr bool IS_INT8 = FORMAT == INT8_ROWS || FORMAT == INT8_128 || FORMAT == INT8_32;
    static constexpr int COLUMNS = IS_FP8 || IS_INT8 ? 128 : 256;  // of a slice
    static constexpr int STEPS = COLUMNS / 16;
    // Steps of 16 columns that are multiplied together, with the same scale. Each step of NVFP4 has its own, which becomes part of the
    // expanded values.
    static constexpr int GROUP_STEPS = FORMAT == INT4_32 || FORMAT == MXFP4 || FORMAT == INT8_32 ? 2 : 8;
    static constexpr int GROUPS = STEPS / GROUP_STEPS;
    // Whether rows have a scale for all of K, by which their sums are multiplied at the end.
    static constexpr bool HAS_ROW_SCALES = FORMAT == FP8_ROWS || FORMAT == NVFP4 || FORMAT == INT8_ROWS;
    static constexpr bool HAS_GROUP_SCALES = FORMAT != FP8_ROWS && FORMAT != INT8_ROWS;
    // Bytes of scales and zero points of a tile of 64 rows and a slice, at most.
    static constexpr int META_BYTES = !HAS_GROUP_SCALES      ? 0
                                      : FORMAT == FP8_BLOCKS ? 16
                                      : FORMAT == NVFP4      ? STEPS * 64
                                                             : GROUPS * 64 * (FORMAT == MXFP4 ? 1 : 3);
    static constexpr u32 ZERO_POINT = IS_INT8 ? 0 : 8;  // of integers whose groups have none
    // What sums are multiplied by besides the scales of their rows.
    static constexpr float SUM_FACTOR = FORMAT == NVFP4 ? 0x1p8f : 1.0f;
};

// A scale of a group of u4 or i8 codes: f16 or bf16.
__device__ __forceinline__ float group_scale(u16 bits, bool is_f16) {
    float f;
    if (!is_f16) return __uint_as_float((u32)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

// The value of an e4m3 code. Exponents of e4m3 have a bias of 7, those of f32 one of 127.
__device__ __forceinline__ float e4m3_value(u32 code) {
    return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}

// a * b + c, two bf16 each.
__device__ __forceinline__ u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// The four e4m3 codes of a word as bf16: columns 2 t, 2 t + 1 in `low`, 2 t + 8, 2 t + 9 in `high`. bf16 holds every
// value exactly, also those that are subnormal before the product.
__device__ __forceinline__ void expand_e4m3(u32 word, u32& low, u32& high) {
    constexpr u32 SIGN = 0x80008000u, REST = 0x07f007f0u, TWO_TO_120 = 0x7b807b80u, MINUS_ZERO = 0x80008000u;
    low = multiply_add_bf16x2(((word << 8) & SIGN) | ((word << 4) & REST), TWO_TO_120, MINUS_ZERO);
    high = multiply_add_bf16x2((word & SIGN) | ((word >> 4) & REST), TWO_TO_120, MINUS_ZERO);
}

// (a & mask) | bits in one operation, which the compiler does not find if both are constants.
__device__ __forceinline__ u32 select_or(u32 a, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
    return r;
}

constexpr u32 INT_BASE = 0x43004300u;  // 128 twice; the lowest bits of its mantissa are units

// The integers at bits 0 to 7 and 16 to 23 of `pair` as bf16: 128 and the low seven bits, less 128, or less 256 if the sign is set.
__device__ __forceinline__ u32 expand_i8_pair(u32 pair) {
    constexpr u32 MINUS_ONE = 0xbf80bf80u, SIGN = 0x00800080u, REST = 0x007f007fu;
    return multiply_add_bf16x2(select_or(pair, SIGN, INT_BASE), MINUS_ONE, select_or(pair, REST, INT_BASE));
}

// The four i8 codes of a word: columns 2 t, 2 t + 1 in `low`, 2 t + 8, 2 t + 9 in `high`.
__device__ __forceinline__ void expand_i8(u32 word, u32& low, u32& high) { low = expand_i8_pair(word), high = expand_i8_pair(word >> 8); }

// What the expansion adds for a zero point, twice: -(128 + zero) for u4, where it is 16 at most, and -zero for i8.
template <int FORMAT>
__device__ __forceinline__ u32 negative_zero_point(u32 zero) {
    if constexpr (Codes<FORMAT>::IS_INT8) return expand_i8_pair(zero * 0x10001u) ^ 0x80008000u;
    else return (INT_BASE | 0x80008000u) + zero * 0x10001u;
}

// Half of the eight u4 codes of a word, less their zero point: `zero` is -(128 + zero point) twice.
__device__ __forceinline__ void expand_u4(u32 word, int step, u32 zero, u32& low, u32& high) {
    constexpr u32 ONE = 0x3f803f80u, CODES = 0x000f000fu;
    low = multiply_add_bf16x2(select_or(word >> (8 * step), CODES, INT_BASE), ONE, zero);
    high = multiply_add_bf16x2(select_or(word >> (8 * step + 4), CODES, INT_BASE), ONE, zero);
}

// A scale that is a power of two, stored as its exponent with a bias of 127.
__device__ __forceinline__ float e8m0_value(u32 exponent) { return __uint_as_float(exponent ? exponent << 23 : 0x400000); }

// The value of an e2m1 code. Its exponent has a bias of 1.
__device__ __forceinline__ float e2m1_value(u32 code) { return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f; }

constexpr u32 TWO_TO_126 = 0x7e807e80u;  // as a scale of expand_e2m1: 1

// Half of the eight e2m1 codes of a word, times `scale` / 2^126, which is two bf16.
__device__ __forceinline__ void expand_e2m1(u32 word, int step, u32 scale, u32& low, u32& high) {
    constexpr u32 MINUS_ZERO = 0x80008000u;
    const u32 a = word >> (8 * step), b = word >> (8 * step + 4);
    low = multiply_add_bf16x2(((a & 0x00080008u) << 12) | ((a & 0x00070007u) << 6), scale, MINUS_ZERO);
    high = multiply_add_bf16x2(((b & 0x00080008u) << 12) | ((b & 0x00070007u) << 6), scale, MINUS_ZERO);
}

// The four e4m3 scales of a word times 2^118 as bf16: steps 0 and 2 in `even`, 1 and 3 in `odd`. A value of e2m1 times a scale has 6 bits,
// so bf16 holds it exactly; expand_e2m1 makes 2^-8 of it, since bf16 does not hold 448 times 2^126.
__device__ __forceinline__ void expand_scales(u32 word, u32& even, u32& odd) {
    constexpr u32 TWO_TO_118 = 0x7a807a80u, MINUS_ZERO = 0x80008000u;
    expand_e4m3(word, even, odd);
    even = multiply_add_bf16x2(even, TWO_TO_118, MINUS_ZERO);
    odd = multiply_add_bf16x2(odd, TWO_TO_118, MINUS_ZERO);
}

// The scales and zero points of a thread's two rows, g and g + 8 of a warp's 16, in one group of columns.
template <int FORMAT>
struct RowScales {
    float first, second;
    u32 first_zero, second_zero;  // as negative_zero_point makes them
};

// Those of the eight steps of half a slice, as expand_scales makes them of two words each.
template <>
struct RowScales<NVFP4> {
    u32 pairs[2][4];

    __device__ __forceinline__ void set(int r, u32 word0, u32 word1) {
        expand_scales(word0, pairs[r][0], pairs[r][1]);
        expand_scales(word1, pairs[r][2], pairs[r][3]);
    }

    // The scale of a step of row r, twice.
    __device__ __forceinline__ u32 of(int r, int step) const {
        return __byte_perm(pairs[r][step % 8 / 4 * 2 + step % 2], 0, step % 4 < 2 ? 0x1010 : 0x3232);
    }
};

// Which word of a tile and slice of NVFP4 has the scales of steps 4 i .. 4 i + 4 of a row.
__device__ __forceinline__ int scale_word(int i, int row) { return i * 64 + row; }

// The fragment of a step of 16 columns: `words` has the 32 bytes of a thread's two rows.
template <int FORMAT>
__device__ __forceinline__ void expand(u32* a, const u32 (*words)[8], int step, const RowScales<FORMAT>& scales) {
    if constexpr (Codes<FORMAT>::IS_FP8) {
        expand_e4m3(words[0][step], a[0], a[2]);
        expand_e4m3(words[1][step], a[1], a[3]);
    } else if constexpr (Codes<FORMAT>::IS_INT8) {
        expand_i8(words[0][step], a[0], a[2]);
        expand_i8(words[1][step], a[1], a[3]);
        if constexpr (Codes<FORMAT>::HAS_GROUP_SCALES) {
            // Differences are 255 at most, so bf16 holds them exactly.
            constexpr u32 ONE = 0x3f803f80u;
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = multiply_add_bf16x2(a[i], ONE, i % 2 ? scales.second_zero : scales.first_zero);
        }
    } else if constexpr (FORMAT == MXFP4) {
        expand_e2m1(words[0][step / 2], step % 2, TWO_TO_126, a[0], a[2]);
        expand_e2m1(words[1][step / 2], step % 2, TWO_TO_126, a[1], a[3]);
    } else if constexpr (FORMAT == NVFP4) {
        expand_e2m1(words[0][step / 2], step % 2, scales.of(0, step), a[0], a[2]);
        expand_e2m1(words[1][step / 2], step % 2, scales.of(1, step), a[1], a[3]);
    } else {
        expand_u4(words[0][step / 2], step % 2, scales.first_zero, a[0], a[2]);
        expand_u4(words[1][step / 2], step % 2, scales.second_zero, a[1], a[3]);
    }
}

// Scales and zero points of a weight.
struct Meta {
    const u8* values;
    i32 bytes;  // of a tile and slice; 0 for FP8_ROWS and INT8_ROWS, whose scales belong to rows
    i32 is_f16;
};

constexpr i32 SCALE_TILE = 64;  // rows whose scales lie together

// The scales of a tile of 64 rows: those of each slice, then those of whole rows, [64] f32, if there are any.
template <int FORMAT>
__device__ __forceinline__ const u8* tile_scales(const Meta& meta, i64 tile, i32 slices) {
    constexpr i32 ROWS_BYTES = Codes<FORMAT>::HAS_ROW_SCALES ? SCALE_TILE * 4 : 0;
    return meta.values + tile * (slices * meta.bytes + ROWS_BYTES);
}

// The scale of row `row` of all, if rows have scales.
template <int FORMAT>
__device__ __forceinline__ const float* row_scale(const Meta& meta, i64 row, i32 slices) {
    const u8* rows = tile_scales<FORMAT>(meta, row / SCALE_TILE, slices) + slices * meta.bytes;
    return reinterpret_cast<const float*>(rows) + row % SCALE_TILE;
}

// sums[2 j], sums[2 j + 1] of a thread's two rows in turn, times the scales of rows `row` and `row + 8`, if rows have scales.
template <int FORMAT, int COUNT>
__device__ __forceinline__ void scale_sums(float* sums, const Meta& meta, i64 row, i32 slices) {
    if constexpr (Codes<FORMAT>::HAS_ROW_SCALES) {
        const float* of = row_scale<FORMAT>(meta, row, slices);
        const float first = of[0] * Codes<FORMAT>::SUM_FACTOR, second = of[8] * Codes<FORMAT>::SUM_FACTOR;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] *= i % 4 < 2 ? first : second;
    }
}
