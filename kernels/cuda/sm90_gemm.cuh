// Common parts of linear layers on Hopper: the ring that loads slices of K, and the epilogue of a tile's sums.
//
// y        epilogue STORE [M, N] bf16; STORE_F32 [M, N] f32; SILU, GELU [M, N / 2] bf16 = act(gate) * up
// gate/up  rows 16 b + i of w are gate row 8 b + i for i < 8 and up row 8 b + i - 8 for i >= 8
#pragma once
#include "sm90.cuh"
#include "activation.cuh"

constexpr i32 BK = 64;           // columns of a slice of K
constexpr i32 TILE = 64;         // rows of w in a tile
constexpr i32 PITCH = TILE + 4;  // floats in a row of partial sums; PITCH % 16 == 4 avoids bank conflicts of their stores

// Slices of W_ROWS rows of w and X_ROWS of x, which the copy engine fills in turn.
template <int W_ROWS, int X_ROWS>
struct Ring {
    static constexpr u32 W_BYTES = W_ROWS * BK * 2, X_BYTES = X_ROWS * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES;
    static_assert(W_BYTES % 1024 == 0 && X_BYTES % 1024 == 0, "swizzle atoms are 1024 bytes");
    u32 base, full, empty;  // shared addresses: stages, and barriers of 8 bytes each
    i32 stages;

    __device__ u32 w(i32 s) const { return base + s * STAGE_BYTES; }
    __device__ u32 x(i32 s) const { return base + s * STAGE_BYTES + W_BYTES; }
};

// One warpgroup: acc [64 rows of w, NT rows of x] += a slice of w times a slice of x, at shared addresses.
template <int NT>
__device__ __forceinline__ void multiply_slice(float* acc, u32 w_address, u32 x_address) {
    const u64 w = tile_descriptor(w_address), x = tile_descriptor(x_address);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; ++k) wgmma<NT>(acc, w + 2 * k, x + 2 * k);
    wgmma_commit();
    wgmma_wait<0>();
}

// Stores a warpgroup's sums as [NT][PITCH] f32.
template <int NT>
__device__ __forceinline__ void store_partial(float* partial, const float* acc) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
        float* p = partial + (8 * j + column) * PITCH + row;
        p[0] = acc[4 * j];
        p[PITCH] = acc[4 * j + 1];
        p[8] = acc[4 * j + 2];
        p[PITCH + 8] = acc[4 * j + 3];
    }
}

__device__ __forceinline__ void add(float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Sums of a tile over the groups of each of the cluster's blocks, and then over the blocks. A block stores its own as [GROUPS][MT][PITCH] f32; a row
// of them belongs to a row of x, and MT rows fit.
template <int MT, int GROUPS>
struct Reducer {
    u32 partial;  // shared address; it is the same in the other blocks
    i32 parts;

    __device__ float4 sum(int m, int r) const {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        const u32 offset = (u32)(m * PITCH + r) * 4;
        for (int p = 0; p < parts; ++p) {
            const u32 there = cluster_map(partial + offset, p);
            float4 part = cluster_load(there);
#pragma unroll
            for (int g = 1; g < GROUPS; ++g) add(part, cluster_load(there + g * MT * PITCH * 4));
            add(total, part);
        }
        return total;
    }
};

enum Epilogue : i32 { STORE = 0, STORE_F32 = 1, SILU = 2, GELU = 3 };

struct Output {
    void* y;
    const bf16* bias;  // [N] or null
    i32 m, n;
    i32 epilogue;
    i32 pitch;  // of y, for STORE and STORE_F32
};

__device__ __forceinline__ void add_bias(float4& v, const bf16* bias, int n) {
    if (!bias) return;
    const uint2 b = *reinterpret_cast<const uint2*>(bias + n);
    v.x += unpack_lo(b.x), v.y += unpack_hi(b.x), v.z += unpack_lo(b.y), v.w += unpack_hi(b.y);
}

__device__ __forceinline__ uint2 pack4(const float4& v) {
    return make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
}

// Rows first .. first + count of the tile whose row 0 is n0, by the block's first `threads` threads.
template <class Parts>
__device__ __forceinline__ void store_tile(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count, int threads) {
    const int quads = count / 4;
    for (int i = threadIdx.x; i < out.m * quads; i += threads) {
        const int m = i / quads, r = first + i % quads * 4, n = n0 + r;
        if (n >= out.n) continue;
        float4 v = parts.sum(m, r);
        add_bias(v, out.bias, n);
        if (out.epilogue == STORE) {
            *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * out.pitch + n) = pack4(v);
        } else {
            *reinterpret_cast<float4*>((float*)out.y + (i64)m * out.pitch + n) = v;
        }
    }
}

// The same for gate/up: eight gate rows followed by their up rows become eight columns of y.
template <class Parts>
__device__ __forceinline__ void store_gated(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count, int threads) {
    const int quads = count / 8;
    for (int i = threadIdx.x; i < out.m * quads; i += threads) {
        const int m = i / quads, q = i % quads, r = first + q / 2 * 16 + q % 2 * 4, n = n0 + r;
        if (n >= out.n) continue;
        float4 gate = parts.sum(m, r), up = parts.sum(m, r + 8);
        add_bias(gate, out.bias, n);
        add_bias(up, out.bias, n + 8);
        const float4 v = out.epilogue == SILU ? gated<silu>(gate, up) : gated<gelu_tanh>(gate, up);
        const int column = n / 16 * 8 + n % 16;
        *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * (out.n / 2) + column) = pack4(v);
    }
}

// Either of both, as the epilogue says.
template <class Parts>
__device__ __forceinline__ void store_rows(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count, int threads) {
    if (out.epilogue < SILU) {
        store_tile(parts, out, n0, first, count, threads);
    } else {
        store_gated(parts, out, n0, first, count, threads);
    }
}
