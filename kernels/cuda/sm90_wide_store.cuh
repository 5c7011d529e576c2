// Tiles of 128 rows of x by COLS rows of w, with x as the 64-row operand of two warpgroups: their order, and what happens
// with their sums.
#pragma once
#include "fragment.cuh"
#include "sm90_sum_order.cuh"
#include "sm90_wide_tile.cuh"

constexpr int GROUPS = 2, GROUP_ROWS = 64, CONSUMERS = GROUPS * 128;

template <i32 EPILOGUE>
__device__ __forceinline__ float act(float gate) {
    return EPILOGUE == SILU ? silu(gate) : gelu_tanh(gate);
}

// Stores rows of bf16: rows g and g + 8 of each 16 rows of x.
template <i32 EPILOGUE, int COLS>
__device__ __forceinline__ void store_bf16(const Output& out, i32 m0, i32 n0, int group, const float* acc) {
    constexpr bool IS_GATED = EPILOGUE >= SILU;
    constexpr int BLOCKS = IS_GATED ? COLS / 16 : COLS / 8;  // of eight outputs
    const i32 t = threadIdx.x % 4, row = m0 + group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const i32 pitch = IS_GATED ? out.n / 2 : out.pitch, columns = IS_GATED ? out.n / 2 : out.n, first = IS_GATED ? n0 / 2 : n0;
#pragma unroll
    for (int four = 0; four < BLOCKS; four += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (four + i >= BLOCKS) {
                    v[i] = 0;
                } else if constexpr (IS_GATED) {
                    const float* a = acc + 8 * (four + i) + 2 * half;
                    const i32 n = n0 + 16 * (four + i) + 2 * t;
                    const float2 g = bias_of(out.bias, n, out.n), u = bias_of(out.bias, n + 8, out.n);
                    v[i] = pack_bf16x2(act<EPILOGUE>(a[0] + g.x) * (a[4] + u.x), act<EPILOGUE>(a[1] + g.y) * (a[5] + u.y));
                } else {
                    const float* a = acc + 4 * (four + i) + 2 * half;
                    const float2 b = bias_of(out.bias, n0 + 8 * (four + i) + 2 * t, out.n);
                    v[i] = pack_bf16x2(a[0] + b.x, a[1] + b.y);
                }
            }
            gather_block(v, t);
            const i32 column = first + 8 * (four + t);
            if (row + 8 * half < out.m && column < min(columns, first + 8 * BLOCKS)) {
                *reinterpret_cast<uint4*>((bf16*)out.y + (i64)(row + 8 * half) * pitch + column) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

template <int COLS>
__device__ __forceinline__ void store_f32(const Output& out, i32 m0, i32 n0, int group, const float* acc) {
    const i32 row = m0 + group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < COLS / 8; ++j) {
        const i32 n = n0 + 8 * j + threadIdx.x % 4 * 2;
        const float2 b = bias_of(out.bias, n, out.n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half >= out.m || n >= out.n) continue;
            const float2 v = make_float2(acc[4 * j + 2 * half] + b.x, acc[4 * j + 2 * half + 1] + b.y);
            *reinterpret_cast<float2*>((float*)out.y + (i64)(row + 8 * half) * out.pitch + n) = v;
        }
    }
}

// Adds the parts of K over the cluster, and stores a share of the tile's columns. All loads of the ring are complete.
template <int COLS>
__device__ __forceinline__ void store_parts(const Output& out, i32 parts, float* partial, u32 address, i32 m0, i32 n0, int group,
                                            const float* acc) {
    const int row = group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
    for (int j = 0; j < COLS / 8; ++j) {
        float* to = partial + ((8 * j / TILE) * NT + row) * PITCH + 8 * j % TILE + column;
        *reinterpret_cast<float2*>(to) = make_float2(acc[4 * j], acc[4 * j + 1]);
        *reinterpret_cast<float2*>(to + 8 * PITCH) = make_float2(acc[4 * j + 2], acc[4 * j + 3]);
    }
    cluster_sync();
    store_share(address, parts, rows_of(out, m0), n0, COLS, CONSUMERS);
    cluster_sync();  // no block may exit while another reads its partial sums
}

// As the epilogue says, for a tile whose whole sums are in `acc`.
template <int COLS>
__device__ __forceinline__ void store_sums(const Output& out, i32 m0, i32 n0, int group, const float* acc) {
    if (out.epilogue == STORE) {
        store_bf16<STORE, COLS>(out, m0, n0, group, acc);
    } else if (out.epilogue == STORE_F32) {
        store_f32<COLS>(out, m0, n0, group, acc);
    } else if (out.epilogue == SILU) {
        store_bf16<SILU, COLS>(out, m0, n0, group, acc);
    } else {
        store_bf16<GELU, COLS>(out, m0, n0, group, acc);
    }
}
