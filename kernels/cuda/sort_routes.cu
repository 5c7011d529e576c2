// sort_routes: rows for the experts of a worker: tokens sorted by expert, then by token
//
// experts   [R]  u32: the expert of each route; route r belongs to token r / K
// offsets   [L + 1] u32: the first row of each of the worker's experts first .. first + L, and the number of rows
// tokens    [R]  u32: the token of each row
// places    [R]  u32: the row of each route; not written for routes to experts of other workers
// rows      [R, E] bf16: row r is x[tokens[r], :]; not written if null
// x         [T, E] bf16
// launch    grid L, block 1024: one block for each expert; it reads all routes. No result depends on the order of blocks
// needs     E % 8 == 0, x and rows 16-byte aligned: checked in sort_routes.rs
// bound     latency; memory for many tokens
// test      tests/cuda_experts.rs, exact
// archs: 80 90a 100a ptx
#include "common.cuh"

constexpr int WARPS = 32, AHEAD = 4;

struct Sorted {
    u32* offsets;
    u32* tokens;
    u32* places;
    bf16* rows;
    const bf16* x;
    u32 routes, top_k, first, cols;
};

// Finds the routes of expert first + blockIdx.x among `experts`.
__device__ __forceinline__ void sort(const Sorted& p, const u32* experts) {
    __shared__ u32 lower_of[WARPS], own_of[WARPS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = p.first, expert = first + blockIdx.x, routes = p.routes;
    // Each warp has a range of routes.
    const u32 share = (routes + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = min(warp * share, routes), end = min(begin + share, routes);

    u32 lower = 0, own = 0;
    for (u32 r = begin; r < end; r += 32 * AHEAD) {
        u32 e[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) e[i] = r + 32 * i + lane < end ? experts[r + 32 * i + lane] : 0xffffffffu;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            lower += __popc(__ballot_sync(FULL_WARP, e[i] >= first && e[i] < expert));
            own += __popc(__ballot_sync(FULL_WARP, e[i] == expert));
        }
    }
    if (lane == 0) lower_of[warp] = lower, own_of[warp] = own;
    __syncthreads();
    u32 start = 0, count = 0, row = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
        if (w == warp) row = count;
        start += lower_of[w];
        count += own_of[w];
    }
    row += start;
    if (threadIdx.x == 0) {
        p.offsets[blockIdx.x] = start;
        if (blockIdx.x == gridDim.x - 1) p.offsets[gridDim.x] = start + count;
    }

    for (u32 r = begin; r < end; r += 32 * AHEAD) {
        u32 e[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) e[i] = r + 32 * i + lane < end ? experts[r + 32 * i + lane] : 0xffffffffu;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const u32 found = __ballot_sync(FULL_WARP, e[i] == expert);
            if (e[i] == expert) {
                const u32 route = r + 32 * i + lane, to = row + __popc(found & ((1u << lane) - 1));
                p.tokens[to] = route / p.top_k;
                p.places[route] = to;
            }
            row += __popc(found);
        }
    }
    if (!p.rows) return;

    __syncthreads();
    const u32 chunks = p.cols / 8;
    for (u32 i = threadIdx.x; i < count * chunks; i += blockDim.x) {
        const u64 to = start + i / chunks;
        const u32 column = i % chunks * 8;
        store8(p.rows + to * p.cols + column, load8(p.x + (u64)p.tokens[to] * p.cols + column));
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) sort_routes(const Sorted p, const u32* experts) {
    pdl_launch();
    pdl_wait();
    sort(p, experts);
}
