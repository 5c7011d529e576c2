// Consecutive products of few rows in one kernel; a link reads what the one before wrote. In a group, each rank has a part of K in
// ADD_NORM and ADD_BRANCH links.
// One file: one kernel, whose parts use the same shared memory and barriers.
//
// A link is y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) of M <= 16 rows, and one of
// STORE, STORE_F32, SILU, GELU  described in sm90_gemm.cuh
// ADD_NORM  residual[m, n] += the sum (over the group), y[m, n] = residual[m, n] * gain[n], unscaled, and the squares
//          of each tile's columns for the link that reads y: with `squares_in`, sums are multiplied by rsqrt(mean of
//          the row's squares + eps)
// ADD_BRANCH  for a branch p, the sum (over the group), whose norm has the weight u: p is stored, and the residual lacks it. y has 2 M rows,
//          r gain in row m and p u gain in row M + m, where r is the residual with the branch before, if it lacks one: then `squares_in` are
//          those of that branch. `squares_out` are of p, r, r p u and p u. A link that reads y multiplies both rows, and
//          returns s (s' sum of row M + m + sum of row m), where s' is the scale of the branch and s that of r + s' p u. So no
//          block waits for the norm of a branch. M <= 4
//
// x        [M, K]  bf16 through a tensor map of [NT rows, 64]; rows from M on are zero
// w        FORMAT bf16: [N, K] bf16 through a tensor map of [TILE, 64]. Others: codes and scales as sm90_quantized_gemm.cu
//          describes, through a tensor map of [TILE, 128] bytes; all links have the same format. Read once
// squares  [M, ceil(N / TILE)] f32, of ADD_BRANCH four each
// packets  [blocks][NT TILE / 4] of 32 bytes: partial sums of a tile that several blocks share, four floats and four tags
// arrivals u32: how often a block has ended a link, over all launches. epochs [blocks] u32: the number of links over all
//          launches, one counter for each block so that no block reads another's end. Both zero before the first launch
// peers    described in sm90_gemm.cuh; all ranks launch the same chain
// launch   one block per multiprocessor, 128 GROUPS + 96 threads, dynamic shared memory and `stages`, a multiple of
//          GROUPS, from the wrapper.
//          A link's tiles of TILE rows of w are cut into slices of 64 columns (128 of fp8, 256 of 4 bits), and the slices are divided evenly among
//          the blocks, or fewer of them that have MIN_SLICES each. One warp keeps a ring filled with weights, of this link and then of the next one, whose x does
//          not exist yet. A second warp loads x as soon as all blocks have arrived. A third warp adds squares. GROUPS
//          warpgroups multiply, each every GROUPS-th slice. So weights are loaded without a pause across the ends of
//          links, and at the start while the previous kernel runs.
//          The block with the first slices of a tile adds the sums that the others send, in order of K; it multiplies
//          these slices last.
// maths    fp32 in the tensor cores, K in parts that depend on N, K and the number of blocks: no result depends on M.
//          Squares and y are computed from the fp32 sum; with peers, each rank's part is rounded to bf16 first
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up), all blocks resident at the same time: checked in
//          linear_chain.rs
// bound    memory, 2 N K bytes per link in bf16
// test     tests/cuda_linear_chain.rs, compared with reference::linear and reference::rms_norm
#pragma once
#include "peers.cuh"
#include "sm90_quantized.cuh"

constexpr i32 ADD_NORM = 4, ADD_BRANCH = 5;
constexpr int GROUPS = 4;        // warpgroups that multiply
constexpr int CONSUMERS = GROUPS * 128;
constexpr int MAX_LINKS = 4;
constexpr u32 MIN_SLICES = 8;    // of a block that has any: fewer blocks share a small weight, since a tile's sums are added in turn
constexpr u32 WRITTEN = 1u << 31;  // set in every tag; memory that was not written does not have it

struct Norm {
    const float* squares_in;  // [M, slices_in], or null if x has its scale
    bf16* residual;           // [M, N], ADD_NORM and ADD_BRANCH
    const bf16* gain;         // [N], the same
    float* squares_out;       // [M, slices_out], the same
    i32 slices_in, slices_out;
    float inverse_cols, eps;
};

