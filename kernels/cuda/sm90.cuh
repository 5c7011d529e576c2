// Features of Hopper: the tensor copy engine, its barriers, clusters, and warpgroup matrix products.
#pragma once
#include "cluster.cuh"

// A `CUtensorMap`, created on the host and passed as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Barriers in shared memory (PTX ISA, mbarrier).

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Signals the barrier, for this thread, after all copies that it started are complete.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A position in a ring: a stage, and the parity of its barrier.
struct Cursor {
    i32 stage;
    u32 parity;

    // By at most `stages`.
    __device__ void advance(i32 by, i32 stages) {
        stage += by;
        if (stage >= stages) stage -= stages, parity ^= 1;
    }

    __device__ void jump(i32 by, i32 stages) {
        stage += by;
        while (stage >= stages) stage -= stages, parity ^= 1;
    }
};

// Tensor copies from global to shared memory.

// Weights are read once per step, so they are evicted from the L2 cache first.
constexpr u64 EVICT_FIRST = 0x12f0000000000000ull;
constexpr u64 EVICT_LAST = 0x14f0000000000000ull;

__device__ __forceinline__ void tensor_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at column x, row y; elements outside the matrix are zero.
__device__ __forceinline__ void tensor_load(u32 dst, const TensorMap* map, i32 x, i32 y, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}

// The same for a box in three dimensions.
__device__ __forceinline__ void tensor_load_3d(u32 dst, const TensorMap* map, i32 x, i32 y, i32 z, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}

// Warpgroup products: 64 rows of A by columns of B, both K-major in shared memory under the 128-byte swizzle.

// What was written to shared memory by this thread, or by another whose signal it waited for, becomes visible to the products.
__device__ __forceinline__ void products_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Descriptor of a tile whose rows are 128 bytes; eight rows form a swizzle atom of 1024 bytes.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// D[64, 8] += A[64, 16] B[8, 16]^T; thread holds rows g, g + 8 and columns 2t, 2t + 1 (g = lane / 4, t = lane % 4).
__device__ __forceinline__ void wgmma_n8(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_n16(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b));
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)

__device__ __forceinline__ void wgmma_n32(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
        : F16(0)
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_n64(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, 1, 1, 1, 0, 0;"
        : F16(0), F16(16)
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_n128(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 0;"
        : F16(0), F16(16), F16(32), F16(48)
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_n256(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, 0, 0;"
        : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80), F16(96), F16(112)
        : "l"(a), "l"(b));
}

// The same with A in registers: `a` has this thread's rows g and g + 8 in columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9
// (a[2], a[3]), two bf16 each. Without `add`, D is overwritten. The registers may not change before wgmma_wait.
__device__ __forceinline__ void wgmma_registers_n8(float* d, const u32* a, u64 b, i32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n"
        "}\n"
        : F4(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_registers_n16(float* d, const u32* a, u64 b, i32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
        "}\n"
        : F4(0), F4(4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_registers_n32(float* d, const u32* a, u64 b, i32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
        "}\n"
        : F16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_registers_n64(float* d, const u32* a, u64 b, i32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}\n"
        : F16(0), F16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_registers_n128(float* d, const u32* a, u64 b, i32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
        "}\n"
        : F16(0), F16(16), F16(32), F16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Products of e4m3: D[64, 128] = A[64, 32] B[128, 32]^T, plus D if `add`.
__device__ __forceinline__ void wgmma_e4m3_n128(float* d, u64 a, u64 b, i32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1;\n"
        "}\n"
        : F16(0), F16(16), F16(32), F16(48)
        : "l"(a), "l"(b), "r"(add));
}

#undef F4
#undef F16

template <int N>
__device__ __forceinline__ void wgmma(float* d, u64 a, u64 b) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 128 || N == 256, "wgmma: a width this file has");
    if constexpr (N == 8) wgmma_n8(d, a, b);
    if constexpr (N == 16) wgmma_n16(d, a, b);
    if constexpr (N == 32) wgmma_n32(d, a, b);
    if constexpr (N == 64) wgmma_n64(d, a, b);
    if constexpr (N == 128) wgmma_n128(d, a, b);
    if constexpr (N == 256) wgmma_n256(d, a, b);
}

template <int N>
__device__ __forceinline__ void wgmma_registers(float* d, const u32* a, u64 b, i32 add) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 128, "wgmma_registers: a width this file has");
    if constexpr (N == 8) wgmma_registers_n8(d, a, b, add);
    if constexpr (N == 16) wgmma_registers_n16(d, a, b, add);
    if constexpr (N == 32) wgmma_registers_n32(d, a, b, add);
    if constexpr (N == 64) wgmma_registers_n64(d, a, b, add);
    if constexpr (N == 128) wgmma_registers_n128(d, a, b, add);
}
