// Decode attention: operands (described in decode_attention.cu), the running softmax of a warp, and the sums over warps
// and splits.
#pragma once
#include "kv_codes.cuh"
#include "mma.cuh"

constexpr int WARPS = 4;         // number of warps that attend
constexpr int THREADS = WARPS * 32;
constexpr int TILE = 16;         // positions that a warp processes at a time
constexpr int GROUP = 8;         // query heads per block
constexpr float LOG2E = 1.4426950408889634f;

struct DecodeAttention {
    const bf16* q;
    const void* k_blocks;  // bf16 or codes
    const void* v_blocks;
    const u32* block_tables;
    const u32* context_lens;
    bf16* out;
    float* partial;  // [R][H][splits][D]
    float2* stats;   // [R][H][splits]: maximum, denominator
    u32* counters;   // [R][K * groups]
    const float* sinks;  // [H] a logit of each head that has no value, or null
    u32 q_stride;    // elements
    u32 max_blocks;
    u32 heads, kv_heads;
    u32 block_shift;  // log2 B
    u32 window;       // positions that are attended to, 0 for all
    u32 min_chunk;    // minimum number of positions in a split, a multiple of 16
    float scale;
    u32 chunk;        // positions that are attended to begin at a multiple of it, 0 for no bound
    u32 splits;       // into which a row is divided at most
    const float* k_scales;  // of codes, else null
    const float* v_scales;
};

// Number of groups of query heads per KV head.
__device__ __forceinline__ u32 groups_of(const DecodeAttention& a) { return (a.heads / a.kv_heads + GROUP - 1) / GROUP; }

// Changes the scaled scores, in powers of two, of this thread's heads 2t and 2t + 1: not at all, or by ALiBi's penalty of
// distance, or by a cap.
enum class Scores { PLAIN, ALIBI, CAPPED };

struct NoBias {
    __device__ float add(float score, int, u32) const { return score; }
};

struct Alibi {
    float slope[2];
    u32 newest;

    __device__ Alibi(const float* slopes, int heads, int t, u32 len) : newest(len - 1) {
#pragma unroll
        for (int h = 0; h < 2; ++h) slope[h] = 2 * t + h < heads ? slopes[2 * t + h] * LOG2E : 0.0f;
    }

    __device__ float add(float score, int h, u32 position) const { return score + slope[h] * (float)(i32)(position - newest); }
};

// Soft cap of the scores: cap * tanh(score / cap).
struct Capped {
    float cap, inverse;

    __device__ explicit Capped(float value) : cap(value * LOG2E), inverse(1.0f / (value * LOG2E)) {}

    __device__ float add(float score, int, u32) const { return cap * tanh_exp(score * inverse); }
};

// The positions that one block processes.
struct Chunk {
    u32 first_valid;  // earlier positions are outside the window or the chunk of the newest
    u32 begin, end;
    u32 active;  // number of splits with work
};

template <bool HAS_CHUNKS = true>
__device__ __forceinline__ Chunk chunk_of(const DecodeAttention& a, u32 len, u32 split, u32 splits) {
    Chunk c;
    c.first_valid = a.window && len > a.window ? len - a.window : 0;
    if (HAS_CHUNKS && a.chunk && len > 0) c.first_valid = max(c.first_valid, (len - 1) / a.chunk * a.chunk);
    const u32 start = c.first_valid / TILE * TILE, span = len - start;
    const u32 size = max(a.min_chunk, ((span + splits - 1) / splits + 63) / 64 * 64);
    c.active = (span + size - 1) / size;
    c.begin = start + split * size;
    c.end = min(c.begin + size, len);
    return c;
}

// Running softmax of a warp for heads 2t and 2t + 1.
template <int D>
struct Softmax {
    float top[2] = {-INFINITY_F, -INFINITY_F};
    float denominator[2] = {0.0f, 0.0f};  // of this thread's positions only
    float sum[D / 16][4] = {};

    // Takes part in the softmax with the sinks of the heads, before any score; one warp of a row does so.
    __device__ void begin_with(const float* sinks, int heads) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (2 * t + h >= heads) continue;
            top[h] = sinks[2 * t + h] * LOG2E;
            denominator[h] = g == 0 ? 1.0f : 0.0f;
        }
    }

    // Takes the scaled scores of a tile and returns the probabilities as the fragment p^T, multiplied by the scales of the tile's
    // values if they are codes.
    template <class Tile>
    __device__ void step(float (&s)[4], u32& b0, u32& b1, const Tile& tile) {
        float correction[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = fmaxf(s[h], s[h + 2]);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, d));
            m = fmaxf(m, top[h]);
            correction[h] = exp2_fast(top[h] - m);
            top[h] = m;
            s[h] = exp2_fast(s[h] - m);
            s[h + 2] = exp2_fast(s[h + 2] - m);
            denominator[h] = denominator[h] * correction[h] + s[h] + s[h + 2];
        }
        tile.weigh(s);
        b0 = transpose_8x8(pack_bf16x2(s[0], s[1]));
        b1 = transpose_8x8(pack_bf16x2(s[2], s[3]));
        if (__any_sync(FULL_WARP, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                sum[i][0] *= correction[0], sum[i][1] *= correction[1];
                sum[i][2] *= correction[0], sum[i][3] *= correction[1];
            }
        }
    }
};