// Of ADD_BRANCH.
struct Branch {
    bf16* values;             // [M, N]
    const bf16* gain;         // [N]
    const bf16* gain_before;  // [N]
};

struct Link {
    TensorMap w, x;
    Output out;
    Norm norm;
    i32 k;
    Meta meta;  // of quantized weights
    Branch branch;
};

struct Chain {
    Link links[MAX_LINKS];
    AllReduce peers;
    u8* packets;
    u32* arrivals;
    u32* epochs;
    i32 count, stages;
};

// Quantized weights.
template <int FORMAT, int NT>
struct CodesRing : QuantizedRing<FORMAT, NT> {
    __device__ __forceinline__ void multiply(float* acc, i32 s, const Meta& meta) const { multiply_codes_by_warps<FORMAT, NT>(acc, *this, s, meta); }
};

// Weights in bf16, with the interface of QuantizedRing.
template <int NT>
struct PlainRing : Ring<TILE, NT> {
    using R = Ring<TILE, NT>;
    static constexpr i32 COLUMNS = BK;
    static constexpr u32 META_BYTES = 0;

    __device__ void load_weights(i32 s, const TensorMap* map, const Meta&, i32 n0, i32 slice, i32, u32 more) const {
        barrier_arrive_expect(R::full + 8 * s, R::W_BYTES + more);
        tensor_load(R::w(s), map, slice * BK, n0, R::full + 8 * s, EVICT_FIRST);
    }

    __device__ void load_rows(i32 s, const TensorMap* map, i32 slice) const {
        tensor_load(R::x(s), map, slice * BK, 0, R::full + 8 * s, EVICT_LAST);
    }

    __device__ __forceinline__ void multiply(float* acc, i32 s, const Meta&) const { multiply_slice<NT>(acc, R::w(s), R::x(s)); }
    __device__ __forceinline__ void scale_rows(float*, const Meta&, i32, i32) const {}
};

// The slices of a link that a block computes, counted tile by tile.
struct Share {
    u32 slices;  // number of slices in a tile
    u32 blocks;  // number of blocks that have any
    u32 total, first, end;

    __device__ u32 first_of(u32 block) const { return block < blocks ? total * block / blocks : total; }
    __device__ u32 block_of(u32 slice) const { return ((slice + 1) * blocks - 1) / total; }
};

template <class R>
__device__ __forceinline__ Share share_of(const Link& link) {
    Share s;
    s.slices = (link.k + R::COLUMNS - 1) / R::COLUMNS;
    s.total = (link.out.n + TILE - 1) / TILE * s.slices;
    s.blocks = min(gridDim.x, max(s.total / MIN_SLICES, 1u));
    s.first = s.first_of(blockIdx.x);
    s.end = s.first_of(blockIdx.x + 1);
    return s;
}

// What this reads, and everything its writer wrote before, is seen by the reads that follow.
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
}

__device__ __forceinline__ void arrive_release(u32* p) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

// Fence between other threads' writes that this thread has seen and reads by the copy engine.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Waits until all blocks have ended this number of links.
__device__ __forceinline__ void wait_for_links(const Chain& c, u32 links) {
    const u32 target = links * gridDim.x;
    while ((i32)(load_acquire(c.arrivals) - target) < 0) {}
}

// Barrier of all threads that multiply.
__device__ __forceinline__ void team_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// One thread: loads the weights of all links.
template <class R>
__device__ __forceinline__ void load_weights(const R& ring, const Chain& c) {
    Cursor at{0, 1};
    for (i32 l = 0; l < c.count; ++l) {
        const Link& link = c.links[l];
        const Share share = share_of<R>(link);
        i32 tile = share.first / share.slices, slice = share.first % share.slices;
        for (u32 i = share.first; i < share.end; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            ring.load_weights(at.stage, &link.w, link.meta, tile * TILE, slice, share.slices, 0);
            if (++slice == (i32)share.slices) slice = 0, ++tile;
            at.advance(1, ring.stages);
        }
    }
}

