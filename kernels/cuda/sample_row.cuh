// The values of a row from which its next token is chosen.
#pragma once
#include "sample.cuh"

constexpr u32 THREADS = 1024;  // of sample_choose_f32
// How far below the likeliest token a level ends.
__device__ constexpr float DISTANCES[LEVELS] = {0.25f, 1.0f, 2.0f, 4.0f, 6.0f, 9.0f, 13.0f};

// The logits of one row in the layout of the workers' shares.
struct Raw {
    const float* logits;
    u32 s, num_samples, share;
    __device__ __forceinline__ float operator[](u32 v) const {
        return logits[((u64)(v / share) * num_samples + s) * share + v % share];
    }
};

__device__ __forceinline__ Raw raw_of(const SampleArgs& a, u32 s) { return {a.logits, s, a.num_samples, a.share}; }

// Tokens begin .. end of a row.
struct Range {
    u32 begin, end;
    __device__ bool has(u32 v) const { return begin <= v && v < end; }
};

__device__ __forceinline__ Range chunk_of(u32 vocab, u32 chunk) {
    const u32 length = (vocab + 4 * CHUNKS - 1) / (4 * CHUNKS) * 4;
    return {min(chunk * length, vocab), min((chunk + 1) * length, vocab)};
}

// Whether some tokens are left out of the draw, besides those below min-p.
__device__ __forceinline__ bool has_top_k(const RowParams& p, u32 vocab) { return p.top_k != 0 && p.top_k < vocab; }
__device__ __forceinline__ bool is_filtered(const RowParams& p, u32 vocab) { return has_top_k(p, vocab) || p.top_p < 1.0f; }

// Whether any token may be drawn.
__device__ __forceinline__ bool draws_at_once(const RowParams& p, u32 vocab) {
    return !(p.flags & GREEDY) && !is_filtered(p, vocab) && !(p.min_p > 0.0f);
}

// The mask of sample s, or null.
__device__ __forceinline__ const u32* mask_of(const SampleArgs& a, u32 s) {
    if (a.mask_rows == nullptr || a.mask_rows[s] == NO_MASK) return nullptr;
    return a.masks + (u64)a.mask_rows[s] * ((a.vocab + 31) / 32);
}

// The values of a row from which tokens are chosen, before the temperature.
struct Row {
    const float* values;
    float scale;
    bool is_adjusted;  // copied to `work`
    bool has_fours;    // four values can be loaded at a time; the same for all rows of a model

    __device__ Row(const SampleArgs& a, const RowParams& p, u32 s)
        : scale(p.flags & GREEDY ? 1.0f : 1.0f / p.temperature),
          is_adjusted(p.flags & (PENALTIES | LISTS) || a.share < a.vocab || mask_of(a, s) != nullptr),
          has_fours(a.vocab % 4 == 0 && a.share % 4 == 0) {
        values = is_adjusted ? a.work + (u64)s * a.vocab : a.logits + (u64)s * a.share;
    }

    // Calls `f` with the tokens of a range and their scaled values, by `threads` threads of which this one is `thread`.
    template <class F>
    __device__ __forceinline__ void each(Range range, u32 thread, u32 threads, const F& f) const {
        if (has_fours) {
#pragma unroll 2
            for (u32 v = range.begin + 4 * thread; v < range.end; v += 4 * threads) {
                const float4 x = *reinterpret_cast<const float4*>(values + v);
                f(v, x.x * scale), f(v + 1, x.y * scale), f(v + 2, x.z * scale), f(v + 3, x.w * scale);
            }
        } else {
#pragma unroll 4
            for (u32 v = range.begin + thread; v < range.end; v += threads) f(v, values[v] * scale);
        }
    }
};

// Copies tokens of the row to `work`, minus `shift`, and applies penalties, bias, bans and the mask.
__device__ void adjust(const SampleArgs& a, const RowParams& p, const Raw& raw, float shift, float* work, u32 row,
                       u32 num_generated, Range range) {
    const u32* counts = a.counts + (u64)row * a.vocab;
    const u32* mask = mask_of(a, raw.s);
#pragma unroll 4
    for (u32 v = range.begin + threadIdx.x; v < range.end; v += blockDim.x) {
        float x = raw[v] - shift;
        if (p.flags & PENALTIES) {
            const u32 count = counts[v], generated = count & ~PROMPT_BIT;
            if (count != 0) x = x > 0.0f ? x / p.repetition : x * p.repetition;
            if (generated != 0) x -= p.presence + p.frequency * (float)generated;
        }
        // Bias added later leaves an infinite value as it is.
        work[v] = mask == nullptr || mask[v / 32] >> (v % 32) & 1 ? x : -INFINITY_F;
    }
    __syncthreads();
    if (!(p.flags & LISTS)) return;
    const u32* bias = p.lists + p.num_end;
    for (u32 i = threadIdx.x; i < p.num_bias; i += blockDim.x)
        if (range.has(bias[i])) atomicAdd(work + bias[i], __uint_as_float(bias[p.num_bias + i]));
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32* word = bias + 2 * p.num_bias;
        const u32 length = p.num_prompt + num_generated;
        const u32* history = a.history + (u64)row * a.max_len;
        for (u32 i = 0; i < p.num_bad; ++i, word += 1 + word[0]) {
            const u32 before = word[0] - 1;
            bool completes = before <= length && range.has(word[1 + before]);
            for (u32 j = 0; completes && j < before; ++j) completes = history[length - before + j] == word[1 + j];
            if (completes) work[word[1 + before]] = -INFINITY_F;
        }
    }
    if (num_generated < p.min_tokens)
        for (u32 i = threadIdx.x; i < p.num_end; i += blockDim.x)
            if (range.has(p.lists[i])) work[p.lists[i]] = -INFINITY_F;
    __syncthreads();
}

// The likeliest of tokens of a row, returned to every thread.
template <class Values>
__device__ __forceinline__ u64 best_of(const Values& values, Range range, u64 below, u64* scratch) {
    u64 best = 0;
#pragma unroll 4
    for (u32 v = range.begin + threadIdx.x; v < range.end; v += blockDim.x) {
        const u64 pair = pair_of(values[v], v);
        if (pair < below) best = max_u64(best, pair);
    }
    return block_max_u64(best, scratch);
}

// What decides which of the allowed tokens is drawn: the largest.
__device__ __forceinline__ u64 race(u64 stream, float z, u32 v) {
    const u32 random = mix(stream ^ ((u64)v * 0x9e3779b97f4a7c15ull)) >> 32;
    const float uniform = ((float)random + 0.5f) * 2.3283064e-10f;  // in (0, 1]
    return pair_of(z - logf(-log1pf(-fminf(uniform, 0.99999994f))), v);
}

__device__ __forceinline__ u64 stream_of(const RowParams& p, u32 num_generated) {
    return mix(p.seed + 0x9e3779b97f4a7c15ull * (num_generated + 1));
}

// The likeliest token of a row and its scaled value; lane l has that of chunk l.
__device__ __forceinline__ u64 best_of_chunks(const Partial* partials) { return warp_max_u64(partials[threadIdx.x % 32].best); }

// The key of the least logit that min-p allows.
__device__ __forceinline__ u32 least_key(const RowParams& p, float max_z) {
    return p.min_p > 0.0f ? key_of(max_z + __logf(p.min_p)) : 0;
}
