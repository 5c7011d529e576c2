// decode_attention_bf16: o[r, h, :] = softmax(scale * q[r, h, :] . k[r, j, :]) v[r, j, :] over positions j of row r
// rope_decode_attention_bf16: the same, but first rotates q and k of the newest position and writes its k and v; without chunks
// alibi_decode_attention_bf16: the first with slopes[h] * (j - newest position) added to the score of position j  (Press et al. 2022)
// capped_decode_attention_bf16: the first with scores s that become cap * tanh(s / cap)
// shared_..., on Hopper: the others with fewer blocks than splits, so that rows are divided in one way whatever their number is
// archs: 80 90a 100a ptx
//
// q             [R, H, D] bf16, rows `q_stride` elements apart (the q part of qkv)
// k, v blocks   [block][K][B][D] bf16, one layer; query heads h G .. h G + G share KV head h, G = H / K
// block_tables  [R, max_blocks] u32; context_lens [R] u32, 0 marks a padding row, whose output is zero
// slopes        [H] f32
// sinks         [H] f32 or null: a logit of each head that takes part in the softmax and has no value
// o             [R, H, D] bf16
// workspace     partial sums [R][H][splits][D] f32, their maximum and denominator [R][H][splits][2] f32, and counters
//               [R][K * groups] u32, zero before the first launch and after each launch
// maths         scores and sums in fp32, probabilities rounded to bf16 for the product with v
// launch        grid (blocks, K * groups, R), 4 warps. A block computes one split of a row, or, with the prefix, every `blocks`-th. Up to 8 query heads of a KV head form a group, so K and V are
//               read once for all of them. A warp processes 16 positions at a time: K and V are loaded directly into
//               the registers of mma.sync, as K q^T and V^T p^T, and the next tile is loaded while this one is used.
//               The number of splits of a row depends on its length. The splits are added in order: through shared
//               memory if they are in one cluster (of blocks adjacent in x), otherwise by the block that finishes last.
//               With rotation, a block rotates its own q. The block with the newest position takes its k and v from
//               qkv and writes them; if several groups share a KV head, each writes the same bits. All other positions
//               belong to earlier steps, so the first of them are read before the previous kernel has ended.
// needs         B % 16 == 0, a power of two; pointers 16-byte aligned; checked in decode_attention.rs
// bound         memory, 4 K D bytes per position: R = 32, 1024 positions, K = 32, D = 128: 537 MB, 120 us at 4.47 TB/s
//               (H200)
// test          tests/cuda_decode_attention.rs, reference::attention in fp32, each element within 2^-7 of the largest |v|
#include "cluster.cuh"
#include "decode_attention.cuh"
#include "rope.cuh"

constexpr u32 MAX_CLUSTER = 8;  // maximum number of blocks in a cluster

// For rotation: angles [max_positions, D / 2], and the blocks to write, which are the same as those read.
struct Rope {
    const float* cos;
    const float* sin;
    bf16* k_blocks;
    bf16* v_blocks;
};

// One tile of K or V in registers, as fragments.
template <int D>
struct Tile {
    static constexpr int WIDE = D % 64 == 0;                 // V in runs of 8 elements, otherwise of 4
    static constexpr int RUNS = WIDE ? D / 64 : D / 32;
    uint4 k[2][D / 32];  // rows g, g + 8; elements 32 i + 8 t ..
    u32 v[4][RUNS][WIDE ? 4 : 2];  // rows 2t, 2t + 1, 2t + 8, 2t + 9; elements 64 c + 8 g .. (32 c + 4 g ..)

