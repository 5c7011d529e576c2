// rope_cache_bf16: rotates q and k of qkv by position; writes k and v to the KV blocks, q stays in qkv   (Su et al.
//                                                                                                        2021)
// rope_cache_fp8, rope_cache_int8: the same, and k and v are written as codes with scales (kv_codes.rs)
//
// qkv           [T, (H + 2K) D] bf16; q is overwritten, k and v are read
// k_blocks,
// v_blocks      [blocks, K, B, D] bf16, one layer
// k_codes,
// v_codes       [blocks, K, B, D] codes; k_scales, v_scales [blocks, K, B] f32
// cos, sin      [max_positions, D / 2] f32; halves are paired: (i, i + D / 2)
// positions     [T] u32
// slots         [T] u32: block * B + offset; with u32::MAX no k and v are written
// queries       q is multiplied, behind the rotation, by 1 + beta ln(1 + floor((position + offset) / period)), not if beta is 0, and by
//               gains [D] f32, of each head, or null
// maths         fp32, one rounding on store
// launch        grid (T, ceil(units / 128)), block 128; a unit is 8 dimensions of each half of a q or k head, or of a v head;
//               for codes, the units of a head are padded to a power of two, so that a warp has whole heads
// needs         D % 16 == 0, pointers 16-byte aligned, B a power of two: checked in rope_cache.rs before launch
// bound         memory, about 4 T (H + 2K) D bytes
// test          tests/cuda_ops.rs; codes: tests/cuda_kv_codes.rs, the bytes of kv_codes.rs; each element within one bf16 ulp of fp32
// archs: 80 90a 100a ptx
#include "kv_codes.cuh"
#include "query_scale.cuh"
#include "rope.cuh"

struct Queries {
    const float* gains;
    QueryScale scale;

    __device__ bool are_scaled() const { return gains || scale.beta != 0.0f; }
};

// Scales the rotation, or makes a rotation that only scales.
__device__ __forceinline__ void scale_angles(Angles& angles, bool rotates, const Queries& queries, u32 position) {
    const float factor = queries.scale.at(position);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        angles.c[j] = rotates ? angles.c[j] * factor : factor;
        angles.s[j] = rotates ? angles.s[j] * factor : 0.0f;
    }
}

__device__ __forceinline__ void multiply(Angles& angles, const float* gains) {
    float gain[8];
    load_floats8(gain, gains);
#pragma unroll
    for (int j = 0; j < 8; ++j) angles.c[j] *= gain[j], angles.s[j] *= gain[j];
}

// Eight pairs; the elements of `lo` and of `hi` are multiplied by gains of their own, before they are rounded.
__device__ __forceinline__ void rotate8_by_gains(uint4& lo, uint4& hi, const Angles& angles, const float* lo_gains, const float* hi_gains) {
    Angles of_lo = angles, of_hi = angles;
    multiply(of_lo, lo_gains);
    multiply(of_hi, hi_gains);
    uint4 lo_before = lo, hi_before = hi;
    rotate8(lo, hi_before, of_lo);
    rotate8(lo_before, hi, of_hi);
}

