// sample_adjust_f32, sample_levels_f32, sample_choose_f32: the next token of each row with its own settings, with log-probabilities
//
// logits       [G, S, P] f32: G workers' shares of P tokens each; the logit of token v is at (v / P, s, v % P)
// work         [S, V] f32: logits after penalties, bias, bans and the mask, of rows that have any of them
// partials     [S, CHUNKS] Partial: what the chunks of a row have
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
// method       sample_adjust finds the likeliest token of each chunk, and draws, if all tokens may be drawn. sample_levels draws with
//              min-p alone; otherwise it counts the tokens, and their mass, within each of LEVELS distances from the likeliest. The first level that has all
//              tokens of top-k and top-p is sorted, if it has at most MAX_LISTED; otherwise sample_choose searches the whole row
//              for the thresholds
// determinism  all sums have a fixed order, so workers with equal logits choose equal tokens
// launch       sample_adjust_f32, sample_levels_f32: grid (S, CHUNKS), block 256; sample_choose_f32: grid S, block 1024
// bound        memory: 4 V bytes a row in each kernel
// test         tests/cuda_sample.rs: compares each setting with a sorted fp64 reference, and draws by their frequencies
// archs: 80 90a 100a ptx
#include "sample_filtered.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) sample_adjust_f32(SampleArgs a) {
    __shared__ u64 pairs[32];
    __shared__ float floats[32];
    const u32 s = blockIdx.x;
    pdl_launch();
    pdl_wait();
    const u32 row_id = row_of(a, s);
    const RowParams p = a.params[row_id];
    if (p.num_candidates != 0) return;
    const Raw raw = raw_of(a, s);
    const Range range = chunk_of(a.vocab, blockIdx.y);
    const Row row(a, p, s);
    if (row.is_adjusted) adjust(a, p, raw, 0.0f, a.work + (u64)s * a.vocab, row_id, a.num_generated[s], range);
    Partial& partial = a.partials[(u64)s * CHUNKS + blockIdx.y];
    u64 best = 0;
    if (draws_at_once(p, a.vocab)) {
        const u64 stream = stream_of(p, a.num_generated[s]);
        u64 drawn = 0;
        row.each(range, threadIdx.x, blockDim.x, [&](u32 v, float z) {
            best = max_u64(best, pair_of(z, v));
            drawn = max_u64(drawn, race(stream, z, v));
        });
        drawn = block_max_u64(drawn, pairs);
        if (threadIdx.x == 0) partial.drawn = drawn;
    } else {
        row.each(range, threadIdx.x, blockDim.x, [&](u32 v, float z) { best = max_u64(best, pair_of(z, v)); });
    }
    best = block_max_u64(best, pairs);
    if (threadIdx.x == 0) partial.best = best;
    if (p.num_logprobs == 0) return;
    const u64 raw_best = best_of(raw, range, ~0ull, pairs);
    const float most = value_of(raw_best >> 32);
    float mass = 0.0f;
    for (u32 v = range.begin + threadIdx.x; v < range.end; v += blockDim.x) mass += __expf(raw[v] - most);
    mass = block_sum(mass, floats);
    if (threadIdx.x == 0) partial.raw_best = raw_best, partial.raw_mass = mass;
}

extern "C" __global__ void __launch_bounds__(256) sample_levels_f32(SampleArgs a) {
    __shared__ u64 pairs[32];
    __shared__ float floats[32];
    const u32 s = blockIdx.x;
    pdl_launch();
    pdl_wait();
    const RowParams p = a.params[row_of(a, s)];
    if (p.num_candidates != 0 || p.flags & GREEDY || draws_at_once(p, a.vocab)) return;
    Partial* partials = a.partials + (u64)s * CHUNKS;
    Partial& own = partials[blockIdx.y];
    const Range range = chunk_of(a.vocab, blockIdx.y);
    const Row row(a, p, s);
    const float max_z = value_of(best_of_chunks(partials) >> 32);
    if (!is_filtered(p, a.vocab)) {
        const u64 stream = stream_of(p, a.num_generated[s]);
        const u32 low = least_key(p, max_z);
        u64 drawn = 0;
        row.each(range, threadIdx.x, blockDim.x, [&](u32 v, float z) {
            if (key_of(z) >= low) drawn = max_u64(drawn, race(stream, z, v));
        });
        drawn = block_max_u64(drawn, pairs);
        if (threadIdx.x == 0) own.drawn = drawn;
        return;
    }
    u32 counts[LEVELS] = {};
    float masses[LEVELS] = {}, mass = 0.0f;
    row.each(range, threadIdx.x, blockDim.x, [&](u32, float z) {
        const float weight = __expf(z - max_z);
        mass += weight;
        if (z < max_z - DISTANCES[LEVELS - 1]) return;
#pragma unroll
        for (int level = 0; level < LEVELS; ++level) {
            const bool is_within = z >= max_z - DISTANCES[level];
            counts[level] += is_within ? 1 : 0;
            masses[level] += is_within ? weight : 0.0f;
        }
    });
    mass = block_sum(mass, floats);
    if (threadIdx.x == 0) own.mass = mass;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        // Counts are below 2^24, so f32 has them exactly.
        const float count = block_sum((float)counts[level], floats), weight = block_sum(masses[level], floats);
        if (threadIdx.x == 0) own.counts[level] = (u32)count, own.masses[level] = weight;
    }
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

