// Prefill attention by Hopper's warpgroups: see sm90_prefill_attention.cu. A warpgroup that fills shared memory, which each kernel has
// for itself, and two that compute.
#pragma once
#include "kv_codes.cuh"
#include "mma.cuh"
#include "prefill_attention.cuh"
#include "sm90.cuh"

constexpr u32 QUERIES = 128, KEYS = 128, STAGES = 2, CONSUMER_WARPS = 8;
constexpr u32 PANEL = 128 * 128;  // bytes of 128 rows of 64 elements

__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

// Shared memory: queries, then stages of keys, then of values, each with D / 64 panels; then barriers.
template <int D>
struct Shared {
    static constexpr u32 TILE = D / 64 * PANEL;
    static constexpr u32 BYTES = TILE * (1 + 2 * STAGES);
    u32 base, barriers;

    __device__ u32 q() const { return base; }
    __device__ u32 k(u32 s) const { return base + TILE * (1 + s); }
    __device__ u32 v(u32 s) const { return base + TILE * (1 + STAGES + s); }
    __device__ u32 q_full() const { return barriers; }
    __device__ u32 q_empty() const { return barriers + 8; }
    __device__ u32 k_full(u32 s) const { return barriers + 16 + 8 * s; }
    __device__ u32 k_empty(u32 s) const { return barriers + 32 + 8 * s; }
    __device__ u32 v_full(u32 s) const { return barriers + 48 + 8 * s; }
    __device__ u32 v_empty(u32 s) const { return barriers + 64 + 8 * s; }

