// quantized_gemm: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for weights in 8 or 4 bits and few rows: M <= 64; the
//                 simple version, for any GPU
// archs: 80 90a 100a ptx
//
// x        [M, K]  bf16
// w        [N, slices * 128] bytes of codes (quantized.cuh)
// scales   as sm90_quantized_gemm.cu describes
// y        described in simple_gemm.cuh
// maths    codes become bf16 exactly, those of NVFP4 times their group's scale; fp32 sums in mma.sync within a group of columns
//          with the same scale, times the scale; slices of K in eight interleaved parts, summed in order: no result depends on M
// launch   grid ceil(N / 16), block 256: a block has 16 rows of w. Each of its 8 warps has every eighth slice, loaded
//          directly from memory into registers
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in quantized_gemm.rs
// bound    memory, N K bytes or N K / 2 and the scales; sm90_quantized_gemm.cu is closer to this bound
// test     tests/cuda_quantized_gemm.rs: each element within 2^-8 relative of its own value plus K 2^-24 of the sum of
//          magnitudes
#include "simple_gemm.cuh"
#include "quantized.cuh"

// `row`: the first of a thread's two rows; `meta`: of its tile and slice.
template <int FORMAT>
__device__ __forceinline__ RowScales<FORMAT> load_scales(const u8* meta, i32 meta_bytes, int group, u32 row, bool is_f16) {
    if constexpr (!Codes<FORMAT>::HAS_GROUP_SCALES) {
        return {};
    } else if constexpr (FORMAT == NVFP4) {
        RowScales<NVFP4> scales;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32* words = reinterpret_cast<const u32*>(meta) + scale_word(2 * group, row % SCALE_TILE + 8 * r);
            scales.set(r, words[0], words[scale_word(1, 0)]);
        }
        return scales;
    } else if constexpr (FORMAT == MXFP4) {
        const u8* scale = meta + group * SCALE_TILE + row % SCALE_TILE;
        return {e8m0_value(scale[0]), e8m0_value(scale[8]), 0, 0};
    } else if constexpr (FORMAT == FP8_BLOCKS) {
        const float2 scales = *reinterpret_cast<const float2*>(meta);
        return {scales.x, scales.y, 0, 0};
    } else {
        constexpr i32 SCALE_BYTES = Codes<FORMAT>::GROUPS * SCALE_TILE * 2;
        const u16* scale = reinterpret_cast<const u16*>(meta) + group * SCALE_TILE + row % SCALE_TILE;
        const u8* zero = meta + SCALE_BYTES + group * SCALE_TILE + row % SCALE_TILE;
        const bool has_zeros = meta_bytes > SCALE_BYTES;
        const auto zero_of = [&](int i) { return negative_zero_point<FORMAT>(has_zeros ? zero[i] : Codes<FORMAT>::ZERO_POINT); };
        return {group_scale(scale[0], is_f16), group_scale(scale[8], is_f16), zero_of(0), zero_of(8)};
    }
}

// The two columns of x at `column`, zero outside the matrix.
__device__ __forceinline__ u32 load_pair(const bf16* x, u32 row, u32 m, u32 column, u32 k) {
    return row < m && column < k ? *reinterpret_cast<const u32*>(x + (u64)row * k + column) : 0;
}

// acc += a slice of rows g and g + 8 times that of x.
template <int FORMAT, int NT>
__device__ __forceinline__ void multiply_slice(float (&acc)[NT / 8][4], const u8* const (&rows)[2], const bf16* x, const u8* meta,
                                               const Meta& scales, u32 row, u32 m, u32 slice, u32 k) {
    using C = Codes<FORMAT>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 words[2][8] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!rows[r]) continue;
            const uint4 v = load_stream(rows[r] + slice * 128 + (2 * t + h) * 16);
            words[r][4 * h] = v.x, words[r][4 * h + 1] = v.y, words[r][4 * h + 2] = v.z, words[r][4 * h + 3] = v.w;
        }
    }