// Reports log-probabilities of the raw logits: of the chosen token, and of the likeliest ones, best first.
__device__ void log_probabilities(const SampleArgs& a, const RowParams& p, const Raw& raw, const Partial* partials, const Output& out,
                                  u32 token, u64* pairs) {
    const u32 lane = threadIdx.x % 32;
    u64 best = partials[lane].raw_best;  // of the lane's chunk, below those that were reported
    const float own = value_of(best >> 32), most = warp_max(own);
    // The chunks behind the last token have no best one.
    const float total = most + logf(warp_sum(best != 0 ? partials[lane].raw_mass * __expf(own - most) : 0.0f));
    if (threadIdx.x == 0) *out.logprob = raw[token] - total;
    for (u32 n = 0; n < min(p.num_logprobs - 1, a.max_top); ++n) {
        const u64 next = warp_max_u64(best);
        if (threadIdx.x == 0) out.top_tokens[n] = token_of(next), out.top_logprobs[n] = value_of(next >> 32) - total;
        const u32 chunk = __ffs(__ballot_sync(FULL_WARP, best == next)) - 1;
        const u64 following = best_of(raw, chunk_of(a.vocab, chunk), next, pairs);
        if (lane == chunk) best = following;
    }
}

// Reports the likeliest tokens of a beam, with log-probabilities in `work`, best first.
__device__ void report_candidates(const SampleArgs& a, const RowParams& p, const float* work, const Output& out, u64* pairs) {
    u64 last = ~0ull;
    for (u32 n = 0; n < min(p.num_candidates, a.max_top); ++n) {
        last = best_of(work, Range{0, a.vocab}, last, pairs);
        if (threadIdx.x != 0) continue;
        if (n == 0) *out.token = token_of(last);
        out.top_tokens[n] = token_of(last), out.top_logprobs[n] = value_of(last >> 32);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_choose_f32(SampleArgs a) {
    __shared__ Scratch shared;
    const u32 s = blockIdx.x;
    pdl_launch();
    pdl_wait();
    const u32 row_id = row_of(a, s), num_generated = a.num_generated[s];
    const RowParams p = a.params[row_id];
    const Raw raw = raw_of(a, s);
    const Partial* partials = a.partials + (u64)s * CHUNKS;
    const Output out = output_of(a, s);
    if (p.num_candidates != 0) {
        float* work = a.work + (u64)s * a.vocab;
        adjust(a, p, raw, log_total(a, raw, shared.floats), work, row_id, num_generated, Range{0, a.vocab});
        return report_candidates(a, p, work, out, shared.pairs);
    }
    u64 chosen = best_of_chunks(partials);
    if (!(p.flags & GREEDY)) {
        if (is_filtered(p, a.vocab)) {
            const u32 top = chosen >> 32;
            const Row row(a, p, s);
            chosen = Filtered{a, p, partials, row, value_of(top), stream_of(p, num_generated)}.draw(top, shared);
        } else {
            chosen = warp_max_u64(partials[threadIdx.x % 32].drawn);
        }
    }
    const u32 token = token_of(chosen);
    if (p.num_logprobs != 0) log_probabilities(a, p, raw, partials, out, token, shared.pairs);
    if (threadIdx.x == 0) {
        append(a, s, token);
        *out.token = token;
    }
}
