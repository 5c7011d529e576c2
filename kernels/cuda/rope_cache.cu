// rope_cache_bf16: rotates q and k of qkv by position; writes k and v to the KV blocks, q stays in qkv   (Su et al.
//                                                                                                        2021)
//
// qkv           [T, (H + 2K) D] bf16; q is overwritten, k and v are read
// k_blocks,
// v_blocks      [blocks, K, B, D] bf16, one layer
// cos, sin      [max_positions, D / 2] f32; halves are paired: (i, i + D / 2)
// positions     [T] u32
// slots         [T] u32: block * B + offset; with u32::MAX no k and v are written
// scale         q is multiplied by 1 + beta ln(1 + floor((position + offset) / period)); not if beta is 0
// maths         fp32, one rounding on store
// launch        grid (T, ceil(units / 128)), block 128; a unit is 8 dimensions of each half of a q or k head, or of a v head
// needs         D % 16 == 0, pointers 16-byte aligned, B a power of two: checked in rope_cache.rs before launch
// bound         memory, about 4 T (H + 2K) D bytes
// test          tests/cuda_ops.rs, each element within one bf16 ulp of fp32
// archs: 80 90a 100a ptx
#include "rope.cuh"

struct QueryScale {
    float beta;
    u32 period, offset;
};

// Scales the rotation, or makes a rotation that only scales.
__device__ __forceinline__ void scale_angles(Angles& angles, bool rotates, const QueryScale& scale, u32 position) {
    const float factor = 1.0f + scale.beta * log1pf((float)((position + scale.offset) / scale.period));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        angles.c[j] = rotates ? angles.c[j] * factor : factor;
        angles.s[j] = rotates ? angles.s[j] * factor : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(128)
rope_cache_bf16(bf16* qkv, bf16* k_blocks, bf16* v_blocks, const float* cos, const float* sin, const u32* positions,
                const u32* slots, u32 heads, u32 kv_heads, u32 dim, u32 log2_block, const QueryScale scale) {
    const u32 t = blockIdx.x, unit = blockIdx.y * blockDim.x + threadIdx.x;
    const u32 half = dim / 2, units_per_head = half / 8;
    const u32 head = unit / units_per_head, i = unit % units_per_head * 8;
    pdl_launch();
    // The step's inputs and the table are written before the first kernel of the step, so no wait is needed for them.
    const u32 slot = slots[t];
    const bool rotates = cos != nullptr && head < heads + kv_heads, scales = scale.beta != 0.0f && head < heads;
    Angles angles;
    if (rotates) {
        const u64 at = (u64)positions[t] * half + i;
        angles = load_angles(cos + at, sin + at);
    }
    if (scales) scale_angles(angles, rotates, scale, positions[t]);
    pdl_wait();
    if (head >= heads + 2 * kv_heads) return;
    bf16* x = qkv + ((u64)t * (heads + 2 * kv_heads) + head) * dim;
    uint4 lo = *reinterpret_cast<const uint4*>(x + i), hi = *reinterpret_cast<const uint4*>(x + half + i);
    if (rotates || scales) rotate8(lo, hi, angles);
    bf16* to = x;
    if (head >= heads) {
        if (slot == 0xffffffffu) return;
        const bool is_v = head >= heads + kv_heads;
        const u32 kv_head = head - heads - (is_v ? kv_heads : 0);
        const u64 block = slot >> log2_block, offset = slot & ((1u << log2_block) - 1);
        to = (is_v ? v_blocks : k_blocks) + (((block * kv_heads + kv_head) << log2_block) + offset) * dim;
    }
    *reinterpret_cast<uint4*>(to + i) = lo;
    *reinterpret_cast<uint4*>(to + half + i) = hi;
}
