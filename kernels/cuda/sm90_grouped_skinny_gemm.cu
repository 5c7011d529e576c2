// sm90_grouped_skinny_gemm_bf16: y[r, n] = sum_k x[r, k] * w[l, n, k] (+ bias[l, n]) for the rows r of each expert l, for
// few rows an expert
// archs: 90a
//
// x        [R, K]    bf16, rows sorted by expert, through tensor map `x_map`, box [8, 64]; rows from R on are zero
// w        [L, N, K] bf16 through tensor map `w_map` of [L N, K], box [64, 64]; read once for each tile of rows
// y        [R, N] bf16, also through an activation, or [R, N / 2] bf16 = act(gate) * up: grouped.cuh
// maths    fp32 in the tensor cores, K in order: no result depends on other rows
// launch   one block for each multiprocessor, 128 GROUPS + 32 threads, dynamic shared memory from the wrapper.
//          Work items are (tile of at most `tile_rows` rows of an expert, 64 rows of its w), divided evenly. One warp keeps
//          a ring filled with slices of w and x, across the ends of items, so that memory never waits. GROUPS warpgroups
//          take the items in turn: one stores its sums while another multiplies. Only one multiplies at a time, because a
//          barrier's parity tells only two uses of a stage apart. Weights are the 64-row operand of wgmma
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up), L <= 512: checked in grouped_gemm.rs
// bound    memory, 2 N K bytes for each expert that has rows
// test     tests/cuda_experts.rs
#include "grouped_store.cuh"
#include "sm90.cuh"

constexpr int GROUPS = 2;
constexpr i32 BOX = 64, BK = 2 * BOX;    // columns of a copy and of a stage
constexpr i32 TILE = 64;                 // rows of w in an item
constexpr u32 W_BOX_BYTES = TILE * BOX * 2, W_BYTES = 2 * W_BOX_BYTES;
constexpr u32 X_BOX_BYTES = 8 * BOX * 2;

struct Stages {
    u32 base, full, empty;  // shared addresses; barriers of 8 bytes each
    u32 x_width;            // rows of x in a stage
    i32 count;

    __device__ u32 w(i32 s, int half) const { return base + s * (W_BYTES + 2 * x_width * BOX * 2) + half * W_BOX_BYTES; }
    __device__ u32 x(i32 s, int half) const { return w(s, 0) + W_BYTES + half * x_width * BOX * 2; }
};

// Turns of the warpgroups: each waits on its own barrier, and the other one arrives when its products are done.
__device__ __forceinline__ void wait_for_turn(i32 group) { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUPS * 128) : "memory"); }
__device__ __forceinline__ void pass_turn(i32 group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + (group + 1) % GROUPS), "n"(GROUPS * 128) : "memory");
}

__device__ __forceinline__ void produce(const Stages& ring, const Tiles& tiles, const TensorMap* w_map, const TensorMap* x_map,
                                        const Grouped& p, u32 items, i32 slices) {
    Cursor at{0, 1};
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = tiles.tile(item);
        const i32 w_row = tile.expert * p.n + tile.column * TILE;
        const u32 boxes = (tile.rows + 7) / 8;
        for (i32 i = 0; i < slices; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            const u32 full = ring.full + 8 * at.stage;
            barrier_arrive_expect(full, W_BYTES + 2 * boxes * X_BOX_BYTES);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i32 column = i * BK + half * BOX;
                tensor_load(ring.w(at.stage, half), w_map, column, w_row, full, EVICT_FIRST);
                for (u32 b = 0; b < boxes; ++b) {
                    tensor_load(ring.x(at.stage, half) + b * X_BOX_BYTES, x_map, column, tile.first_x + 8 * b, full, EVICT_LAST);
                }
            }
            at.advance(1, ring.count);
        }
    }
}

template <int NT>
__device__ __forceinline__ void multiply_item(const Stages& ring, Cursor at, i32 slices, const Grouped& p, const Tile& tile, u32 n0,
                                              i32 group) {
    float acc[NT / 2] = {};
    wait_for_turn(group);
    for (i32 i = 0; i < slices; ++i) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u64 w = tile_descriptor(ring.w(at.stage, half)), x = tile_descriptor(ring.x(at.stage, half));
#pragma unroll
            for (int k = 0; k < BOX / 16; ++k) wgmma<NT>(acc, w + 2 * k, x + 2 * k);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
        at.advance(1, ring.count);
    }
    pass_turn(group);
    store<NT>(p, tile, n0, acc);
}

__device__ __forceinline__ void consume(const Stages& ring, const Tiles& tiles, const Grouped& p, u32 items, i32 slices,
                                        i32 group) {
    Cursor at{0, 0};
    at.jump(group * slices, ring.count);
    if (group == GROUPS - 1) pass_turn(group);
    for (u32 item = blockIdx.x + group * gridDim.x; item < items; item += GROUPS * gridDim.x) {
        const Tile tile = tiles.tile(item);
        const u32 n0 = tile.column * TILE;
        if (tile.rows <= 8) multiply_item<8>(ring, at, slices, p, tile, n0, group);
        else if (tile.rows <= 16) multiply_item<16>(ring, at, slices, p, tile, n0, group);
        else if (tile.rows <= 32) multiply_item<32>(ring, at, slices, p, tile, n0, group);
        else multiply_item<64>(ring, at, slices, p, tile, n0, group);
        at.jump(GROUPS * slices, ring.count);
    }
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, 1)
sm90_grouped_skinny_gemm_bf16(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Grouped p, u32 tile_rows,
                              i32 stages) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    __shared__ u32 ends[MAX_GROUPS];
    const u32 aligned = (shared_address(dynamic) + 1023) & ~1023u, bars = shared_address(barriers);
    const Stages ring{aligned, bars, bars + 8 * stages, tile_rows, stages};
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, 4);
        barrier_init_fence();
    }
    pdl_wait();
    pdl_launch();  // not earlier: see sum_experts.cu
    Tiles tiles{ends, p, tile_rows, (p.n + TILE - 1) / TILE};
    tiles.count();
    const u32 items = tiles.total();
    const i32 slices = (p.k + BK - 1) / BK;
    if (threadIdx.x >= GROUPS * 128) {
        if (threadIdx.x == GROUPS * 128) produce(ring, tiles, &w_map, &x_map, p, items, slices);
    } else {
        consume(ring, tiles, p, items, slices, threadIdx.x / 128);
    }
}
