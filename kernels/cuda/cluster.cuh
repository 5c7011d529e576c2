// Thread blocks of a cluster, which can read each other's shared memory: Hopper and later. On other GPUs a cluster is
// one block.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of `address` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 cluster_map(u32 address, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

__device__ __forceinline__ float4 cluster_load(u32 address) {
    float4 r;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float cluster_load_f32(u32 address) {
    float r;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
    return r;
}

// Number of blocks in this block's cluster.
__device__ __forceinline__ u32 cluster_blocks() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(r));
    return r;
}

#else

__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ u32 cluster_map(u32 address, u32) { return address; }
__device__ __forceinline__ float cluster_load_f32(u32) { return 0.0f; }
__device__ __forceinline__ u32 cluster_blocks() { return 1; }

#endif
