// Draws of rows whose settings leave tokens out: those behind top-k or top-p.
#pragma once
#include "sample_row.cuh"

constexpr int PIVOTS = 15;
constexpr u32 MAX_LISTED = 4096;

// The largest key t in [low, high) for which the weight of tokens with keys >= t reaches `target`; at `low` it must do
// so. Those with keys >= high weigh `above`. A token has weight 1, or exp(z - max_z) with MASS. 16-ary search: at most 8 passes.
template <bool MASS>
__device__ u32 threshold(const Row& row, u32 vocab, u32 low, u32 high, float above, float max_z, float target,
                         float (*scratch)[PIVOTS + 1]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    while (high - low > 1) {
        const u32 step = (high - low + PIVOTS) / (PIVOTS + 1);
        float sums[PIVOTS] = {};
        row.each(Range{0, vocab}, threadIdx.x, blockDim.x, [&](u32, float z) {
            const u32 key = key_of(z);
            if (key < low || key >= high) return;
            const float weight = MASS ? __expf(z - max_z) : 1.0f;
#pragma unroll
            for (int j = 0; j < PIVOTS; ++j) sums[j] += key >= low + step * (j + 1) ? weight : 0.0f;
        });
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PIVOTS; ++j) {
            const float sum = warp_sum(sums[j]);
            if (lane == 0) scratch[warp][j] = sum;
        }
        __syncthreads();
        if (threadIdx.x < PIVOTS) {
            float sum = above;
            for (int w = 0; w < warps; ++w) sum += scratch[w][threadIdx.x];
            scratch[0][threadIdx.x] = sum;  // Only this thread reads column threadIdx.x before the barrier.
        }
        __syncthreads();
        u32 reached = 0;
        while (reached < PIVOTS && low + step * (reached + 1) < high && scratch[0][reached] >= target) ++reached;
        const u32 next = low + step * (reached + 1);
        if (next < high) above = scratch[0][reached], high = next;
        low += step * reached;
    }
    return low;
}

// Sum of exp(z - max_z) over the tokens whose key is at least `low`.
__device__ float mass_above(const Row& row, u32 vocab, u32 low, float max_z, float* scratch) {
    float sum = 0.0f;
    row.each(Range{0, vocab}, threadIdx.x, blockDim.x, [&](u32, float z) {
        if (key_of(z) >= low) sum += __expf(z - max_z);
    });
    return block_sum(sum, scratch);
}

// Shared memory of sample_choose_f32.
struct Scratch {
    u64 list[MAX_LISTED];
    u64 pairs[32];
    float floats[32];
    float pivots[32][PIVOTS + 1];
    u32 size, first;
};

// A row whose draw leaves tokens out.
struct Filtered {
    const SampleArgs& a;
    const RowParams& p;
    const Partial* partials;
    const Row& row;
    float max_z;
    u64 stream;

    // Draws from the whole row.
    __device__ u64 draw_by_search(u32 top, Scratch& shared) const {
        u32 low = 0;
        if (has_top_k(p, a.vocab)) low = threshold<false>(row, a.vocab, 0, top + 1, 0.0f, max_z, (float)p.top_k, shared.pivots);
        if (p.top_p < 1.0f) {
            const float mass = mass_above(row, a.vocab, low, max_z, shared.floats);
            low = threshold<true>(row, a.vocab, low, top + 1, 0.0f, max_z, p.top_p * mass, shared.pivots);
        }
        low = max(low, least_key(p, max_z));
        u64 drawn = 0;
        row.each(Range{0, a.vocab}, threadIdx.x, THREADS, [&](u32 v, float z) {
            if (key_of(z) >= low) drawn = max_u64(drawn, race(stream, z, v));
        });
        return block_max_u64(drawn, shared.pairs);
    }

    // The first level that has all tokens which may be drawn, and few enough; LEVELS if there is none. `mass`: of all tokens.
    __device__ int level(float& mass) const {
        const Partial& own = partials[threadIdx.x % CHUNKS];
        mass = warp_sum(own.mass);
        int found = LEVELS;
#pragma unroll
        for (int level = LEVELS - 1; level >= 0; --level) {
            const float count = warp_sum((float)own.counts[level]), part = warp_sum(own.masses[level]);
            const bool has_all = has_top_k(p, a.vocab) ? count >= (float)p.top_k : part >= p.top_p * mass;
            if (has_all && count <= (float)MAX_LISTED) found = level;
        }
        return found;
    }

