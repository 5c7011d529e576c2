// Quantized weights on Hopper: a ring of slices of codes and of x. One warpgroup multiplies a tile of a slice.
#pragma once
#include "mma.cuh"
#include "sm90_gemm.cuh"
#include "quantized.cuh"

static_assert(TILE == SCALE_TILE, "a block needs the scales of one tile");

// Copies `bytes` bytes, a multiple of 16, to shared memory.
__device__ __forceinline__ void bulk_load(u32 dst, const u8* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ uint4 shared_load16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float shared_load_f32(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u16 shared_load_u16(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u32 shared_load_u32(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u32 shared_load_u8(u32 address) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// `row`: the first row within the tile.
template <int FORMAT>
__device__ __forceinline__ RowScales<FORMAT> row_scales(u32 meta, u32 meta_bytes, int group, int row, bool is_f16) {
    if constexpr (FORMAT == NVFP4) {
        RowScales<NVFP4> scales;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 words = meta + 4 * scale_word(2 * group, row + 8 * r);
            scales.set(r, shared_load_u32(words), shared_load_u32(words + 4 * scale_word(1, 0)));
        }
        return scales;
    } else if constexpr (FORMAT == MXFP4) {
        const u32 scale = meta + group * TILE + row;
        return {e8m0_value(shared_load_u8(scale)), e8m0_value(shared_load_u8(scale + 8)), 0, 0};
    } else if constexpr (FORMAT == FP8_BLOCKS) {
        return {shared_load_f32(meta), shared_load_f32(meta + 4), 0, 0};
    } else {
        using C = Codes<FORMAT>;
        constexpr u32 SCALE_BYTES = C::GROUPS * SCALE_TILE * 2;
        const u32 scale = meta + (group * TILE + row) * 2, zero = meta + SCALE_BYTES + group * TILE + row;
        const bool has_zeros = meta_bytes > SCALE_BYTES;
        const auto zero_of = [&](int i) { return negative_zero_point<FORMAT>(has_zeros ? shared_load_u8(zero + i) : C::ZERO_POINT); };
        return {group_scale(shared_load_u16(scale), is_f16), group_scale(shared_load_u16(scale + 16), is_f16), zero_of(0), zero_of(8)};
    }
}

// One warpgroup: acc [64 rows of w, NT rows of x] += slice `s` of tile `tile` of a ring times that of x.
template <int FORMAT, int NT, class Ring>
__device__ __forceinline__ void multiply_codes(float* acc, const Ring& ring, i32 s, const Meta& meta, i32 tile) {
    using C = Codes<FORMAT>;
    constexpr u32 TILE_BYTES = TILE * 128;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 % 4 * 16 + g;
    u32 words[2][8];
    const auto load_half = [&](int h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4 v = shared_load16(ring.w(s) + tile * TILE_BYTES + (row + 8 * r) * 128 + ((2 * t + h) ^ g) * 16);
            words[r][4 * h] = v.x, words[r][4 * h + 1] = v.y, words[r][4 * h + 2] = v.z, words[r][4 * h + 3] = v.w;
        }
    };
    load_half(0);
    if constexpr (C::GROUPS == 1) load_half(1);
    float sums[C::HAS_ROW_SCALES ? 1 : NT / 2];
#pragma unroll
    for (int group = 0; group < C::GROUPS; ++group) {
        if (C::GROUPS > 1 && group == C::GROUPS / 2) load_half(1);
        RowScales<FORMAT> of{};
        if constexpr (C::HAS_GROUP_SCALES) of = row_scales<FORMAT>(ring.scales(s) + tile * C::META_BYTES, meta.bytes, group, row, meta.is_f16 != 0);
        u32 a[C::GROUP_STEPS][4];
#pragma unroll
        for (int i = 0; i < C::GROUP_STEPS; ++i) expand<FORMAT>(a[i], words, group * C::GROUP_STEPS + i, of);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::GROUP_STEPS; ++i) {
            const int step = group * C::GROUP_STEPS + i;
            const u64 columns = tile_descriptor(ring.x(s, step / 4)) + 2 * (step % 4);
            if constexpr (C::HAS_ROW_SCALES) {
                wgmma_registers<NT>(acc, a[i], columns, 1);
            } else {
                wgmma_registers<NT>(sums, a[i], columns, i > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if constexpr (!C::HAS_ROW_SCALES) {
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) acc[i] += (i % 4 < 2 ? of.first : of.second) * sums[i];
        }
    }
}

// The same by products of a warp, for NT <= 16: nothing waits for them, so expansion and products run side by side. Each group has two
// sums, of its even and of its odd steps.
template <int FORMAT, int NT, class Ring>
__device__ __forceinline__ void multiply_codes_by_warps(float* acc, const Ring& ring, i32 s, const Meta& meta) {
    using C = Codes<FORMAT>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 % 4 * 16 + g;
    u32 words[2][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = i % 2, h = i / 2;
        const uint4 v = shared_load16(ring.w(s) + (row + 8 * r) * 128 + ((2 * t + h) ^ g) * 16);
        words[r][4 * h] = v.x, words[r][4 * h + 1] = v.y, words[r][4 * h + 2] = v.z, words[r][4 * h + 3] = v.w;
    }
#pragma unroll
    for (int group = 0; group < C::GROUPS; ++group) {
        RowScales<FORMAT> of{};
        if constexpr (C::HAS_GROUP_SCALES) of = row_scales<FORMAT>(ring.scales(s), meta.bytes, group, row, meta.is_f16 != 0);
        float sums[2][NT / 8][4] = {};
        u32 x[NT / 8][4];  // of two steps
#pragma unroll
        for (int i = 0; i < C::GROUP_STEPS; ++i) {
            const int step = group * C::GROUP_STEPS + i;
            u32 a[4];
            expand<FORMAT>(a, words, step, of);
#pragma unroll
            for (int j = 0; j < NT / 8; ++j) {
                if (i % 2 == 0) load_matrices(x[j], ring.x(s, step / 4) + (8 * j + lane % 8) * 128 + ((step % 4 * 2 + lane / 8) ^ lane % 8) * 16);
                mma_16x8x16(sums[i % 2][j], a[0], a[1], a[2], a[3], x[j][i % 2 * 2], x[j][i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) {
            const float sum = sums[0][i / 4][i % 4] + sums[1][i / 4][i % 4];
            if constexpr (C::HAS_ROW_SCALES) acc[i] += sum;
            else acc[i] += (i % 4 < 2 ? of.first : of.second) * sum;
        }
    }
}

// A stage has TILES tiles of w and NT rows of x.
template <int FORMAT, int NT, int TILES = 1>
struct QuantizedRing {
    using C = Codes<FORMAT>;
    static constexpr i32 COLUMNS = C::COLUMNS;
    static constexpr int BOXES = COLUMNS / BK;  // of x, each BK columns
    static constexpr u32 TILE_BYTES = TILE * 128, W_BYTES = TILES * TILE_BYTES, BOX_BYTES = NT * BK * 2, X_BYTES = BOXES * BOX_BYTES, STAGE_BYTES = W_BYTES + X_BYTES;
    static constexpr u32 META_BYTES = TILES * C::META_BYTES;
    static_assert(BOX_BYTES % 1024 == 0, "swizzle atoms are 1024 bytes");
    u32 base, full, empty;  // shared addresses: stages, then scales of each stage, and barriers of 8 bytes each
    i32 stages;

    __device__ u32 w(i32 s) const { return base + s * STAGE_BYTES; }
    __device__ u32 x(i32 s, i32 box) const { return base + s * STAGE_BYTES + W_BYTES + box * BOX_BYTES; }
    __device__ u32 scales(i32 s) const { return base + stages * STAGE_BYTES + s * META_BYTES; }

    // Loads codes and scales of one of `slices` slices of the stage's tiles, whose first row is n0, and lets the stage wait for
    // `more` bytes besides. Scales of tiles behind `last`, the last of the weight, are those of `last`.
    __device__ void load_weights(i32 s, const TensorMap* map, const Meta& meta, i32 n0, i32 slice, i32 slices, u32 more, i32 last = 0x7fffffff) const {
        barrier_arrive_expect(full + 8 * s, W_BYTES + TILES * meta.bytes + more);
        tensor_load(w(s), map, slice * 128, n0, full + 8 * s, EVICT_FIRST);
        if constexpr (C::HAS_GROUP_SCALES) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const u8* from = tile_scales<FORMAT>(meta, min(n0 / TILE + tile, last), slices) + slice * meta.bytes;
                bulk_load(scales(s) + tile * C::META_BYTES, from, meta.bytes, full + 8 * s, EVICT_FIRST);
            }
        }
    }

    // Loads a slice of rows m0 .. m0 + NT of x.
    __device__ void load_rows(i32 s, const TensorMap* map, i32 slice, i32 m0 = 0) const {
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            tensor_load(x(s, box), map, (slice * BOXES + box) * BK, m0, full + 8 * s, EVICT_LAST);
        }
    }

    // One warpgroup: acc [64 rows of w, NT rows of x] += a slice of a tile of w times that of x.
    __device__ __forceinline__ void multiply(float* acc, i32 s, const Meta& meta, i32 tile = 0) const {
        multiply_codes<FORMAT, NT>(acc, *this, s, meta, tile);
    }

    // Multiplies the sums of rows n0 .. n0 + TILE by their rows' scales, if scales belong to rows.
    __device__ __forceinline__ void scale_rows(float* acc, const Meta& meta, i32 n0, i32 slices) const {
        scale_sums<FORMAT, NT / 2>(acc, meta, n0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, slices);
    }
};
