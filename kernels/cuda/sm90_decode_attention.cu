// sm90_decode_attention_bf16: the same as decode_attention_bf16, for many rows and heads on Hopper
// sm90_alibi_decode_attention_bf16: the same as alibi_decode_attention_bf16
// archs: 90a
// One file: one kernel, whose parts use the same shared memory and barriers.
//
// k, v blocks   through tensor maps of one layer's [blocks * K * B, D]: `k_map`, `v_map` in the shape [D / 64, blocks *
//               K * B, 64] with box [D / 64, 16, 64]; `half_k_map`, `half_v_map` with box [8, 64]
// the rest      the same as in decode_attention.cu; num_rows is R, splits is a parameter instead of the grid's width
// is_late       whether nothing may be read before earlier kernels have ended, otherwise only the newest position of a row waits
// whole_len     rows of up to this length are not shared by blocks: a visit has all splits of the row. No result depends on it
// next_visit    u32, zero before the first launch and after each launch: blocks take the next visit (row, KV head,
//               group, split or all of them) from it when they are free
// launch        two persistent blocks per multiprocessor. A fifth warp makes the copy engine load tiles of 16 positions
//               into a ring in shared memory, and the heads' queries into slots; the other four warps attend and take
//               tiles in turn. The data of a block's next visit is loaded while the current one is summed, so memory
//               never waits for a block to start. Splits are added in order by the block that has all of them, or by the one that ends
//               last, with the same bits.
// needs         D 128; B % 16 == 0, a power of two; pointers 16-byte aligned; checked in decode_attention.rs
// bound         memory, 4 K D bytes per position: R = 128, 160 positions, K = 32, D = 128: 336 MB, 75 us at 4.47 TB/s
//               (H200)
// test          tests/cuda_decode_attention.rs, reference::attention in fp32, each element within 2^-7 of the largest |v|
#include "cluster.cuh"
#include "decode_attention.cuh"
#include "sm90.cuh"

constexpr u32 SLOTS = 4;      // visits whose queries are loaded or being loaded
constexpr u32 LENS = 1024;    // number of rows whose lengths are stored in shared memory
constexpr u32 NONE = 0xffffffffu;

// A visit: the unit of work of a block, some heads of a row's KV head and one split of its positions, or all.
struct Visit {
    u32 row;  // NONE after the last
    u32 in_row;  // KV head and group
    u32 split, len;
};

// How rows are divided.
struct Splits {
    u32 count;      // at most
    u32 whole_len;  // rows of up to this length are visited once

    __device__ bool are_together(u32 len) const { return len <= whole_len; }

    // Number of visits of a row's heads.
    __device__ u32 visits(const DecodeAttention& a, u32 len) const {
        return are_together(len) ? 1 : chunk_of(a, len, 0, count).active;
    }

    // The positions of a visit.
    __device__ Chunk all_of(const DecodeAttention& a, const Visit& v) const {
        Chunk c = chunk_of(a, v.len, v.split, count);
        if (are_together(v.len)) c.end = v.len;
        return c;
    }
};

// The splits of some heads of a row, added in order: this thread's element of each head. D is THREADS.
struct Fold {
    float top[GROUP], denominator[GROUP], sum[GROUP];

    __device__ void add(int head, float other_top, float other_denominator, float other_sum, bool is_first) {
        if (is_first) {
            top[head] = other_top, denominator[head] = other_denominator, sum[head] = other_sum;
            return;
        }
        const float highest = fmaxf(top[head], other_top);
        const float own = exp2_fast(top[head] - highest), other = exp2_fast(other_top - highest);
        denominator[head] = __fmaf_rn(other_denominator, other, __fmul_rn(denominator[head], own));
        sum[head] = __fmaf_rn(other_sum, other, __fmul_rn(sum[head], own));
        top[head] = highest;
    }