    // Lists the tokens of a level, best first; returns their number. Warp w takes chunk w.
    __device__ u32 list(int level, Scratch& shared) const {
        static_assert(THREADS / 32 == CHUNKS, "a warp for each chunk");
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) shared.size = 0;
        __syncthreads();
        if (partials[warp].counts[level] != 0) {
            const float least = max_z - DISTANCES[level];
            row.each(chunk_of(a.vocab, warp), lane, 32, [&](u32 v, float z) {
                if (z < least) return;
                const u32 at = atomicAdd(&shared.size, 1);
                if (at < MAX_LISTED) shared.list[at] = pair_of(z, v);
            });
        }
        __syncthreads();
        const u32 size = min(shared.size, MAX_LISTED);
        u32 padded = 32;
        while (padded < size) padded *= 2;
        for (u32 i = size + threadIdx.x; i < padded; i += THREADS) shared.list[i] = 0;
        sort(shared.list, padded);
        return size;
    }

    // Sorts a power of two of pairs, the largest first (a bitonic network).
    __device__ static void sort(u64* list, u32 size) {
        for (u32 run = 2; run <= size; run *= 2) {
            for (u32 step = run / 2; step > 0; step /= 2) {
                __syncthreads();
                for (u32 i = threadIdx.x; i < size / 2; i += THREADS) {
                    const u32 low = 2 * i - i % step, high = low + step;
                    const u64 x = list[low], y = list[high];
                    if ((x < y) == ((low & run) == 0)) list[low] = y, list[high] = x;
                }
            }
        }
        __syncthreads();
    }

    // The number of listed tokens whose key is at least `key`.
    __device__ static u32 keep_to(const u64* list, u32 size, u32 key) {
        u32 low = 0, high = size;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if ((u32)(list[middle] >> 32) >= key) low = middle + 1;
            else high = middle;
        }
        return low;
    }

    // Draws from the listed tokens. `mass`: of all tokens.
    __device__ u64 draw_listed(u32 size, float mass, Scratch& shared) const {
        const u64* list = shared.list;
        u32 kept = size;
        if (has_top_k(p, a.vocab)) kept = keep_to(list, size, list[p.top_k - 1] >> 32);
        if (p.top_p < 1.0f) kept = keep_mass(kept, mass, shared);
        kept = min(kept, keep_to(list, size, least_key(p, max_z)));
        u64 drawn = 0;
        for (u32 i = threadIdx.x; i < kept; i += THREADS) drawn = max_u64(drawn, race(stream, value_of(list[i] >> 32), token_of(list[i])));
        return block_max_u64(drawn, shared.pairs);
    }

    // How many of the first `kept` listed tokens reach top-p: of their own mass after top-k, otherwise of `mass`.
    __device__ u32 keep_mass(u32 kept, float mass, Scratch& shared) const {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = (kept + THREADS - 1) / THREADS, begin = threadIdx.x * each;
        const auto weight = [&](u32 i) { return i < kept ? __expf(value_of(shared.list[i] >> 32) - max_z) : 0.0f; };
        float own = 0.0f;
        for (u32 i = begin; i < begin + each; ++i) own += weight(i);
        float before = own;  // the sum of the lanes up to this one
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float other = __shfl_up_sync(FULL_WARP, before, d);
            if (lane >= d) before += other;
        }
        if (threadIdx.x == 0) shared.first = kept;
        if (lane == 31) shared.floats[warp] = before;
        __syncthreads();
        float total = 0.0f;
        for (u32 w = 0; w < THREADS / 32; ++w) {
            if (w == warp) before += total - own;
            total += shared.floats[w];
        }
        const float target = p.top_p * (has_top_k(p, a.vocab) ? total : mass);
        for (u32 i = begin; i < begin + each; ++i) {
            before += weight(i);
            if (before >= target && i < kept) {
                atomicMin(&shared.first, i);
                break;
            }
        }
        __syncthreads();
        const u32 first = shared.first;
        return first < kept ? min(kept, keep_to(shared.list, kept, shared.list[first] >> 32)) : kept;
    }

    __device__ u64 draw(u32 top, Scratch& shared) const {
        float mass;
        const int level = this->level(mass);
        if (level == LEVELS) return draw_by_search(top, shared);
        const u32 size = list(level, shared);
        return draw_listed(size, mass, shared);
    }
};
