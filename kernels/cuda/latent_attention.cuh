// Common parts of the kernels of attention over latent vectors: operands, and the tiles of queries and splits of positions that blocks
// compute. latent_attention.cu describes the operands.
#pragma once
#include "latent.cuh"
#include "mma.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr u32 MAX_SPLITS = 128;

struct LatentAttention {
    bf16* rows;
    const bf16* cache;
    const u32* block_tables;
    const u32* context_lens;
    const u32* row_starts;
    float* partial;
    float2* stats;
    u32 first, count;
    u32 heads, max_blocks, block_shift;
    u32 splits;     // into which a tile's positions are divided at most
    u32 min_chunk;  // minimum number of positions of a split, a multiple of 64
    float scale;
};

// A tile of queries of one row.
struct Tile {
    u32 row;             // of the tables
    u64 query;           // the first query's index in [T, H]
    u32 index;           // the same among the row's queries
    u32 queries;         // 0 for none
    u32 position, heads; // position of the row's first query
    u32 end;             // number of positions that some query attends to
    u32 chunk, active;   // positions of a split, and the number of splits that have some

    __device__ Tile(const LatentAttention& a, u32 row, u32 tile, u32 size) : row(row), heads(a.heads) {
        const u32 start = a.row_starts ? a.row_starts[row] : row, stop = a.row_starts ? a.row_starts[row + 1] : row + 1;
        const u32 from = max(start, a.first), to = min(stop, a.first + a.count);
        const u32 all = from < to ? (to - from) * a.heads : 0;
        index = tile * size;
        queries = index < all ? min(all - index, size) : 0;
        query = (u64)(from - a.first) * a.heads + index;
        const u32 len = a.context_lens[row];
        position = len - (stop - from);
        end = len > 0 && queries > 0 ? position + (index + queries - 1) / a.heads + 1 : 0;
        chunk = max(a.min_chunk, ((end + a.splits - 1) / a.splits + 63) / 64 * 64);
        active = (end + chunk - 1) / chunk;
    }

    // Position of query `i` of the tile.
    __device__ u32 position_of(u32 i) const { return position + (index + i) / heads; }
};

// Each warp copies every WARPS-th of COUNT rows to shared memory. `from(i, valid)` is the address of row i, or sets
// `valid` to false for zeros; `to.at(i, column)` is where its elements go.
template <int RANK, int COUNT, int WARPS, class To, class From>
__device__ __forceinline__ void load_rows(const To& to, From from) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < COUNT / WARPS; ++i) {
        const u32 row = i * WARPS + threadIdx.x / 32;
        bool valid;
        const bf16* p = from(row, valid) + 8 * lane;
#pragma unroll
        for (u32 column = 0; column < RANK; column += 256) copy_async(to.at(row, column + 8 * lane), p + column, valid);
        if (lane < UNITS) copy_async(to.at(row, RANK + 8 * lane), p + RANK, valid);
    }
}

// The rows of a sequence's positions in the blocks.
template <int RANK>
struct Positions {
    const bf16* cache;
    const u32* table;
    u32 shift, in_block, end;

    __device__ Positions(const LatentAttention& a, u32 row, u32 end)
        : cache(a.cache), table(a.block_tables + (u64)row * a.max_blocks), shift(a.block_shift), in_block((1u << a.block_shift) - 1), end(end) {}

    // That of position first + i, where position first is below the end; not valid from the end on.
    __device__ const bf16* row(u32 first, u32 i, bool& valid) const {
        valid = first + i < end;
        const u32 at = valid ? first + i : first;
        return cache + (((u64)table[at >> shift] << shift) + (at & in_block)) * WIDTH<RANK>;
    }
};

// The result of padding, by the first of the splits.
template <int RANK, int THREADS>
__device__ __forceinline__ void clear(bf16* rows, u32 queries) {
    for (u32 i = threadIdx.x; blockIdx.x == 0 && i < queries * (RANK / 8); i += THREADS) {
        *reinterpret_cast<uint4*>(rows + (u64)(i / (RANK / 8)) * WIDTH<RANK> + i % (RANK / 8) * 8) = make_uint4(0, 0, 0, 0);
    }
}