    __device__ void load_k(const bf16* rows, u32 last, int g, int t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bf16* row = rows + min(g + 8 * i, last) * D + 8 * t;
#pragma unroll
            for (int c = 0; c < D / 32; ++c) k[i][c] = load_once(row + 32 * c);
        }
    }

    __device__ void load_v(const bf16* rows, u32 last, int g, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bf16* row = rows + min(2 * t + i % 2 + i / 2 * 8, last) * D;
#pragma unroll
            for (int c = 0; c < RUNS; ++c) {
                if constexpr (WIDE) {
                    const uint4 x = load_once(row + 64 * c + 8 * g);
                    v[i][c][0] = x.x, v[i][c][1] = x.y, v[i][c][2] = x.z, v[i][c][3] = x.w;
                } else {
                    const uint2 x = load_once_8(row + 32 * c + 4 * g);
                    v[i][c][0] = x.x, v[i][c][1] = x.y;
                }
            }
        }
    }

    // scores[16 positions, 8 heads] = K q^T
    __device__ void scores(float (&s)[4], const u32 (&q)[D / 16][2]) const {
        s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            mma_16x8x16(s, k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y, q[2 * c][0], q[2 * c][1]);
            mma_16x8x16(s, k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w, q[2 * c + 1][0], q[2 * c + 1][1]);
        }
    }

    // sum[D, 8 heads] += V^T p^T; b0, b1 is p^T
    __device__ void accumulate(float (&sum)[D / 16][4], u32 b0, u32 b1) const {
        constexpr int WORDS = WIDE ? 4 : 2;
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) {
                const u32 a0 = __byte_perm(v[0][c][j], v[1][c][j], 0x5410), a1 = __byte_perm(v[0][c][j], v[1][c][j], 0x7632);
                const u32 a2 = __byte_perm(v[2][c][j], v[3][c][j], 0x5410), a3 = __byte_perm(v[2][c][j], v[3][c][j], 0x7632);
                mma_16x8x16(sum[c * WORDS + j], a0, a1, a2, a3, b0, b1);
            }
        }
    }

    // Element of D for sum[i]: [0] and [1] belong to one element, [2] and [3] to the next.
    static __device__ void store(float* sum, int i, int g, float x, float y) {
        const int e = WIDE ? i / 4 * 64 + 8 * g + i % 4 * 2 : i / 2 * 32 + 4 * g + i % 2 * 2;
        *reinterpret_cast<float2*>(sum + e) = make_float2(x, y);
    }
};

// The tiles of one warp: every WARPS-th run of 16 positions from begin to end, of one KV head of a row.
template <int D>
struct Walk {
    const DecodeAttention& a;
    const u32* table;
    u32 begin, end, kv_head;
    u32 entries;  // lane i holds the block number of the warp's tile i, for 32 tiles at a time

    __device__ Walk(const DecodeAttention& attention, u32 first, u32 last, u32 row, u32 head)
        : a(attention), table(a.block_tables + (u64)row * a.max_blocks), begin(first), end(last), kv_head(head), entries(0) {}

    __device__ u32 start(u32 i) const { return begin + (i * WARPS + threadIdx.x / 32) * TILE; }
    __device__ bool has(u32 i) const { return start(i) < end; }
    __device__ u32 last(u32 i) const { return min(end - start(i), (u32)TILE) - 1; }

    // Offset of the first position of tile i in the blocks. All lanes must call it, with tiles in order.
    __device__ u64 rows(u32 i) {
        if (i % 32 == 0) {
            const u32 p = start(i + threadIdx.x % 32);
            entries = p < end ? table[p >> a.block_shift] : 0;
        }
        return at(i);
    }

    // The same for a tile whose block number is already loaded.
    __device__ u64 at(u32 i) const {
        const u32 p = start(i), in_block = (1u << a.block_shift) - 1;
        const u64 block = __shfl_sync(FULL_WARP, entries, i % 32);
        return (((block * a.kv_heads + kv_head) << a.block_shift) + (p & in_block)) * D;
    }
};

// Attends to the walk's tiles. If there is a first one, it must already be in `tile`.
template <int D, class Bias>
__device__ __forceinline__ void attend(Softmax<D>& state, Walk<D>& walk, Tile<D>& tile, u32 first_valid,
                                       const u32 (&q)[D / 16][2], const Bias& bias) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const DecodeAttention& a = walk.a;
    const float scale = a.scale * LOG2E;
    if (!walk.has(0)) return;
    for (u32 i = 0;; ++i) {
        const u32 p = walk.start(i);
        const bool more = walk.has(i + 1);
        float s[4];
        tile.scores(s, q);
        u64 rows = 0;
        u32 last = 0;
        if (more) {
            rows = walk.rows(i + 1);
            last = walk.last(i + 1);
            tile.load_k(a.k_blocks + rows, last, g, t);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const u32 position = p + g + e / 2 * 8;
            s[e] = position < walk.end && position >= first_valid ? bias.add(s[e] * scale, e % 2, position) : -INFINITY_F;
        }
        u32 b0, b1;
        state.step(s, b0, b1);
        tile.accumulate(state.sum, b0, b1);
        if (!more) break;
        tile.load_v(a.v_blocks + rows, last, g, t);
    }
}

