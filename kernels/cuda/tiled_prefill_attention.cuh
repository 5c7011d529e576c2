// Prefill attention with tiles of keys and values in shared memory: see prefill_attention.cu.
#pragma once
#include "kv_codes.cuh"
#include "mma.cuh"
#include "prefill_attention.cuh"

constexpr int WARPS = 8, QUERIES = WARPS * 16, KEYS = 64;

// A tile of rows in shared memory, with 16 bytes of padding per row so that eight rows are in different banks.
template <int D>
struct Rows {
    static constexpr u32 PITCH = 2 * D + 16;
    __device__ static constexpr u32 bytes(int rows) { return rows * PITCH; }
    u32 base;

    __device__ u32 at(int row, int column) const { return base + row * PITCH + column * 2; }
};

template <int D>
__device__ __forceinline__ void load_queries(const Rows<D>& rows, const PrefillAttention& a, const QueryTile& t, u32 head) {
    for (int i = threadIdx.x; i < QUERIES * (D / 8); i += WARPS * 32) {
        const u32 row = i / (D / 8), column = i % (D / 8) * 8;
        const bool valid = row < t.count;
        const u64 token = t.token + (valid ? row : 0);
        copy_async(rows.at(row, column), a.q + token * a.q_stride + head * D + column, valid);
    }
}

template <int D>
__device__ __forceinline__ void load_keys(const Rows<D>& k, const Rows<D>& v, const PrefillAttention& a, const BlockRows& blocks,
                                          u32 first, u32 end) {
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * (D / 8); i += WARPS * 32) {
        const u32 row = i / (D / 8), column = i % (D / 8) * 8;
        const bool valid = first + row < end;
        const u64 offset = blocks(valid ? first + row : first) * D + column;
        copy_async(k.at(row, column), static_cast<const bf16*>(a.k_blocks) + offset, valid);
        copy_async(v.at(row, column), static_cast<const bf16*>(a.v_blocks) + offset, valid);
    }
}

// Codes of keys and values in shared memory on their way to bf16, in two stages, and their scales.
template <int D>
struct Staged {
    static constexpr u32 PIECES = KEYS * (D / 16), STAGE = 2 * PIECES * 16;  // a piece has 16 codes; K, then V
    u8* memory;

    __device__ uint4* pieces(u32 stage, u32 of_v) const { return reinterpret_cast<uint4*>(memory + stage * STAGE) + of_v * PIECES; }
    __device__ float* scales(u32 stage, u32 of_v) const {
        return reinterpret_cast<float*>(memory + 2 * STAGE) + (2 * stage + of_v) * KEYS;
    }

    __device__ void load(u32 stage, const PrefillAttention& a, const BlockRows& blocks, u32 first, u32 end) const {
        const u32 to_k = address(pieces(stage, 0)), to_v = address(pieces(stage, 1));
#pragma unroll
        for (int i = threadIdx.x; i < PIECES; i += WARPS * 32) {
            const u32 key = first + i / (D / 16);
            const bool valid = key < end;
            const u64 offset = blocks(valid ? key : first) * D + i % (D / 16) * 16;
            copy_async(to_k + i * 16, static_cast<const u8*>(a.k_blocks) + offset, valid);
            copy_async(to_v + i * 16, static_cast<const u8*>(a.v_blocks) + offset, valid);
        }
        if (threadIdx.x < KEYS / 2) {  // four scales of K, or of V
            const u32 of_v = threadIdx.x / (KEYS / 4), four = threadIdx.x % (KEYS / 4) * 4;
            const bool valid = first + four < end;
            copy_async(address(scales(stage, of_v) + four), (of_v ? a.v_scales : a.k_scales) + blocks(valid ? first + four : first), valid);
        }
    }

    // A thread expands the codes that it loaded.
    template <Kv KV>
    __device__ void expand(u32 stage, const Rows<D>& k, const Rows<D>& v) const {
#pragma unroll
        for (int i = threadIdx.x; i < PIECES; i += WARPS * 32) {
            const u32 row = i / (D / 16), column = i % (D / 16) * 16;
            expand_piece<KV>(k.at(row, column), pieces(stage, 0)[i]);
            expand_piece<KV>(v.at(row, column), pieces(stage, 1)[i]);
        }
    }

