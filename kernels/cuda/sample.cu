// sample_argmax_f32, sample_greedy: the likeliest token of each row that its mask allows, lowest id on a tie
// sample_f32: the next token of each row with its own settings, with log-probabilities
// sample_join: computes a row's token counts when a sequence takes the row
//
// logits       [G, S, P] f32: G workers' shares of P tokens each; the logit of token v is at (v / P, s, v % P)
// pairs        [G, S, C] u64: order-preserving bits of the value, then the complement of the token; C chunks of a share
// work         [S, V] f32, scratch
// params       [rows] RowParams; last_tokens [rows] u32; history [rows, max_len] u32; counts [rows, V] u32:
//              bit 31 is set for a token of the prompt, the other bits count how often the token was generated
// rows         [S] u32, with VERIFIES if rank 0 decides what is appended; num_generated [S] u32
// outputs      slots of [max_samples] tokens, log-probabilities and top lists, in host memory; `slot` is the index of
//              the slot
// masks        [num_masked, ceil(V / 32)] u32: bit v % 32 of word v / 32 allows token v; mask_rows [S] u32: the mask of
//              a sample, or NO_MASK
// beams        rows with candidates draw nothing and append nothing: their likeliest tokens are reported with
//              log-probabilities after penalties, bias and bans
// order        repetition, presence and frequency penalty; bias; bad words; end ids before min_tokens; mask;
//              temperature; top-k; top-p; min-p, as documented in engine::SamplingParams; ties at a threshold are kept
// draw         the token with the smallest quotient of an exponential variate and its probability: one pass, no
//              normalization (the exponential race; Gumbel-max). The variate depends only on seed, output position and
//              token.
// determinism  all sums have a fixed order, so workers with equal logits choose equal tokens
// launch       sample_argmax_f32: grid (S, C), block 256; sample_greedy: grid S, block 32; sample_f32: grid S, block 1024;
//              sample_join: grid 1, block 1024
// bound        latency: at most about 20 passes over a row, 8 for each of top-k and top-p
// test         tests/cuda_sample.rs: compares each setting with a sorted fp64 reference, and draws by their frequencies
// archs: 80 90a 100a ptx
#include "common.cuh"

constexpr u32 GREEDY = 1, PENALTIES = 2, LISTS = 4, DECAYS = 8;
constexpr u32 VERIFIES = 0x80000000u;  // set in an entry of `rows`: nothing is appended to the row
constexpr u32 NO_MASK = 0xffffffffu;  // in an entry of `mask_rows`: all tokens are allowed
constexpr u32 PROMPT_BIT = 0x80000000u;
constexpr int PIVOTS = 15;

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

extern "C" __global__ void __launch_bounds__(256)
sample_argmax_f32(u64* pairs, const float* logits, u32 share, u32 stride, u32 first_token, const u32* mask_rows,
                  const u32* masks, u32 mask_words) {
    __shared__ u64 scratch[32];
    const u32 s = blockIdx.x, chunks = gridDim.y;
    const u32 length = (share + chunks - 1) / chunks, begin = blockIdx.y * length;
    const u32 end = begin + length < share ? begin + length : share;
    const float* row = logits + (u64)s * stride;
    pdl_launch();
    pdl_wait();
    u64 best = 0;
    const u32* mask = mask_rows == nullptr || mask_rows[s] == NO_MASK ? nullptr : masks + (u64)mask_rows[s] * mask_words;
    if (mask == nullptr) {
#pragma unroll 4
        for (u32 v = begin + threadIdx.x; v < end; v += 256) best = max_u64(best, pair_of(row[v], first_token + v));
    } else {
#pragma unroll 4
        for (u32 v = begin + threadIdx.x; v < end; v += 256) {
            const u32 token = first_token + v;
            const bool allowed = mask[token / 32] >> token % 32 & 1;
            best = max_u64(best, pair_of(allowed ? row[v] : -INFINITY_F, token));
        }
    }
    best = block_max_u64(best, scratch);
    if (threadIdx.x == 0) pairs[(u64)s * chunks + blockIdx.y] = best;
}

extern "C" __global__ void __launch_bounds__(32) sample_greedy(SampleArgs a, const u64* pairs, u32 groups, u32 chunks) {
    const u32 s = blockIdx.x;
    pdl_launch();
    pdl_wait();
    u64 best = 0;
    for (u32 i = threadIdx.x; i < groups * chunks; i += 32)
        best = max_u64(best, pairs[((u64)(i / chunks) * a.num_samples + s) * chunks + i % chunks]);
    best = warp_max_u64(best);
    if (threadIdx.x != 0) return;
    append(a, s, token_of(best));
    *output_of(a, s).token = token_of(best);
}

