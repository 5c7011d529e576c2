// Chunks of 64 positions of a layer of Gated DeltaNet. With G the running sum of log g in a chunk:
//   (I + A) U = R,  R = beta (V - e^G K S),  A[t, j] = beta_t e^(G_t - G_j) (k_t . k_j) for j < t
//   O = e^G Q S + P U,                       P[t, j] = e^(G_t - G_j) (q_t . k_j) for j <= t
//   S = e^G_end S + K^T (e^(G_end - G) U)
// gated_delta_chunks.cu computes what does not depend on S, for many chunks at the same time: K, Q, V, P and T = (I + A)^-1.
// gated_delta_states.cu goes through the chunks of a row.
// Places of chunks: recurrent_chunks.cuh.
#pragma once
#include "gated_delta.cuh"
#include "recurrent_chunks.cuh"

// What is kept of a call's places, in the order of this structure.
struct DeltaScratch : ChunkPlaces {
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
