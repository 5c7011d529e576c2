// Decode attention with K and V in registers: see decode_attention.cu. One file: one kernel.
#pragma once
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
    // Weights [D] of RMS norms of q and k before the rotation, or null.
    const bf16* q_gain;
    const bf16* k_gain;
    float eps;
};

// One tile of K or V in registers, as fragments.
template <int D>
struct Tile {
    static constexpr int WIDE = D % 64 == 0;                 // V in runs of 8 elements, otherwise of 4
    static constexpr int RUNS = WIDE ? D / 64 : D / 32;
    uint4 k[2][D / 32];  // rows g, g + 8; elements 32 i + 8 t ..
    u32 v[4][RUNS][WIDE ? 4 : 2];  // rows 2t, 2t + 1, 2t + 8, 2t + 9; elements 64 c + 8 g .. (32 c + 4 g ..)

    // From position `first` of the blocks on; rows after `last` repeat it.
    __device__ void load_k(const DecodeAttention& a, u64 first, u32 last, int g, int t) {
        const bf16* rows = static_cast<const bf16*>(a.k_blocks) + first * D;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bf16* row = rows + min(g + 8 * i, last) * D + 8 * t;
#pragma unroll
            for (int c = 0; c < D / 32; ++c) k[i][c] = load_once(row + 32 * c);
        }
    }

    __device__ void load_v(const DecodeAttention& a, u64 first, u32 last, int g, int t) {
        const bf16* rows = static_cast<const bf16*>(a.v_blocks) + first * D;
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

    static __device__ void order(u32&, u32&) {}

    // Multiplies probabilities by the scales of V.
    static __device__ void weigh(float (&)[4]) {}

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

// The same for codes, which become bf16 when they are used. Elements of V are in the order of bf16; those of K are not, see `order`.
template <int D, Kv KV>
struct CodedTile {
    static constexpr int WIDE = D % 64 == 0;
    static constexpr int RUNS = WIDE ? D / 64 : D / 32;
    uint2 k[2][D / 32];            // rows g, g + 8; elements 32 i + 8 t ..
    u32 v[4][RUNS][WIDE ? 2 : 1];  // rows 2t, 2t + 1, 2t + 8, 2t + 9; elements 64 c + 8 g .. (32 c + 4 g ..)
    float k_scales[2], v_scales[2];  // rows g, g + 8

    // The order of four elements of q in which `expand_codes` has those of k.
    static __device__ void order(u32& low, u32& high) {
        const u32 even = __byte_perm(low, high, 0x5410);
        high = __byte_perm(low, high, 0x7632);
        low = even;
    }

    __device__ void load_k(const DecodeAttention& a, u64 first, u32 last, int g, int t) {
        const u8* rows = static_cast<const u8*>(a.k_blocks) + first * D;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 place = min(g + 8 * i, last);
#pragma unroll
            for (int c = 0; c < D / 32; ++c) k[i][c] = load_once_8(rows + place * D + 8 * t + 32 * c);
            k_scales[i] = a.k_scales[first + place];
        }
    }

    __device__ void load_v(const DecodeAttention& a, u64 first, u32 last, int g, int t) {
        const u8* rows = static_cast<const u8*>(a.v_blocks) + first * D;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u8* row = rows + min(2 * t + i % 2 + i / 2 * 8, last) * D;
#pragma unroll
            for (int c = 0; c < RUNS; ++c) {
                if constexpr (WIDE) {
                    const uint2 x = load_once_8(row + 64 * c + 8 * g);
                    v[i][c][0] = x.x, v[i][c][1] = x.y;
                } else {
                    v[i][c][0] = load_once_4(row + 32 * c + 4 * g);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) v_scales[i] = a.v_scales[first + min(g + 8 * i, last)];
    }

    __device__ void scores(float (&s)[4], const u32 (&q)[D / 16][2]) const {
        s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            u32 a[4];
            expand_codes<KV>(k[0][c].x, a[0], a[2]);
            expand_codes<KV>(k[1][c].x, a[1], a[3]);
            mma_16x8x16(s, a[0], a[1], a[2], a[3], q[2 * c][0], q[2 * c][1]);
            expand_codes<KV>(k[0][c].y, a[0], a[2]);
            expand_codes<KV>(k[1][c].y, a[1], a[3]);
            mma_16x8x16(s, a[0], a[1], a[2], a[3], q[2 * c + 1][0], q[2 * c + 1][1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= k_scales[e / 2];
    }

    __device__ void weigh(float (&p)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] *= v_scales[e / 2];
    }

    __device__ void accumulate(float (&sum)[D / 16][4], u32 b0, u32 b1) const {
        constexpr int WORDS = WIDE ? 2 : 1;
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) {
                // Two elements of two rows in each word: those of one element become a pair.
                u32 a[4];
                expand_codes<KV>(__byte_perm(v[0][c][j], v[1][c][j], 0x5410), a[0], a[1]);
                expand_codes<KV>(__byte_perm(v[2][c][j], v[3][c][j], 0x5410), a[2], a[3]);
                mma_16x8x16(sum[(c * WORDS + j) * 2], a[0], a[1], a[2], a[3], b0, b1);
                expand_codes<KV>(__byte_perm(v[0][c][j], v[1][c][j], 0x7632), a[0], a[1]);
                expand_codes<KV>(__byte_perm(v[2][c][j], v[3][c][j], 0x7632), a[2], a[3]);
                mma_16x8x16(sum[(c * WORDS + j) * 2 + 1], a[0], a[1], a[2], a[3], b0, b1);
            }
        }
    }

    static __device__ void store(float* sum, int i, int g, float x, float y) { Tile<D>::store(sum, i, g, x, y); }
};

