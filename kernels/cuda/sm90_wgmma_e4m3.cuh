// Warpgroup products in e4m3 besides those of sm90.cuh: D[64, N] = A[64, 32] B[N, 32]^T, plus D if `add`.
#pragma once
#include "sm90.cuh"

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(i) F4(i), F4(i + 4)

template <int N>
__device__ __forceinline__ void wgmma_e4m3(float* d, u64 a, u64 b, i32 add) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 112 || N == 128, "wgmma_e4m3: a width this file has");
    if constexpr (N == 128) wgmma_e4m3_n128(d, a, b, add);
    if constexpr (N == 8) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.s32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n"
            "}\n"
            : F4(0)
            : "l"(a), "l"(b), "r"(add));
    }
    if constexpr (N == 16) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.s32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1;\n"
            "}\n"
            : F8(0)
            : "l"(a), "l"(b), "r"(add));
    }
    if constexpr (N == 32) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.s32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1;\n"
            "}\n"
            : F8(0), F8(8)
            : "l"(a), "l"(b), "r"(add));
    }
    if constexpr (N == 64) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.s32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "%32, %33, p, 1, 1;\n"
            "}\n"
            : F8(0), F8(8), F8(16), F8(24)
            : "l"(a), "l"(b), "r"(add));
    }
    if constexpr (N == 112) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.s32 p, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55}, "
            "%56, %57, p, 1, 1;\n"
            "}\n"
            : F8(0), F8(8), F8(16), F8(24), F8(32), F8(40), F8(48)
            : "l"(a), "l"(b), "r"(add));
    }
}

// The same for 80 columns with A in registers, as one ldmatrix of four reads it: this thread's rows g and g + 8 in bytes 4 t to
// 4 t + 3 (a[0], a[1]) and 4 t + 16 to 4 t + 19 (a[2], a[3]). They may not change before wgmma_wait.
template <int N>
__device__ __forceinline__ void wgmma_registers_e4m3(float* d, const u32* a, u64 b, i32 add) {
    static_assert(N == 80, "wgmma_registers_e4m3: a width this file has");
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %45, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39}, "
        "{%40, %41, %42, %43}, %44, p, 1, 1;\n"
        "}\n"
        : F8(0), F8(8), F8(16), F8(24), F8(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef F4
#undef F8

// A warp's rows of a tile of 64 rows and 128 columns, under the 128-byte swizzle, as the fragments of four products.
__device__ __forceinline__ void load_fragments(u32 (&a)[4][4], u32 tile) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        const u32 chunk = (2 * k + lane / 16) ^ row % 8;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                     : "r"(tile + row * 128 + chunk * 16)
                     : "memory");
    }
}
