// sm90_grouped_quantized_gemm: y[r, n] = sum_k x[r, k] * w[l, n, k] (+ bias[l, n]) for the rows r of each expert l, for
// weights in 8 or 4 bits and few rows an expert
// archs: 90a
//
// x        [R, K]    bf16, rows sorted by expert, through tensor map `x_map`, box [8, 64]; rows from R on are zero
// w        [L N, slices * 128] bytes of codes through tensor map `w_map`, box [64, 128], and scales, as quantized.cuh and
//          sm90_quantized_gemm.cu describe for one matrix of L N rows
// y        [R, N] bf16, also through an activation, or [R, N / 2] bf16 = act(gate) * up: grouped.cuh
// maths    as sm90_quantized_gemm.cu. _g2: K in order; _g4: every fourth slice in order, then the four sums. No result depends on
//          the values of other rows
// launch   one block for each multiprocessor, 128 GROUPS + 32 threads, dynamic shared memory from the wrapper.
//          Work items are (tile of at most `tile_rows` rows of an expert, 64 rows of its w), divided evenly. Stage s of the
//          ring belongs to group s % GROUPS. _g4, for tiles of at most 16 rows: four warpgroups take the slices of an item in
//          turn, since few items have to be fast. _g2: two have an item each, whose slices alternate in the ring
// needs    K % 8 == 0, N % 64 == 0, L <= 512: checked in grouped_gemm.rs
// bound    memory, the codes of each expert that has rows
// test     tests/cuda_experts.rs
#include "grouped_store.cuh"
#include "sm90_quantized.cuh"

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
    __device__ void release(i32 s) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * s);
    }
};

// The operands and the division of the work.
template <int FORMAT>
struct Work {
    const GroupedRing<FORMAT>& ring;
    const Tiles& tiles;
    const TensorMap *w_map, *x_map;
    const Grouped& p;
    const Meta& meta;
    u32 items;
    i32 slices;

    // One thread: loads slice i of a tile as soon as the stage is free.
    __device__ __forceinline__ void load(i32 stage, u32 parity, const Tile& tile, i32 i) const {
        using R = GroupedRing<FORMAT>;
        const i32 w_row = tile.expert * p.n + tile.column * TILE;
        const u32 boxes = (tile.rows + 7) / 8, full = ring.full + 8 * stage;
        barrier_wait(ring.empty + 8 * stage, parity);
        barrier_arrive_expect(full, W_BYTES + meta.bytes + R::BOXES * boxes * X_BOX_BYTES);
        tensor_load(ring.w(stage), w_map, i * 128, w_row, full, EVICT_FIRST);
        if constexpr (R::C::HAS_GROUP_SCALES) {
            bulk_load(ring.scales(stage), tile_scales<FORMAT>(meta, w_row / TILE, slices) + i * meta.bytes, meta.bytes, full, EVICT_FIRST);
        }
#pragma unroll 1
        for (u32 box = 0; box < R::BOXES * boxes; ++box) {
            const u32 part = box / boxes, rows = box % boxes;
            tensor_load(ring.x(stage, part) + rows * X_BOX_BYTES, x_map, (i * R::BOXES + part) * BK, tile.first_x + 8 * rows, full, EVICT_LAST);
        }
    }

    // One warpgroup: acc += a slice, when it has arrived.
    template <int NT>
    __device__ __forceinline__ void multiply(float* acc, const Cursor& at) const {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        multiply_codes<FORMAT, NT>(acc, ring, at.stage, meta, 0);
        ring.release(at.stage);
    }

    // One warpgroup: multiplies the sums by the scales of their rows of w, if scales belong to rows, and stores them.
    template <int NT>
    __device__ __forceinline__ void finish(float* acc, const Tile& tile) const {
        const u32 n0 = tile.column * TILE;
        scale_sums<FORMAT, NT / 2>(acc, meta, tile.expert * p.n + n0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, slices);
        store<NT>(p, tile, n0, acc);
    }
};

// GROUPS warpgroups have an item each.
struct ItemEach {
    static constexpr int GROUPS = 2;

    template <int FORMAT>
    __device__ static void produce(const Work<FORMAT>& work) {
        Cursor at{0, 1};
        for (u32 first = blockIdx.x; first < work.items; first += GROUPS * gridDim.x) {
            Tile of[GROUPS];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                of[group] = work.tiles.tile(min(first + group * gridDim.x, work.items - 1));
            }
            for (i32 i = 0; i < work.slices; ++i) {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    if (first + group * gridDim.x < work.items) work.load(at.stage, at.parity, of[group], i);
                    at.advance(1, work.ring.stages);
                }
            }
        }
    }

    template <int FORMAT, int NT>
    __device__ static void item(const Work<FORMAT>& work, Cursor& at, const Tile& tile) {
        float acc[NT / 2] = {};
        for (i32 i = 0; i < work.slices; ++i) {
            work.template multiply<NT>(acc, at);
            at.advance(GROUPS, work.ring.stages);
        }
        work.template finish<NT>(acc, tile);
    }

    template <int FORMAT>
    __device__ static void consume(const Work<FORMAT>& work, int group) {
        Cursor at{group, 0};
        for (u32 index = blockIdx.x + group * gridDim.x; index < work.items; index += GROUPS * gridDim.x) {
            const Tile tile = work.tiles.tile(index);
            if (tile.rows <= 8) item<FORMAT, 8>(work, at, tile);
            else if (tile.rows <= 16) item<FORMAT, 16>(work, at, tile);
            else if (tile.rows <= 32) item<FORMAT, 32>(work, at, tile);
            else item<FORMAT, 64>(work, at, tile);
        }
    }
};