// One thread: loads x of each link, after it is written.
template <class R>
__device__ __forceinline__ void load_rows(const R& ring, const Chain& c, u32 epoch) {
    Cursor at{0, 1};
    for (i32 l = 0; l < c.count; ++l) {
        const Link& link = c.links[l];
        const Share share = share_of<R>(link);
        if (l > 0) {
            wait_for_links(c, epoch + l);
            proxy_fence();
        }
        i32 slice = share.first % share.slices;
        for (u32 i = share.first; i < share.end; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            barrier_arrive_expect(ring.full + 8 * at.stage, R::X_BYTES);
            ring.load_rows(at.stage, &link.x, slice);
            if (++slice == (i32)share.slices) slice = 0;
            at.advance(1, ring.stages);
        }
    }
}

// One warp: the scales of ROWS rows from `first` on, as ADD_NORM's squares give them.
template <int NT>
__device__ __forceinline__ void norm_scales(float (&scales)[NT], const Norm& norm, i32 rows) {
    constexpr int ROWS = 8;  // at a time, so that loads do not wait for each other
    const int lane = threadIdx.x % 32;
    for (i32 first = 0; first < rows; first += ROWS) {
        float sums[ROWS] = {};
#pragma unroll 2
        for (i32 i = lane; i < norm.slices_in; i += 32) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                if (first + j < rows) sums[j] += __ldcg(norm.squares_in + (i64)(first + j) * norm.slices_in + i);
            }
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            const float sum = warp_sum(sums[j]);
            if (lane == 0 && first + j < rows) scales[first + j] = rsqrtf(sum * norm.inverse_cols + norm.eps);
        }
    }
}

// One warp: scales[m] is that of the sum of residual and branch, scales[rows + m] this times that of the branch. With `is_before`
// scales[m] is that of the branch alone.
template <int NT>
__device__ __forceinline__ void branch_scales(float (&scales)[NT], const Norm& norm, i32 rows, bool is_before) {
    const int lane = threadIdx.x % 32;
    const float4* squares = reinterpret_cast<const float4*>(norm.squares_in);
    for (i32 m = 0; m < rows; ++m) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (i32 i = lane; i < norm.slices_in; i += 32) add(sum, __ldcg(squares + (i64)m * norm.slices_in + i));
        const float branch = rsqrtf(warp_sum(sum.x) * norm.inverse_cols + norm.eps);
        float scale = branch;
        if (!is_before) {
            const float total = warp_sum(sum.y + branch * (2.0f * sum.z + branch * sum.w));
            scale = rsqrtf(total * norm.inverse_cols + norm.eps);
        }
        if (lane == 0) {
            scales[m] = scale;
            if (!is_before) scales[rows + m] = scale * branch;
        }
    }
}

// One warp: computes the scale of each row of x, for each link that needs it. Before that, it prefetches what the
// epilogues of the block's tiles read.
template <class R, int NT, bool BRANCH>
__device__ __forceinline__ void compute_scales(float (*scales)[NT], u32 ready, const Chain& c, u32 epoch) {
    constexpr int LINE = 64;  // columns in a cache line
    const int lane = threadIdx.x % 32;
    for (i32 l = 0; l < c.count; ++l) {
        const Norm& norm = c.links[l].norm;
        const Output& out = c.links[l].out;
        const Share share = share_of<R>(c.links[l]);
        const i32 begin = share.first / share.slices * TILE, end = (share.end + share.slices - 1) / share.slices * TILE;
        for (i32 n = begin + lane * LINE; n < min(end, out.n); n += 32 * LINE) {
            if (out.bias) prefetch(out.bias + n);
            if (out.epilogue >= ADD_NORM) prefetch(norm.gain + n);
            if (BRANCH && out.epilogue == ADD_BRANCH) prefetch(c.links[l].branch.gain + n);
        }
        if (!norm.squares_in) continue;
        if (l > 0) wait_for_links(c, epoch + l);
        if constexpr (BRANCH) {
            branch_scales<NT>(scales[l], norm, out.m, out.epilogue == ADD_BRANCH);
        } else {
            norm_scales<NT>(scales[l], norm, out.m);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ready);
    }
}

// The sums of a tile: those of the groups in shared memory, and those sent by blocks first .. last, each of which has sent some.
template <int NT>
struct Sums {
    static constexpr int AT_ONCE = 4;  // packets that are waited for together, since a load takes as long as four
    const float* partial;  // [GROUPS][NT][PITCH]
    const float* scales;   // [NT] or null
    u8* packets;
    Share share;
    u32 tag, first, last;

