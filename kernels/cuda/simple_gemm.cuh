// Common parts of linear layers for few rows on any GPU: the tile of a block, whose warps have parts of K, and its epilogue.
//
// y        epilogue STORE [M, N] bf16; STORE_F32 [M, N] f32; SILU, GELU [M, N / 2] bf16 = act(gate) * up
// gate/up  rows 16 b + i of w are gate row 8 b + i for i < 8 and up row 8 b + i - 8 for i >= 8
#pragma once
#include "activation.cuh"
#include "mma.cuh"

constexpr int WARPS = 8, ROWS = 16;  // of a block, and of w in a tile

enum Epilogue : i32 { STORE = 0, STORE_F32 = 1, SILU = 2, GELU = 3 };

// Sum over the warps for element (m, n) of the tile.
template <int NT>
__device__ __forceinline__ float tile_sum(const float* partial, int m, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[(w * NT + m) * (ROWS + 1) + n];
    return sum;
}

// Adds the sums of all warps, in order, and stores rows n0 .. n0 + ROWS of w. `partial` is [WARPS][NT][ROWS + 1] f32.
template <int NT>
__device__ __forceinline__ void store_tile(float* partial, const float (&acc)[NT / 8][4], void* y, const bf16* bias, u32 m, u32 n,
                                           u32 n0, i32 epilogue) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            partial[(warp * NT + 8 * j + 2 * t + e % 2) * (ROWS + 1) + g + e / 2 * 8] = acc[j][e];
        }
    }
    __syncthreads();

    const int columns = epilogue < SILU ? ROWS : ROWS / 2;
    for (u32 i = threadIdx.x; i < m * columns; i += blockDim.x) {
        const int row = i / columns, c = i % columns;
        if (n0 + c >= n) continue;
        float v = tile_sum<NT>(partial, row, c) + (bias ? to_f32(bias[n0 + c]) : 0.0f);
        if (epilogue >= SILU) {
            const float up = tile_sum<NT>(partial, row, c + 8) + (bias ? to_f32(bias[n0 + c + 8]) : 0.0f);
            v = (epilogue == SILU ? silu(v) : gelu_tanh(v)) * up;
            ((bf16*)y)[(u64)row * (n / 2) + n0 / 2 + c] = to_bf16(v);
        } else if (epilogue == STORE_F32) {
            ((float*)y)[(u64)row * n + n0 + c] = v;
        } else {
            ((bf16*)y)[(u64)row * n + n0 + c] = to_bf16(v);
        }
    }
}
