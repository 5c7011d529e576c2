// What linear layers share on Hopper: the ring that brings slices of K, and what becomes of a tile once its parts lie in the shared
// memory of a cluster.
//
// y        epilogue STORE [M, N] bf16; STORE_F32 [M, N] f32; SILU, GELU [M, N / 2] bf16 = act(gate) * up
// gate/up  rows 16 b + i of w are gate row 8 b + i for i < 8 and up row 8 b + i - 8 for i >= 8
#pragma once
#include "sm90.cuh"
#include "activation.cuh"
#include "peers.cuh"

constexpr i32 BK = 64;  // columns of a slice of K

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

// Keeps the ring full with slices first .. first + count of K, of rows n0 .. of w and of all rows of x. Weights stream while the
// kernel before this one runs.
template <class R>
__device__ __forceinline__ void produce(const R& ring, const TensorMap* w_map, const TensorMap* x_map, i32 n0, i32 first,
                                        i32 count) {
    const i32 early = min(count, ring.stages);
    for (i32 i = 0; i < early; ++i) {
        barrier_arrive_expect(ring.full + 8 * i, R::STAGE_BYTES);
        tensor_load(ring.w(i), w_map, (first + i) * BK, n0, ring.full + 8 * i, EVICT_FIRST);
    }
    pdl_wait();
    for (i32 i = 0; i < early; ++i) tensor_load(ring.x(i), x_map, (first + i) * BK, 0, ring.full + 8 * i, EVICT_LAST);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        barrier_arrive_expect(ring.full + 8 * s, R::STAGE_BYTES);
        tensor_load(ring.w(s), w_map, (first + i) * BK, n0, ring.full + 8 * s, EVICT_FIRST);
        tensor_load(ring.x(s), x_map, (first + i) * BK, 0, ring.full + 8 * s, EVICT_LAST);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

enum Epilogue : i32 { STORE = 0, STORE_F32 = 1, SILU = 2, GELU = 3 };

struct Output {
    void* y;
    const bf16* bias;  // [N] or null
    i32 m, n;
    i32 epilogue;
};

struct Norm {
    const float* squares_in;  // [M, slices_in], or null: x is as it should be
    bf16* residual;           // [M, N], with peers
    const bf16* gain;         // [N], with peers
    float* squares_out;       // [M, slices_out], with peers
    i32 slices_in, slices_out;
    float inverse_cols, eps;
};

// Sums of a tile over the cluster's blocks and their groups. A block leaves its own as [GROUPS][MT][pitch] f32, where a row is one of
// x and MT of them fit.
template <int MT, int GROUPS, bool NORM>
struct Reducer {
    u32 partial;  // shared address; the other blocks' lie at the same place
    i32 parts, pitch;
    const float* scales;  // [MT] of rows, with norm

    __device__ float4 sum(int m, int r) const {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        const u32 offset = (u32)(m * pitch + r) * 4;
        for (int p = 0; p < parts; ++p) {
            const u32 there = cluster_map(partial + offset, p);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const float4 v = cluster_load(there + g * MT * pitch * 4);
                total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
        }
        if (NORM) {
            const float scale = scales[m];
            total.x *= scale, total.y *= scale, total.z *= scale, total.w *= scale;
        }
        return total;
    }
};

__device__ __forceinline__ void add_bias(float4& v, const bf16* bias, int n) {
    if (!bias) return;
    const uint2 b = *reinterpret_cast<const uint2*>(bias + n);
    v.x += unpack_lo(b.x), v.y += unpack_hi(b.x), v.z += unpack_lo(b.y), v.w += unpack_hi(b.y);
}

__device__ __forceinline__ uint2 pack4(const float4& v) {
    return make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
}

// Rows first .. first + count of the tile whose row 0 is n0; all threads of the block take part.
template <class Parts>
__device__ __forceinline__ void store_tile(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count) {
    const int quads = count / 4;
    for (int i = threadIdx.x; i < out.m * quads; i += blockDim.x) {
        const int m = i / quads, r = first + i % quads * 4, n = n0 + r;
        if (n >= out.n) continue;
        float4 v = parts.sum(m, r);
        add_bias(v, out.bias, n);
        if (out.epilogue == STORE) {
            *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * out.n + n) = pack4(v);
        } else {
            *reinterpret_cast<float4*>((float*)out.y + (i64)m * out.n + n) = v;
        }
    }
}

