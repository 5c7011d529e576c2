// decode_attention_bf16: o[r, h, :] = softmax(scale * q[r, h, :] . k[r, j, :]) v[r, j, :] over positions j of row r
// rope_decode_attention_bf16: the same, but first applies norms to q and k of the newest position, if there are any, rotates them, and
//                             writes its k and v; without chunks
// alibi_decode_attention_bf16: the first with slopes[h] * (j - newest position) added to the score of position j  (Press et al. 2022)
// capped_decode_attention_bf16: the first with scores s that become cap * tanh(s / cap)
// shared_..., on Hopper: the others with fewer blocks than splits, so that rows are divided in one way whatever their number is
// archs: 80 90a 100a ptx
//
// q             [R, H, D] bf16, rows `q_stride` elements apart (the q part of qkv)
// k, v blocks   [block][K][B][D] bf16, one layer (coded_decode_attention.cu: codes); query heads h G .. h G + G share KV head h, G = H / K
// block_tables  [R, max_blocks] u32; context_lens [R] u32, 0 marks a padding row, whose output is zero
// slopes        [H] f32
// sinks         [H] f32 or null: a logit of each head that takes part in the softmax and has no value
// o             [R, H, D] bf16
// workspace     partial sums [R][H][splits][D] f32, their maximum and denominator [R][H][splits][2] f32, and counters
//               [R][K * groups] u32, zero before the first launch and after each launch
// maths         scores and sums in fp32, probabilities rounded to bf16 for the product with v
// launch        grid (blocks, K * groups, R), 4 warps. A block computes one split of a row, or, with the prefix `shared_`, every
//               `blocks`-th. Up to 8 query heads of a KV head form a group, so K and V are read once for all of them. A warp
//               processes 16 positions at a time: K and V are loaded directly into the registers of mma.sync, as K q^T and
//               V^T p^T, and the next tile is loaded while this one is used.
//               The number of splits of a row depends on its length. The splits are added in order: through shared
//               memory if they are in one cluster (of blocks adjacent in x), otherwise by the block that finishes last.
//               With rotation, a block rotates its own q, which it copies to shared memory first. The block with the newest
//               position takes its k and v from qkv, too, and writes them; if several groups share a KV head, each writes the same bits. All other positions
//               belong to earlier steps, so the first of them are read before the previous kernel has ended.
// needs         B % 16 == 0, a power of two; pointers 16-byte aligned; checked in decode_attention.rs
// bound         memory, 4 K D bytes per position: R = 32, 1024 positions, K = 32, D = 128: 537 MB, 120 us at 4.47 TB/s
//               (H200)
// test          tests/cuda_decode_attention.rs, reference::attention in fp32, each element within 2^-7 of the largest |v|
#include "register_attention.cuh"

#define DECODE_ATTENTION(PREFIX, D, SHARED) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) PREFIX##decode_attention_bf16_d##D(const DecodeAttention a) { \
        decode_attention<D, Kv::BF16, false, Scores::PLAIN, SHARED>(a, Rope{}, nullptr, 0.0f); \
    }

#define ALIBI_DECODE_ATTENTION(PREFIX, D, SHARED) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        PREFIX##alibi_decode_attention_bf16_d##D(const DecodeAttention a, const float* slopes) { \
        decode_attention<D, Kv::BF16, false, Scores::ALIBI, SHARED>(a, Rope{}, slopes, 0.0f); \
    }

#define CAPPED_DECODE_ATTENTION(PREFIX, D, SHARED) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        PREFIX##capped_decode_attention_bf16_d##D(const DecodeAttention a, float cap) { \
        decode_attention<D, Kv::BF16, false, Scores::CAPPED, SHARED>(a, Rope{}, nullptr, cap); \
    }

#define ROPE_DECODE_ATTENTION(D) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        rope_decode_attention_bf16_d##D(const DecodeAttention a, const Rope rope) { \
        decode_attention<D, Kv::BF16, true, Scores::PLAIN, false>(a, rope, nullptr, 0.0f); \
    }

#define ALL_DECODE_ATTENTION(PREFIX, SHARED) \
    DECODE_ATTENTION(PREFIX, 64, SHARED) \
    DECODE_ATTENTION(PREFIX, 96, SHARED) \
    DECODE_ATTENTION(PREFIX, 128, SHARED) \
    DECODE_ATTENTION(PREFIX, 256, SHARED) \
    ALIBI_DECODE_ATTENTION(PREFIX, 64, SHARED) \
    ALIBI_DECODE_ATTENTION(PREFIX, 96, SHARED) \
    ALIBI_DECODE_ATTENTION(PREFIX, 128, SHARED) \
    CAPPED_DECODE_ATTENTION(PREFIX, 128, SHARED) \
    CAPPED_DECODE_ATTENTION(PREFIX, 256, SHARED)

ROPE_DECODE_ATTENTION(64)
ROPE_DECODE_ATTENTION(128)
ROPE_DECODE_ATTENTION(256)
ALL_DECODE_ATTENTION(, false)
#if __CUDA_ARCH__ == 900
ALL_DECODE_ATTENTION(shared_, true)
#endif