// The logits of one row in the layout of the workers' shares.
struct Raw {
    const float* logits;
    u32 s, num_samples, share;
    __device__ __forceinline__ float operator[](u32 v) const {
        return logits[((u64)(v / share) * num_samples + s) * share + v % share];
    }
};

// The mask of sample s, or null.
__device__ __forceinline__ const u32* mask_of(const SampleArgs& a, u32 s) {
    if (a.mask_rows == nullptr || a.mask_rows[s] == NO_MASK) return nullptr;
    return a.masks + (u64)a.mask_rows[s] * ((a.vocab + 31) / 32);
}

// Copies the row to `work`, minus `shift`, and applies penalties, bias, bans and the mask.
__device__ void adjust(const SampleArgs& a, const RowParams& p, const Raw& raw, float shift, float* work, u32 row,
                       u32 num_generated) {
    const u32* counts = a.counts + (u64)row * a.vocab;
    const u32* mask = mask_of(a, raw.s);
    for (u32 v = threadIdx.x; v < a.vocab; v += blockDim.x) {
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
        if (bias[i] < a.vocab) atomicAdd(work + bias[i], __uint_as_float(bias[p.num_bias + i]));
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32* word = bias + 2 * p.num_bias;
        const u32 length = p.num_prompt + num_generated;
        const u32* history = a.history + (u64)row * a.max_len;
        for (u32 i = 0; i < p.num_bad; ++i, word += 1 + word[0]) {
            const u32 before = word[0] - 1;
            bool completes = before <= length && word[1 + before] < a.vocab;
            for (u32 j = 0; completes && j < before; ++j) completes = history[length - before + j] == word[1 + j];
            if (completes) work[word[1 + before]] = -INFINITY_F;
        }
    }
    if (num_generated < p.min_tokens)
        for (u32 i = threadIdx.x; i < p.num_end; i += blockDim.x)
            if (p.lists[i] < a.vocab) work[p.lists[i]] = -INFINITY_F;
    __syncthreads();
}

// The largest key t in [low, high) for which the weight of tokens with keys >= t reaches `target`; at `low` it must do
// so. A token has weight 1, or exp(z - max_z) with MASS. 16-ary search: at most 8 passes.
template <bool MASS>
__device__ u32 threshold(const float* z, u32 vocab, u32 low, u32 high, float scale, float max_z, float target,
                         float (*scratch)[PIVOTS + 1]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    while (high - low > 1) {
        const u32 step = (high - low + PIVOTS) / (PIVOTS + 1);
        float sums[PIVOTS] = {};
        for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) {
            const float x = z[v] * scale;
            const u32 key = key_of(x);
            const float weight = MASS ? __expf(x - max_z) : 1.0f;
#pragma unroll
            for (int j = 0; j < PIVOTS; ++j) sums[j] += key >= low + step * (j + 1) ? weight : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PIVOTS; ++j) {
            const float sum = warp_sum(sums[j]);
            if (lane == 0) scratch[warp][j] = sum;
        }
        __syncthreads();
        if (threadIdx.x < PIVOTS) {
            float sum = 0.0f;
            for (int w = 0; w < warps; ++w) sum += scratch[w][threadIdx.x];
            scratch[0][threadIdx.x] = sum; // Only this thread reads column threadIdx.x before the barrier.
        }
        __syncthreads();
        u32 reached = 0;
        while (reached < PIVOTS && low + step * (reached + 1) < high && scratch[0][reached] >= target) ++reached;
        const u32 next = low + step * (reached + 1);
        high = next < high ? next : high;
        low += step * reached;
    }
    return low;
}

// Sum of exp(z - max_z) over the tokens whose key is at least `low`.
__device__ float mass_above(const float* z, u32 vocab, u32 low, float scale, float max_z, float* scratch) {
    float sum = 0.0f;
    for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) {
        const float x = z[v] * scale;
        if (key_of(x) >= low) sum += __expf(x - max_z);
    }
    return block_sum(sum, scratch);
}

// The logarithm of the sum of the exponentials of the raw logits, returned to every thread.
__device__ float log_total(const SampleArgs& a, const Raw& raw, float* floats) {
    float most = -INFINITY_F;
    for (u32 v = threadIdx.x; v < a.vocab; v += blockDim.x) most = fmaxf(most, raw[v]);
    most = block_max(most, floats);
    float mass = 0.0f;
    for (u32 v = threadIdx.x; v < a.vocab; v += blockDim.x) mass += __expf(raw[v] - most);
    return most + logf(block_sum(mass, floats));
}