template <int D, Kv KV>
struct TileType {
    using Type = CodedTile<D, KV>;
};

template <int D>
struct TileType<D, Kv::BF16> {
    using Type = Tile<D>;
};

template <int D, Kv KV>
using TileOf = typename TileType<D, KV>::Type;

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

    // Index of the first position of tile i among those of all blocks. All lanes must call it, with tiles in order.
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
        return ((block * a.kv_heads + kv_head) << a.block_shift) + (p & in_block);
    }
};

// Attends to the walk's tiles. If there is a first one, it must already be in `tile`.
template <int D, class Tile, class Bias>
__device__ __forceinline__ void attend(Softmax<D>& state, Walk<D>& walk, Tile& tile, u32 first_valid,
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
            tile.load_k(a, rows, last, g, t);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const u32 position = p + g + e / 2 * 8;
            s[e] = position < walk.end && position >= first_valid ? bias.add(s[e] * scale, e % 2, position) : -INFINITY_F;
        }
        u32 b0, b1;
        state.step(s, b0, b1, tile);
        tile.accumulate(state.sum, b0, b1);
        if (!more) break;
        tile.load_v(a, rows, last, g, t);
    }
}

// Loads the walk's first tile.
template <int D, class Tile>
__device__ __forceinline__ void load_first(Walk<D>& walk, Tile& tile) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (!walk.has(0)) return;
    const u64 rows = walk.rows(0);
    tile.load_k(walk.a, rows, walk.last(0), g, t);
    tile.load_v(walk.a, rows, walk.last(0), g, t);
}