// Loads the walk's first tile, and prefetches some of the next.
template <int D>
__device__ __forceinline__ void begin_walk(Walk<D>& walk, Tile<D>& tile) {
    constexpr u32 AHEAD = 4;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (!walk.has(0)) return;
    const u64 rows = walk.rows(0);
    tile.load_k(walk.a.k_blocks + rows, walk.last(0), g, t);
    tile.load_v(walk.a.v_blocks + rows, walk.last(0), g, t);
    for (u32 i = 1; i < AHEAD && walk.has(i); ++i) {
        const u64 ahead = walk.at(i);
        for (u32 line = lane * 64; line < TILE * D; line += 32 * 64) {
            prefetch(walk.a.k_blocks + ahead + line);
            prefetch(walk.a.v_blocks + ahead + line);
        }
    }
}

// Adds the splits of a row that are in one cluster, in order, through its shared memory. `active` blocks call it.
template <int D>
__device__ __forceinline__ void combine_in_cluster(bf16* out, Merged<D>* merged, int heads, u32 split, u32 active) {
    __shared__ float2 stats[GROUP];  // maximum, denominator
    if (threadIdx.x < heads) stats[threadIdx.x] = make_float2(merged_top<D>(merged, threadIdx.x), merged_denominator<D>(merged, threadIdx.x));
    for (int i = threadIdx.x; i < heads * D; i += blockDim.x) merged->sum[i] = merged_sum<D>(merged, heads, i);
    cluster_sync();
    const u32 stat = shared_address(stats), sums = shared_address(merged->sum);
    for (int i = split * blockDim.x + threadIdx.x; i < heads * D; i += active * blockDim.x) {
        const u32 head = i / D;
        float tops[MAX_CLUSTER], parts[MAX_CLUSTER], denominators[MAX_CLUSTER], top = -INFINITY_F;
#pragma unroll
        for (u32 s = 0; s < MAX_CLUSTER; ++s) {
            if (s >= active) break;
            tops[s] = cluster_load_f32(cluster_map(stat + head * 8, s));
            denominators[s] = cluster_load_f32(cluster_map(stat + head * 8 + 4, s));
            parts[s] = cluster_load_f32(cluster_map(sums + i * 4, s));
            top = fmaxf(top, tops[s]);
        }
        float sum = 0.0f, denominator = 0.0f;
#pragma unroll
        for (u32 s = 0; s < MAX_CLUSTER; ++s) {
            if (s >= active) break;
            const float weight = exp2_fast(tops[s] - top);
            sum += weight * parts[s];
            denominator += weight * denominators[s];
        }
        out[i] = to_bf16(sum / denominator);
    }
    cluster_sync();  // no block may exit while another reads its sums
}

// The fragments of this thread's head: its elements 32 i + 8 t.
template <int D>
__device__ __forceinline__ void load_q(u32 (&q)[D / 16][2], const bf16* q_row, bool valid) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        const uint4 x = valid ? load_once(q_row + 32 * i) : make_uint4(0, 0, 0, 0);
        q[2 * i][0] = x.x, q[2 * i][1] = x.y, q[2 * i + 1][0] = x.z, q[2 * i + 1][1] = x.w;
    }
}

// The same, rotated. A thread has both elements of each pair (e, e + D / 2), because D / 2 is a multiple of 32.
template <int D>
__device__ __forceinline__ void load_rotated_q(u32 (&q)[D / 16][2], const bf16* q_row, bool valid, const Angles (&angles)[D / 64]) {
    static_assert(D % 64 == 0, "load_rotated_q: halves of a head are multiples of 32");
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
        constexpr int HALF = D / 64;
        uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
        if (valid) lo = load_once(q_row + 32 * i), hi = load_once(q_row + 32 * (i + HALF));
        rotate8(lo, hi, angles[i]);
        q[2 * i][0] = lo.x, q[2 * i][1] = lo.y, q[2 * i + 1][0] = lo.z, q[2 * i + 1][1] = lo.w;
        q[2 * (i + HALF)][0] = hi.x, q[2 * (i + HALF)][1] = hi.y, q[2 * (i + HALF) + 1][0] = hi.z, q[2 * (i + HALF) + 1][1] = hi.w;
    }
}

// The newest position's k and v of one KV head, from qkv.
template <int D>
struct Newest {
    const bf16* k;
    const bf16* v;

    __device__ Newest(const DecodeAttention& a, u32 row, u32 kv_head)
        : k(a.q + (u64)row * a.q_stride + (u64)(a.heads + kv_head) * D), v(k + (u64)a.kv_heads * D) {}

