// Shared parts of the kernels. No external headers: bf16 is a 16-bit integer here, and conversions are written out.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

constexpr u32 FULL_WARP = 0xffffffffu;
#define INFINITY_F __int_as_float(0x7f800000)

// The bits of a bf16 number.
struct bf16 {
    u16 bits;
};

// Eight bf16 in one 16-byte load or store.
struct alignas(16) bf16x8 {
    bf16 v[8];
};

__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}

// Packs (lo, hi) as two bf16 in one register; lo is the element at the lower address.
__device__ __forceinline__ u32 pack_bf16x2(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

__device__ __forceinline__ float unpack_lo(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float unpack_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }

__device__ __forceinline__ bf16x8 load8(const bf16* p) { return *reinterpret_cast<const bf16x8*>(p); }
__device__ __forceinline__ void store8(bf16* p, const bf16x8& x) { *reinterpret_cast<bf16x8*>(p) = x; }

// Read-only data that is read once; it does not stay in L1.
__device__ __forceinline__ uint4 load_stream(const void* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}

// Prefetches the cache line at p to L2.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(FULL_WARP, x, d);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, d));
    return x;
}

// Sum over the block, returned to every thread; `scratch` has 32 floats. The number of threads is a multiple of 32. The
// order is fixed, so equal inputs give equal bits.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : -INFINITY_F);
}

// Waits for the previous kernel of the stream and its memory. See the conventions in mod.rs.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start. It still waits for this kernel's memory in its pdl_wait.
__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