// Reports the `wanted` highest of `values` minus `shift`, best first; with `is_choice` the best one is also the chosen
// token.
template <class Values>
__device__ void report_likeliest(const SampleArgs& a, const Values& values, float shift, u32 wanted, bool is_choice, const Output& out,
                                 u64* pairs) {
    u64 last = ~0ull;
    for (u32 n = 0; n < min(wanted, a.max_top); ++n) {
        u64 next = 0;
        for (u32 v = threadIdx.x; v < a.vocab; v += blockDim.x) {
            const u64 pair = pair_of(values[v], v);
            if (pair < last) next = max_u64(next, pair);
        }
        last = block_max_u64(next, pairs);
        if (threadIdx.x == 0) {
            if (n == 0 && is_choice) *out.token = token_of(last);
            out.top_tokens[n] = token_of(last);
            out.top_logprobs[n] = value_of(last >> 32) - shift;
        }
    }
}

// Reports log-probabilities of the raw logits: of the chosen token, and of the likeliest ones, best first.
__device__ void log_probabilities(const SampleArgs& a, const RowParams& p, const Raw& raw, const Output& out, u32 token,
                                  u64* pairs, float* floats) {
    const float total = log_total(a, raw, floats);
    if (threadIdx.x == 0) *out.logprob = raw[token] - total;
    report_likeliest(a, raw, total, p.num_logprobs - 1, false, out, pairs);
}

extern "C" __global__ void __launch_bounds__(1024) sample_f32(SampleArgs a) {
    __shared__ u64 pairs[32];
    __shared__ float floats[32];
    __shared__ float pivots[32][PIVOTS + 1];
    const u32 s = blockIdx.x;
    pdl_launch();
    pdl_wait();
    const u32 row = row_of(a, s), num_generated = a.num_generated[s];
    const RowParams p = a.params[row];
    const Raw raw = {a.logits, s, a.num_samples, a.share};
    float* work = a.work + (u64)s * a.vocab;
    const bool is_beam = p.num_candidates != 0;
    adjust(a, p, raw, is_beam ? log_total(a, raw, floats) : 0.0f, work, row, num_generated);
    if (is_beam) {
        report_likeliest(a, work, 0.0f, p.num_candidates, true, output_of(a, s), pairs);
        return;
    }

    const bool greedy = p.flags & GREEDY;
    const float scale = greedy ? 1.0f : 1.0f / p.temperature;
    u64 best = 0;
    for (u32 v = threadIdx.x; v < a.vocab; v += blockDim.x) best = max_u64(best, pair_of(work[v] * scale, v));
    best = block_max_u64(best, pairs);
    if (!greedy) {
        const u32 top = best >> 32;
        const float max_z = value_of(top);
        u32 low = 0;
        if (p.top_k != 0 && p.top_k < a.vocab)
            low = threshold<false>(work, a.vocab, 0, top + 1, scale, max_z, (float)p.top_k, pivots);
        if (p.top_p < 1.0f) {
            const float mass = mass_above(work, a.vocab, low, scale, max_z, floats);
            low = threshold<true>(work, a.vocab, low, top + 1, scale, max_z, p.top_p * mass, pivots);
        }
        if (p.min_p > 0.0f) {
            const u32 least = key_of(max_z + __logf(p.min_p));
            low = low > least ? low : least;
        }
        const u64 stream = mix(p.seed + 0x9e3779b97f4a7c15ull * (num_generated + 1));
        best = 0;
        for (u32 v = threadIdx.x; v < a.vocab; v += blockDim.x) {
            const float x = work[v] * scale;
            if (key_of(x) < low) continue;
            const u32 random = mix(stream ^ ((u64)v * 0x9e3779b97f4a7c15ull)) >> 32;
            const float uniform = ((float)random + 0.5f) * 2.3283064e-10f; // in (0, 1]
            best = max_u64(best, pair_of(x - logf(-log1pf(-fminf(uniform, 0.99999994f))), v));
        }
        best = block_max_u64(best, pairs);
    }
    const u32 token = token_of(best);
    const Output out = output_of(a, s);
    if (p.num_logprobs != 0) log_probabilities(a, p, raw, out, token, pairs, floats);
    if (threadIdx.x == 0) {
        append(a, s, token);
        *out.token = token;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
sample_join(u32* counts, const u32* history, u32 vocab, u32 num_prompt, u32 num_tokens) {
    pdl_launch();
    pdl_wait();
    for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) counts[v] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < num_tokens; i += blockDim.x) {
        if (history[i] >= vocab) continue;
        if (i < num_prompt)
            atomicOr(counts + history[i], PROMPT_BIT);
        else
            atomicAdd(counts + history[i], 1u);
    }
}
