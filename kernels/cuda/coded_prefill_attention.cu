// prefill_attention_fp8, prefill_attention_int8, and the same with alibi_ and capped_: as the kernels of prefill_attention.cu with
// bf16 in their name, for blocks of codes
// archs: 80 90a 100a ptx
//
// k, v blocks   [block][K][B][D] codes, and a scale for each position and KV head, [block][K][B] f32 (kv_codes.rs)
// the rest      the same as in prefill_attention.cu
// launch        as there. Codes come to shared memory while the tile before is used, and become bf16 there, which holds them exactly;
//               scores are multiplied by the scales of K, and probabilities by those of V
// bound         arithmetic, 2 D operations per query, head and key attended to, twice
// test          tests/cuda_kv_codes.rs
#include "tiled_prefill_attention.cuh"

#define PREFILL_ATTENTION(NAME, KV, D)                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) prefill_attention_##NAME##_d##D(const PrefillAttention a) { \
        prefill_attention<D, KV, Scores::PLAIN>(a, nullptr, 0.0f);                                                      \
    }

#define ALIBI_PREFILL_ATTENTION(NAME, KV, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                            \
        alibi_prefill_attention_##NAME##_d##D(const PrefillAttention a, const float* slopes) {                          \
        prefill_attention<D, KV, Scores::ALIBI>(a, slopes, 0.0f);                                                       \
    }

#define CAPPED_PREFILL_ATTENTION(NAME, KV, D)                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                            \
        capped_prefill_attention_##NAME##_d##D(const PrefillAttention a, float cap) {                                   \
        prefill_attention<D, KV, Scores::CAPPED>(a, nullptr, cap);                                                      \
    }

#define FOR_CODES(NAME, KV)                                                                                             \
    PREFILL_ATTENTION(NAME, KV, 64)                                                                                     \
    PREFILL_ATTENTION(NAME, KV, 96)                                                                                     \
    PREFILL_ATTENTION(NAME, KV, 128)                                                                                    \
    PREFILL_ATTENTION(NAME, KV, 256)                                                                                    \
    ALIBI_PREFILL_ATTENTION(NAME, KV, 64)                                                                               \
    ALIBI_PREFILL_ATTENTION(NAME, KV, 96)                                                                               \
    ALIBI_PREFILL_ATTENTION(NAME, KV, 128)                                                                              \
    CAPPED_PREFILL_ATTENTION(NAME, KV, 128)                                                                             \
    CAPPED_PREFILL_ATTENTION(NAME, KV, 256)

FOR_CODES(fp8, Kv::FP8)
FOR_CODES(int8, Kv::INT8)
