// Common parts of the prefill attention kernels: parameters, and the keys that a tile of queries attends to.
#pragma once
#include "common.cuh"

enum class Scores { PLAIN, ALIBI, CAPPED };

constexpr float LOG2E = 1.4426950408889634f;

struct PrefillAttention {
    const bf16* q;  // [T, H, D], rows `q_stride` elements apart (the q part of qkv)
    const void* k_blocks;  // bf16 or codes
    const void* v_blocks;
    const u32* block_tables;  // [R, max_blocks]
    const u32* context_lens;  // [R]
    const u32* row_starts;    // [R + 1]
    bf16* out;                // [T, H, D]
    const float* sinks;       // [H] a logit of each head that has no value, or null
    u32 q_stride;
    u32 max_blocks;
    u32 heads, kv_heads;
    u32 block_shift;  // log2 B
    u32 window;       // positions that are attended to, 0 for all
    float scale;
    u32 chunk;        // positions that are attended to begin at a multiple of it, 0 for no bound
    const float* k_scales;    // of codes, else null
    const float* v_scales;
};

// A tile of queries of one row, and the keys that it attends to.
struct QueryTile {
    u32 row;
    u32 token;      // index in T of the tile's first query
    u32 count;      // queries of the tile, 0 for none
    u32 position;   // of the first query
    u32 len;        // keys of the row
    u32 begin, end; // keys that any query of the tile attends to
};

// The first key that the query at `position` attends to.
__device__ __forceinline__ u32 first_seen(const PrefillAttention& a, u32 position) {
    const u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    return a.chunk ? max(first, position / a.chunk * a.chunk) : first;
}

__device__ __forceinline__ QueryTile query_tile(const PrefillAttention& a, u32 row, u32 index, u32 queries) {
    QueryTile t;
    t.row = row;
    const u32 start = a.row_starts[row], tokens = a.row_starts[row + 1] - start;
    t.len = a.context_lens[row];
    t.token = start + index * queries;
    t.count = index * queries < tokens ? min(tokens - index * queries, queries) : 0;
    t.position = t.len - tokens + index * queries;
    t.begin = first_seen(a, t.position);
    t.end = t.position + t.count;
    return t;
}

// Whether the query at `position`, which attends to keys from `first` on, attends to the key at `key`.
__device__ __forceinline__ bool sees(u32 position, u32 first, u32 key) { return key <= position && key >= first; }

// The index of a key of one KV head among all rows of the K and V blocks.
struct BlockRows {
    const u32* table;
    u32 kv_heads, kv_head, shift, in_block;

    __device__ BlockRows(const PrefillAttention& a, u32 row, u32 head)
        : table(a.block_tables + (u64)row * a.max_blocks),
          kv_heads(a.kv_heads),
          kv_head(head),
          shift(a.block_shift),
          in_block((1u << a.block_shift) - 1) {}

    __device__ u64 operator()(u32 key) const {
        return (((u64)table[key >> shift] * kv_heads + kv_head) << shift) + (key & in_block);
    }
};
