// Rows of tokens for products of experts on Hopper: a warpgroup gathers them, so that no copy of each token for each of its experts
// is made before.
#pragma once
#include "grouped.cuh"
#include "mma.cuh"
#include "sm90.cuh"

// A thread's part of a tile of at most ROWS rows, in slices of 128 bytes: chunk threadIdx.x % 8 of 16 bytes of every 16th row.
template <u32 ROWS>
struct GatheredRows {
    static constexpr u32 STEP = 16;
    u32 tokens[ROWS / STEP];

    __device__ static u32 first() { return threadIdx.x / 8 % STEP; }

    // `of_rows` [R]: the token of each row.
    __device__ __forceinline__ GatheredRows(const u32* of_rows, const Tile& tile) {
#pragma unroll
        for (u32 i = 0; i < ROWS / STEP; ++i) {
            const u32 row = first() + STEP * i;
            tokens[i] = row < tile.rows ? of_rows[tile.first + row] : 0;
        }
    }

    // Copies slice `slice` of the tile's `rows` rows of x, of `pitch` bytes, to shared address `to` under the 128-byte swizzle. Bytes from
    // a row's end on are zero. Rows that the tile does not have keep what they hold: nothing that is stored depends on them.
    __device__ __forceinline__ void copy(u32 to, const u8* x, u32 pitch, u32 slice, u32 rows) const {
        const u32 chunk = threadIdx.x % 8, column = slice * 128 + chunk * 16;
        to += first() * 128 + (chunk ^ first() % 8) * 16;
        const bool is_inside = column < pitch;
        x += is_inside ? column : 0;
#pragma unroll
        for (u32 i = 0; i < ROWS / STEP; ++i) {
            if (first() + STEP * i < rows) copy_async(to + i * STEP * 128, x + (u64)tokens[i] * pitch, is_inside);
        }
    }
};