    __device__ u8* packet(u32 block, int m, int r) const {
        return packets + ((u64)block * (NT * TILE / 4) + m * (TILE / 4) + r / 4) * 32;
    }

    __device__ float4 own(int m, int r) const {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const float4 v = *reinterpret_cast<const float4*>(partial + (g * NT + m) * PITCH + r);
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        return total;
    }

    __device__ void send(u32 block, int m, int r) const {
        const float4 v = own(m, r);
        u8* p = packet(block, m, r);
        send_half(p, make_uint2(__float_as_uint(v.x), __float_as_uint(v.y)), tag);
        send_half(p + 16, make_uint2(__float_as_uint(v.z), __float_as_uint(v.w)), tag);
    }

    __device__ float4 sum(int m, int r) const {
        float4 total = own(m, r);
        for (u32 block = first; block <= last; block += AT_ONCE) {
            uint4 a[AT_ONCE], b[AT_ONCE];
            for (bool waits = true; waits;) {
                waits = false;
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    const u8* p = packet(min(block + j, last), m, r);
                    a[j] = load_volatile(p), b[j] = load_volatile(p + 16);
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    waits |= a[j].y != tag || a[j].w != tag || b[j].y != tag || b[j].w != tag;
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (block + j > last) continue;
                total.x += __uint_as_float(a[j].x), total.y += __uint_as_float(a[j].z);
                total.z += __uint_as_float(b[j].x), total.w += __uint_as_float(b[j].z);
            }
        }
        if (scales) {
            const float scale = scales[m];
            total.x *= scale, total.y *= scale, total.z *= scale, total.w *= scale;
        }
        return total;
    }
};

// The sums of rows of which x has two: scales[m] times that of row m, plus scales[rows + m] times that of row rows + m.
template <int NT>
struct PairSums {
    const Sums<NT>& sums;
    const float* scales;
    i32 rows;

    __device__ float4 sum(int m, int r) const {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int row = m; row < 2 * rows; row += rows) {
            const float4 v = sums.sum(row, r);
            const float scale = scales[row];
            total.x += scale * v.x, total.y += scale * v.y, total.z += scale * v.z, total.w += scale * v.w;
        }
        return total;
    }
};

// Multiplies this group's slices up to `end`, counted over all links, and adds them to `acc`.
template <class R>
__device__ __forceinline__ void consume(const R& ring, Cursor& at, u32& next, u32 end, float* acc, const Meta& meta) {
    for (; next < end; next += GROUPS) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        ring.multiply(acc, at.stage, meta);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
        at.advance(GROUPS, ring.stages);
    }
}

// Adds four columns of a row to the residual; returns the sum of the results' squares.
__device__ __forceinline__ float add_to_residual(const Output& out, const Norm& norm, i32 m, i32 n, float4 v, uint2 old, uint2 gain) {
    uint2* residual = reinterpret_cast<uint2*>(norm.residual + (i64)m * out.n + n);
    v.x += unpack_lo(old.x), v.y += unpack_hi(old.x), v.z += unpack_lo(old.y), v.w += unpack_hi(old.y);
    *residual = pack4(v);
    const float squares = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    v.x *= unpack_lo(gain.x), v.y *= unpack_hi(gain.x), v.z *= unpack_lo(gain.y), v.w *= unpack_hi(gain.y);
    *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * out.n + n) = pack4(v);
    return squares;
}

// What four columns of a row need besides the branch.
struct BranchInputs {
    uint2 old, gain, branch_gain, before, before_gain;  // `before` and its gain: the branch that the residual lacks; zero if there is none

    __device__ void load(const Link& link, i32 m, i32 n, bool lacks) {
        const i64 i = (i64)m * link.out.n + n;
        old = __ldcg(reinterpret_cast<const uint2*>(link.norm.residual + i));
        gain = *reinterpret_cast<const uint2*>(link.norm.gain + n);
        branch_gain = *reinterpret_cast<const uint2*>(link.branch.gain + n);
        before = before_gain = make_uint2(0, 0);
        if (!lacks) return;
        before = __ldcg(reinterpret_cast<const uint2*>(link.branch.values + i));
        before_gain = *reinterpret_cast<const uint2*>(link.branch.gain_before + n);
    }
};

__device__ __forceinline__ float4 unpack4(const uint2& v) { return make_float4(unpack_lo(v.x), unpack_hi(v.x), unpack_lo(v.y), unpack_hi(v.y)); }