    template <Kv KV>
    static __device__ void expand_piece(u32 to, const uint4& piece) {
        const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
        u32 out[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 low, high;
            expand_codes<KV>(words[i], low, high);
            out[2 * i] = __byte_perm(low, high, 0x5410), out[2 * i + 1] = __byte_perm(low, high, 0x7632);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + 16 * i), "r"(out[4 * i]), "r"(out[4 * i + 1]),
                         "r"(out[4 * i + 2]), "r"(out[4 * i + 3])
                         : "memory");
        }
    }

    static __device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
};

// Multiplies scores, or probabilities, by the scales of their keys. That of a probability of 0 may be unwritten.
__device__ __forceinline__ void multiply_by(float (&x)[KEYS / 8][4], const float* scales) {
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[j][e] = x[j][e] == 0.0f ? 0.0f : x[j][e] * (e % 2 ? scale.y : scale.x);
    }
}

// A warp's 16 queries: running softmax and sum; each thread has queries g and g + 8.
template <int D>
struct Attention {
    float top[2] = {-INFINITY_F, -INFINITY_F};
    float denominator[2] = {0.0f, 0.0f};  // of this thread's keys only
    float sum[D / 8][4] = {};

    // Takes part in the softmax with a sink, before any score.
    __device__ void begin_with(float sink) {
        top[0] = top[1] = sink;
        denominator[0] = denominator[1] = threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
    }

