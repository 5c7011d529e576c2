// sm90_grouped_quantized_gemm: y[r, n] = sum_k x[r, k] * w[l, n, k] (+ bias[l, n]) for the rows r of each expert l, for
// weights in 8 or 4 bits and few rows an expert
// archs: 90a
//
// x        [R, K]    bf16, rows sorted by expert, through tensor map `x_map`, box [8, 64]; rows from R on are zero
// w        [L N, slices * 128] bytes of codes through tensor map `w_map`, box [64, 128], and scales, as quantized.cuh and
//          sm90_quantized_gemm.cu describe for one matrix of L N rows. MXFP4: [groups][64] exponents for each tile and slice
// y        [R, N] bf16, or [R, N / 2] bf16 = act(gate) * up: grouped.cuh
// maths    as sm90_quantized_gemm.cu, K in order: no result depends on other rows
// launch   one block for each multiprocessor, 128 GROUPS + 32 threads, dynamic shared memory from the wrapper.
//          Work items are (tile of at most `tile_rows` rows of an expert, 64 rows of its w), divided evenly. GROUPS
//          warpgroups have an item each, whose slices alternate in the ring: stage s belongs to group s % GROUPS
// needs    K % 8 == 0, N % 64 == 0, L <= 512: checked in grouped_gemm.rs
// bound    memory, the codes of each expert that has rows
// test     tests/cuda_experts.rs
#include "grouped_store.cuh"
#include "sm90_quantized.cuh"

constexpr int GROUPS = 2;
constexpr u32 W_BYTES = TILE * 128, X_BOX_BYTES = 8 * BK * 2;

template <int FORMAT>
struct GroupedRing {
    using C = Codes<FORMAT>;
    static constexpr int BOXES = C::COLUMNS / BK;  // of x, each BK columns
    u32 base, full, empty;  // shared addresses: stages, then scales of each stage, and barriers of 8 bytes each
    u32 x_width;            // rows of x in a stage
    i32 stages;

    __device__ u32 w(i32 s) const { return base + s * (W_BYTES + BOXES * x_width * BK * 2); }
    __device__ u32 x(i32 s, int box) const { return w(s) + W_BYTES + box * x_width * BK * 2; }
    __device__ u32 scales(i32 s) const { return w(stages) + s * C::META_BYTES; }
};

template <int FORMAT>
__device__ __forceinline__ void produce(const GroupedRing<FORMAT>& ring, const Tiles& tiles, const TensorMap* w_map, const TensorMap* x_map,
                                        const Grouped& p, const Meta& meta, u32 items, i32 slices) {
    using R = GroupedRing<FORMAT>;
    Cursor at{0, 1};
    for (u32 first = blockIdx.x; first < items; first += GROUPS * gridDim.x) {
        Tile of[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            of[group] = tiles.tile(min(first + group * gridDim.x, items - 1));
        }
        for (i32 i = 0; i < slices; ++i) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (first + group * gridDim.x < items) {
                    const Tile& tile = of[group];
                    const i32 w_row = tile.expert * p.n + tile.column * TILE;
                    const u32 boxes = (tile.rows + 7) / 8, full = ring.full + 8 * at.stage;
                    barrier_wait(ring.empty + 8 * at.stage, at.parity);
                    barrier_arrive_expect(full, W_BYTES + meta.bytes + R::BOXES * boxes * X_BOX_BYTES);
                    tensor_load(ring.w(at.stage), w_map, i * 128, w_row, full, EVICT_FIRST);
                    if constexpr (FORMAT != FP8_ROWS) {
                        bulk_load(ring.scales(at.stage), meta.values + ((i64)(w_row / TILE) * slices + i) * meta.bytes, meta.bytes, full, EVICT_FIRST);
                    }
#pragma unroll 1
                    for (u32 box = 0; box < R::BOXES * boxes; ++box) {
                        const u32 part = box / boxes, rows = box % boxes;
                        tensor_load(ring.x(at.stage, part) + rows * X_BOX_BYTES, x_map, (i * R::BOXES + part) * BK, tile.first + 8 * rows, full, EVICT_LAST);
                    }
                }
                at.advance(1, ring.stages);
            }
        }
    }
}