__device__ __forceinline__ float4 times(const float4& a, const float4& b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

__device__ __forceinline__ float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Stores four columns of a row of a branch p; returns the sums of p^2, r^2, r p u and (p u)^2. `scale`: that of the branch before.
__device__ __forceinline__ float4 add_branch(const Link& link, i32 m, i32 n, const float4& p, const BranchInputs& in, float scale) {
    const i64 i = (i64)m * link.out.n + n;
    float4 r = unpack4(in.old);
    const float4 before = times(unpack4(in.before), unpack4(in.before_gain));
    r.x += scale * before.x, r.y += scale * before.y, r.z += scale * before.z, r.w += scale * before.w;
    const float4 gain = unpack4(in.gain), q = times(p, unpack4(in.branch_gain));
    *reinterpret_cast<uint2*>(link.norm.residual + i) = pack4(r);
    *reinterpret_cast<uint2*>(link.branch.values + i) = pack4(p);
    bf16* y = (bf16*)link.out.y + i;
    *reinterpret_cast<uint2*>(y) = pack4(times(r, gain));
    *reinterpret_cast<uint2*>(y + (i64)link.out.m * link.out.n) = pack4(times(q, gain));
    return make_float4(dot(p, p), dot(r, r), dot(r, q), dot(q, q));
}

// Items of a tile (four columns of a row each) and their distribution over a block's threads. Rows are adjacent in a
// warp, and all threads of the warp take part in every round.
struct Quads {
    int quads, m, r, n;

    __device__ Quads(int item, i32 n0, i32 first, i32 count)
        : quads(count / 4), m(item / quads), r(first + item % quads * 4), n(n0 + r) {}

    __device__ bool is_inside(const Output& out) const { return m < out.m && n < out.n; }

    __device__ void store_squares(const Output& out, const Norm& norm, float squares, i32 slice) const {
        for (int d = quads / 2; d > 0; d /= 2) squares += __shfl_xor_sync(FULL_WARP, squares, d);
        if (threadIdx.x % quads == 0 && m < out.m) norm.squares_out[(i64)m * norm.slices_out + slice] = squares;
    }

    __device__ void store_squares(const Output& out, const Norm& norm, float4 sum, i32 slice) const {
        for (int d = quads / 2; d > 0; d /= 2) {
            add(sum, make_float4(__shfl_xor_sync(FULL_WARP, sum.x, d), __shfl_xor_sync(FULL_WARP, sum.y, d),
                                 __shfl_xor_sync(FULL_WARP, sum.z, d), __shfl_xor_sync(FULL_WARP, sum.w, d)));
        }
        if (threadIdx.x % quads == 0 && m < out.m) reinterpret_cast<float4*>(norm.squares_out)[(i64)m * norm.slices_out + slice] = sum;
    }
};

template <bool BRANCH>
struct SquareSums {
    using Type = float;
};
template <>
struct SquareSums<true> {
    using Type = float4;
};

// ADD_NORM of a tile whose row 0 is n0, or ADD_BRANCH, with the scales of the branch that the residual lacks, if it lacks one.
template <int NT, bool PEERS, bool BRANCH>
__device__ __forceinline__ void add_norm(const Sums<NT>& sums, const Link& link, const AllReduce& peers, i32 n0, const float* before) {
    constexpr int ITEMS = (NT / (BRANCH ? 2 : 1) * TILE / 4 + CONSUMERS - 1) / CONSUMERS;
    const Output& out = link.out;
    const int lane = threadIdx.x % 32, begin = threadIdx.x - lane, end = out.m * TILE / 4;
    const i32 columns = n0 / 16;
    const u32 epoch = PEERS ? __ldcg(peers.epochs + columns) + 1 : 0;  // possibly written by another block in the previous link
    uint2 own[PEERS ? ITEMS : 1], old[ITEMS], gain[ITEMS];
    BranchInputs branch[BRANCH ? ITEMS : 1];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const Quads at(begin + j * CONSUMERS + lane, n0, 0, TILE);
        if (!at.is_inside(out)) continue;
        if constexpr (BRANCH) {
            branch[j].load(link, at.m, at.n, before != nullptr);
        } else {
            old[j] = __ldcg(reinterpret_cast<const uint2*>(link.norm.residual + (i64)at.m * out.n + at.n));
            gain[j] = *reinterpret_cast<const uint2*>(link.norm.gain + at.n);
        }
    }
    if constexpr (PEERS) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            const Quads at(begin + j * CONSUMERS + lane, n0, 0, TILE);
            if (!at.is_inside(out)) continue;
            float4 v = sums.sum(at.m, at.r);
            add_bias(v, out.bias, at.n);
            own[j] = pack4(v);
            for (u32 i = 1; i < peers.ranks; ++i) {
                const u32 r = (peers.rank + i) % peers.ranks;
                send_half(peers.row(r, epoch & 1, peers.rank, at.m) + (u64)at.n * 4, own[j], epoch);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (begin + j * CONSUMERS >= end) break;
        const Quads at(begin + j * CONSUMERS + lane, n0, 0, TILE);
        typename SquareSums<BRANCH>::Type squares{};
        if (at.is_inside(out)) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
            if constexpr (PEERS) {
                for (u32 r = 0; r < peers.ranks; ++r) {
                    const u8* from = peers.row(peers.rank, epoch & 1, r, at.m) + (u64)at.n * 4;
                    const uint2 x = r == peers.rank ? own[j] : receive_half(peers, from, epoch, r);
                    v.x += unpack_lo(x.x), v.y += unpack_hi(x.x), v.z += unpack_lo(x.y), v.w += unpack_hi(x.y);
                }
            } else {
                v = sums.sum(at.m, at.r);
                add_bias(v, out.bias, at.n);
            }
            if constexpr (BRANCH) {
                squares = add_branch(link, at.m, at.n, v, branch[j], before ? before[at.m] : 0.0f);
            } else {
                squares = add_to_residual(out, link.norm, at.m, at.n, v, old[j], gain[j]);
            }
        }
        at.store_squares(out, link.norm, squares, n0 / TILE);
    }
    if constexpr (PEERS) {
        team_sync();  // all threads have read the epoch
        const i32 c = threadIdx.x;
        if (c < TILE / 16 && (columns + c) * 16 < out.n) peers.epochs[columns + c] = epoch;
    }
}