    // Writes k, rotated, and v to the blocks. All threads of the block must call it.
    __device__ void write(const DecodeAttention& a, const Rope& rope, u32 row, u32 kv_head, u32 position) const {
        const u64 block = a.block_tables[(u64)row * a.max_blocks + (position >> a.block_shift)];
        const u32 offset = position & ((1u << a.block_shift) - 1);
        const u64 at = (((block * a.kv_heads + kv_head) << a.block_shift) + offset) * D;
        for (u32 i = threadIdx.x; i < D / 16 + D / 8; i += blockDim.x) {
            if (i < D / 16) {
                const u64 angle = (u64)position * (D / 2) + 8 * i;
                uint4 lo = load_once(k + 8 * i), hi = load_once(k + D / 2 + 8 * i);
                rotate8(lo, hi, load_angles(rope.cos + angle, rope.sin + angle));
                *reinterpret_cast<uint4*>(rope.k_blocks + at + 8 * i) = lo;
                *reinterpret_cast<uint4*>(rope.k_blocks + at + D / 2 + 8 * i) = hi;
            } else {
                const u32 e = 8 * (i - D / 16);
                *reinterpret_cast<uint4*>(rope.v_blocks + at + e) = load_once(v + e);
            }
        }
    }

    // One warp attends to it: it is row 0 of a tile.
    __device__ void attend(Softmax<D>& state, const u32 (&q)[D / 16][2], const Angles (&angles)[D / 64], float scale) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        u32 rotated[D / 16][2];
        load_rotated_q<D>(rotated, k + 8 * t, g == 0, angles);
        Tile<D> tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int c = 0; c < Tile<D>::RUNS; ++c) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (i == 0 && t == 0) x = load_once(v + 64 * c + 8 * g);
                tile.v[i][c][0] = x.x, tile.v[i][c][1] = x.y, tile.v[i][c][2] = x.z, tile.v[i][c][3] = x.w;
            }
        }
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            tile.k[0][c] = make_uint4(rotated[2 * c][0], rotated[2 * c][1], rotated[2 * c + 1][0], rotated[2 * c + 1][1]);
            tile.k[1][c] = make_uint4(0, 0, 0, 0);
        }
        float s[4];
        tile.scores(s, q);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = g == 0 && e < 2 ? s[e] * scale : -INFINITY_F;
        u32 b0, b1;
        state.step(s, b0, b1);
        tile.accumulate(state.sum, b0, b1);
    }
};

// One split of a row.
template <int D, bool ROPE, Scores SCORES>
__device__ __forceinline__ void attend_split(const DecodeAttention& a, const Rope& rope, const float* slopes, float cap, u32 len,
                                             u32 split, const Chunk& c) {
    extern __shared__ float4 dynamic[];
    const u32 splits = a.splits, row = blockIdx.z;
    const u32 per_kv_head = a.heads / a.kv_heads, groups = groups_of(a);
    const u32 kv_head = blockIdx.y / groups, group = blockIdx.y % groups;
    const int heads = min(per_kv_head - group * GROUP, (u32)GROUP);
    const u32 first_head = kv_head * per_kv_head + group * GROUP;
    bf16* out = a.out + ((u64)row * a.heads + first_head) * D;

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Walk<D> walk(a, c.begin, ROPE ? min(c.end, len - 1) : c.end, row, kv_head);
    Tile<D> tile;
    Softmax<D> state;
    if (a.sinks && split == 0 && threadIdx.x < 32) state.begin_with(a.sinks + first_head, heads);
    u32 q[D / 16][2];
    const bf16* q_row = a.q + (u64)row * a.q_stride + (u64)(first_head + g) * D + 8 * t;
    if constexpr (ROPE) {
        Angles angles[D / 64];
        const u64 angle = (u64)(len - 1) * (D / 2) + 8 * t;
#pragma unroll
        for (int i = 0; i < D / 64; ++i) angles[i] = load_angles(rope.cos + angle + 32 * i, rope.sin + angle + 32 * i);
        // Positions before the newest belong to earlier steps: their k and v are loaded while the previous kernel runs.
        begin_walk(walk, tile);
        pdl_wait();
        load_rotated_q<D>(q, q_row, g < heads, angles);
        if (c.end == len) {
            const Newest<D> newest(a, row, kv_head);
            if (threadIdx.x / 32 == (walk.end - walk.begin) / TILE % WARPS) newest.attend(state, q, angles, a.scale * LOG2E);
            newest.write(a, rope, row, kv_head, len - 1);
        }
    } else {
        load_q<D>(q, q_row, g < heads);
        begin_walk(walk, tile);
    }
    if constexpr (SCORES == Scores::ALIBI) {
        attend(state, walk, tile, c.first_valid, q, Alibi(slopes + first_head, heads, t, len));
    } else if constexpr (SCORES == Scores::CAPPED) {
        attend(state, walk, tile, c.first_valid, q, Capped(cap));
    } else {
        attend(state, walk, tile, c.first_valid, q, NoBias());
    }

    Merged<D>* merged = reinterpret_cast<Merged<D>*>(dynamic);
    publish<D, Tile<D>>(merged, state, heads, threadIdx.x / 32);
    if (c.active == 1) return store_out<D>(out, merged, heads);
    if (c.active <= cluster_blocks()) return combine_in_cluster<D>(out, merged, heads, split, c.active);
    const Part part = {((u64)row * a.heads + first_head) * splits, row * gridDim.y + blockIdx.y, split, splits, c.active};
    store_part<D>(a, part, out, merged, heads);
}

