// Chunks of rows of a layer with a recurrent state, and the places in scratch memory of what is computed of them without the state.
//
// Chunks end at multiples of 64 positions. Row r has the places first_place(r) + 0, 1, ... for them, which do not meet those of
// the next row; some places stay empty. A call computes the places first_place .. first_place + num_places.
#pragma once
#include "common.cuh"

constexpr u32 CHUNK = 64;

// The places of a call. What they keep follows `base`, in an order of each kind of layer.
struct ChunkPlaces {
    unsigned char* base;
    u32 first_place, num_places;
};

// A row's tokens first..end, and its first position.
struct ChunkRow {
    u32 index, first, end, position;

    __device__ u32 first_place() const { return first / CHUNK + 2 * index; }
    // Tokens from the first one to the end of its chunk.
    __device__ u32 head_tokens() const { return CHUNK - position % CHUNK; }
    __device__ u32 chunks() const {
        const u32 count = end - first, head = head_tokens();
        return count <= head ? (count + CHUNK - 1) / CHUNK : 1 + (count - head + CHUNK - 1) / CHUNK;
    }
    __device__ u32 start(u32 chunk) const { return chunk == 0 ? first : first + head_tokens() + (chunk - 1) * CHUNK; }
    __device__ u32 count(u32 chunk) const { return min(end - start(chunk), chunk == 0 ? head_tokens() : CHUNK); }
};

__device__ __forceinline__ ChunkRow chunk_row(const u32* row_starts, const u32* positions, u32 index) {
    const u32 first = row_starts[index], end = row_starts[index + 1];
    return {index, first, end, first < end ? positions[first] : 0};
}

// The row to which a place belongs. Every lane of a warp calls it.
__device__ __forceinline__ u32 row_of_place(const u32* row_starts, u32 rows, u32 place) {
    const u32 lane = threadIdx.x % 32;
    u32 before = 0;  // rows whose places begin at or before this one
    for (u32 base = 0; base < rows; base += 32) {
        const u32 row = base + lane;
        const u32 found = __popc(__ballot_sync(FULL_WARP, row < rows && row_starts[row] / CHUNK + 2 * row <= place));
        before += found;
        if (found < 32) break;
    }
    return before - 1;
}
