// latent_attention_bf16: rows[t, h, :L] = sum over j <= p of w[j] c[j, :L],  w = softmax_j(scale * rows[t, h, :] . c[j, :])
// latent_combine_bf16:   adds the splits of rows that were divided                                  (MLA: DeepSeek-V2, 2024)
//
// rows          [T, H, L + 64] bf16: queries as latent_product.cu makes them; the first L, 256 or 512, elements become the result
// cache         [blocks, B, L + 64] bf16, one layer: c of each position, the same for all heads
// block_tables  [R, max_blocks] u32; context_lens [R] u32
// row_starts    [R + 1] u32: the tokens of row r are the last row_starts[r + 1] - row_starts[r] positions of it; those of
//               them in first .. first + count are in `rows`. Null: row r has one token, token r of `rows`, and a row without
//               positions, which is padding, gets zeros
// partial       [R][tiles][splits][M][L] f32, stats [R][tiles][splits][M] (maximum, denominator), if there are splits
// maths         scores, maxima and sums in fp32; probabilities rounded to bf16 for the product with c (Dao 2023)
// launch        grid (splits, tiles, R): the queries of a row, heads within tokens, form tiles of M; with the last keys first.
//               M = 16: 4 warps, two blocks on a multiprocessor; a warp has the scores of 8 of 32 positions at a time, with
//               the queries in registers. M = 64: 8 warps, one block; a warp has the scores of 16 queries by 32 of 64
//               positions. Each warp adds L / warps elements of the result for all queries. Positions pass through shared
//               memory, and are used twice: for scores and for sums. latent_combine: grid (M, tiles, R), L / 4 threads
// needs         B a power of two, 16 or more; at most 128 splits; pointers 16-byte aligned: checked in latent_attention.rs
// bound         few heads: memory, 2 L + 128 bytes for each position, 64 K positions of 512 16.9 us at 4.47 TB/s; many:
//               arithmetic, 4 L + 128 operations for each query, head and position
// test          tests/cuda_latent.rs, reference::attention_with
// archs: 80 90a 100a ptx
#include "latent_attention.cuh"

template <int RANK>
constexpr u32 ROW_BYTES = 2 * WIDTH<RANK>;

// Rows in shared memory. Pieces of 16 bytes are permuted within 128 bytes, so that eight rows are in different banks.
template <int RANK>
struct Rows {
    u32 base;

    __device__ u32 at(u32 row, u32 column) const { return base + row * ROW_BYTES<RANK> + ((2 * column) ^ ((row % 8) * 16)); }
};

// Scores of this warp's queries for NW positions from n0 on; thread has queries g and g + 8, positions 2t and 2t + 1 of each 8.
template <int RANK, int M, int NW>
struct Queries;

template <int RANK, int NW>
struct Queries<RANK, 16, NW> {
    static_assert(NW == 8, "a warp has eight positions");
    u32 q[WIDTH<RANK> / 16][4];

    __device__ void load(const bf16* rows, u32 count) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const bf16* low = rows + (u64)min(g, count - 1) * WIDTH<RANK> + 2 * t;
        const bf16* high = rows + (u64)min(g + 8, count - 1) * WIDTH<RANK> + 2 * t;
#pragma unroll
        for (int k = 0; k < WIDTH<RANK> / 16; ++k) {
            q[k][0] = *reinterpret_cast<const u32*>(low + 16 * k), q[k][1] = *reinterpret_cast<const u32*>(high + 16 * k);
            q[k][2] = *reinterpret_cast<const u32*>(low + 16 * k + 8), q[k][3] = *reinterpret_cast<const u32*>(high + 16 * k + 8);
        }
    }

    __device__ void scores(float (&s)[1][4], const Rows<RANK>& tile, int n0) const {
        const u32 lane = threadIdx.x % 32;
        float part[4][4] = {};  // so that few products wait for each other
#pragma unroll
        for (int k = 0; k < WIDTH<RANK> / 32; ++k) {
            u32 b[4];
            load_matrices(b, tile.at(n0 + lane % 8, 32 * k + lane / 8 * 8));
            const u32(&low)[4] = q[2 * k];
            const u32(&high)[4] = q[2 * k + 1];
            mma_16x8x16(part[2 * k % 4], low[0], low[1], low[2], low[3], b[0], b[1]);
            mma_16x8x16(part[2 * k % 4 + 1], high[0], high[1], high[2], high[3], b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][e] = (part[0][e] + part[1][e]) + (part[2][e] + part[3][e]);
    }
};