// GROUPS warpgroups share each item. An item has a multiple of GROUPS slices; those behind the last are not loaded.
struct SharedItem {
    static constexpr int GROUPS = 4, MAX_NT = 16;

    template <int FORMAT>
    __device__ static i32 turns(const Work<FORMAT>& work) { return (work.slices + GROUPS - 1) / GROUPS * GROUPS; }

    template <int FORMAT>
    __device__ static void produce(const Work<FORMAT>& work) {
        Cursor at{0, 1};
        for (u32 index = blockIdx.x; index < work.items; index += gridDim.x) {
            const Tile tile = work.tiles.tile(index);
            for (i32 i = 0; i < turns(work); ++i) {
                if (i < work.slices) {
                    work.load(at.stage, at.parity, tile, i);
                } else {
                    barrier_wait(work.ring.empty + 8 * at.stage, at.parity);
                    barrier_arrive(work.ring.full + 8 * at.stage);
                }
                at.advance(1, work.ring.stages);
            }
        }
    }

    // `sums` [GROUPS - 1][MAX_NT / 2][128]: those of all groups but the first.
    template <int FORMAT, int NT>
    __device__ static void item(const Work<FORMAT>& work, Cursor& at, const Tile& tile, int group, float* sums, bool is_first) {
        float acc[NT / 2] = {};
        for (i32 i = group; i < turns(work); i += GROUPS) {
            if (i < work.slices) {
                work.template multiply<NT>(acc, at);
            } else {
                barrier_wait(work.ring.full + 8 * at.stage, at.parity);
                work.ring.release(at.stage);
            }
            at.advance(GROUPS, work.ring.stages);
        }
        float* own = sums + threadIdx.x % 128;
        if (group > 0) {
            if (!is_first) asm volatile("bar.sync 2, %0;" ::"n"(GROUPS * 128) : "memory");  // the sums before were read
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) own[((group - 1) * (MAX_NT / 2) + i) * 128] = acc[i];
            asm volatile("bar.arrive 1, %0;" ::"n"(GROUPS * 128) : "memory");
            return;
        }
        asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
#pragma unroll
        for (int other = 0; other < GROUPS - 1; ++other) {
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) acc[i] += own[(other * (MAX_NT / 2) + i) * 128];
        }
        asm volatile("bar.arrive 2, %0;" ::"n"(GROUPS * 128) : "memory");
        work.template finish<NT>(acc, tile);
    }

    template <int FORMAT>
    __device__ static void consume(const Work<FORMAT>& work, int group) {
        __shared__ float sums[(GROUPS - 1) * (MAX_NT / 2) * 128];
        Cursor at{group, 0};
        bool is_first = true;
        for (u32 index = blockIdx.x; index < work.items; index += gridDim.x) {
            const Tile tile = work.tiles.tile(index);
            if (tile.rows <= 8) item<FORMAT, 8>(work, at, tile, group, sums, is_first);
            else item<FORMAT, 16>(work, at, tile, group, sums, is_first);
            is_first = false;
        }
    }
};

template <int FORMAT, class Division>
__device__ __forceinline__ void grouped_quantized_gemm(const TensorMap* w_map, const TensorMap* x_map, const Grouped& p, const Meta& meta,
                                                       u32 tile_rows, i32 stages) {
    constexpr int PRODUCER = Division::GROUPS;
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    __shared__ u32 ends[MAX_GROUPS];
    const u32 aligned = (shared_address(dynamic) + 1023) & ~1023u, bars = shared_address(barriers);
    const GroupedRing<FORMAT> ring{aligned, bars, bars + 8 * stages, tile_rows, stages};
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, 4);
        barrier_init_fence();
    }
    pdl_wait();
    pdl_launch();  // not earlier: see sum_experts.cu
    Tiles tiles{ends, p, tile_rows, p.n / TILE};
    tiles.count();
    const i32 slices = (p.k + Codes<FORMAT>::COLUMNS - 1) / Codes<FORMAT>::COLUMNS, group = threadIdx.x / 128;
    const Work<FORMAT> work{ring, tiles, w_map, x_map, p, meta, tiles.total(), slices};
    if (group < PRODUCER) Division::consume(work, group);
    else if (threadIdx.x == PRODUCER * 128) Division::produce(work);
}

#define GROUPED_QUANTIZED_GEMM(NAME, FORMAT, DIVISION) \
    extern "C" __global__ void __launch_bounds__(DIVISION::GROUPS * 128 + 32, 1) sm90_grouped_quantized_gemm_##NAME( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Grouped p, const Meta meta, u32 tile_rows, \
        i32 stages) { \
        grouped_quantized_gemm<FORMAT, DIVISION>(&w_map, &x_map, p, meta, tile_rows, stages); \
    }
#define GROUPED_QUANTIZED_GEMMS(NAME, FORMAT) \
    GROUPED_QUANTIZED_GEMM(NAME##_g4, FORMAT, SharedItem) \
    GROUPED_QUANTIZED_GEMM(NAME##_g2, FORMAT, ItemEach)

GROUPED_QUANTIZED_GEMMS(fp8_rows, FP8_ROWS)
GROUPED_QUANTIZED_GEMMS(fp8_blocks, FP8_BLOCKS)
GROUPED_QUANTIZED_GEMMS(int4_g128, INT4_128)
GROUPED_QUANTIZED_GEMMS(int4_g32, INT4_32)
GROUPED_QUANTIZED_GEMMS(mxfp4, MXFP4)
GROUPED_QUANTIZED_GEMMS(nvfp4, NVFP4)
GROUPED_QUANTIZED_GEMMS(int8_rows, INT8_ROWS)
GROUPED_QUANTIZED_GEMMS(int8_g128, INT8_128)
GROUPED_QUANTIZED_GEMMS(int8_g32, INT8_32)
