// Tiles of 64 or of 160 rows of x by 128 rows of w, with w as the 64-row operand of two warpgroups: the products of
// sm90_fp8_gemm.cu, and what happens with their sums. A thread has rows g and g + 8 of each warp's 16 of w, and of each eight rows
// of x the rows 2 t and 2 t + 1.
#pragma once
#include "sm90_quantized.cuh"
#include "sm90_wgmma_e4m3.cuh"
#include "sm90_wide_store.cuh"

__device__ __forceinline__ float2 shared_load_f32x2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// The transpose of a matrix of 8 x 8 bf16, of which each lane has row lane / 4, columns lane % 4 * 2 and the next.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}

// acc += sums of a slice and half of the rows of x, times the scales of these rows and of w's two blocks.
template <int N>
__device__ __forceinline__ void add_scaled(float* acc, const float* sums, const float2* x_scales, float first, float second) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const float2 x = x_scales[j];
        acc[4 * j] += x.x * first * sums[4 * j], acc[4 * j + 1] += x.y * first * sums[4 * j + 1];
        acc[4 * j + 2] += x.x * second * sums[4 * j + 2], acc[4 * j + 3] += x.y * second * sums[4 * j + 3];
    }
}

// Stores rows of bf16.
template <i32 EPILOGUE, int ROWS>
__device__ __forceinline__ void store_fitted_bf16(const Output& out, i32 m0, i32 n, float first, float second, const float* acc) {
    constexpr bool IS_GATED = EPILOGUE >= SILU;
    constexpr int EACH = IS_GATED ? 4 : 2;  // blocks of eight rows of x in four blocks of eight rows and eight outputs
    const i32 t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const i32 pitch = IS_GATED ? out.n / 2 : out.pitch, columns = IS_GATED ? out.n / 2 : out.n;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += EACH) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (IS_GATED) {
                const float* a = acc + 4 * (j + i);
                v[i] = pack_bf16x2(act<EPILOGUE>(a[0] + first) * (a[2] + second), act<EPILOGUE>(a[1] + first) * (a[3] + second));
            } else {
                const float* a = acc + 4 * (j + i / 2) + i % 2 * 2;
                const float bias = i % 2 ? second : first;
                v[i] = pack_bf16x2(a[0] + bias, a[1] + bias);
            }
            v[i] = transposed(v[i]);
        }
        gather_block(v, t);
        const i32 row = m0 + 8 * (j + (IS_GATED ? t : t / 2)) + g, column = IS_GATED ? n / 2 : n + t % 2 * 8;
        if (row < out.m && column < columns) {
            *reinterpret_cast<uint4*>((bf16*)out.y + (i64)row * pitch + column) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void store_fitted_f32(const Output& out, i32 m0, i32 n, float first, float second, const float* acc) {
    const i32 column = n + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i32 row = m0 + 8 * j + threadIdx.x % 4 * 2 + i;
            if (row >= out.m) continue;
            float* to = (float*)out.y + (i64)row * out.pitch + column;
            if (column < out.n) to[0] = acc[4 * j + i] + first;
            if (column + 8 < out.n) to[8] = acc[4 * j + 2 + i] + second;
        }
    }
}

// As the epilogue says, for a warp's 16 rows of w from n on whose whole sums are in `acc`.
template <int ROWS>
__device__ __forceinline__ void store_fitted(const Output& out, i32 m0, i32 n, const float* acc) {
    const i32 own = n + threadIdx.x % 32 / 4;
    const float first = out.bias && own < out.n ? to_f32(out.bias[own]) : 0.0f;
    const float second = out.bias && own + 8 < out.n ? to_f32(out.bias[own + 8]) : 0.0f;
    if (out.epilogue == STORE) {
        store_fitted_bf16<STORE, ROWS>(out, m0, n, first, second, acc);
    } else if (out.epilogue == STORE_F32) {
        store_fitted_f32<ROWS>(out, m0, n, first, second, acc);
    } else if (out.epilogue == SILU) {
        store_fitted_bf16<SILU, ROWS>(out, m0, n, first, second, acc);
    } else {
        store_fitted_bf16<GELU, ROWS>(out, m0, n, first, second, acc);
    }
}

// Adds the parts of K over the cluster, and stores a share of the tile's 128 columns. All loads of the ring are complete.
template <int ROWS>
__device__ __forceinline__ void store_fitted_parts(const Output& out, i32 parts, float* partial, u32 address, i32 m0, i32 n0, int group,
                                                   const float* acc) {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    store_partial<ROWS>(partial + group * ROWS * PITCH, acc);
    cluster_sync();
    store_share<ROWS>(address, parts, rows_of<ROWS>(out, m0), n0, GROUPS * TILE, CONSUMERS);
    cluster_sync();  // no block may exit while another reads its partial sums
}
