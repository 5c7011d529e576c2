// Low-rank products of adapters: y[t, n] += scale * sum_r B[n, r] * (sum_k A[r, k] * x[t, k]), with the matrices of the token's
// adapter.
//
// Each adapter has a slot. A layer's outputs belong to up to three modules (q, k and v; gate and up), each with matrices of its own.
// All slots together are one product of `cols` columns for each module: those from slot * rank on are of a slot. They are read in
// slices of 64 columns; a rank is a power of two from 8 to 64, so that no slot is divided.
//
// slots    [T] u32: the token's slot, NO_SLOT for none
// slices   bits: bit i belongs to columns 64 i .. 64 i + 63. `in_step`: a token of the step has a slot there; `in_layer`: a slot there
//          has a product in this layer. Both are set before the step
// a        [slots, modules, rank, K] bf16; finite
// b        [N, cols] bf16; 0 where an adapter lacks a product; finite
// scales   [slots, modules] f32
// h        [T, modules, cols] bf16: scale * A x of the token's slot, 0 in the other columns; undefined in slices that are not in
//          both masks
#pragma once
#include "cluster.cuh"
#include "mma.cuh"

constexpr u32 NO_SLOT = 0xffffffffu;
constexpr u32 SLICE = 64;

// Which module the outputs of a layer belong to.
struct Modules {
    u32 count;
    u32 group;      // if set, two modules alternate in groups of so many outputs
    u32 starts[2];  // otherwise the outputs with which the second and the third begin

    __device__ u32 of(u32 n) const {
        return group ? n / group % count : (u32)(n >= starts[0]) + (u32)(n >= starts[1]);
    }
};

// The slices to read.
__device__ __forceinline__ u64 used_slices(const u64* in_step, const u64* in_layer) { return *in_step & *in_layer; }

// A part of a product with A: the columns from `first_chunk` on in chunks of 32, of a slot's 8 or 16 rows.
constexpr i32 CHUNK = 32;   // columns
constexpr i32 K_PARTS = 8;  // of K, whose sums are added in order
constexpr i32 WARPS = 8;
constexpr i32 ROWS = 16;    // of x and of A in a tile

struct Shrink {
    const bf16* x;
    bf16* h;
    const bf16* a;
    const float* scales;
    const u32* slots;
    const u64* in_step;
    const u64* in_layer;
    u32 tokens, k, rank, modules, cols;
    u32 tile;  // tokens of a block, a multiple of 16, at most 256
};

// Eight columns of a row; zeros behind its end.
__device__ __forceinline__ uint4 row_part(const bf16* row, u32 col, u32 k) {
    if (!row || col >= k) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(row + col);
}

// Both products of a chunk: 16 rows of x by 8 rows of A. Columns are permuted alike in both operands.
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], const uint4& low, const uint4& high, const uint4& a) {
    mma_16x8x16(sums, low.x, high.x, low.y, high.y, a.x, a.y);
    mma_16x8x16(sums, low.z, high.z, low.w, high.w, a.z, a.w);
}

