// sm90_grouped_fp8_gemm_{rows,blocks}: y[r, n] = sum_k x[r, k] * w[l, n, k] (+ bias[l, n]) for the rows r of each expert l, for x and w
// in e4m3
// archs: 90a
//
// x        codes [R, 128 S], rows sorted by expert, through tensor maps with boxes of 8 and of 64 rows, S slices of K; scales
//          [S, pitch] f32: as quantize_rows.cu writes them. Or `tokens` [R] u32, the token of each row, and the tokens' codes
//          [T, 128 S] and scales
// w        codes [L N, 128 S] through tensor map `w_map`, box [128, 128], and scales, as quantized.cuh describes for one matrix of L N rows
// y        [R, N] bf16, also through an activation, or [R, N / 2] bf16 = act(gate) * up: grouped.cuh
// maths    as sm90_fp8_gemm.cu: the products of a slice are summed in the tensor cores, times the scales of the row and of the block
//          (FP8_BLOCKS), and added in fp32, slices in order; at the end times the scale of w's row (FP8_ROWS). No result depends on
//          the values or the number of other rows
// launch   one block for each multiprocessor, 384 threads, dynamic shared memory from the wrapper. Work items are (tile of at most
//          `tile_rows` rows of an expert, 128 rows of its w). One warpgroup keeps a ring of slices filled; two multiply 64 rows of w
//          each, the 64-row operand, by as many rows of x as the tile has
// needs    N % 64 == 0, L <= 512: checked in grouped_fp8_gemm.rs
// bound    few rows: memory, the codes of each expert that has rows; many: the tensor cores
// test     tests/cuda_quantized_experts.rs
#include "grouped_rows.cuh"
#include "grouped_store.cuh"
#include "sm90_quantized.cuh"
#include "sm90_wgmma_e4m3.cuh"

constexpr u32 SLICE = 128, GROUPS = 2, CONSUMERS = GROUPS * 128, BOX = 64, MAX_TILE_ROWS = 128;
constexpr u32 W_BYTES = GROUPS * TILE * SLICE, W_SCALES = GROUPS * 16;

struct Fp8GroupedRing {
    u32 base, full, empty;  // shared addresses: stages, then scales of each stage, and barriers of 8 bytes each
    u32 x_rows;             // of a stage, a multiple of 8
    i32 stages;

    __device__ u32 w(i32 s, u32 group) const { return base + s * (W_BYTES + x_rows * SLICE) + group * TILE * SLICE; }
    __device__ u32 x(i32 s) const { return w(s, GROUPS); }
    __device__ u32 w_scales(i32 s) const { return w(stages, 0) + s * (W_SCALES + x_rows * 4 + 16); }
    // From the last multiple of 4 up to the tile's first row on; if rows are gathered, from the tile's first row on.
    __device__ u32 x_scales(i32 s) const { return w_scales(s) + W_SCALES; }
};

struct Operands {
    const float* x_scales;  // [S, x_pitch]
    const u8* w_scales;
    i32 x_pitch;
    i32 slices;
    const u8* x;        // the tokens' codes
    const u32* tokens;  // null if rows are sorted

    __device__ bool are_gathered() const { return tokens != nullptr; }
};

// One thread: loads slice i of a tile's w, and what `x_bytes` more will be loaded.
template <int FORMAT>
__device__ __forceinline__ void load_w(const Fp8GroupedRing& ring, const TensorMap* w_map, const Grouped& p, const Operands& operands,
                                       const Tile& tile, const Cursor& at, i32 i, u32 x_bytes) {
    const u32 first_row = tile.expert * p.n + tile.column * GROUPS * TILE, full = ring.full + 8 * at.stage;
    barrier_arrive_expect(full, W_BYTES + (FORMAT == FP8_BLOCKS ? W_SCALES : 0) + x_bytes);
    tensor_load(ring.w(at.stage, 0), w_map, i * SLICE, first_row, full, EVICT_FIRST);
    if constexpr (FORMAT == FP8_BLOCKS) {
        const u32 last = p.groups * p.n / TILE - 1;
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) {
            const u8* from = operands.w_scales + ((i64)min(first_row / TILE + group, last) * operands.slices + i) * 16;
            bulk_load(ring.w_scales(at.stage) + 16 * group, from, 16, full, EVICT_FIRST);
        }
    }
}