// The products of all links.
template <class R, int NT, bool PEERS, bool BRANCH>
__device__ __forceinline__ void multiply(const R& ring, const Chain& c, float* partial, const float (*scales)[NT],
                                         u32 scaled, u32 epoch) {
    const i32 group = threadIdx.x / 128;
    Cursor at{group, 0};
    u32 next = group, run = 0, scaled_parity = 0;
    for (i32 l = 0; l < c.count; ++l) {
        const Link& link = c.links[l];
        const Share share = share_of<R>(link);
        const bool is_scaled = link.norm.squares_in != nullptr;
        bool waits = is_scaled;
        for (u32 i = share.first; i < share.end;) {
            const u32 tile = i / share.slices, begin = tile * share.slices, until = min(begin + share.slices, share.end);
            float acc[NT / 2] = {};
            run += until - i;
            consume(ring, at, next, run, acc, link.meta);
            ring.scale_rows(acc, link.meta, tile * TILE, share.slices);
            if (i > share.first) team_sync();  // the sums of the tile before have been read
            store_partial<NT>(partial + group * NT * PITCH, acc);
            if (waits) barrier_wait(scaled, scaled_parity), scaled_parity ^= 1, waits = false;
            team_sync();
            const u32 last = share.block_of(begin + share.slices - 1);
            const float* row_scales = is_scaled ? scales[l] : nullptr;
            const bool is_pair = BRANCH && is_scaled && link.out.epilogue != ADD_BRANCH;
            const Sums<NT> sums{partial, BRANCH ? nullptr : row_scales, c.packets, share, (epoch + l + 1) | WRITTEN, blockIdx.x + 1, last};
            if (i > begin) {
                const int rows = is_pair ? 2 * link.out.m : link.out.m;
                for (int item = threadIdx.x; item < rows * (TILE / 4); item += CONSUMERS) {
                    sums.send(blockIdx.x, item / (TILE / 4), item % (TILE / 4) * 4);
                }
            } else if (link.out.epilogue >= ADD_NORM) {
                add_norm<NT, PEERS, BRANCH>(sums, link, c.peers, tile * TILE, row_scales);
            } else if (is_pair) {
                store_rows(PairSums<NT>{sums, row_scales, link.out.m}, link.out, tile * TILE, 0, TILE, CONSUMERS);
            } else {
                store_rows(sums, link.out, tile * TILE, 0, TILE, CONSUMERS);
            }
            i = until;
        }
        if (waits) barrier_wait(scaled, scaled_parity), scaled_parity ^= 1;  // there are no tiles
        team_sync();  // all have stored their results and read the partial sums
        if (threadIdx.x == 0) {
            if (share.first == share.end && l > 0) wait_for_links(c, epoch + l);  // no other wait guarantees this for this block
            arrive_release(c.arrivals);
        }
    }
    if (threadIdx.x == 0) c.epochs[blockIdx.x] = epoch + c.count;
}