#pragma unroll
    for (int group = 0; group < C::GROUPS; ++group) {
        const RowScales<FORMAT> s = load_scales<FORMAT>(meta, scales.bytes, group, row, scales.is_f16 != 0);
        float sums[NT / 8][4] = {};
#pragma unroll
        for (int i = 0; i < C::GROUP_STEPS; ++i) {
            const int step = group * C::GROUP_STEPS + i;
            u32 a[4];
            expand<FORMAT>(a, words, step, s);
            const u32 column = slice * C::COLUMNS + step * 16 + 2 * t;
#pragma unroll
            for (int j = 0; j < NT / 8; ++j) {
                const u32 b0 = load_pair(x, 8 * j + g, m, column, k), b1 = load_pair(x, 8 * j + g, m, column + 8, k);
                mma_16x8x16(sums[j], a[0], a[1], a[2], a[3], b0, b1);
            }
        }
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if constexpr (C::HAS_ROW_SCALES) acc[j][e] += sums[j][e];
                else acc[j][e] += (e < 2 ? s.first : s.second) * sums[j][e];
            }
        }
    }
}

template <int FORMAT, int NT>
__device__ __forceinline__ void quantized_gemm(void* y, const bf16* x, const u8* codes, const Meta& meta, const bf16* bias, u32 m,
                                               u32 n, u32 k, i32 epilogue) {
    extern __shared__ float partial[];  // [WARPS][NT][ROWS + 1]
    pdl_launch();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const u32 n0 = blockIdx.x * ROWS, slices = (k + Codes<FORMAT>::COLUMNS - 1) / Codes<FORMAT>::COLUMNS;
    const auto codes_of = [&](u32 row) { return row < n ? codes + (u64)row * slices * 128 : nullptr; };
    const u8* const rows[2] = {codes_of(n0 + g), codes_of(n0 + g + 8)};
    const u8* own = tile_scales<FORMAT>(meta, n0 / SCALE_TILE, slices);
    pdl_wait();

    float acc[NT / 8][4] = {};
    for (u32 slice = warp; slice < slices; slice += WARPS) {
        multiply_slice<FORMAT, NT>(acc, rows, x, own + (u64)slice * meta.bytes, meta, n0 + g, m, slice, k);
    }
    scale_sums<FORMAT, NT / 2>(&acc[0][0], meta, n0 + g, slices);
    store_tile<NT>(partial, acc, y, bias, m, n, n0, epilogue);
}

#define QUANTIZED_GEMM(NAME, FORMAT, NT) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        quantized_gemm_##NAME##_m##NT(void* y, const bf16* x, const u8* codes, const Meta meta, const bf16* bias, u32 m, u32 n, \
                                      u32 k, i32 epilogue) { \
        quantized_gemm<FORMAT, NT>(y, x, codes, meta, bias, m, n, k, epilogue); \
    }

#define QUANTIZED_GEMMS(NAME, FORMAT) \
    QUANTIZED_GEMM(NAME, FORMAT, 8) \
    QUANTIZED_GEMM(NAME, FORMAT, 16) \
    QUANTIZED_GEMM(NAME, FORMAT, 32) \
    QUANTIZED_GEMM(NAME, FORMAT, 64)

QUANTIZED_GEMMS(fp8_rows, FP8_ROWS)
QUANTIZED_GEMMS(fp8_blocks, FP8_BLOCKS)
QUANTIZED_GEMMS(int4_g128, INT4_128)
QUANTIZED_GEMMS(int4_g32, INT4_32)
QUANTIZED_GEMMS(mxfp4, MXFP4)
QUANTIZED_GEMMS(nvfp4, NVFP4)
QUANTIZED_GEMMS(int8_rows, INT8_ROWS)
QUANTIZED_GEMMS(int8_g128, INT8_128)
QUANTIZED_GEMMS(int8_g32, INT8_32)