// One thread: loads slices of tiles, whose rows of x are sorted.
template <int FORMAT>
__device__ __forceinline__ void load_sorted(const Fp8GroupedRing& ring, const Tiles& tiles, const TensorMap* w_map, const TensorMap* x_map,
                                            const TensorMap* x_box_map, const Grouped& p, const Operands& operands, u32 items) {
    Cursor at{0, 1};
    for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
        const Tile tile = tiles.tile(index);
        const u32 rows = (tile.rows + 7) / 8 * 8, first_scale = tile.first_x / 4 * 4;
        const u32 scale_bytes = (tile.first_x + tile.rows - first_scale + 3) / 4 * 16;
        for (i32 i = 0; i < operands.slices; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            load_w<FORMAT>(ring, w_map, p, operands, tile, at, i, rows * SLICE + scale_bytes);
            const u32 full = ring.full + 8 * at.stage;
            const float* scales = operands.x_scales + (i64)i * operands.x_pitch + first_scale;
            bulk_load(ring.x_scales(at.stage), reinterpret_cast<const u8*>(scales), scale_bytes, full, EVICT_LAST);
            u32 row = 0;
            for (; row + BOX <= rows; row += BOX) {
                tensor_load(ring.x(at.stage) + row * SLICE, x_box_map, i * SLICE, tile.first_x + row, full, EVICT_LAST);
            }
            for (; row < rows; row += 8) tensor_load(ring.x(at.stage) + row * SLICE, x_map, i * SLICE, tile.first_x + row, full, EVICT_LAST);
            at.advance(1, ring.stages);
        }
    }
}

// One warpgroup: the same for rows of tokens. A thread copies the scale of one row.
template <int FORMAT>
__device__ __forceinline__ void load_gathered(const Fp8GroupedRing& ring, const Tiles& tiles, const TensorMap* w_map, const Grouped& p,
                                              const Operands& operands, u32 items) {
    const u32 row = threadIdx.x - CONSUMERS;
    Cursor at{0, 1};
    for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
        const Tile tile = tiles.tile(index);
        const GatheredRows<MAX_TILE_ROWS> rows(operands.tokens, tile);
        const float* scale = operands.x_scales + (row < tile.rows ? operands.tokens[tile.first + row] : 0);
        for (i32 i = 0; i < operands.slices; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            if (row == 0) load_w<FORMAT>(ring, w_map, p, operands, tile, at, i, 0);
            rows.copy(ring.x(at.stage), operands.x, operands.slices * SLICE, i, tile.rows);
            if (row < tile.rows) copy_async_4(ring.x_scales(at.stage) + 4 * row, scale + (i64)i * operands.x_pitch);
            arrive_when_copied(ring.full + 8 * at.stage);
            at.advance(1, ring.stages);
        }
    }
}