template <class R, int NT, bool PEERS, bool BRANCH>
__device__ __forceinline__ void linear_chain(const Chain& c) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[65];
    __shared__ float scales[MAX_LINKS][NT];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    R ring;
    ring.base = aligned, ring.full = shared_address(barriers), ring.empty = shared_address(barriers + 32), ring.stages = c.stages;
    const u32 scaled = shared_address(barriers + 64);
    float* partial = reinterpret_cast<float*>(dynamic + (aligned - raw) + c.stages * (R::STAGE_BYTES + R::META_BYTES));
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < c.stages; ++s) {
            barrier_init(ring.full + 8 * s, 2);
            barrier_init(ring.empty + 8 * s, 4);
        }
        barrier_init(scaled, 1);
        barrier_init_fence();
    }
    __syncthreads();

    const u32 warp = threadIdx.x / 32;
    if (warp == CONSUMERS / 32) {
        if (threadIdx.x == CONSUMERS) load_weights(ring, c);
        __syncwarp();
        return;
    }
    pdl_wait();
    const u32 epoch = __ldcg(c.epochs + blockIdx.x);
    asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS + 64) : "memory");  // all have read the epoch
    if (warp == CONSUMERS / 32 + 1) {
        if (threadIdx.x % 32 == 0) load_rows(ring, c, epoch);
    } else if (warp == CONSUMERS / 32 + 2) {
        compute_scales<R, NT, BRANCH>(scales, scaled, c, epoch);
    } else {
        multiply<R, NT, PEERS, BRANCH>(ring, c, partial, scales, scaled, epoch);
    }
}

#define LINEAR_CHAIN(KIND, NAME, BRANCH, NT, ...) \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 96, 1) \
        sm90_##KIND##_##NAME##_m##NT(const __grid_constant__ Chain c) { \
        linear_chain<__VA_ARGS__, NT, false, BRANCH>(c); \
    } \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 96, 1) \
        sm90_peer_##KIND##_##NAME##_m##NT(const __grid_constant__ Chain c) { \
        linear_chain<__VA_ARGS__, NT, true, BRANCH>(c); \
    }

#define LINEAR_CHAINS(KIND, BRANCH, NT) \
    LINEAR_CHAIN(KIND, bf16, BRANCH, NT, PlainRing<NT>) \
    LINEAR_CHAIN(KIND, fp8_rows, BRANCH, NT, CodesRing<FP8_ROWS, NT>) \
    LINEAR_CHAIN(KIND, fp8_blocks, BRANCH, NT, CodesRing<FP8_BLOCKS, NT>) \
    LINEAR_CHAIN(KIND, int4_g128, BRANCH, NT, CodesRing<INT4_128, NT>) \
    LINEAR_CHAIN(KIND, int4_g32, BRANCH, NT, CodesRing<INT4_32, NT>) \
    LINEAR_CHAIN(KIND, mxfp4, BRANCH, NT, CodesRing<MXFP4, NT>) \
    LINEAR_CHAIN(KIND, nvfp4, BRANCH, NT, CodesRing<NVFP4, NT>) \
    LINEAR_CHAIN(KIND, int8_rows, BRANCH, NT, CodesRing<INT8_ROWS, NT>) \
    LINEAR_CHAIN(KIND, int8_g128, BRANCH, NT, CodesRing<INT8_128, NT>) \
    LINEAR_CHAIN(KIND, int8_g32, BRANCH, NT, CodesRing<INT8_32, NT>)
