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
// slopes        [H] f32, for ALiBi                                                        (Press et al. 2022)
// maths         fp32, online softmax
// launch        grid (T, H), block 32
// needs         D <= 512
// bound         latency; used for shapes that the fast kernels do not support, and as their reference
// test          tests/cuda_ops.rs: 2^-7 of the value plus 2^-8 of the largest |v|
// archs: 80 90a 100a ptx
#include "common.cuh"

template <int MAX_D, bool ALIBI>
__device__ __forceinline__ void attend(bf16* out, const bf16* qkv, const bf16* k_blocks, const bf16* v_blocks,
                                       const u32* block_tables, const u32* token_tables, const u32* positions,
                                       const u32* slots, u32 q_stride, u32 max_blocks, u32 heads, u32 kv_heads, u32 dim,
                                       u32 log2_block, float scale, u32 window, u32 chunk, const float* sinks, float cap,
                                       const float* slopes) {
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
        const u64 at = (((block * kv_heads + kv_head) << log2_block) + (p & ((1u << log2_block) - 1))) * dim;
        float score = 0.0f;
#pragma unroll
        for (int j = 0; j < MAX_D / 32; ++j)
            if (j * 32 + lane < dim) score += q[j] * to_f32(k_blocks[at + j * 32 + lane]);
        score = warp_sum(score);
        if (cap != 0.0f) score = cap * tanhf(score / cap);
        if (ALIBI) score += slope * (float)(i32)(p + 1 - end);
        const float next = fmaxf(most, score), old = __expf(most - next), weight = __expf(score - next);
        mass = mass * old + weight;
#pragma unroll
        for (int j = 0; j < MAX_D / 32; ++j)
            if (j * 32 + lane < dim) sum[j] = sum[j] * old + weight * to_f32(v_blocks[at + j * 32 + lane]);
        most = next;
    }
    bf16* to = out + ((u64)t * heads + head) * dim;
#pragma unroll
    for (int j = 0; j < MAX_D / 32; ++j)
        if (j * 32 + lane < dim) to[j * 32 + lane] = to_bf16(end > 0 ? sum[j] / mass : 0.0f);
}

#define OPERANDS                                                                                                        \
    bf16 *out, const bf16 *qkv, const bf16 *k_blocks, const bf16 *v_blocks, const u32 *block_tables,                    \
        const u32 *token_tables, const u32 *positions, const u32 *slots, u32 q_stride, u32 max_blocks, u32 heads,       \
        u32 kv_heads, u32 dim, u32 log2_block, float scale, u32 window, u32 chunk, const float *sinks
#define PASSED                                                                                                          \
    out, qkv, k_blocks, v_blocks, block_tables, token_tables, positions, slots, q_stride, max_blocks, heads, kv_heads,  \
        dim, log2_block, scale, window, chunk, sinks

extern "C" __global__ void __launch_bounds__(32) paged_attention_bf16(OPERANDS) {
    if (dim <= 256) return attend<256, false>(PASSED, 0.0f, nullptr);
    attend<512, false>(PASSED, 0.0f, nullptr);
}

extern "C" __global__ void __launch_bounds__(32) alibi_paged_attention_bf16(OPERANDS, const float* slopes) {
    if (dim <= 256) return attend<256, true>(PASSED, 0.0f, slopes);
    attend<512, true>(PASSED, 0.0f, slopes);
}

extern "C" __global__ void __launch_bounds__(32) capped_paged_attention_bf16(OPERANDS, float cap) {
    if (dim <= 256) return attend<256, false>(PASSED, cap, nullptr);
    attend<512, false>(PASSED, cap, nullptr);
}