    // Adds what the block's warps have published.
    template <int D>
    __device__ void add(const Merged<D>* merged, int heads, bool is_first) {
        static_assert(D == THREADS, "a thread has one element of each head");
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            if (head >= heads) break;
            const float sum = merged_sum<D>(merged, heads, head * D + threadIdx.x);
            add(head, merged_top<D>(merged, head), merged_denominator<D>(merged, head), sum, is_first);
        }
    }

    // Adds the splits that several blocks have stored.
    __device__ void add(const float* partial, const float2* stats, int heads, u32 splits, u32 active) {
        constexpr int AT_ONCE = 4;  // heads whose loads are in flight together
#pragma unroll
        for (int first = 0; first < GROUP; first += AT_ONCE) {
            if (first >= heads) break;
#pragma unroll 1
            for (u32 s = 0; s < active; ++s) {
                float2 stat[AT_ONCE];
                float value[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const u32 at = min(first + i, heads - 1) * splits + s;
                    stat[i] = __ldcg(stats + at);
                    value[i] = __ldcg(partial + (u64)at * THREADS + threadIdx.x);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) add(first + i, stat[i].x, stat[i].y, value[i], s == 0);
            }
        }
    }

    __device__ void store(bf16* out, int heads) const {
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            if (head < heads) out[head * THREADS + threadIdx.x] = to_bf16(sum[head] / denominator[head]);
        }
    }
};

// Values derived from a visit.
struct Heads {
    u32 kv_head, first;
    int count;

    __device__ Heads(const DecodeAttention& a, const Visit& v) {
        const u32 per_kv_head = a.heads / a.kv_heads, groups = groups_of(a), group = v.in_row % groups;
        kv_head = v.in_row / groups;
        first = kv_head * per_kv_head + group * GROUP;
        count = min(per_kv_head - group * GROUP, (u32)GROUP);
    }
};

// Shared memory: the ring's tiles of K and V, queries of the slots, lengths, barriers, visits, sums. A tile has D / 64
// panels of 16 rows of 128 bytes, with the copy engine's swizzle.
template <int D>
struct Shared {
    static constexpr u32 STAGES = 8, PANEL = TILE * 128, TENSOR = D / 64 * PANEL;
    static constexpr u32 QUERIES = STAGES * 2 * TENSOR, CONTEXTS = QUERIES + SLOTS * GROUP * D * 2;
    static constexpr u32 BARRIERS = CONTEXTS + LENS * 4;
    static_assert(STAGES % WARPS == 0, "a stage always has the same warp, which so is never a round ahead of it");
    static constexpr u32 VISITS = BARRIERS + (STAGES + SLOTS) * 16, MERGED = VISITS + SLOTS * 16;
    u8* memory;

    __device__ u32 base() const { return shared_address(memory); }
    __device__ u32 k(u32 stage) const { return base() + stage * 2 * TENSOR; }
    __device__ bf16* queries(u32 slot) const { return reinterpret_cast<bf16*>(memory + QUERIES) + slot * GROUP * D; }
    __device__ u32* lens() const { return reinterpret_cast<u32*>(memory + CONTEXTS); }
    __device__ Visit* visit(u32 slot) const { return reinterpret_cast<Visit*>(memory + VISITS) + slot; }
    __device__ Merged<D>* merged() const { return reinterpret_cast<Merged<D>*>(memory + MERGED); }
    __device__ u32 full(u32 stage) const { return base() + BARRIERS + stage * 16; }
    __device__ u32 empty(u32 stage) const { return full(stage) + 8; }
    __device__ u32 slot_full(u32 slot) const { return full(STAGES + slot); }
    __device__ u32 slot_empty(u32 slot) const { return slot_full(slot) + 8; }

    // The location of 16 bytes of a row in a tile.
    static __device__ u32 at(u32 row, u32 piece) { return piece / 8 * PANEL + row * 128 + (piece % 8 ^ row % 8) * 16; }

    __device__ void init() const {
        for (u32 i = 0; i < STAGES; ++i) barrier_init(full(i), 1), barrier_init(empty(i), 1);
        for (u32 i = 0; i < SLOTS; ++i) barrier_init(slot_full(i), 33), barrier_init(slot_empty(i), THREADS);
        barrier_init_fence();
    }
};

// Counts the uses of a ring of N.
template <u32 N>
struct RingPosition {
    u32 index = 0, parity = 0;

    __device__ void skip(u32 count) {
        index += count;
        while (index >= N) index -= N, parity ^= 1;
    }
};