extern "C" __global__ void __launch_bounds__(128)
rope_cache_bf16(bf16* qkv, bf16* k_blocks, bf16* v_blocks, const float* cos, const float* sin, const u32* positions,
                const u32* slots, u32 heads, u32 kv_heads, u32 dim, u32 log2_block, const Queries queries) {
    const u32 t = blockIdx.x, unit = blockIdx.y * blockDim.x + threadIdx.x;
    const u32 half = dim / 2, units_per_head = half / 8;
    const u32 head = unit / units_per_head, i = unit % units_per_head * 8;
    pdl_launch();
    // The step's inputs and the table are written before the first kernel of the step, so no wait is needed for them.
    const u32 slot = slots[t];
    const bool rotates = cos != nullptr && head < heads + kv_heads, scales = queries.are_scaled() && head < heads;
    Angles angles;
    if (rotates) {
        const u64 at = (u64)positions[t] * half + i;
        angles = load_angles(cos + at, sin + at);
    }
    if (scales) scale_angles(angles, rotates, queries, positions[t]);
    pdl_wait();
    if (head >= heads + 2 * kv_heads) return;
    bf16* x = qkv + ((u64)t * (heads + 2 * kv_heads) + head) * dim;
    uint4 lo = *reinterpret_cast<const uint4*>(x + i), hi = *reinterpret_cast<const uint4*>(x + half + i);
    if (scales && queries.gains) rotate8_by_gains(lo, hi, angles, queries.gains + i, queries.gains + half + i);
    else if (rotates || scales) rotate8(lo, hi, angles);
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

__device__ __forceinline__ float size_of(u32 pair) { return larger(fabsf(unpack_lo(pair)), fabsf(unpack_hi(pair))); }

__device__ __forceinline__ float size_of(const uint4& x) {
    return larger(larger(size_of(x.x), size_of(x.y)), larger(size_of(x.z), size_of(x.w)));
}

struct CodedCache {
    u8 *k_codes, *v_codes;
    float *k_scales, *v_scales;
};

template <Kv KV>
__device__ __forceinline__ void rope_cache_codes(bf16* qkv, const CodedCache& cache, const float* cos, const float* sin,
                                                 const u32* positions, const u32* slots, u32 heads, u32 kv_heads, u32 dim,
                                                 u32 log2_block, const Queries& queries, u32 log2_lanes) {
    const u32 t = blockIdx.x, unit = blockIdx.y * blockDim.x + threadIdx.x;
    const u32 half = dim / 2, head = unit >> log2_lanes, i = (unit & ((1u << log2_lanes) - 1)) * 8;
    const bool valid = i < half && head < heads + 2 * kv_heads;
    pdl_launch();
    const u32 slot = slots[t];
    const bool rotates = cos != nullptr && valid && head < heads + kv_heads, scales = queries.are_scaled() && valid && head < heads;
    Angles angles;
    if (rotates) {
        const u64 at = (u64)positions[t] * half + i;
        angles = load_angles(cos + at, sin + at);
    }
    if (scales) scale_angles(angles, rotates, queries, positions[t]);
    pdl_wait();
    uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
    bf16* x = qkv + ((u64)t * (heads + 2 * kv_heads) + head) * dim;
    if (valid) lo = *reinterpret_cast<const uint4*>(x + i), hi = *reinterpret_cast<const uint4*>(x + half + i);
    if (scales && queries.gains) rotate8_by_gains(lo, hi, angles, queries.gains + i, queries.gains + half + i);
    else if (rotates || scales) rotate8(lo, hi, angles);
    float size = larger(size_of(lo), size_of(hi));
    for (u32 d = 1u << log2_lanes >> 1; d > 0; d >>= 1) size = larger(size, __shfl_xor_sync(FULL_WARP, size, d));
    if (!valid) return;
    if (head < heads) {
        *reinterpret_cast<uint4*>(x + i) = lo;
        *reinterpret_cast<uint4*>(x + half + i) = hi;
        return;
    }
    if (slot == 0xffffffffu) return;
    const bool is_v = head >= heads + kv_heads;
    const u32 kv_head = head - heads - (is_v ? kv_heads : 0);
    const u64 block = slot >> log2_block, offset = slot & ((1u << log2_block) - 1);
    const u64 row = ((block * kv_heads + kv_head) << log2_block) + offset;
    const float own = scale_of<KV>(size), inverse = inverse_of(own);
    u8* to = (is_v ? cache.v_codes : cache.k_codes) + row * dim;
    *reinterpret_cast<uint2*>(to + i) = encode8<KV>(lo, inverse);
    *reinterpret_cast<uint2*>(to + half + i) = encode8<KV>(hi, inverse);
    if (i == 0) (is_v ? cache.v_scales : cache.k_scales)[row] = own;
}

#define ROPE_CACHE(NAME, KV)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        rope_cache_##NAME(bf16* qkv, const CodedCache cache, const float* cos, const float* sin, const u32* positions, \
                          const u32* slots, u32 heads, u32 kv_heads, u32 dim, u32 log2_block, const Queries queries,   \
                          u32 log2_lanes) {                                                                            \
        rope_cache_codes<KV>(qkv, cache, cos, sin, positions, slots, heads, kv_heads, dim, log2_block, queries,        \
                             log2_lanes);                                                                              \
    }

ROPE_CACHE(fp8, Kv::FP8)
ROPE_CACHE(int8, Kv::INT8)