    // `writers` arrive when a stage is full.
    __device__ void init(u32 writers) const {
        barrier_init(q_full(), 1), barrier_init(q_empty(), 32 * CONSUMER_WARPS);
        for (u32 s = 0; s < STAGES; ++s) {
            barrier_init(k_full(s), writers), barrier_init(k_empty(s), CONSUMER_WARPS);
            barrier_init(v_full(s), writers), barrier_init(v_empty(s), CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
};

// The work queue of blocks: `works` tiles, distributed by a counter that the last request resets.
struct Queue {
    u32* next_tile;
    u32 tiles, works;

    __device__ u32 take() const {
        const u32 index = atomicAdd(next_tile, 1);
        if (index == works + gridDim.x - 1) *next_tile = 0;  // each block makes one request that finds no tile
        return index;
    }
};

// A tile of queries of one head. Tiles of one row and head are consecutive; those with the most keys come first.
struct Work {
    QueryTile tile;
    u32 head, begin, count;  // first key, rounded down; slices of KEYS keys
};

__device__ __forceinline__ Work work_at(const PrefillAttention& a, u32 index, const Queue& queue) {
    Work w = {};
    if (index >= queue.works) return w;
    const u32 tiles = queue.tiles, row = index / (tiles * a.heads);
    w.head = index / tiles % a.heads;
    w.tile = query_tile(a, row, tiles - 1 - index % tiles, QUERIES);
    w.begin = w.tile.begin / KEYS * KEYS;
    w.count = w.tile.count ? (w.tile.end - w.begin + KEYS - 1) / KEYS : 0;
    return w;
}

// Counts the uses of a ring's stages.
struct RingPosition {
    u32 stage = 0, parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Gives a tile to the warpgroups that compute, which have read the queries of the one before, and loads its queries. Without keys it
// is the end.
template <int D>
__device__ __forceinline__ void publish(const Shared<D>& smem, const TensorMap* q_map, u32 index, const Work& w, volatile u32* current) {
    *current = index;
    if (w.count == 0) return barrier_arrive(smem.q_full());
    barrier_arrive_expect(smem.q_full(), Shared<D>::TILE);
    for (u32 p = 0; p < D / 64; ++p) {
        tensor_load(smem.q() + p * PANEL, q_map, w.head * D + p * 64, w.tile.token, smem.q_full(), EVICT_FIRST);
    }
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define REGISTERS_0_31                                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_32_63                                                                                                \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// s[64, 128] (+)= q[64, 16] k[128, 16]^T
__device__ __forceinline__ void multiply_qk(float (&s)[64], u64 q, u64 k, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_0_31 ", " REGISTERS_32_63 "}, "
        "%64, %65, add, 1, 1, 0, 0;\n}\n"
        : F16(s, 0), F16(s, 16), F16(s, 32), F16(s, 48)
        : "l"(q), "l"(k), "r"((u32)add));
}

// o[64, 128] += p[64, 16] v[16, 128], where the columns of v are contiguous
__device__ __forceinline__ void multiply_pv(float (&o)[64], const u32* p, u64 v) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_0_31 ", " REGISTERS_32_63 "}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
        : F16(o, 0), F16(o, 16), F16(o, 32), F16(o, 48)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// o[64, 64] += p[64, 16] v[16, 64]
__device__ __forceinline__ void multiply_pv(float (&o)[32], const u32* p, u64 v) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_0_31 "}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
        : F16(o, 0), F16(o, 16)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

#undef F4
#undef F16

// A warpgroup's 64 queries; a thread has rows g and g + 8 of its warp's 16.
template <int D>
struct Attention {
    float sum[D / 2];
    u32 p[KEYS / 4];
    float top[2], denominator[2];  // denominators of this thread's keys only

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) sum[i] = 0.0f;
        top[0] = top[1] = -INFINITY_F;
        denominator[0] = denominator[1] = 0.0f;
    }

    // Takes part in the softmax with a sink, divided by the scale, before any score.
    __device__ void begin_with(float sink) {
        top[0] = top[1] = sink;
        denominator[0] = denominator[1] = threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
    }

    // Caps scores before they are scaled: `limit` is the cap divided by the scale.
    __device__ static void cap(float (&s)[64], float limit) {
        const float inverse = 1.0f / limit;
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] = limit * tanh_exp(s[i] * inverse);
    }

    __device__ static void scores(float (&s)[64], u32 q, u32 k) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const u32 at = i / 4 * PANEL + i % 4 * 32;
            multiply_qk(s, descriptor(q + at, 16, 1024), descriptor(k + at, 16, 1024), i > 0);
        }
        wgmma_commit();
    }

    __device__ void accumulate(u32 v) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) multiply_pv(sum, p + 4 * i, descriptor(v + i * 2048, PANEL, 1024));
        wgmma_commit();
    }

    // Sets scores of keys that are not attended to to minus infinity.
    __device__ static void mask(float (&s)[64], const PrefillAttention& a, u32 position, u32 first) {
        const u32 key = first + threadIdx.x % 4 * 2;
        const u32 seen_from[2] = {first_seen(a, position), first_seen(a, position + 8)};
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const int r = i / 2 % 2;
            if (!sees(position + r * 8, seen_from[r], key + i / 4 * 8 + i % 2)) s[i] = -INFINITY_F;
        }
    }

    // Adds ALiBi's penalty of distance to scores before they are scaled: `slope` is divided by the scale.
    __device__ static void penalize(float (&s)[64], float slope, u32 position, u32 first) {
        const float nearest = slope * (float)(i32)(first + threadIdx.x % 4 * 2 - position);
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] += nearest + slope * (float)(i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
    }

    // Turns scores into probabilities relative to the running maximum; earlier sums must be multiplied by `correction`.
    __device__ void softmax(float (&s)[64], float (&correction)[2], float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = top[r];
#pragma unroll
            for (int i = 0; i < 64; i += 4) m = fmaxf(m, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
            const float base = m == -INFINITY_F ? 0.0f : m * scale;  // no key attended to yet
            // Exactly 1 if the maximum stays: slices of which a query sees no key, as in a tile of later queries, then change nothing.
            correction[r] = m == top[r] ? 1.0f : exp2_fast(top[r] * scale - base);
            top[r] = m;
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < 64; i += 4) {
                s[i + 2 * r] = exp2_fast(s[i + 2 * r] * scale - base);
                s[i + 2 * r + 1] = exp2_fast(s[i + 2 * r + 1] * scale - base);
                total += s[i + 2 * r] + s[i + 2 * r + 1];
            }
            denominator[r] = denominator[r] * correction[r] + total;
        }
    }

    __device__ void rescale(const float (&correction)[2]) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) sum[i] *= correction[i / 2 % 2];
    }

    __device__ void pack(const float (&s)[64]) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) p[i] = pack_bf16x2(s[2 * i], s[2 * i + 1]);
    }

    __device__ void store(bf16* out, u64 row_elements, u32 first, u32 count) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float d = denominator[r];
            d += __shfl_xor_sync(FULL_WARP, d, 1);
            d += __shfl_xor_sync(FULL_WARP, d, 2);
            const u32 query = first + lane / 4 + 8 * r;
            if (query >= count) continue;
            const float inverse = 1.0f / d;
            u32* to = reinterpret_cast<u32*>(out + query * row_elements) + lane % 4;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) {
                to[4 * j] = pack_bf16x2(sum[4 * j + 2 * r] * inverse, sum[4 * j + 2 * r + 1] * inverse);
            }
        }
    }
};

