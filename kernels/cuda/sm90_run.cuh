// A run of slices of K on Hopper: the loop of a warpgroup over a ring that another warp keeps filled.
#pragma once
#include "sm90.cuh"

// One warpgroup: acc [64 rows of x, COLS rows of w] += its rows times the ring's, for `count` slices of 64 columns. `ring` has the
// shared addresses of its stages, x(stage, group) and w(stage), and of their barriers; wait_full waits for the data of a stage. A stage
// is released when the product after it was issued, so that tensor cores never wait. Unless MAY_BE_EMPTY, `count` is at least 1. A
// product has WIDTH columns: with more than 384 threads a block, a thread has too few registers for one of 256.
template <int COLS, bool MAY_BE_EMPTY, int WIDTH = COLS, class Ring>
__device__ __forceinline__ void multiply_run(float* acc, const Ring& ring, Cursor& at, i32 count, int group) {
    i32 before = 0;
    for (i32 i = 0; i < count; ++i) {
        ring.wait_full(at);
        const u64 x = tile_descriptor(ring.x(at.stage, group)), w = tile_descriptor(ring.w(at.stage));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int n = 0; n < COLS; n += WIDTH) wgmma<WIDTH>(acc + n / 2, x + 2 * k, w + n * 8 + 2 * k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * before);
        before = at.stage;
        at.advance(1, ring.stages);
    }
    wgmma_wait<0>();
    if ((!MAY_BE_EMPTY || count > 0) && threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * before);
}