// Barrier of all threads that attend.
__device__ __forceinline__ void attend_sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Maxima, denominators and sums of all warps for the heads, in shared memory.
template <int D>
struct Merged {
    float top[WARPS][GROUP];
    float denominator[WARPS][GROUP];
    float sum[1];  // [WARPS][heads][D]
};

// Writes this warp's part, as number `warp`, relative to the block's maximum. Places maps a sum to its elements of D.
template <int D, class Places>
__device__ __forceinline__ void publish(Merged<D>* merged, Softmax<D>& state, int heads, int warp) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) state.denominator[h] += __shfl_xor_sync(FULL_WARP, state.denominator[h], d);
        if (g == 0) merged->top[warp][2 * t + h] = state.top[h];
    }
    attend_sync();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * t + h;
        float top = merged->top[0][head];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, merged->top[w][head]);
        const float weight = exp2_fast(state.top[h] - top);
        if (g == 0) merged->denominator[warp][head] = state.denominator[h] * weight;
        if (head >= heads) continue;
        float* sum = merged->sum + (warp * heads + head) * D;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            Places::store(sum, i, g, state.sum[i][h] * weight, state.sum[i][h + 2] * weight);
        }
    }
    attend_sync();
}

template <int D>
__device__ __forceinline__ float merged_top(const Merged<D>* merged, int head) {
    float top = merged->top[0][head];
    for (int w = 1; w < WARPS; ++w) top = fmaxf(top, merged->top[w][head]);
    return top;
}

template <int D>
__device__ __forceinline__ float merged_denominator(const Merged<D>* merged, int head) {
    float sum = merged->denominator[0][head];
    for (int w = 1; w < WARPS; ++w) sum += merged->denominator[w][head];
    return sum;
}

// Element i of [heads][D], added over the warps.
template <int D>
__device__ __forceinline__ float merged_sum(const Merged<D>* merged, int heads, int i) {
    float sum = merged->sum[i];
    for (int w = 1; w < WARPS; ++w) sum += merged->sum[w * heads * D + i];
    return sum;
}

// Adds the splits of `heads` heads, in order; `weights` has [heads][splits] floats.
template <int D>
__device__ __forceinline__ void combine(bf16* out, const float* partial, const float2* stats, float* weights, int heads,
                                        u32 splits, u32 active) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int head = warp; head < heads; head += WARPS) {
        const float2* stat = stats + head * splits;
        float top = -INFINITY_F, denominator = 0.0f;
        for (u32 s = lane; s < active; s += 32) top = fmaxf(top, __ldcg(stat + s).x);
        top = warp_max(top);
        for (u32 s = lane; s < active; s += 32) {
            const float2 x = __ldcg(stat + s);
            const float weight = exp2_fast(x.x - top);
            weights[head * splits + s] = weight;
            denominator += weight * x.y;
        }
        denominator = warp_sum(denominator);
        for (u32 s = lane; s < active; s += 32) weights[head * splits + s] /= denominator;
    }
    attend_sync();
    for (int i = threadIdx.x; i < heads * (D / 4); i += THREADS) {
        const int head = i / (D / 4), e = i % (D / 4) * 4;
        const float* p = partial + (u64)head * splits * D + e;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (u32 s = 0; s < active; ++s) {
            const float weight = weights[head * splits + s];
            const float4 x = __ldcg(reinterpret_cast<const float4*>(p + s * D));
            sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
        }
        *reinterpret_cast<uint2*>(out + head * D + e) = make_uint2(pack_bf16x2(sum.x, sum.y), pack_bf16x2(sum.z, sum.w));
    }
}

// Returns true in the last of `active` blocks that call it; it can then read what the others wrote before.
__device__ __forceinline__ bool is_last(u32* counter, u32 active) {
    __shared__ bool last;
    attend_sync();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1) == active - 1;
        if (last) *counter = 0;
        __threadfence();
    }
    attend_sync();
    return last;
}

// Writes the sums of heads that only this block computes.
template <int D>
__device__ __forceinline__ void store_out(bf16* out, const Merged<D>* merged, int heads) {
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        out[i] = to_bf16(merged_sum<D>(merged, heads, i) / merged_denominator<D>(merged, i / D));
    }
}

// One of `active` parts of some heads of a row.
struct Part {
    u64 first;    // index of the first of the heads' [splits] partial sums
    u32 counter;  // index of the counter that its blocks share
    u32 split, splits, active;
};

// Writes the part. Returns true in the last block, which adds all of them.
template <int D>
__device__ __forceinline__ bool store_part(const DecodeAttention& a, const Part& p, Merged<D>* merged, int heads) {
    float* partial = a.partial + p.first * D;
    float2* stats = a.stats + p.first;
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        partial[((u64)(i / D) * p.splits + p.split) * D + i % D] = merged_sum<D>(merged, heads, i);
    }
    if (threadIdx.x < heads) {
        stats[threadIdx.x * p.splits + p.split] =
            make_float2(merged_top<D>(merged, threadIdx.x), merged_denominator<D>(merged, threadIdx.x));
    }
    return is_last(a.counters + p.counter, p.active);
}