// All visits of the launch: first the further visits of rows that have more than one, then the first of every row.
struct Work {
    const DecodeAttention& a;
    const u32* lens;  // of the first LENS rows
    Splits splits;
    u32 num_rows, per_row, furthers = 0, count;

    __device__ Work(const DecodeAttention& attention, const u32* known_lens, u32 rows, Splits of_rows)
        : a(attention), lens(known_lens), splits(of_rows), num_rows(rows) {
        per_row = a.kv_heads * groups_of(a);
        for (u32 row = 0; row < num_rows; row += 32) furthers += __reduce_add_sync(FULL_WARP, further(row + threadIdx.x % 32));
        furthers *= per_row;
        count = furthers + num_rows * per_row;
    }

    __device__ u32 len_of(u32 row) const { return row < LENS ? lens[row] : a.context_lens[row]; }

    // Number of visits of a row's heads after their first.
    __device__ u32 further(u32 row) const {
        const u32 len = row < num_rows ? len_of(row) : 0;
        return len == 0 ? 0 : splits.visits(a, len) - 1;
    }

    __device__ Visit at(u32 index) const {
        if (index >= count) return {NONE, 0, 0, 0};
        if (index >= furthers) {
            const u32 first = index - furthers;
            return {first / per_row, first % per_row, 0, len_of(first / per_row)};
        }
        u32 left = index / per_row;  // number of further visits before this one
        for (u32 row = 0;; row += 32) {
            const u32 mine = further(row + threadIdx.x % 32), all = __reduce_add_sync(FULL_WARP, mine);
            if (left >= all) {
                left -= all;
                continue;
            }
            u32 lane = 0;
            for (u32 here; (here = __shfl_sync(FULL_WARP, mine, lane)) <= left; ++lane) left -= here;
            return {row + lane, index % per_row, 1 + left, len_of(row + lane)};
        }
    }
};

// For K and V, for whole tiles and halves.
struct Maps {
    const TensorMap *k, *v, *half_k, *half_v;
};

// The warp that loads. Lane i of `blocks` has the block of a visit's tile i, for 32 tiles at a time.
template <int D>
struct Producer {
    const DecodeAttention& a;
    const Shared<D>& smem;
    Maps maps;
    Splits splits;
    RingPosition<Shared<D>::STAGES> stage;
    RingPosition<SLOTS> slot;

    __device__ void produce(const Work& work, u32* next_visit) {
        Visit v = work.at(blockIdx.x);
        u32 blocks = look_up(v, 0);
        // What earlier steps wrote is loaded while the previous kernel runs, unless this step writes other positions, too.
        u32 i = load_tiles(v, blocks, 0, Shared<D>::STAGES, true);
        pdl_wait();
        asm volatile("fence.proxy.async.global;" ::: "memory");  // makes the newest position visible to the copy engine, too
        const u32 claims = max(work.count, gridDim.x);
        u32 index = claim(next_visit, claims);
        while (true) {
            publish_visit(v);
            if (v.row == NONE) return;
            // The data of the next visit is requested before this visit's tiles, which wait for free space.
            const Visit next = work.at(gridDim.x + __shfl_sync(FULL_WARP, index, 0));
            const u32 next_blocks = look_up(next, 0);
            if (next.row != NONE) index = claim(next_visit, claims);
            load_tiles(v, blocks, i, NONE, false);
            v = next, blocks = next_blocks, i = 0;
        }
    }

    // In lane 0: the number of visits taken before this one. The last of `claims` requests resets the counter. Each block makes one
    // request that finds no visit, also a block without a first visit.
    static __device__ u32 claim(u32* next_visit, u32 claims) {
        u32 index = 0;
        if (threadIdx.x % 32 == 0) {
            index = atomicAdd(next_visit, 1);
            if (index == claims - 1) *next_visit = 0;
        }
        return index;
    }