// One block computes 16 rows of A for up to `tile` tokens of one slot. PARTS is the number of parts of K that it computes: one, in
// a cluster of K_PARTS blocks, or all. The sums are the same.
template <int PARTS>
__device__ __forceinline__ void shrink(const Shrink& s) {
    constexpr i32 EARLY = 2;  // chunks of A that each warp loads before it waits
    extern __shared__ float sums[];  // [tile / 16][16][16], then [WARPS][16][16]
    __shared__ u32 own[256];
    __shared__ u32 counts[WARPS];
    pdl_launch();
    const u32 units = (s.rank + ROWS - 1) / ROWS, width = min(s.rank, (u32)ROWS);
    const u32 unit = blockIdx.y % units, module = blockIdx.y / units % s.modules, slot = blockIdx.y / units / s.modules;
    const u32 column = slot * s.rank + unit * ROWS, first_token = blockIdx.z * s.tile;
    const u32 tokens = min(s.tile, s.tokens - first_token);
    const bool is_used = used_slices(s.in_step, s.in_layer) >> (column / SLICE) & 1;
    if (!is_used) {
        pdl_wait();  // the next kernel takes the end of this one as the end of those before
        return;
    }
    const i32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const bool is_token = thread < tokens, is_own = is_token && s.slots[first_token + thread] == slot;
    const u32 votes = __ballot_sync(FULL_WARP, is_own);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    u32 before = __popc(votes & ((1u << lane) - 1)), total = 0;
    for (i32 w = 0; w < WARPS; ++w) {
        if (w < warp) before += counts[w];
        total += counts[w];
    }
    if (is_own) own[before] = first_token + thread;

    const i32 chunks = (s.k + CHUNK - 1) / CHUNK;
    const bf16* a = s.a + (u64)((slot * s.modules + module) * s.rank + unit * ROWS) * s.k;
    const bf16* a_rows[2] = {a + (u64)g * s.k, width > 8 ? a + (u64)(g + 8) * s.k : nullptr};
    const i32 part = PARTS == 1 ? blockIdx.x : 0;
    const i32 first = chunks * part / K_PARTS + warp, end = chunks * (part + 1) / K_PARTS;
    uint4 early[EARLY][2];
    if (total > 0) {
#pragma unroll
        for (i32 i = 0; i < EARLY; ++i) {
            const i32 c = first + i * WARPS;
#pragma unroll
            for (i32 half = 0; half < 2; ++half) early[i][half] = c < end ? row_part(a_rows[half], c * CHUNK + 8 * t, s.k) : make_uint4(0, 0, 0, 0);
        }
        for (i32 c = first + EARLY * WARPS; c < end; c += WARPS) {
            if (c * CHUNK + 8 * t >= (i32)s.k) continue;
            prefetch(a_rows[0] + c * CHUNK + 8 * t);
            if (a_rows[1]) prefetch(a_rows[1] + c * CHUNK + 8 * t);
        }
    }
    __syncthreads();
    pdl_wait();

    const u64 pitch = (u64)s.modules * s.cols;
    bf16* h = s.h + module * s.cols + column;
    if (part == 0 && is_token && !is_own) {
        uint4* row = reinterpret_cast<uint4*>(h + (first_token + thread) * pitch);
        row[0] = make_uint4(0, 0, 0, 0);
        if (width > 8) row[1] = make_uint4(0, 0, 0, 0);
    }
    if (total == 0) return;

    const i32 groups = (total + ROWS - 1) / ROWS;
    float* of_warps = sums + s.tile * ROWS;
    for (i32 group = 0; group < groups; ++group) {
        const u32 low_token = group * ROWS + g, high_token = low_token + 8;
        const bf16* low = low_token < total ? s.x + (u64)own[low_token] * s.k : nullptr;
        const bf16* high = high_token < total ? s.x + (u64)own[high_token] * s.k : nullptr;
        for (i32 p = 0; p < PARTS; ++p) {
            const i32 from = chunks * (part + p) / K_PARTS + warp, to = chunks * (part + p + 1) / K_PARTS;
            float acc[2][4] = {};
            if (p == 0) {
#pragma unroll
                for (i32 i = 0; i < EARLY; ++i) {
                    const i32 c = from + i * WARPS;
                    if (c >= to) break;
                    const uint4 x0 = row_part(low, c * CHUNK + 8 * t, s.k), x1 = row_part(high, c * CHUNK + 8 * t, s.k);
                    multiply_chunk(acc[0], x0, x1, early[i][0]);
                    multiply_chunk(acc[1], x0, x1, early[i][1]);
                }
            }
#pragma unroll 2
            for (i32 c = from + (p == 0 ? EARLY * WARPS : 0); c < to; c += WARPS) {
                const u32 col = c * CHUNK + 8 * t;
                const uint4 x0 = row_part(low, col, s.k), x1 = row_part(high, col, s.k);
                const uint4 a0 = row_part(a_rows[0], col, s.k), a1 = row_part(a_rows[1], col, s.k);
                multiply_chunk(acc[0], x0, x1, a0);
                multiply_chunk(acc[1], x0, x1, a1);
            }
            float* own_sums = of_warps + warp * ROWS * ROWS;
#pragma unroll
            for (i32 half = 0; half < 2; ++half) {
#pragma unroll
                for (i32 i = 0; i < 4; ++i) own_sums[(g + i / 2 * 8) * ROWS + half * 8 + 2 * t + i % 2] = acc[half][i];
            }
            __syncthreads();
            float sum = of_warps[thread];
#pragma unroll
            for (i32 w = 1; w < WARPS; ++w) sum += of_warps[w * ROWS * ROWS + thread];
            float& kept = sums[group * ROWS * ROWS + thread];
            kept = p == 0 ? sum : kept + sum;
            __syncthreads();
        }
    }

    const float scale = s.scales[slot * s.modules + module];
    const auto store = [&](i32 group, i32 element, float sum) {
        const u32 row = group * ROWS + element / ROWS, r = element % ROWS;
        if (row < total && r < width) h[own[row] * pitch + r] = to_bf16(scale * sum);
    };
    if constexpr (PARTS == K_PARTS) {
        for (i32 group = 0; group < groups; ++group) store(group, thread, sums[group * ROWS * ROWS + thread]);
    } else {
        // Each block of the cluster adds the sums of an eighth of the elements.
        cluster_sync();
        for (i32 group = warp; group < groups; group += WARPS) {
            const i32 element = part * 32 + lane;
            const u32 there = shared_address(sums + group * ROWS * ROWS + element);
            float sum = cluster_load_f32(cluster_map(there, 0));
#pragma unroll
            for (i32 p = 1; p < K_PARTS; ++p) sum += cluster_load_f32(cluster_map(there, p));
            store(group, element, sum);
        }
        cluster_sync();  // no block may exit while another reads its sums
    }
}