// Zeros for a padding row.
template <int D>
__device__ __forceinline__ void clear_row(const DecodeAttention& a) {
    const u32 per_kv_head = a.heads / a.kv_heads, groups = groups_of(a), group = blockIdx.y % groups;
    const u32 heads = min(per_kv_head - group * GROUP, (u32)GROUP), first_head = blockIdx.y / groups * per_kv_head + group * GROUP;
    bf16* out = a.out + ((u64)blockIdx.z * a.heads + first_head) * D;
    for (u32 i = threadIdx.x; i < heads * D; i += blockDim.x) out[i] = to_bf16(0.0f);
}

template <int D, bool ROPE, Scores SCORES, bool SHARED>
__device__ __forceinline__ void decode_attention(const DecodeAttention& a, const Rope& rope, const float* slopes, float cap) {
    pdl_launch();
    if (!ROPE) pdl_wait();
    // The step's inputs and the angles are written before the first kernel of the step, so no wait is needed for them.
    const u32 len = a.context_lens[blockIdx.z];
    if (len == 0) {
        if (blockIdx.x != 0) return;
        if (ROPE) pdl_wait();
        return clear_row<D>(a);
    }
#pragma unroll 1
    for (u32 split = blockIdx.x; SHARED || split == blockIdx.x; split += gridDim.x) {
        const Chunk c = chunk_of<!ROPE>(a, len, split, a.splits);
        if (split >= c.active) return;
        attend_split<D, ROPE, SCORES>(a, rope, slopes, cap, len, split, c);
        if (!SHARED) return;
    }
}

#define DECODE_ATTENTION(PREFIX, D, SHARED) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) PREFIX##decode_attention_bf16_d##D(const DecodeAttention a) { \
        decode_attention<D, false, Scores::PLAIN, SHARED>(a, Rope{}, nullptr, 0.0f); \
    }

#define ALIBI_DECODE_ATTENTION(PREFIX, D, SHARED) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        PREFIX##alibi_decode_attention_bf16_d##D(const DecodeAttention a, const float* slopes) { \
        decode_attention<D, false, Scores::ALIBI, SHARED>(a, Rope{}, slopes, 0.0f); \
    }

#define CAPPED_DECODE_ATTENTION(PREFIX, D, SHARED) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        PREFIX##capped_decode_attention_bf16_d##D(const DecodeAttention a, float cap) { \
        decode_attention<D, false, Scores::CAPPED, SHARED>(a, Rope{}, nullptr, cap); \
    }

#define ROPE_DECODE_ATTENTION(D) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) \
        rope_decode_attention_bf16_d##D(const DecodeAttention a, const Rope rope) { \
        decode_attention<D, true, Scores::PLAIN, false>(a, rope, nullptr, 0.0f); \
    }

#define ALL_DECODE_ATTENTION(PREFIX, SHARED) \
    DECODE_ATTENTION(PREFIX, 64, SHARED) \
    DECODE_ATTENTION(PREFIX, 96, SHARED) \
    DECODE_ATTENTION(PREFIX, 128, SHARED) \
    DECODE_ATTENTION(PREFIX, 256, SHARED) \
    ALIBI_DECODE_ATTENTION(PREFIX, 64, SHARED) \
    ALIBI_DECODE_ATTENTION(PREFIX, 96, SHARED) \
    ALIBI_DECODE_ATTENTION(PREFIX, 128, SHARED) \
    CAPPED_DECODE_ATTENTION(PREFIX, 128, SHARED) \
    CAPPED_DECODE_ATTENTION(PREFIX, 256, SHARED)

ROPE_DECODE_ATTENTION(64)
ROPE_DECODE_ATTENTION(128)
ROPE_DECODE_ATTENTION(256)
ALL_DECODE_ATTENTION(, false)
#if __CUDA_ARCH__ == 900
ALL_DECODE_ATTENTION(shared_, true)
#endif