    // The visit and its queries.
    __device__ void publish_visit(const Visit& v) {
        const u32 lane = threadIdx.x % 32, full = smem.slot_full(slot.index);
        barrier_wait(smem.slot_empty(slot.index), slot.parity ^ 1);
        if (v.row != NONE) {
            const Heads heads(a, v);
            const bf16* from = a.q + (u64)v.row * a.q_stride + heads.first * D;
            const u32 to = shared_address(smem.queries(slot.index));
            for (u32 i = lane; i < heads.count * D / 8; i += 32) copy_async(to + i * 16, from + i * 8, true);
        }
        if (lane == 0) {
            *smem.visit(slot.index) = v;
            barrier_arrive(full);
        }
        arrive_when_copied(full);
        slot.skip(1);
    }

    __device__ u32 look_up(const Visit& v, u32 from) const {
        if (v.row == NONE) return 0;
        const Chunk c = splits.all_of(a, v);
        const u32 p = c.begin + (from + threadIdx.x % 32) * TILE;
        return p < c.end ? a.block_tables[(u64)v.row * a.max_blocks + (p >> a.block_shift)] : 0;
    }

    // Loads the visit's tiles from `i` on, but at most `most`, and without the newest position's if `early`; returns
    // the index of the next one.
    __device__ u32 load_tiles(const Visit& v, u32 blocks, u32 i, u32 most, bool early) {
        const Chunk c = splits.all_of(a, v);
        const u32 kv_head = Heads(a, v).kv_head;
        for (; i < most && c.begin + i * TILE < c.end; ++i) {
            const u32 p = c.begin + i * TILE, valid = min(c.end - p, (u32)TILE);
            if (early && p + valid == v.len) break;
            if (i % 32 == 0 && i) blocks = look_up(v, i);
            const u32 block = __shfl_sync(FULL_WARP, blocks, i % 32), in_block = p & ((1u << a.block_shift) - 1);
            load_tile(((block * a.kv_heads + kv_head) << a.block_shift) + in_block, valid);
        }
        return i;
    }

    // Loads a whole tile or its first half, which may include up to seven rows that are not valid.
    __device__ void load_tile(u32 row, u32 valid) {
        if (threadIdx.x % 32 == 0) {
            barrier_wait(smem.empty(stage.index), stage.parity ^ 1);
            const u32 full = smem.full(stage.index), k = smem.k(stage.index), v = k + Shared<D>::TENSOR;
            if (valid > TILE / 2) {
                barrier_arrive_expect(full, 2 * Shared<D>::TENSOR);
                tensor_load_3d(k, maps.k, 0, row, 0, full, EVICT_FIRST);
                tensor_load_3d(v, maps.v, 0, row, 0, full, EVICT_FIRST);
            } else {
                barrier_arrive_expect(full, Shared<D>::TENSOR);
                for (u32 p = 0; p < D / 64; ++p) {
                    tensor_load(k + p * Shared<D>::PANEL, maps.half_k, p * 64, row, full, EVICT_FIRST);
                    tensor_load(v + p * Shared<D>::PANEL, maps.half_v, p * 64, row, full, EVICT_FIRST);
                }
            }
        }
        __syncwarp();
        stage.skip(1);
    }
};

// A tile in shared memory.
template <int D>
struct Tile {
    u32 base;  // address of K; V follows

    static __device__ void weigh(float (&)[4]) {}

    // scores[16 positions, 8 heads] = K q^T
    __device__ void scores(float (&s)[4], const u32 (&q)[D / 16][2]) const {
        const u32 lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
        float odd[4] = {};
        s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            u32 k[4];
            load_matrices(k, base + Shared<D>::at(row, 2 * i + half));
            mma_16x8x16(i % 2 ? odd : s, k[0], k[1], k[2], k[3], q[i][0], q[i][1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] += odd[e];
    }

    // sum[D, 8 heads] += V^T p^T; b0, b1 is p^T
    __device__ void accumulate(float (&sum)[D / 16][4], u32 b0, u32 b1) const {
        const u32 lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            u32 v[4];
            load_matrices_transposed(v, base + Shared<D>::TENSOR + Shared<D>::at(row, 2 * i + half));
            mma_16x8x16(sum[i], v[0], v[1], v[2], v[3], b0, b1);
        }
    }

