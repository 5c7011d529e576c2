// decode_attention_fp8, decode_attention_int8, and the same with alibi_ and capped_: as the kernels of decode_attention.cu with
// bf16 in their name, for blocks of codes; with shared_ before their names on Hopper for heads of 64 and 128 without alibi_ and capped_
// archs: 80 90a 100a ptx
//
// k, v blocks   [block][K][B][D] codes, and a scale for each position and KV head, [block][K][B] f32 (kv_codes.rs)
// the rest      the same as in decode_attention.cu
// launch        as there. Codes become bf16 in registers, which holds them exactly; scores are multiplied by the scales of K, and
//               probabilities by those of V
// bound         memory, 2 K (D + 4) bytes per position: R = 32, 2048 positions, K = 8, D = 128: 138 MB, 31 us at 4.47 TB/s
//               (H200)
// test          tests/cuda_kv_codes.rs
#include "register_attention.cuh"

#define DECODE_ATTENTION(PREFIX, NAME, KV, D, SHARED)                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) PREFIX##decode_attention_##NAME##_d##D(const DecodeAttention a) {  \
        decode_attention<D, KV, false, Scores::PLAIN, SHARED>(a, Rope{}, nullptr, 0.0f);                                        \
    }

#define ALIBI_DECODE_ATTENTION(NAME, KV, D)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                            \
        alibi_decode_attention_##NAME##_d##D(const DecodeAttention a, const float* slopes) {                            \
        decode_attention<D, KV, false, Scores::ALIBI, false>(a, Rope{}, slopes, 0.0f);                                         \
    }

#define CAPPED_DECODE_ATTENTION(NAME, KV, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                            \
        capped_decode_attention_##NAME##_d##D(const DecodeAttention a, float cap) {                                     \
        decode_attention<D, KV, false, Scores::CAPPED, false>(a, Rope{}, nullptr, cap);                                        \
    }

#define FOR_CODES(NAME, KV)                                                                                             \
    DECODE_ATTENTION(, NAME, KV, 64, false)                                                                             \
    DECODE_ATTENTION(, NAME, KV, 96, false)                                                                             \
    DECODE_ATTENTION(, NAME, KV, 128, false)                                                                            \
    DECODE_ATTENTION(, NAME, KV, 256, false)                                                                            \
    ALIBI_DECODE_ATTENTION(NAME, KV, 64)                                                                                \
    ALIBI_DECODE_ATTENTION(NAME, KV, 96)                                                                                \
    ALIBI_DECODE_ATTENTION(NAME, KV, 128)                                                                               \
    CAPPED_DECODE_ATTENTION(NAME, KV, 128)                                                                              \
    CAPPED_DECODE_ATTENTION(NAME, KV, 256)

FOR_CODES(fp8, Kv::FP8)
FOR_CODES(int8, Kv::INT8)
#if __CUDA_ARCH__ == 900
DECODE_ATTENTION(shared_, fp8, Kv::FP8, 64, true)
DECODE_ATTENTION(shared_, fp8, Kv::FP8, 128, true)
DECODE_ATTENTION(shared_, int8, Kv::INT8, 64, true)
DECODE_ATTENTION(shared_, int8, Kv::INT8, 128, true)
#endif