// Prefetches some of the walk's tiles, from `first` on, whose first is 0 or was loaded.
template <int D, Kv KV>
__device__ __forceinline__ void prefetch_tiles(Walk<D>& walk, u32 first) {
    constexpr u32 AHEAD = 4;
    const int lane = threadIdx.x % 32;
    if (first == 0 && walk.has(0)) walk.rows(0);
    for (u32 i = first; i < AHEAD && walk.has(i); ++i) {
        const u64 ahead = walk.at(i) * D * ELEMENT_BYTES<KV>;
        for (u32 line = lane * 128; line < TILE * D * ELEMENT_BYTES<KV>; line += 32 * 128) {
            prefetch(static_cast<const u8*>(walk.a.k_blocks) + ahead + line);
            prefetch(static_cast<const u8*>(walk.a.v_blocks) + ahead + line);
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

// Angles that are loaded when they are used, by a thread for the pairs 32 i + 8 t.
struct LateAngles {
    const float* cos;
    const float* sin;

    __device__ Angles operator[](int i) const { return load_angles(cos + 32 * i, sin + 32 * i); }
};

// Norms of heads with the sums and roundings of head_norm.cu, where a lane has eight elements: the same bits.
__device__ __forceinline__ float squares8(const uint4& x) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        sum += unpack_lo(words[j]) * unpack_lo(words[j]);
        sum += unpack_hi(words[j]) * unpack_hi(words[j]);
    }
    return sum;
}

__device__ __forceinline__ u32 scale2(u32 x, u32 gain, float scale) {
    return pack_bf16x2(unpack_lo(x) * scale * unpack_lo(gain), unpack_hi(x) * scale * unpack_hi(gain));
}

__device__ __forceinline__ void scale8(uint4& x, const bf16* gain, float scale) {
    const uint4 g = *reinterpret_cast<const uint4*>(gain);
    x.x = scale2(x.x, g.x, scale), x.y = scale2(x.y, g.y, scale), x.z = scale2(x.z, g.z, scale), x.w = scale2(x.w, g.w, scale);
}

// The norm of the head of which this thread and three others have the elements 32 i + 8 t; `gain` begins at 8 t.
template <int D>
__device__ __forceinline__ void norm_head(uint4 (&x)[D / 32], const bf16* gain, float eps) {
    float sums[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; ++i) sums[i] = squares8(x[i]);
#pragma unroll
    for (int d = D / 64; d > 0; d /= 2) {
#pragma unroll
        for (int i = 0; i < d; ++i) sums[i] += sums[i + d];
    }
    float sum = sums[0];
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    const float scale = rsqrtf(sum / D + eps);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) scale8(x[i], gain + 32 * i, scale);
}

// The same, rotated, behind a norm if `gain` is not null. A thread has both elements of each pair (e, e + D / 2), because D / 2 is a
// multiple of 32.
template <int D, class A>
__device__ __forceinline__ void load_rotated_q(u32 (&q)[D / 16][2], const bf16* q_row, bool valid, const A& angles, const bf16* gain,
                                               float eps) {
    static_assert(D % 64 == 0, "load_rotated_q: halves of a head are multiples of 32");
    constexpr int HALF = D / 64;
    uint4 x[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; ++i) x[i] = valid ? *reinterpret_cast<const uint4*>(q_row + 32 * i) : make_uint4(0, 0, 0, 0);
    if (gain) norm_head<D>(x, gain, eps);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        uint4 &lo = x[i], &hi = x[i + HALF];
        rotate8(lo, hi, angles[i]);
        q[2 * i][0] = lo.x, q[2 * i][1] = lo.y, q[2 * i + 1][0] = lo.z, q[2 * i + 1][1] = lo.w;
        q[2 * (i + HALF)][0] = hi.x, q[2 * (i + HALF)][1] = hi.y, q[2 * (i + HALF) + 1][0] = hi.z, q[2 * (i + HALF) + 1][1] = hi.w;
    }
}

// What a block takes of qkv, and the weights of norms, in shared memory, so that nothing of it is loaded after something else.
template <int D>
struct alignas(16) StagedHeads {
    bf16 gains[2][D];  // of q and k
    bf16 heads[GROUP + 2][D + 32];  // of q, then k and v of the newest position; padded so that rows are in different banks

    static __device__ void copy(bf16* to, const bf16* from) { copy_async(shared_address(to), from, true); }

    // All threads of the block: the weights, if there are any.
    __device__ void load_gains(const Rope& rope) {
        const u32 i = threadIdx.x;
        if (rope.q_gain && i < D / 8) copy(gains[0] + 8 * i, rope.q_gain + 8 * i), copy(gains[1] + 8 * i, rope.k_gain + 8 * i);
    }