    // Unwritten positions may contain NaN, which a probability of zero would not remove.
    __device__ void clear_values(u32 valid) const {
        const u32 pieces = D / 8;
        for (u32 i = threadIdx.x % 32; i < (TILE - valid) * pieces; i += 32) {
            const u32 to = base + Shared<D>::TENSOR + Shared<D>::at(valid + i / pieces, i % pieces);
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copy engine writes there again
        __syncwarp();
    }

    // Element of D for sum[i]: [0] and [1] belong to one element, [2] and [3] to the element eight further on.
    static __device__ void store(float* sum, int i, int g, float x, float y) {
        sum[16 * i + g] = x;
        sum[16 * i + g + 8] = y;
    }
};

// The slot's queries as fragments; zeros for heads that it does not have.
template <int D>
__device__ __forceinline__ void load_queries(u32 (&q)[D / 16][2], const bf16* queries, int heads) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32* from = reinterpret_cast<const u32*>(queries + g * D) + t;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        q[i][0] = g < heads ? from[8 * i] : 0;
        q[i][1] = g < heads ? from[8 * i + 4] : 0;
    }
}

// One of the warps that attend.
template <int D>
struct Consumer {
    const DecodeAttention& a;
    const Shared<D>& smem;
    Splits splits;
    u32 warp;  // its index in the rotation of tiles: it takes tiles warp, warp + WARPS, ... of a split
    RingPosition<Shared<D>::STAGES> stage;  // of the split's first tile
    RingPosition<SLOTS> slot;

    template <Scores SCORES>
    __device__ void attend(const float* slopes, float cap) {
        while (true) {
            barrier_wait(smem.slot_full(slot.index), slot.parity);
            const Visit v = *smem.visit(slot.index);
            if (v.row == NONE) return;
            const Heads heads(a, v);
            u32 q[D / 16][2];
            load_queries<D>(q, smem.queries(slot.index), heads.count);
            barrier_arrive(smem.slot_empty(slot.index));
            slot.skip(1);
            const bool has_all = splits.are_together(v.len);
            const u32 last = has_all ? chunk_of(a, v.len, 0, splits.count).active : v.split + 1;
            Fold fold;
            u32 split = v.split;
            do {  // also for a padding row, which has no split
                const Chunk c = chunk_of(a, v.len, split, splits.count);
                Softmax<D> state;
                if (a.sinks && split == 0 && warp == 0) state.begin_with(a.sinks + heads.first, heads.count);
                if constexpr (SCORES == Scores::ALIBI) {
                    attend_tiles(state, q, c, Alibi(slopes + heads.first, heads.count, threadIdx.x % 4, v.len));
                } else if constexpr (SCORES == Scores::CAPPED) {
                    attend_tiles(state, q, c, Capped(cap));
                } else {
                    attend_tiles(state, q, c, NoBias());
                }
                publish<D, Tile<D>>(smem.merged(), state, heads.count, warp);
                const u32 tiles = (c.end - c.begin + TILE - 1) / TILE;
                stage.skip(tiles);
                warp = (warp + WARPS - tiles % WARPS) % WARPS;
                if (has_all && c.active > 1) {
                    fold.add(smem.merged(), heads.count, split == 0);
                    attend_sync();  // the next split writes where some warps may still read
                } else {
                    store(fold, v, heads, c);
                }
            } while (++split < last);
            if (has_all && last > 1) fold.store(out_of(v, heads), heads.count);
        }
    }