// The same for gate/up: eight gate rows, then their up rows, become eight columns of y.
template <class Parts>
__device__ __forceinline__ void store_gated(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count) {
    const int quads = count / 8;
    for (int i = threadIdx.x; i < out.m * quads; i += blockDim.x) {
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

// Four columns of a row onto the residual; gives the sum of the results' squares.
__device__ __forceinline__ float add_to_residual(const Output& out, const Norm& norm, i32 m, i32 n, float4 v) {
    uint2* residual = reinterpret_cast<uint2*>(norm.residual + (i64)m * out.n + n);
    const uint2 old = *residual, gain = *reinterpret_cast<const uint2*>(norm.gain + n);
    v.x += unpack_lo(old.x), v.y += unpack_hi(old.x), v.z += unpack_lo(old.y), v.w += unpack_hi(old.y);
    *residual = pack4(v);
    const float squares = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    v.x *= unpack_lo(gain.x), v.y *= unpack_hi(gain.x), v.z *= unpack_lo(gain.y), v.w *= unpack_hi(gain.y);
    *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * out.n + n) = pack4(v);
    return squares;
}

// Items of a tile, four columns of a row each, and how a block's threads share them: rows lie side by side in a warp, whose threads
// all take part in every round.
struct Quads {
    int quads, m, r, n;

    __device__ Quads(int item, i32 n0, i32 first, i32 count)
        : quads(count / 4), m(item / quads), r(first + item % quads * 4), n(n0 + r) {}

    __device__ bool is_inside(const Output& out) const { return m < out.m && n < out.n; }

    __device__ void store_squares(const Output& out, const Norm& norm, float squares, i32 slice) const {
        for (int d = quads / 2; d > 0; d /= 2) squares += __shfl_xor_sync(FULL_WARP, squares, d);
        if (threadIdx.x % quads == 0 && m < out.m) norm.squares_out[(i64)m * norm.slices_out + slice] = squares;
    }
};

// Rows first .. first + count of the tile and the other ranks' parts of it onto the residual; `slice` is this block's place in the
// sums of squares. All parts are sent before any is awaited.
template <int ITEMS, class Parts>
__device__ __forceinline__ void store_peer_norm(const Parts& parts, const Output& out, const Norm& norm, const AllReduce& peers,
                                                i32 n0, i32 first, i32 count, i32 slice) {
    const int lane = threadIdx.x % 32, begin = threadIdx.x - lane, end = out.m * count / 4;
    const i32 columns = (n0 + first) / 16;
    const u32 epoch = n0 + first < out.n ? peers.epochs[columns] + 1 : 0;
    uint2 own[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const Quads at(begin + j * blockDim.x + lane, n0, first, count);
        if (!at.is_inside(out)) continue;
        float4 v = parts.sum(at.m, at.r);
        add_bias(v, out.bias, at.n);
        own[j] = pack4(v);
        for (u32 i = 1; i < peers.ranks; ++i) {
            const u32 r = (peers.rank + i) % peers.ranks;
            send_half(peers.row(r, epoch & 1, peers.rank, at.m) + (u64)at.n * 4, own[j], epoch);
        }
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (begin + j * blockDim.x >= end) break;
        const Quads at(begin + j * blockDim.x + lane, n0, first, count);
        float squares = 0.0f;
        if (at.is_inside(out)) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
            for (u32 r = 0; r < peers.ranks; ++r) {
                const u8* from = peers.row(peers.rank, epoch & 1, r, at.m) + (u64)at.n * 4;
                const uint2 x = r == peers.rank ? own[j] : receive_half(peers, from, epoch, r);
                v.x += unpack_lo(x.x), v.y += unpack_hi(x.x), v.z += unpack_lo(x.y), v.w += unpack_hi(x.y);
            }
            squares = add_to_residual(out, norm, at.m, at.n, v);
        }
        at.store_squares(out, norm, squares, slice);
    }
    __syncthreads();  // all threads have read the epoch
    const i32 c = threadIdx.x;
    if (c < count / 16 && (columns + c) * 16 < out.n) peers.epochs[columns + c] = epoch;
}
