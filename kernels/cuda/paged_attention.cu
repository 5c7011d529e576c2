// paged_attention_bf16: out[t, h, :] = softmax(scale q[t, h] . k[0 ..= position]) v, one warp per query head; the
// simple version
// alibi_paged_attention_bf16: the same with slopes[h] * (p - position) added to the score of position p
// capped_paged_attention_bf16: the same with scores s that become cap * tanh(s / cap)
//
// out           [T, H D] bf16
// qkv           [T, H D] bf16, rows `q_stride` elements apart; q, which is already rotated
// k_blocks,
// v_blocks      [blocks, K, B, D] bf16, one layer
// block_tables  [R, max_blocks] u32
// token_tables  [T] u32: the row of block_tables that a token uses
// positions     [T] u32; a token attends to positions p <= its own, p > own - window if window is not 0, and
//               p >= own / chunk * chunk if chunk is not 0
// slots         [T] u32; u32::MAX marks a padding token, whose output is zeros
// sinks         [H] f32 or null: a logit of each head that takes part in the softmax and has no value
// scales        k and v of codes, each [blocks, K, B] f32; for kernels with fp8 or int8 in place of bf16 in their name, whose blocks
//               have codes (kv_codes.rs)
// slopes        [H] f32, for ALiBi                                                        (Press et al. 2022)
// maths         fp32, online softmax
// launch        grid (T, H), block 32
// needs         D <= 512
// bound         latency; used for shapes that the fast kernels do not support, and as their reference
// test          tests/cuda_ops.rs: 2^-7 of the value plus 2^-8 of the largest |v|
// archs: 80 90a 100a ptx
#include "kv_codes.cuh"

// Scales of codes.
struct Scales {
    const float *k, *v;
};

template <Kv KV>
__device__ __forceinline__ float element(const void* blocks, u64 at) {
    if constexpr (KV == Kv::BF16) return to_f32(static_cast<const bf16*>(blocks)[at]);
    else return code_value<KV>(static_cast<const u8*>(blocks)[at]);
}

template <int MAX_D, bool ALIBI, Kv KV>
__device__ __forceinline__ void attend(bf16* out, const bf16* qkv, const void* k_blocks, const void* v_blocks,
                                       const u32* block_tables, const u32* token_tables, const u32* positions,
                                       const u32* slots, u32 q_stride, u32 max_blocks, u32 heads, u32 kv_heads, u32 dim,
                                       u32 log2_block, float scale, u32 window, u32 chunk, const float* sinks, float cap,
                                       const float* slopes, const Scales& scales) {
    const u32 t = blockIdx.x, head = blockIdx.y, lane = threadIdx.x;
    const u32 kv_head = head / (heads / kv_heads);
    float q[MAX_D / 32], sum[MAX_D / 32];
    pdl_launch();
    pdl_wait();
    const bf16* query = qkv + (u64)t * q_stride + head * dim;
#pragma unroll
    for (int j = 0; j < MAX_D / 32; ++j) {
        q[j] = j * 32 + lane < dim ? to_f32(query[j * 32 + lane]) * scale : 0.0f;
        sum[j] = 0.0f;
    }
    const u32* table = block_tables + (u64)token_tables[t] * max_blocks;
    float most = sinks ? sinks[head] : -INFINITY_F, mass = sinks ? 1.0f : 0.0f;
    const u32 end = slots[t] == 0xffffffffu ? 0 : positions[t] + 1;
    u32 begin = window != 0 && end > window ? end - window : 0;
    if (chunk != 0 && end > 0) begin = max(begin, (end - 1) / chunk * chunk);
    const float slope = ALIBI ? slopes[head] : 0.0f;
    for (u32 p = begin; p < end; ++p) {
        const u64 block = table[p >> log2_block];
        const u64 row = ((block * kv_heads + kv_head) << log2_block) + (p & ((1u << log2_block) - 1)), at = row * dim;
        float score = 0.0f;
#pragma unroll
        for (int j = 0; j < MAX_D / 32; ++j)
            if (j * 32 + lane < dim) score += q[j] * element<KV>(k_blocks, at + j * 32 + lane);
        score = warp_sum(score);
        if (KV != Kv::BF16) score *= scales.k[row];
        if (cap != 0.0f) score = cap * tanhf(score / cap);
        if (ALIBI) score += slope * (float)(i32)(p + 1 - end);
        const float next = fmaxf(most, score), old = __expf(most - next), weight = __expf(score - next);
        mass = mass * old + weight;
        const float part = KV == Kv::BF16 ? weight : weight * scales.v[row];
#pragma unroll
        for (int j = 0; j < MAX_D / 32; ++j)
            if (j * 32 + lane < dim) sum[j] = sum[j] * old + part * element<KV>(v_blocks, at + j * 32 + lane);
        most = next;
    }
    bf16* to = out + ((u64)t * heads + head) * dim;
#pragma unroll
    for (int j = 0; j < MAX_D / 32; ++j)
        if (j * 32 + lane < dim) to[j * 32 + lane] = to_bf16(end > 0 ? sum[j] / mass : 0.0f);
}

#define OPERANDS                                                                                                        \
    bf16 *out, const bf16 *qkv, const void *k_blocks, const void *v_blocks, const u32 *block_tables,                    \
        const u32 *token_tables, const u32 *positions, const u32 *slots, u32 q_stride, u32 max_blocks, u32 heads,       \
        u32 kv_heads, u32 dim, u32 log2_block, float scale, u32 window, u32 chunk, const float *sinks, const Scales scales
#define PASSED                                                                                                          \
    out, qkv, k_blocks, v_blocks, block_tables, token_tables, positions, slots, q_stride, max_blocks, heads, kv_heads,  \
        dim, log2_block, scale, window, chunk, sinks

#define PAGED_ATTENTION(NAME, KV)                                                                                       \
    extern "C" __global__ void __launch_bounds__(32) paged_attention_##NAME(OPERANDS) {                                 \
        if (dim <= 256) return attend<256, false, KV>(PASSED, 0.0f, nullptr, scales);                                   \
        attend<512, false, KV>(PASSED, 0.0f, nullptr, scales);                                                          \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32) alibi_paged_attention_##NAME(OPERANDS, const float* slopes) {      \
        if (dim <= 256) return attend<256, true, KV>(PASSED, 0.0f, slopes, scales);                                     \
        attend<512, true, KV>(PASSED, 0.0f, slopes, scales);                                                            \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32) capped_paged_attention_##NAME(OPERANDS, float cap) {               \
        if (dim <= 256) return attend<256, false, KV>(PASSED, cap, nullptr, scales);                                    \
        attend<512, false, KV>(PASSED, cap, nullptr, scales);                                                           \
    }

PAGED_ATTENTION(bf16, Kv::BF16)
PAGED_ATTENTION(fp8, Kv::FP8)
PAGED_ATTENTION(int8, Kv::INT8)
