// Eight-bit keys and values (kernels/kv_codes.rs): codes [blocks, K, B, D], and a scale of each position, [blocks, K, B] f32.
#pragma once
#include "quantized.cuh"

// The type of the elements in KV blocks.
enum class Kv { BF16, FP8, INT8 };

template <Kv KV>
constexpr u32 ELEMENT_BYTES = KV == Kv::BF16 ? 2 : 1;

template <Kv KV>
constexpr float LARGEST_CODE = KV == Kv::FP8 ? 448.0f : 127.0f;

// The four codes of a word as bf16, which holds every code exactly: those of bytes 0 and 2 in `low`, of 1 and 3 in `high`.
template <Kv KV>
__device__ __forceinline__ void expand_codes(u32 word, u32& low, u32& high) {
    if constexpr (KV == Kv::FP8) {
        expand_e4m3(word, low, high);
    } else {
        expand_i8(word, low, high);
    }
}

template <Kv KV>
__device__ __forceinline__ float code_value(u8 code) {
    return KV == Kv::FP8 ? e4m3_value(code) : (float)(signed char)code;
}

// The scale of elements of at most this size; 0 where it would not be a normal number.
template <Kv KV>
__device__ __forceinline__ float scale_of(float size) {
    const float scale = __fdiv_rn(size, LARGEST_CODE<KV>);
    return scale < 0x1p-126f ? 0.0f : scale;
}

// Four bytes that an earlier kernel wrote and that are read only once.
__device__ __forceinline__ u32 load_once_4(const void* p) {
    u32 r;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}

// The larger number; NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// What elements are multiplied by before they are rounded.
__device__ __forceinline__ float inverse_of(float scale) { return scale > 0.0f ? __frcp_rn(scale) : 0.0f; }

// The nearest e4m3 code of a number of at most 448 in size, the even one of two.
__device__ __forceinline__ u32 e4m3_code(float value) {
    const float size = fabsf(value);
    const u32 bits = __float_as_uint(size);
    const u32 normal = min(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3), 0x7eu);
    const u32 code = size < 0.015625f ? (u32)__float2int_rn(size * 512.0f) : normal;
    return code | (__float_as_uint(value) >> 24 & 0x80);
}

template <Kv KV>
__device__ __forceinline__ u32 encode(float value) {
    const float bounded = fminf(fmaxf(value, -LARGEST_CODE<KV>), LARGEST_CODE<KV>);
    return KV == Kv::FP8 ? e4m3_code(bounded) : (u32)__float2int_rn(bounded) & 0xff;
}

// The codes of two bf16 numbers.
template <Kv KV>
__device__ __forceinline__ u32 encode2(u32 pair, float inverse) {
    return encode<KV>(unpack_lo(pair) * inverse) | encode<KV>(unpack_hi(pair) * inverse) << 8;
}

// The codes of eight bf16 numbers, in order.
template <Kv KV>
__device__ __forceinline__ uint2 encode8(const uint4& x, float inverse) {
    return make_uint2(encode2<KV>(x.x, inverse) | encode2<KV>(x.y, inverse) << 16,
                      encode2<KV>(x.z, inverse) | encode2<KV>(x.w, inverse) << 16);
}
