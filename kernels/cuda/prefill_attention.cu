// prefill_attention_bf16: o[t, h, :] = softmax(scale * q[t, h, :] . k[j, :]) v[j, :] over the positions j <= p of t's row
// alibi_prefill_attention_bf16: the same with slopes[h] * (j - p) added to the score of position j    (Press et al. 2022)
// capped_prefill_attention_bf16: the first with scores s that become cap * tanh(s / cap)
// archs: 80 90a 100a ptx
//
// q, o          [T, H, D] bf16; the queries of row r are row_starts[r] .. row_starts[r + 1], the last of its context_lens[r] positions
// k, v blocks   [block][K][B][D] bf16, one layer, including the queries' own keys; prefill_attention.cuh describes the
//               rest
// maths         scores, maxima and sums in fp32; probabilities rounded to bf16 for the product with v (Dao 2023)
// launch        grid (tiles of 128 queries, H, R), 8 warps of 16 queries; tiles with the most keys first. 64 keys and
//               values at a time pass through shared memory; the next ones are loaded while these are used
// needs         B % 16 == 0, a power of two; pointers 16-byte aligned; checked in prefill_attention.rs
// bound         arithmetic, 2 D operations per query, head and key attended to, twice
// test          tests/cuda_prefill_attention.rs, reference::attention in fp32, each element within 2^-7 of the largest |v|
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
        const u64 offset = blocks(valid ? first + row : first) + column;
        copy_async(k.at(row, column), a.k_blocks + offset, valid);
        copy_async(v.at(row, column), a.v_blocks + offset, valid);
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

template <int D, Scores SCORES>
__device__ __forceinline__ void prefill_attention(const PrefillAttention& a, const float* slopes, float cap) {
    extern __shared__ uint4 dynamic[];
    pdl_launch();
    pdl_wait();
    const u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    const QueryTile tile = query_tile(a, blockIdx.z, gridDim.x - 1 - blockIdx.x, QUERIES);
    if (tile.count == 0) return;
    const BlockRows blocks(a, tile.row, kv_head, D);
    const u32 base = (u32)__cvta_generic_to_shared(dynamic);
    const Rows<D> q{base};
    auto k = [&](u32 stage) { return Rows<D>{base + Rows<D>::bytes(QUERIES + 2 * stage * KEYS)}; };
    auto v = [&](u32 stage) { return Rows<D>{base + Rows<D>::bytes(QUERIES + (2 * stage + 1) * KEYS)}; };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = a.scale * LOG2E, slope = SCORES == Scores::ALIBI ? slopes[head] * LOG2E : 0.0f;
    const float limit = cap * LOG2E, inverse_limit = 1.0f / limit;

    const u32 begin = tile.begin / KEYS * KEYS;
    load_queries<D>(q, a, tile, head);
    load_keys<D>(k(0), v(0), a, blocks, begin, tile.end);
    copy_async_commit();
    Attention<D> state;
    if (a.sinks) state.begin_with(a.sinks[head] * LOG2E);
    u32 stage = 0;
    for (u32 first = begin; first < tile.end; first += KEYS, stage ^= 1) {
        if (first + KEYS < tile.end) load_keys<D>(k(stage ^ 1), v(stage ^ 1), a, blocks, first + KEYS, tile.end);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[KEYS / 8][4] = {};
        state.scores(s, q, k(stage), warp, lane);
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
        state.accumulate(s, v(stage), lane);
        __syncthreads();
    }
    bf16* out = a.out + ((u64)tile.token * a.heads + head) * D;
    state.store(out, (u64)a.heads * D, warp * 16, tile.count, lane);
}

#define PREFILL_ATTENTION(D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) prefill_attention_bf16_d##D(const PrefillAttention a) {   \
        prefill_attention<D, Scores::PLAIN>(a, nullptr, 0.0f);                                                         \
    }

#define ALIBI_PREFILL_ATTENTION(D)                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                           \
        alibi_prefill_attention_bf16_d##D(const PrefillAttention a, const float* slopes) {                             \
        prefill_attention<D, Scores::ALIBI>(a, slopes, 0.0f);                                                          \
    }

#define CAPPED_PREFILL_ATTENTION(D)                                                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                           \
        capped_prefill_attention_bf16_d##D(const PrefillAttention a, float cap) {                                      \
        prefill_attention<D, Scores::CAPPED>(a, nullptr, cap);                                                         \
    }

PREFILL_ATTENTION(64)
PREFILL_ATTENTION(96)
PREFILL_ATTENTION(128)
PREFILL_ATTENTION(256)
ALIBI_PREFILL_ATTENTION(64)
ALIBI_PREFILL_ATTENTION(96)
ALIBI_PREFILL_ATTENTION(128)
CAPPED_PREFILL_ATTENTION(128)
CAPPED_PREFILL_ATTENTION(256)