template <int RANK, int NW>
struct Queries<RANK, 64, NW> {
    Rows<RANK> q;

    __device__ void scores(float (&s)[NW / 8][4], const Rows<RANK>& tile, int n0, int m0) const {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < NW / 8; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll 12
        for (int k = 0; k < WIDTH<RANK>; k += 16) {
            u32 a[4];
            load_matrices(a, q.at(m0 + lane % 16, k + lane / 16 * 8));
#pragma unroll
            for (int j = 0; j < NW / 16; ++j) {
                u32 b[4];
                load_matrices(b, tile.at(n0 + 16 * j + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
                mma_16x8x16(s[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16x8x16(s[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
};

template <int RANK, int M, int N, int WARPS>
__device__ __forceinline__ void latent_attention(const LatentAttention& a, u32 stages) {
    extern __shared__ uint4 dynamic[];
    constexpr int WM = M / 16, WN = WARPS / WM, NW = N / WN;  // warps by queries and by positions; positions of a warp
    constexpr int COLUMNS = RANK / WARPS;                     // of the result that a warp adds
    constexpr u32 P_PITCH = 2 * N + 16;
    const Tile tile(a, blockIdx.z, gridDim.y - 1 - blockIdx.y, M);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m0 = warp / WN * 16, n0 = warp % WN * NW;
    pdl_launch();
    pdl_wait();
    if (tile.queries == 0) return;
    bf16* own = a.rows + tile.query * WIDTH<RANK>;
    if (tile.end == 0) return clear<RANK, WARPS * 32>(own, tile.queries);
    if (blockIdx.x >= tile.active) return;
    const u32 begin = blockIdx.x * tile.chunk, end = min(begin + tile.chunk, tile.end);
    const u32 base = (u32)__cvta_generic_to_shared(dynamic);
    const u32 ring = base + (M == 64 ? M * ROW_BYTES<RANK> : 0), p_base = ring + stages * N * ROW_BYTES<RANK>;
    float* maxima = reinterpret_cast<float*>(reinterpret_cast<u8*>(dynamic) + (p_base - base) + M * P_PITCH);  // [WN][M]
    float* corrections = maxima + WN * M;                                                                      // [M]

    const Positions<RANK> positions(a, tile.row, end);
    auto load = [&](u32 stage, u32 first) {
        load_rows<RANK, N, WARPS>(Rows<RANK>{ring + stage * N * ROW_BYTES<RANK>},
                            [&](u32 row, bool& valid) { return positions.row(first, row, valid); });
    };
    Queries<RANK, M, NW> queries;
    if constexpr (M == 16) {
        queries.load(own, tile.queries);
    } else {
        queries.q = Rows<RANK>{base};
        load_rows<RANK, M, WARPS>(queries.q, [&](u32 row, bool& valid) {
            valid = row < tile.queries;
            return own + (u64)(valid ? row : 0) * WIDTH<RANK>;
        });
    }
    u32 loaded = begin, to = 0;
    for (u32 i = 1; i < stages; ++i) {
        if (loaded < end) load(to, loaded);
        copy_async_commit();
        loaded += N, ++to;
    }

    const float scale = a.scale * LOG2E;
    u32 limit[2];  // the last position that queries g and g + 8 attend to here
#pragma unroll
    for (int r = 0; r < 2; ++r) limit[r] = min(tile.position_of(m0 + g + 8 * r), end - 1);
    float top[2] = {-INFINITY_F, -INFINITY_F}, denominator[2] = {0.0f, 0.0f};  // of this thread's positions only
    float sum[M / 16][COLUMNS / 8][4] = {};
    u32 stage = 0;
    for (u32 first = begin; first < end; first += N) {
        if (stages == 3) copy_async_wait<1>();
        else copy_async_wait<0>();
        __syncthreads();
        if (loaded < end) load(to, loaded);
        copy_async_commit();
        loaded += N, to = to + 1 == stages ? 0 : to + 1;
        const Rows<RANK> rows{ring + stage * N * ROW_BYTES<RANK>};
        stage = stage + 1 == stages ? 0 : stage + 1;

        float s[NW / 8][4];
        if constexpr (M == 16) queries.scores(s, rows, n0);
        else queries.scores(s, rows, n0, m0);
        float most[2] = {-INFINITY_F, -INFINITY_F};
#pragma unroll
        for (int j = 0; j < NW / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 key = first + n0 + 8 * j + 2 * t + e % 2;
                s[j][e] = key <= limit[e / 2] ? s[j][e] * scale : -INFINITY_F;
                most[e / 2] = fmaxf(most[e / 2], s[j][e]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(FULL_WARP, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(FULL_WARP, most[r], 2));
            if (t == 0) maxima[warp % WN * M + m0 + g + 8 * r] = most[r];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = m0 + g + 8 * r;
            float m = top[r];
#pragma unroll
            for (int w = 0; w < WN; ++w) m = fmaxf(m, maxima[w * M + query]);
            const float origin = m == -INFINITY_F ? 0.0f : m;  // no position attended to yet
            const float correction = exp2_fast(top[r] - origin);
            top[r] = m;
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < NW / 8; ++j) {
                const float low = exp2_fast(s[j][2 * r] - origin), high = exp2_fast(s[j][2 * r + 1] - origin);
                total += low + high;
                const u32 at = p_base + query * P_PITCH + 2 * (n0 + 8 * j + 2 * t);
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(pack_bf16x2(low, high)) : "memory");
            }
            denominator[r] = denominator[r] * correction + total;
            if (warp % WN == 0 && t == 0) corrections[query] = correction;
        }
        __syncthreads();
        bool is_kept = true;
        float factor[M / 16][2];
#pragma unroll
        for (int m = 0; m < M / 16; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                factor[m][r] = corrections[16 * m + g + 8 * r];
                is_kept &= factor[m][r] == 1.0f;
            }
        }
        if (!__all_sync(FULL_WARP, is_kept)) {
#pragma unroll
            for (int m = 0; m < M / 16; ++m) {
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; ++j) {
                    sum[m][j][0] *= factor[m][0], sum[m][j][1] *= factor[m][0];
                    sum[m][j][2] *= factor[m][1], sum[m][j][3] *= factor[m][1];
                }
            }
        }
#pragma unroll
        for (int k = 0; k < N; k += 16) {
            u32 p[M / 16][4];
#pragma unroll
            for (int m = 0; m < M / 16; ++m) {
                load_matrices(p[m], p_base + (16 * m + lane % 16) * P_PITCH + 2 * (k + lane / 16 * 8));
            }
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; ++j) {
                u32 b[4];
                load_matrices_transposed(b, rows.at(k + lane % 16, warp * COLUMNS + 16 * j + lane / 16 * 8));
#pragma unroll
                for (int m = 0; m < M / 16; ++m) {
                    mma_16x8x16(sum[m][2 * j], p[m][0], p[m][1], p[m][2], p[m][3], b[0], b[1]);
                    mma_16x8x16(sum[m][2 * j + 1], p[m][0], p[m][1], p[m][2], p[m][3], b[2], b[3]);
                }
            }
        }
    }

    // The denominators of all warps. The corrections have been read.
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        denominator[r] += __shfl_xor_sync(FULL_WARP, denominator[r], 1);
        denominator[r] += __shfl_xor_sync(FULL_WARP, denominator[r], 2);
        if (t == 0) maxima[warp % WN * M + m0 + g + 8 * r] = denominator[r];
        if (t == 0 && warp % WN == 0) corrections[m0 + g + 8 * r] = top[r];
    }
    __syncthreads();
    const bool is_whole = tile.active == 1;
    const u64 part = ((u64)(tile.row * gridDim.y + (gridDim.y - 1 - blockIdx.y)) * a.splits + blockIdx.x) * M;
#pragma unroll
    for (int m = 0; m < M / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 query = 16 * m + g + 8 * r;
            if (query >= tile.queries) continue;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WN; ++w) total += maxima[w * M + query];
            const float inverse = 1.0f / total;
            const u32 column = warp * COLUMNS + 2 * t;
            if (!is_whole && warp == 0 && t == 0) a.stats[part + query] = make_float2(corrections[query], total);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                const float low = sum[m][j][2 * r], high = sum[m][j][2 * r + 1];
                if (is_whole) {
                    *reinterpret_cast<u32*>(own + (u64)query * WIDTH<RANK> + column + 8 * j) = pack_bf16x2(low * inverse, high * inverse);
                } else {
                    *reinterpret_cast<float2*>(a.partial + (part + query) * RANK + column + 8 * j) = make_float2(low, high);
                }
            }
        }
    }
}

template <int RANK>
__device__ __forceinline__ void latent_combine(const LatentAttention& a) {
    __shared__ float weights[MAX_SPLITS];
    const u32 query = blockIdx.x, lane = threadIdx.x % 32;
    const Tile tile(a, blockIdx.z, blockIdx.y, gridDim.x);
    pdl_launch();
    pdl_wait();
    if (query >= tile.queries || tile.active <= 1) return;
    const u64 part = (u64)(tile.row * gridDim.y + blockIdx.y) * a.splits * gridDim.x + query;
    if (threadIdx.x < 32) {
        float top = -INFINITY_F, denominator = 0.0f;
        for (u32 s = lane; s < tile.active; s += 32) top = fmaxf(top, a.stats[part + (u64)s * gridDim.x].x);
        top = warp_max(top);
        for (u32 s = lane; s < tile.active; s += 32) {
            const float2 x = a.stats[part + (u64)s * gridDim.x];
            const float weight = exp2_fast(x.x - top);
            weights[s] = weight;
            denominator += weight * x.y;
        }
        denominator = warp_sum(denominator);
        for (u32 s = lane; s < tile.active; s += 32) weights[s] /= denominator;
    }
    __syncthreads();
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (u32 s = 0; s < tile.active; ++s) {
        const float weight = weights[s];
        const float4 x = *reinterpret_cast<const float4*>(a.partial + (part + (u64)s * gridDim.x) * RANK + 4 * threadIdx.x);
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
    }
    *reinterpret_cast<uint2*>(a.rows + (tile.query + query) * WIDTH<RANK> + 4 * threadIdx.x) =
        make_uint2(pack_bf16x2(sum.x, sum.y), pack_bf16x2(sum.z, sum.w));
}

#define LATENT_ATTENTION(L)                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, 2) latent_attention_bf16_l##L##_m16(const LatentAttention a, u32 stages) { \
        latent_attention<L, 16, 32, 4>(a, stages);                                                                      \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1) latent_attention_bf16_l##L##_m64(const LatentAttention a, u32 stages) { \
        latent_attention<L, 64, 64, 8>(a, stages);                                                                      \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(L / 4) latent_combine_bf16_l##L(const LatentAttention a) { latent_combine<L>(a); }

LATENT_ATTENTION(256)
LATENT_ATTENTION(512)
