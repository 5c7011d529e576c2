// Chunks of 64 positions of a layer of Mamba-2. With G the running sum of log g in a chunk:
//   O = e^G C S + P X + skip X,   P[t, j] = e^(G_t - G_j) d_j (C_t . B_j) for j <= t
//   S = e^G_end S + B^T (e^(G_end - G) d X)
// mamba2_chunks.cu computes what does not depend on S, for many chunks at the same time: C, B, their products, X and the gates.
// mamba2_states.cu goes through the chunks of a row.
//
// Places of chunks: recurrent_chunks.cuh.
#pragma once
#include "mamba2.cuh"
#include "recurrent_chunks.cuh"

// What is kept of a call's places, in the order of this structure.
struct MambaScratch : ChunkPlaces {
    // [places, K, 2, 64, 128] bf16: B and C. Rows behind the last token are 0.
    __device__ bf16* key(const MambaShape& shape, u32 place, u32 key_head) const {
        return reinterpret_cast<bf16*>(base) + ((u64)place * shape.key_heads + key_head) * 2 * CHUNK * MAMBA_KEYS;
    }
    // [places, K, 64, 64] f32: C_t . B_j. Blocks of 16 x 16 above the diagonal are not written.
    __device__ float* products(const MambaShape& shape, u32 place, u32 key_head) const {
        return reinterpret_cast<float*>(key(shape, num_places, 0)) + ((u64)place * shape.key_heads + key_head) * CHUNK * CHUNK;
    }
    // [places, V, 64] of e^G, d e^(G_end - G), G, d; d is 0 behind the last token.
    __device__ float4* factors(const MambaShape& shape, u32 place, u32 head) const {
        return reinterpret_cast<float4*>(products(shape, num_places, 0)) + ((u64)place * shape.value_heads + head) * CHUNK;
    }
};