    // s[16 queries, 64 keys] = q k^T
    __device__ static void scores(float (&s)[KEYS / 8][4], const Rows<D>& q, const Rows<D>& k, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            u32 a[4];
            load_matrices(a, q.at(warp * 16 + lane % 16, i * 16 + lane / 16 * 8));
#pragma unroll
            for (int j = 0; j < KEYS / 16; ++j) {
                u32 b[4];
                load_matrices(b, k.at(j * 16 + lane / 16 * 8 + lane % 8, i * 16 + lane / 8 % 2 * 8));
                mma_16x8x16(s[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16x8x16(s[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }

    // Turns scaled scores into probabilities relative to the running maximum.
    __device__ void softmax(float (&s)[KEYS / 8][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = top[r];
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) m = fmaxf(m, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
            const float base = m == -INFINITY_F ? 0.0f : m;  // no key attended to yet
            const float correction = exp2_fast(top[r] - base);
            top[r] = m;
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
                s[j][2 * r] = exp2_fast(s[j][2 * r] - base);
                s[j][2 * r + 1] = exp2_fast(s[j][2 * r + 1] - base);
                total += s[j][2 * r] + s[j][2 * r + 1];
            }
            denominator[r] = denominator[r] * correction + total;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) sum[j][2 * r] *= correction, sum[j][2 * r + 1] *= correction;
        }
    }

    // sum[16 queries, D] += p v
    __device__ void accumulate(const float (&p)[KEYS / 8][4], const Rows<D>& v, int lane) {
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            const u32 a0 = pack_bf16x2(p[2 * i][0], p[2 * i][1]), a1 = pack_bf16x2(p[2 * i][2], p[2 * i][3]);
            const u32 a2 = pack_bf16x2(p[2 * i + 1][0], p[2 * i + 1][1]), a3 = pack_bf16x2(p[2 * i + 1][2], p[2 * i + 1][3]);
#pragma unroll
            for (int j = 0; j < D / 16; ++j) {
                u32 b[4];
                load_matrices_transposed(b, v.at(i * 16 + lane % 16, j * 16 + lane / 16 * 8));
                mma_16x8x16(sum[2 * j], a0, a1, a2, a3, b[0], b[1]);
                mma_16x8x16(sum[2 * j + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
    }

    __device__ void store(bf16* out, u64 row_elements, u32 first, u32 count, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float d = denominator[r];
            d += __shfl_xor_sync(FULL_WARP, d, 1);
            d += __shfl_xor_sync(FULL_WARP, d, 2);
            const u32 query = first + lane / 4 + 8 * r;
            if (query >= count) continue;
            const float inverse = 1.0f / d;
            u32* p = reinterpret_cast<u32*>(out + query * row_elements) + lane % 4;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) p[4 * j] = pack_bf16x2(sum[j][2 * r] * inverse, sum[j][2 * r + 1] * inverse);
        }
    }
};

template <int D, Kv KV, Scores SCORES>
__device__ __forceinline__ void prefill_attention(const PrefillAttention& a, const float* slopes, float cap) {
    extern __shared__ uint4 dynamic[];
    pdl_launch();
    pdl_wait();
    const u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    const QueryTile tile = query_tile(a, blockIdx.z, gridDim.x - 1 - blockIdx.x, QUERIES);
    if (tile.count == 0) return;
    const BlockRows blocks(a, tile.row, kv_head);
    const u32 base = (u32)__cvta_generic_to_shared(dynamic);
    const Rows<D> q{base};
    // Codes have stages of their own, and one of bf16.
    auto k = [&](u32 stage) { return Rows<D>{base + Rows<D>::bytes(QUERIES + (KV == Kv::BF16 ? 2 * stage * KEYS : 0))}; };
    auto v = [&](u32 stage) { return Rows<D>{k(stage).base + Rows<D>::bytes(KEYS)}; };
    const Staged<D> staged{reinterpret_cast<u8*>(dynamic) + Rows<D>::bytes(QUERIES + 2 * KEYS)};
    auto load = [&](u32 stage, u32 first) {
        if constexpr (KV == Kv::BF16) load_keys<D>(k(stage), v(stage), a, blocks, first, tile.end);
        else staged.load(stage, a, blocks, first, tile.end);
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = a.scale * LOG2E, slope = SCORES == Scores::ALIBI ? slopes[head] * LOG2E : 0.0f;
    const float limit = cap * LOG2E, inverse_limit = 1.0f / limit;

    const u32 begin = tile.begin / KEYS * KEYS;
    load_queries<D>(q, a, tile, head);
    load(0, begin);
    copy_async_commit();
    Attention<D> state;
    if (a.sinks) state.begin_with(a.sinks[head] * LOG2E);
    u32 stage = 0;
    for (u32 first = begin; first < tile.end; first += KEYS, stage ^= 1) {
        if (first + KEYS < tile.end) load(stage ^ 1, first + KEYS);
        copy_async_commit();
        copy_async_wait<1>();
        if constexpr (KV != Kv::BF16) staged.template expand<KV>(stage, k(stage), v(stage));
        __syncthreads();
        float s[KEYS / 8][4] = {};
        state.scores(s, q, k(stage), warp, lane);
        if constexpr (KV != Kv::BF16) multiply_by(s, staged.scales(stage, 0));
        const u32 position = tile.position + warp * 16 + lane / 4;
        const u32 seen_from[2] = {first_seen(a, position), first_seen(a, position + 8)};
        const bool whole = first + KEYS <= tile.position + warp * 16 + 1 && first >= first_seen(a, tile.position + warp * 16 + 15);
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 query = position + e / 2 * 8, key = first + 8 * j + lane % 4 * 2 + e % 2;
                const bool seen = whole || sees(query, seen_from[e / 2], key);
                float score = s[j][e] * scale;
                if (SCORES == Scores::ALIBI) score += slope * (float)(i32)(key - query);
                if (SCORES == Scores::CAPPED) score = limit * tanh_exp(score * inverse_limit);
                s[j][e] = seen ? score : -INFINITY_F;
            }
        }
        state.softmax(s);
        if constexpr (KV != Kv::BF16) multiply_by(s, staged.scales(stage, 1));
        state.accumulate(s, v(stage), lane);
        __syncthreads();
    }
    bf16* out = a.out + ((u64)tile.token * a.heads + head) * D;
    state.store(out, (u64)a.heads * D, warp * 16, tile.count, lane);
}