// Multiplies the sums by the scales of their rows of w, if scales belong to rows.
template <int FORMAT, int NT>
__device__ __forceinline__ void scale_sums(float* acc, const Meta& meta, i32 w_row) {
    if constexpr (FORMAT != FP8_ROWS) return;
    const float* of = reinterpret_cast<const float*>(meta.values) + w_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const float first = of[0], second = of[8];
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) acc[i] *= i % 4 < 2 ? first : second;
}

template <int FORMAT, int NT>
__device__ __forceinline__ void multiply_item(const GroupedRing<FORMAT>& ring, Cursor& at, i32 slices, const Grouped& p, const Meta& meta,
                                              const Tile& tile) {
    float acc[NT / 2] = {};
    for (i32 i = 0; i < slices; ++i) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        multiply_codes<FORMAT, NT>(acc, ring, at.stage, meta, 0);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
        at.advance(GROUPS, ring.stages);
    }
    const u32 n0 = tile.column * TILE;
    scale_sums<FORMAT, NT>(acc, meta, tile.expert * p.n + n0);
    store<NT>(p, tile, n0, acc);
}

template <int FORMAT>
__device__ __forceinline__ void grouped_quantized_gemm(const TensorMap* w_map, const TensorMap* x_map, const Grouped& p, const Meta& meta,
                                                       u32 tile_rows, i32 stages) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    __shared__ u32 ends[MAX_GROUPS];
    pdl_launch();
    const u32 aligned = (shared_address(dynamic) + 1023) & ~1023u, bars = shared_address(barriers);
    const GroupedRing<FORMAT> ring{aligned, bars, bars + 8 * stages, tile_rows, stages};
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, 4);
        barrier_init_fence();
    }
    pdl_wait();
    Tiles tiles{ends, p.offsets, p.groups, tile_rows, p.n / TILE};
    tiles.count();
    const u32 items = tiles.total();
    const i32 slices = (p.k + Codes<FORMAT>::COLUMNS - 1) / Codes<FORMAT>::COLUMNS, group = threadIdx.x / 128;
    if (group == GROUPS) {
        if (threadIdx.x == GROUPS * 128) produce(ring, tiles, w_map, x_map, p, meta, items, slices);
        return;
    }
    Cursor at{group, 0};
    for (u32 item = blockIdx.x + group * gridDim.x; item < items; item += GROUPS * gridDim.x) {
        const Tile tile = tiles.tile(item);
        if (tile.rows <= 8) multiply_item<FORMAT, 8>(ring, at, slices, p, meta, tile);
        else if (tile.rows <= 16) multiply_item<FORMAT, 16>(ring, at, slices, p, meta, tile);
        else if (tile.rows <= 32) multiply_item<FORMAT, 32>(ring, at, slices, p, meta, tile);
        else multiply_item<FORMAT, 64>(ring, at, slices, p, meta, tile);
    }
}

#define GROUPED_QUANTIZED_GEMM(NAME, FORMAT) \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, 1) sm90_grouped_quantized_gemm_##NAME( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Grouped p, const Meta meta, u32 tile_rows, \
        i32 stages) { \
        grouped_quantized_gemm<FORMAT>(&w_map, &x_map, p, meta, tile_rows, stages); \
    }

GROUPED_QUANTIZED_GEMM(fp8_rows, FP8_ROWS)
GROUPED_QUANTIZED_GEMM(fp8_blocks, FP8_BLOCKS)
GROUPED_QUANTIZED_GEMM(int4_g128, INT4_128)
GROUPED_QUANTIZED_GEMM(int4_g32, INT4_32)
GROUPED_QUANTIZED_GEMM(mxfp4, MXFP4)
