// Chunks of 64 positions of a layer of Gated DeltaNet. With G the running sum of log g in a chunk:
//   (I + A) U = R,  R = beta (V - e^G K S),  A[t, j] = beta_t e^(G_t - G_j) (k_t . k_j) for j < t
//   O = e^G Q S + P U,                       P[t, j] = e^(G_t - G_j) (q_t . k_j) for j <= t
//   S = e^G_end S + K^T (e^(G_end - G) U)
// gated_delta_chunks.cu computes what does not depend on S, for many chunks at the same time: K, Q, V, P and T = (I + A)^-1.
// gated_delta_states.cu goes through the chunks of a row.
//
// Chunks end at multiples of 64 positions. Row r has the places first_place(r) + 0, 1, ... for them, which do not meet those of
// the next row; some places stay empty. A call computes the places first_place .. first_place + num_places.
#pragma once
#include "gated_delta.cuh"

constexpr u32 CHUNK = 64;

// What is kept of a call's places, in the order of this structure.
struct DeltaScratch {
    unsigned char* base;
    u32 first_place, num_places;

    // [places, K, 2, 64, 128] bf16: k and q behind their norms. Rows behind the last token are 0.
    __device__ bf16* key(const DeltaShape& shape, u32 place, u32 key_head) const {
        return reinterpret_cast<bf16*>(base) + ((u64)place * shape.key_heads + key_head) * 2 * CHUNK * DELTA_DIM;
    }
    // [places, V, 2, 64, 64] bf16: T and P. Blocks of 16 x 16 above the diagonal are not written.
    __device__ bf16* matrices(const DeltaShape& shape, u32 place, u32 head) const {
        return key(shape, num_places, 0) + ((u64)place * shape.value_heads + head) * 2 * CHUNK * CHUNK;
    }
    // [places, V, 2, 64] of beta, beta e^G, which are 0 behind the last token; then of e^G, e^(G_end - G).
    __device__ float2* factors(const DeltaShape& shape, u32 place, u32 head) const {
        return reinterpret_cast<float2*>(matrices(shape, num_places, 0)) + ((u64)place * shape.value_heads + head) * 2 * CHUNK;
    }
};

// A row's tokens first..end, and its first position.
struct DeltaRow {
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

__device__ __forceinline__ DeltaRow delta_row(const u32* row_starts, const u32* positions, u32 index) {
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
