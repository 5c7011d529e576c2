// Rows of samples, as sample.rs declares them, and what the kernels that choose tokens have in common.
#pragma once
#include "common.cuh"

constexpr u32 GREEDY = 1, PENALTIES = 2, LISTS = 4, DECAYS = 8;
constexpr u32 VERIFIES = 0x80000000u;  // set in an entry of `rows`: nothing is appended to the row
constexpr u32 NO_MASK = 0xffffffffu;  // in an entry of `mask_rows`: all tokens are allowed
constexpr u32 PROMPT_BIT = 0x80000000u;

struct alignas(16) RowParams {
    float temperature, top_p, min_p, repetition;
    float presence, frequency;
    u32 top_k, flags;
    u64 seed;
    u32 min_tokens, num_prompt;
    u32 num_end, num_bias, num_bad, num_logprobs; // num_logprobs: 0 for none, otherwise 1 + number of likeliest tokens
    const u32* lists; // end ids; bias ids; bias values (f32); then for each bad word its length and its tokens
    u32 num_candidates;  // above 0: the row is a beam, and this number of its likeliest tokens is reported
    u32 top_p_reset;     // the token that resets top_p to top_p_first, or u32::MAX
    float top_p_first, top_p_decay, top_p_min;
    u32 reserved;
};
static_assert(sizeof(RowParams) == 96, "RowParams: sample.rs declares the same");

constexpr u32 CHUNKS = 32;  // of a row, each for a block: ARGMAX_CHUNKS in sample.rs
constexpr int LEVELS = 7;

// What a chunk of a row has: [S, CHUNKS] for a step.
struct Partial {
    u64 best;       // the likeliest token by adjusted logits
    u64 raw_best;   // by the logits themselves
    u64 drawn;      // the token that is drawn if nothing is left out
    float raw_mass; // sum of exp(logit - that of raw_best), for rows with log-probabilities
    float mass;     // sum of exp(z - max z)
    u32 counts[LEVELS];    // tokens of each level, and their part of `mass`
    float masses[LEVELS];
};
static_assert(sizeof(Partial) == 88, "PARTIAL_BYTES: sample.rs declares the same");

struct SampleArgs {
    const float* logits;
    float* work;
    RowParams* params;
    u32* last_tokens;
    u32* history;
    u32* counts;
    const u32* rows;
    const u32* num_generated;
    const u32* slot;
    u8* outputs;
    const u32* mask_rows;  // null if no sample has a mask
    const u32* masks;
    u32 num_samples, vocab, share, max_len, max_samples, max_top;
    u32 first_output;  // index in the slot of sample 0
    u32 reserved;
    Partial* partials;
};

struct Output {
    u32* token;
    float* logprob;
    u32* top_tokens;
    float* top_logprobs;
};

__device__ __forceinline__ Output output_of(const SampleArgs& a, u32 s) {
    const u64 slot_words = (u64)a.max_samples * (2 + 2 * a.max_top);
    u32* base = reinterpret_cast<u32*>(a.outputs) + *a.slot * slot_words;
    u32* tops = base + 2 * a.max_samples;
    s += a.first_output;
    return {base + s, reinterpret_cast<float*>(base + a.max_samples + s), tops + (u64)s * a.max_top,
            reinterpret_cast<float*>(tops + (u64)(a.max_samples + s) * a.max_top)};
}

// The unsigned order of the keys is the order of the floats.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Larger is better: compares the value first, then prefers the lower token.
__device__ __forceinline__ u64 pair_of(float x, u32 token) { return (u64)key_of(x) << 32 | (0xffffffffu - token); }
__device__ __forceinline__ u32 token_of(u64 pair) { return 0xffffffffu - (u32)pair; }

__device__ __forceinline__ u64 max_u64(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 warp_max_u64(u64 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = max_u64(x, __shfl_xor_sync(FULL_WARP, x, d));
    return x;
}

__device__ __forceinline__ u64 block_max_u64(u64 x, u64* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_max_u64(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max_u64(lane < warps ? scratch[lane] : 0);
}

// Mixes 64 bits (the finalizer of SplitMix64; Steele, Lea & Flood 2014).
__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u32 row_of(const SampleArgs& a, u32 s) { return a.rows[s] & ~VERIFIES; }

__device__ __forceinline__ void append(const SampleArgs& a, u32 s, u32 token) {
    const u32 row = row_of(a, s);
    RowParams& p = a.params[row];
    if (a.rows[s] & VERIFIES) return;
    const u64 length = p.num_prompt + a.num_generated[s];
    a.last_tokens[row] = token;
    if (p.flags & LISTS && length < a.max_len) a.history[(u64)row * a.max_len + length] = token;
    if (p.flags & PENALTIES) a.counts[(u64)row * a.vocab + token] += 1;
    if (p.flags & DECAYS) {
        const float decayed = fmaxf(p.top_p * p.top_p_decay, fminf(p.top_p_min, p.top_p_first));
        p.top_p = token == p.top_p_reset ? p.top_p_first : decayed;
    }
}