    // All threads of the block: q of `count` heads from `first_head` on, and k and v if `has_newest`; then all of it can be read.
    __device__ void load_heads(const DecodeAttention& a, u32 row, u32 first_head, u32 count, u32 kv_head, bool has_newest) {
        const bf16* qkv = a.q + (u64)row * a.q_stride;
        for (u32 i = threadIdx.x; i < (count + 2) * (D / 8); i += THREADS) {
            const u32 index = i / (D / 8), column = i % (D / 8) * 8;
            const bool is_q = index < count;
            const u32 head = is_q ? first_head + index : a.heads + (index - count) * a.kv_heads + kv_head;
            if (is_q || has_newest) copy(heads[is_q ? index : GROUP + index - count] + column, qkv + (u64)head * D + column);
        }
        copy_async_commit();
        copy_async_wait<0>();
        attend_sync();
    }
};

// The newest position's k and v of one KV head.
template <int D>
struct Newest {
    const bf16* k;
    const bf16* v;

    __device__ explicit Newest(const StagedHeads<D>& staged) : k(staged.heads[GROUP]), v(staged.heads[GROUP + 1]) {}

    // Writes k, behind its norm and rotated, and v to the blocks. All threads of the block must call it.
    __device__ void write(const Rope& rope, const bf16* gain, u64 place, u32 position) const {
        const u64 at = place * D;
        for (u32 i = threadIdx.x; i < D / 16 + D / 8; i += blockDim.x) {
            if (i < D / 16) {
                const u64 angle = (u64)position * (D / 2) + 8 * i;
                uint4 lo = *reinterpret_cast<const uint4*>(k + 8 * i), hi = *reinterpret_cast<const uint4*>(k + D / 2 + 8 * i);
                if (gain) {
                    constexpr u32 LANES = (1u << D / 16) - 1;
                    float sum = squares8(lo) + squares8(hi);
#pragma unroll
                    for (u32 d = D / 32; d > 0; d /= 2) sum += __shfl_xor_sync(LANES, sum, d);
                    const float scale = rsqrtf(sum / D + rope.eps);
                    scale8(lo, gain + 8 * i, scale), scale8(hi, gain + D / 2 + 8 * i, scale);
                }
                rotate8(lo, hi, load_angles(rope.cos + angle, rope.sin + angle));
                *reinterpret_cast<uint4*>(rope.k_blocks + at + 8 * i) = lo;
                *reinterpret_cast<uint4*>(rope.k_blocks + at + D / 2 + 8 * i) = hi;
            } else {
                const u32 e = 8 * (i - D / 16);
                *reinterpret_cast<uint4*>(rope.v_blocks + at + e) = *reinterpret_cast<const uint4*>(v + e);
            }
        }
    }

    // One warp attends to it: it is row 0 of a tile.
    template <class A>
    __device__ void attend(Softmax<D>& state, const u32 (&q)[D / 16][2], const A& angles, const bf16* gain, float eps, float scale) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        u32 rotated[D / 16][2];
        load_rotated_q<D>(rotated, k + 8 * t, g == 0, angles, gain ? gain + 8 * t : nullptr, eps);
        Tile<D> tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int c = 0; c < Tile<D>::RUNS; ++c) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (i == 0 && t == 0) x = *reinterpret_cast<const uint4*>(v + 64 * c + 8 * g);
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
        state.step(s, b0, b1, tile);
        tile.accumulate(state.sum, b0, b1);
    }
};

