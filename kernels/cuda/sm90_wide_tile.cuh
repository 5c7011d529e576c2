// Sums of a block that has ROWS rows of x, NT unless stated otherwise, and several tiles of w.
#pragma once
#include "sm90_gemm.cuh"

constexpr int NT = 128;
constexpr i32 ROW_TILES = 16;  // tiles of x that share the rows of w in the L2 cache

// Tiles with the same rows of w follow each other; at most ROW_TILES of them.
template <int COLS, int ROWS = NT>
struct TileOrder {
    i32 row_tiles, col_tiles, items;

    __device__ explicit TileOrder(const Output& out)
        : row_tiles((out.m + ROWS - 1) / ROWS), col_tiles((out.n + COLS - 1) / COLS), items(row_tiles * col_tiles) {}

    __device__ void tile(i32 index, i32& m0, i32& n0) const {
        const i32 group = index / (ROW_TILES * col_tiles), first_tile = group * ROW_TILES;
        const i32 size = min(ROW_TILES, row_tiles - first_tile), own = index - first_tile * col_tiles;
        m0 = (first_tile + own % size) * ROWS, n0 = own / size * COLS;
    }
};

// Sums of a tile over the cluster's PARTS blocks; their loads are in flight together.
template <int PARTS, int ROWS = NT>
struct PartSums {
    u32 partial;  // shared address of [tiles][ROWS][PITCH] f32; it is the same in the other blocks

    __device__ __forceinline__ float4 sum(int m, int r) const {
        const u32 offset = (u32)((r / TILE * ROWS + m) * PITCH + r % TILE) * 4;
        float4 v[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) v[p] = cluster_load(cluster_map(partial + offset, p));
#pragma unroll
        for (int p = 1; p < PARTS; ++p) v[0].x += v[p].x, v[0].y += v[p].y, v[0].z += v[p].z, v[0].w += v[p].w;
        return v[0];
    }
};

// The output of rows m0 .. of x.
template <int ROWS = NT>
__device__ __forceinline__ Output rows_of(const Output& out, i32 m0) {
    Output own = out;
    own.m = min(out.m - m0, ROWS);
    const i64 row_bytes = out.epilogue >= SILU ? out.n : (i64)out.pitch * (out.epilogue == STORE ? 2 : 4);
    own.y = (u8*)out.y + m0 * row_bytes;
    return own;
}

// Stores this block's share of a tile's `columns`, added over the `parts` blocks of the cluster. `partial` is that of PartSums.
template <int ROWS = NT>
__device__ __forceinline__ void store_share(u32 partial, i32 parts, const Output& own, i32 n0, i32 columns, int threads) {
    // Gate and up are groups of 16 columns.
    const i32 rank = (i32)blockIdx.x % parts, first = columns / 16 * rank / parts * 16, share = columns / 16 * (rank + 1) / parts * 16 - first;
    if (parts == 1) store_rows(PartSums<1, ROWS>{partial}, own, n0, first, share, threads);
    else if (parts == 2) store_rows(PartSums<2, ROWS>{partial}, own, n0, first, share, threads);
    else if (parts == 3) store_rows(PartSums<3, ROWS>{partial}, own, n0, first, share, threads);
    else store_rows(PartSums<4, ROWS>{partial}, own, n0, first, share, threads);
}
