// prefill_attention_bf16: o[t, h, :] = softmax(scale * q[t, h, :] . k[j, :]) v[j, :] over the positions j <= p of t's row
// alibi_prefill_attention_bf16: the same with slopes[h] * (j - p) added to the score of position j    (Press et al. 2022)
// capped_prefill_attention_bf16: the first with scores s that become cap * tanh(s / cap)
// archs: 80 90a 100a ptx
//
// q, o          [T, H, D] bf16; the queries of row r are row_starts[r] .. row_starts[r + 1], the last of its context_lens[r] positions
// k, v blocks   [block][K][B][D] bf16, one layer, including the queries' own keys; prefill_attention.cuh describes the
//               rest
// maths         scores, maxima and sums in fp32; probabilities rounded to bf16 for the product with v (Dao 2023)
// launch        grid (tiles of 128 queries, H, R), 8 warps of 16 queries; tiles with the most keys first. 64 keys and
//               values at a time pass through shared memory; the next ones are loaded while these are used
// needs         B % 16 == 0, a power of two; pointers 16-byte aligned; checked in prefill_attention.rs
// bound         arithmetic, 2 D operations per query, head and key attended to, twice
// test          tests/cuda_prefill_attention.rs, reference::attention in fp32, each element within 2^-7 of the largest |v|
#include "tiled_prefill_attention.cuh"

#define PREFILL_ATTENTION(D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) prefill_attention_bf16_d##D(const PrefillAttention a) {   \
        prefill_attention<D, Kv::BF16, Scores::PLAIN>(a, nullptr, 0.0f);                                                         \
    }

#define ALIBI_PREFILL_ATTENTION(D)                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                           \
        alibi_prefill_attention_bf16_d##D(const PrefillAttention a, const float* slopes) {                             \
        prefill_attention<D, Kv::BF16, Scores::ALIBI>(a, slopes, 0.0f);                                                          \
    }

#define CAPPED_PREFILL_ATTENTION(D)                                                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                           \
        capped_prefill_attention_bf16_d##D(const PrefillAttention a, float cap) {                                      \
        prefill_attention<D, Kv::BF16, Scores::CAPPED>(a, nullptr, cap);                                                         \
    }

PREFILL_ATTENTION(64)
PREFILL_ATTENTION(96)
PREFILL_ATTENTION(128)
PREFILL_ATTENTION(256)
ALIBI_PREFILL_ATTENTION(64)
ALIBI_PREFILL_ATTENTION(96)
ALIBI_PREFILL_ATTENTION(128)
CAPPED_PREFILL_ATTENTION(128)
CAPPED_PREFILL_ATTENTION(256)