// A warp's arrival, after what all its threads did before.
__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Sets the values beyond the row's end to zero. They may be unwritten, and zero times NaN is not zero. Codes of them are expanded to zeros.
template <int D>
__device__ __forceinline__ void clear_tail(u32 v, u32 valid, u32 group) {
    const u32 chunks = (KEYS - valid) * 8;  // of 16 bytes, in each panel
    for (u32 i = threadIdx.x % 128; i < chunks * (D / 64); i += 128) {
        const u32 address = v + i / chunks * PANEL + valid * 128 + i % chunks * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    if (group == 1) asm volatile("bar.sync 2, 128;" ::: "memory");
}

template <int D, Kv KV, Scores SCORES>
__device__ __forceinline__ void consume(const Shared<D>& smem, const PrefillAttention& a, const Queue& queue, volatile u32* current,
                                        const float* slopes, float cap) {
    const u32 group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4;
    const u32 first_query = group * 64 + warp * 16;  // first query of the warp
    const u32 q = smem.q() + group * 64 * 128;
    const float scale = a.scale * LOG2E;
    RingPosition k, v;
    u32 q_parity = 0;
    while (true) {
        barrier_wait(smem.q_full(), q_parity);
        q_parity ^= 1;
        const Work w = work_at(a, *current, queue);
        if (w.count == 0) return;
        const u32 lowest = w.tile.position + first_query, highest = lowest + 15;
        // Whether some query does not attend to some key of the slice.
        auto partial = [&](u32 first) { return first + KEYS > lowest + 1 || first < first_seen(a, highest); };
        const u32 position = lowest + threadIdx.x % 32 / 4;
        const float slope = SCORES == Scores::ALIBI ? slopes[w.head] / a.scale : 0.0f;

        Attention<D> state;
        state.clear();
        if (a.sinks) state.begin_with(a.sinks[w.head] / a.scale);
        float s[64], correction[2];
        barrier_wait(smem.k_full(k.stage), k.parity);
        state.scores(s, q, smem.k(k.stage));
        wgmma_wait<0>();
        release(smem.k_empty(k.stage));
        k.next();
        if (SCORES == Scores::ALIBI) state.penalize(s, slope, position, w.begin);
        if (SCORES == Scores::CAPPED) state.cap(s, cap / a.scale);
        if (partial(w.begin)) state.mask(s, a, position, w.begin);
        state.softmax(s, correction, scale);
        state.pack(s);
        for (u32 i = 1; i < w.count; ++i) {
            const u32 first = w.begin + i * KEYS;
            barrier_wait(smem.k_full(k.stage), k.parity);
            state.scores(s, q, smem.k(k.stage));
            barrier_wait(smem.v_full(v.stage), v.parity);
            state.accumulate(smem.v(v.stage));
            wgmma_wait<1>();
            release(smem.k_empty(k.stage));
            k.next();
            if (SCORES == Scores::ALIBI) state.penalize(s, slope, position, first);
            if (SCORES == Scores::CAPPED) state.cap(s, cap / a.scale);
            if (partial(first)) state.mask(s, a, position, first);
            state.softmax(s, correction, scale);
            wgmma_wait<0>();
            release(smem.v_empty(v.stage));
            v.next();
            state.rescale(correction);
            state.pack(s);
        }
        barrier_arrive(smem.q_empty());  // every thread signals separately that it has read the index of this tile
        barrier_wait(smem.v_full(v.stage), v.parity);
        const u32 last = w.begin + (w.count - 1) * KEYS;
        if (KV == Kv::BF16 && last + KEYS > w.tile.end) clear_tail<D>(smem.v(v.stage), w.tile.end - last, group);
        state.accumulate(smem.v(v.stage));
        wgmma_wait<0>();
        release(smem.v_empty(v.stage));
        v.next();
        state.store(a.out + ((u64)w.tile.token * a.heads + w.head) * D, (u64)a.heads * D, first_query, w.tile.count);
    }
}