    template <class Bias>
    __device__ void attend_tiles(Softmax<D>& state, const u32 (&q)[D / 16][2], const Chunk& c, const Bias& bias) {
        const int g = threadIdx.x % 32 / 4;
        const float scale = a.scale * LOG2E;
        RingPosition<Shared<D>::STAGES> mine = stage;
        mine.skip(warp);
        for (u32 first = c.begin + warp * TILE; first < c.end; first += WARPS * TILE, mine.skip(WARPS)) {
            barrier_wait(smem.full(mine.index), mine.parity);
            const Tile<D> tile = {smem.k(mine.index)};
            if (c.end - first < TILE) tile.clear_values(c.end - first);
            float s[4];
            tile.scores(s, q);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 position = first + g + e / 2 * 8;
                const bool seen = position < c.end && position >= c.first_valid;
                s[e] = seen ? bias.add(s[e] * scale, e % 2, position) : -INFINITY_F;
            }
            u32 b0, b1;
            state.step(s, b0, b1, tile);
            tile.accumulate(state.sum, b0, b1);
            release(smem.empty(mine.index));
        }
    }

    __device__ bf16* out_of(const Visit& v, const Heads& heads) const { return a.out + ((u64)v.row * a.heads + heads.first) * D; }

    // Stores the heads of a row with one split, or of one that other blocks have a part of. The block that is last adds all parts.
    __device__ void store(Fold& fold, const Visit& v, const Heads& heads, const Chunk& c) {
        bf16* out = out_of(v, heads);
        if (v.len == 0) {
            for (int i = threadIdx.x; i < heads.count * D; i += THREADS) out[i] = to_bf16(0.0f);
        } else if (c.active == 1) {
            store_out<D>(out, smem.merged(), heads.count);
        } else {
            const u64 first = ((u64)v.row * a.heads + heads.first) * splits.count;
            const u32 per_row = a.kv_heads * groups_of(a);
            const Part part = {first, v.row * per_row + v.in_row, v.split, splits.count, c.active};
            if (store_part<D>(a, part, smem.merged(), heads.count)) {
                fold.add(a.partial + first * D, a.stats + first, heads.count, splits.count, c.active);
                fold.store(out, heads.count);
            }
            attend_sync();  // the next visit writes where some warps may still read
        }
    }

    // After all lanes have read it.
    static __device__ void release(u32 barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }
};

template <int D, Scores SCORES>
__device__ __forceinline__ void decode_attention(const DecodeAttention& a, const Maps& maps, const float* slopes, float cap,
                                                 u32* next_visit, u32 num_rows, Splits splits, u32 is_late) {
    extern __shared__ __align__(1024) u8 dynamic[];
    pdl_launch();
    if (is_late) {
        pdl_wait();
        asm volatile("fence.proxy.async.global;" ::: "memory");  // for the copy engine
    }
    const Shared<D> smem = {dynamic};
    if (threadIdx.x == 0) smem.init();
    for (u32 row = threadIdx.x; row < min(num_rows, LENS); row += blockDim.x) smem.lens()[row] = a.context_lens[row];
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        Producer<D>{a, smem, maps, splits}.produce(Work(a, smem.lens(), num_rows, splits), next_visit);
        copy_async_wait<0>();
    } else {
        Consumer<D>{a, smem, splits, threadIdx.x / 32}.template attend<SCORES>(slopes, cap);
    }
}

#define DECODE_ATTENTION(D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) sm90_decode_attention_bf16_d##D(                     \
        const DecodeAttention a, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,     \
        const __grid_constant__ TensorMap half_k_map, const __grid_constant__ TensorMap half_v_map, u32* next_visit,   \
        u32 num_rows, const Splits splits, u32 is_late) {                                                                       \
        const Maps maps = {&k_map, &v_map, &half_k_map, &half_v_map};                                                  \
        decode_attention<D, Scores::PLAIN>(a, maps, nullptr, 0.0f, next_visit, num_rows, splits, is_late);             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) sm90_alibi_decode_attention_bf16_d##D(               \
        const DecodeAttention a, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,     \
        const __grid_constant__ TensorMap half_k_map, const __grid_constant__ TensorMap half_v_map, u32* next_visit,   \
        u32 num_rows, const Splits splits, u32 is_late, const float* slopes) {                                                  \
        const Maps maps = {&k_map, &v_map, &half_k_map, &half_v_map};                                                  \
        decode_attention<D, Scores::ALIBI>(a, maps, slopes, 0.0f, next_visit, num_rows, splits, is_late);              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) sm90_capped_decode_attention_bf16_d##D(              \
        const DecodeAttention a, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,     \
        const __grid_constant__ TensorMap half_k_map, const __grid_constant__ TensorMap half_v_map, u32* next_visit,   \
        u32 num_rows, const Splits splits, u32 is_late, float cap) {                                                            \
        const Maps maps = {&k_map, &v_map, &half_k_map, &half_v_map};                                                  \
        decode_attention<D, Scores::CAPPED>(a, maps, nullptr, cap, next_visit, num_rows, splits, is_late);             \
    }

DECODE_ATTENTION(128)