// One split of a row.
template <int D, Kv KV, bool ROPE, Scores SCORES>
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
    using Tile = TileOf<D, KV>;
    Tile tile;
    Softmax<D> state;
    if (a.sinks && split == 0 && threadIdx.x < 32) state.begin_with(a.sinks + first_head, heads);
    u32 q[D / 16][2];
    if constexpr (ROPE) {
        // Registers hold a tile and angles beside each other only if heads are small.
        constexpr bool IS_EARLY = D < 256;
        const u64 angle = (u64)(len - 1) * (D / 2) + 8 * t;
        const LateAngles late{rope.cos + angle, rope.sin + angle};
        __shared__ StagedHeads<D> staged;
        staged.load_gains(rope);
        const u32 in_block = (1u << a.block_shift) - 1;
        const u64 block = a.block_tables[(u64)row * a.max_blocks + ((len - 1) >> a.block_shift)];
        const u64 place = ((block * a.kv_heads + kv_head) << a.block_shift) + ((len - 1) & in_block);  // of the newest position
        // Positions before the newest belong to earlier steps: their k and v are loaded while the previous kernel runs.
        auto rotate = [&](const auto& angles) {
            pdl_wait();
            staged.load_heads(a, row, first_head, heads, kv_head, c.end == len);
            const bf16 *q_gain = rope.q_gain ? staged.gains[0] : nullptr, *k_gain = rope.q_gain ? staged.gains[1] : nullptr;
            load_rotated_q<D>(q, staged.heads[g] + 8 * t, g < heads, angles, q_gain ? q_gain + 8 * t : nullptr, rope.eps);
            if (c.end != len) return;
            const Newest<D> newest(staged);
            if (threadIdx.x / 32 == (walk.end - walk.begin) / TILE % WARPS) newest.attend(state, q, angles, k_gain, rope.eps, a.scale * LOG2E);
            newest.write(rope, k_gain, place, len - 1);
        };
        if constexpr (IS_EARLY) {
            Angles angles[D / 64];
#pragma unroll
            for (int i = 0; i < D / 64; ++i) angles[i] = late[i];
            load_first(walk, tile);
            prefetch_tiles<D, KV>(walk, 1);
            rotate(angles);
        } else {
            prefetch_tiles<D, KV>(walk, 0);
            if (lane < D / 64) prefetch(late.cos + 32 * lane), prefetch(late.sin + 32 * lane);
            rotate(late);
            load_first(walk, tile);
        }
    } else {
        load_q<D>(q, a.q + (u64)row * a.q_stride + (u64)(first_head + g) * D + 8 * t, g < heads);
#pragma unroll
        for (int i = 0; i < D / 16; ++i) Tile::order(q[i][0], q[i][1]);
        load_first(walk, tile);
        prefetch_tiles<D, KV>(walk, 1);
    }
    if constexpr (SCORES == Scores::ALIBI) {
        attend(state, walk, tile, c.first_valid, q, Alibi(slopes + first_head, heads, t, len));
    } else if constexpr (SCORES == Scores::CAPPED) {
        attend(state, walk, tile, c.first_valid, q, Capped(cap));
    } else {
        attend(state, walk, tile, c.first_valid, q, NoBias());
    }

    Merged<D>* merged = reinterpret_cast<Merged<D>*>(dynamic);
    publish<D, Tile>(merged, state, heads, threadIdx.x / 32);
    if (c.active == 1) return store_out<D>(out, merged, heads);
    if (c.active <= cluster_blocks()) return combine_in_cluster<D>(out, merged, heads, split, c.active);
    const Part part = {((u64)row * a.heads + first_head) * splits, row * gridDim.y + blockIdx.y, split, splits, c.active};
    if (!store_part<D>(a, part, merged, heads)) return;
    combine<D>(out, a.partial + part.first * D, a.stats + part.first, reinterpret_cast<float*>(merged), heads, splits, c.active);
}

// Zeros for a padding row.
template <int D>
__device__ __forceinline__ void clear_row(const DecodeAttention& a) {
    const u32 per_kv_head = a.heads / a.kv_heads, groups = groups_of(a), group = blockIdx.y % groups;
    const u32 heads = min(per_kv_head - group * GROUP, (u32)GROUP), first_head = blockIdx.y / groups * per_kv_head + group * GROUP;
    bf16* out = a.out + ((u64)blockIdx.z * a.heads + first_head) * D;
    for (u32 i = threadIdx.x; i < heads * D; i += blockDim.x) out[i] = to_bf16(0.0f);
}

// SHARED: a block computes every `gridDim.x`-th split of its row, otherwise one.
template <int D, Kv KV, bool ROPE, Scores SCORES, bool SHARED>
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
        attend_split<D, KV, ROPE, SCORES>(a, rope, slopes, cap, len, split, c);
        if (!SHARED) return;
    }
}