// One warpgroup: the sums of 64 rows of w for all slices of a tile, stored.
template <int FORMAT, int NT>
__device__ __forceinline__ void multiply_item(const Fp8GroupedRing& ring, const Grouped& p, const Operands& operands, const Tile& tile,
                                              Cursor& at, u32 group) {
    const u32 offset = 4 * ((operands.are_gathered() ? 0 : tile.first_x % 4) + threadIdx.x % 4 * 2);
    float acc[NT / 2] = {};
    for (i32 i = 0; i < operands.slices; ++i) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        if (operands.are_gathered()) products_fence();
        const u64 w = tile_descriptor(ring.w(at.stage, group)), x = tile_descriptor(ring.x(at.stage));
        float sums[NT / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < (int)SLICE / 32; ++k) wgmma_e4m3<NT>(sums, w + 2 * k, x + 2 * k, k > 0);
        wgmma_commit();
        float first = 1.0f, second = 1.0f;  // of w's rows in blocks of eight that are even and odd
        if constexpr (FORMAT == FP8_BLOCKS) {
            first = shared_load_f32(ring.w_scales(at.stage) + 16 * group), second = shared_load_f32(ring.w_scales(at.stage) + 16 * group + 4);
        }
        float2 scales[NT / 8];
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
            // Rows behind the tile's have no scales, and their sums are not stored.
            const u32 from = ring.x_scales(at.stage) + offset + 32 * j;
            scales[j] = make_float2(shared_load_f32(from), shared_load_f32(from + 4));
        }
        wgmma_wait<0>();
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
            acc[4 * j] += scales[j].x * first * sums[4 * j], acc[4 * j + 1] += scales[j].y * first * sums[4 * j + 1];
            acc[4 * j + 2] += scales[j].x * second * sums[4 * j + 2], acc[4 * j + 3] += scales[j].y * second * sums[4 * j + 3];
        }
        at.advance(1, ring.stages);
    }
    const u32 n0 = (tile.column * GROUPS + group) * TILE;
    if (n0 >= p.n) return;
    if constexpr (FORMAT == FP8_ROWS) {
        const float* of = reinterpret_cast<const float*>(operands.w_scales) + tile.expert * p.n + n0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        const float first = of[0], second = of[8];
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) acc[i] *= i % 4 < 2 ? first : second;
    }
    store<NT>(p, tile, n0, acc);
}

template <int FORMAT>
__device__ __forceinline__ void grouped_fp8_gemm(const TensorMap* w_map, const TensorMap* x_map, const TensorMap* x_box_map, const Grouped& p,
                                                 const Operands& operands, u32 tile_rows, i32 stages) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[32];
    __shared__ u32 ends[MAX_GROUPS];
    const u32 aligned = (shared_address(dynamic) + 1023) & ~1023u, bars = shared_address(barriers);
    const Fp8GroupedRing ring{aligned, bars, bars + 8 * stages, tile_rows, stages};
    if (threadIdx.x == 0) {
        const u32 copying = operands.are_gathered() ? 128 : 0;
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1 + copying), barrier_init(ring.empty + 8 * s, CONSUMERS / 32);
        barrier_init_fence();
    }
    pdl_wait();
    pdl_launch();  // not earlier: see sum_experts.cu
    Tiles tiles{ends, p, tile_rows, (p.n + GROUPS * TILE - 1) / (GROUPS * TILE)};
    tiles.count();
    const u32 items = tiles.total(), group = threadIdx.x / 128;
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (operands.are_gathered()) load_gathered<FORMAT>(ring, tiles, w_map, p, operands, items);
        else if (threadIdx.x == CONSUMERS) load_sorted<FORMAT>(ring, tiles, w_map, x_map, x_box_map, p, operands, items);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    Cursor at{0, 0};
    for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
        const Tile tile = tiles.tile(index);
        if (tile.rows <= 8) multiply_item<FORMAT, 8>(ring, p, operands, tile, at, group);
        else if (tile.rows <= 16) multiply_item<FORMAT, 16>(ring, p, operands, tile, at, group);
        else if (tile.rows <= 32) multiply_item<FORMAT, 32>(ring, p, operands, tile, at, group);
        else if (tile.rows <= 64) multiply_item<FORMAT, 64>(ring, p, operands, tile, at, group);
        else multiply_item<FORMAT, 128>(ring, p, operands, tile, at, group);
    }
}

#define GROUPED_FP8_GEMM(NAME, FORMAT) \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) sm90_grouped_fp8_gemm_##NAME( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_box_map, \
        const Grouped p, const Operands operands, u32 tile_rows, i32 stages) { \
        grouped_fp8_gemm<FORMAT>(&w_map, &x_map, &x_box_map, p, operands, tile_rows, stages); \
    }

GROUPED_FP8_GEMM(rows, FP8_ROWS)
GROUPED_FP8_GEMM(blocks, FP8_BLOCKS)
