// What blocks of a kernel need to wait for each other. All of them must be resident at the same time.
#pragma once
#include "common.cuh"

// What this reads, and everything its writer wrote before, is seen by the reads that follow.
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
}

__device__ __forceinline__ void store_release(u32* p, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Adds one, releases what was written before, and acquires what others released; returns the value before.
__device__ __forceinline__ u32 increment_acquire_release(u32* p) {
    u32 r;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(p) : "memory");
    return r;
}

// Waits until all blocks have come here; then what they wrote before can be read. `barrier` is two u32: the number of blocks that
// have come, 0 between launches, and a generation, which thread 0 has read before it wrote anything.
__device__ __forceinline__ void wait_for_all(u32* barrier, u32 generation) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (increment_acquire_release(barrier) == gridDim.x - 1) {
            *barrier = 0;
            store_release(barrier + 1, generation + 1);
        } else {
            while (load_acquire(barrier + 1) == generation) {}
        }
    }
    __syncthreads();
}
