// sm90_skinny_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), for few rows: M <= 64
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [NT rows, 64]; rows from M on are zero
// w        [N, K]  bf16 through tensor map `w_map`, box [64, 64]; read once and evicted first from the L2 cache
// y        described in sm90_gemm.cuh
// maths    fp32 in the tensor cores, K in S equal parts, summed in order of the parts: no result depends on M
// stages   of the ring, a multiple of GROUPS
// launch   grid (S, ceil(N / 64)), cluster (S, 1), 128 GROUPS + 32 threads, dynamic shared memory from the wrapper
//          Weights are the 64-row operand of wgmma, x is the narrow one. One warp keeps a ring filled with 64-wide
//          slices of w and x through the copy engine; GROUPS warpgroups multiply, each every GROUPS-th slice. Slices
//          of w are requested before pdl_wait, as many as fit into the ring, so that they are loaded while the
//          previous kernel runs. The parts of K are in one cluster and are summed through its shared memory.
//          `_low_rank_`: products of adapters are slices behind those of K (sm90_low_rank.cuh), B [N, cols] through `b_map`, box
//          [64, 64], h [M, modules * cols] through `h_map`, box [NT, 64]
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in skinny_gemm.rs
// bound    memory, 2 N K bytes. 22016 x 4096: 180 MB, 40 us at 4.47 TB/s (H200)
// test     tests/cuda_skinny_gemm.rs, reference::linear in fp32, each element within 2^-8 relative of its own value plus
//          K 2^-24 of the sum of magnitudes
#include "sm90_low_rank.cuh"

// Keeps the ring filled with slices first .. first + count of K, of rows n0 .. of w and of all rows of x. Weights are
// loaded while the previous kernel runs.
template <class R>
__device__ __forceinline__ void produce(const R& ring, const TensorMap* w_map, const TensorMap* x_map, i32 n0, i32 first,
                                        i32 count) {
    const i32 early = min(count, ring.stages);
    for (i32 i = 0; i < early; ++i) {
        barrier_arrive_expect(ring.full + 8 * i, R::STAGE_BYTES);
        tensor_load(ring.w(i), w_map, (first + i) * BK, n0, ring.full + 8 * i, EVICT_FIRST);
    }
    pdl_wait();
    for (i32 i = 0; i < early; ++i) tensor_load(ring.x(i), x_map, (first + i) * BK, 0, ring.full + 8 * i, EVICT_LAST);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        barrier_arrive_expect(ring.full + 8 * s, R::STAGE_BYTES);
        tensor_load(ring.w(s), w_map, (first + i) * BK, n0, ring.full + 8 * s, EVICT_FIRST);
        tensor_load(ring.x(s), x_map, (first + i) * BK, 0, ring.full + 8 * s, EVICT_LAST);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

// Multiplies every GROUPS-th slice when it has arrived.
template <int NT, int GROUPS>
__device__ __forceinline__ void consume(const Ring<TILE, NT>& ring, i32 count, i32 group, float* acc) {
    i32 s = group;
    u32 parity = 0;
    for (i32 i = group; i < count; i += GROUPS) {
        while (s >= ring.stages) s -= ring.stages, parity ^= 1;
        barrier_wait(ring.full + 8 * s, parity);
        multiply_slice<NT>(acc, ring.w(s), ring.x(s));
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * s);
        s += GROUPS;
    }
}

// Loads the slices of B and h behind `count` slices of K, each slice of B for each module.
template <class R>
__device__ __forceinline__ void produce_low_rank(const R& ring, const TensorMap* b_map, const TensorMap* h_map, i32 n0, i32 count,
                                                 i32 cols, LowRankSlices slices) {
    Cursor at{0, 1};
    at.jump(count, ring.stages);
    for (i32 i = 0; i < slices.count; ++i) {
        const i32 column = slices.take();
        for (i32 m = 0; m < slices.num_modules; ++m, at.advance(1, ring.stages)) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            barrier_arrive_expect(ring.full + 8 * at.stage, R::STAGE_BYTES);
            tensor_load(ring.w(at.stage), b_map, column, n0, ring.full + 8 * at.stage, EVICT_FIRST);
            tensor_load(ring.x(at.stage), h_map, (slices.first_module + m) * cols + column, 0, ring.full + 8 * at.stage, EVICT_LAST);
        }
    }
}

// Multiplies those of them that are this warpgroup's.
template <int NT, int GROUPS>
__device__ __forceinline__ void consume_low_rank(const Ring<TILE, NT>& ring, i32 count, i32 group, float* acc, const Modules& modules,
                                                 i32 n0, const LowRankSlices& slices) {
    Cursor at{0, 0};
    at.jump(count, ring.stages);
    for (i32 i = 0; i < slices.count * slices.num_modules; ++i, at.advance(1, ring.stages)) {
        if ((count + i) % GROUPS != group) continue;
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        multiply_low_rank<NT>(acc, ring.w(at.stage), ring.x(at.stage), modules, n0, slices.first_module + i % slices.num_modules);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
    }
}

template <int NT, int GROUPS, class Low>
__device__ __forceinline__ void skinny_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, i32 k,
                                            i32 stages, i32 parts, const Low& low_rank, const TensorMap* b_map,
                                            const TensorMap* h_map) {
    constexpr int CONSUMERS = GROUPS * 128;
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const Ring<TILE, NT> ring{aligned, bars, bars + 8 * stages, stages};
    const i32 part = blockIdx.x, n0 = blockIdx.y * TILE;
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, 4);
        barrier_init_fence();
    }
    __syncthreads();

    const i32 slices = (k + BK - 1) / BK;
    const i32 first = slices * part / parts, count = slices * (part + 1) / parts - first;
    const i32 group = threadIdx.x / 128;
    float acc[NT / 2] = {};
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) {
            produce(ring, w_map, x_map, n0, first, count);
            if constexpr (Low::IS_THERE) {
                const LowRankSlices slices(low_rank, n0, out.n, part == parts - 1);
                produce_low_rank(ring, b_map, h_map, n0, count, low_rank.cols, slices);
            }
        }
        __syncwarp();
    } else {
        pdl_wait();
        consume<NT, GROUPS>(ring, count, group, acc);
        if constexpr (Low::IS_THERE) {
            const LowRankSlices slices(low_rank, n0, out.n, part == parts - 1);
            consume_low_rank<NT, GROUPS>(ring, count, group, acc, low_rank.modules, n0, slices);
        }
    }

    __syncthreads();  // all slices are used: the ring's memory now holds the partial sums
    const Reducer<NT, GROUPS> reducer{aligned, parts};
    float* partial = reinterpret_cast<float*>(dynamic + (aligned - raw)) + group * NT * PITCH;
    if (threadIdx.x < CONSUMERS) store_partial<NT>(partial, acc);
    cluster_sync();
    store_rows(reducer, out, n0, part * (TILE / parts), TILE / parts, blockDim.x);
    cluster_sync();  // no block may exit while another reads its partial sums
}

// Blocks of two warpgroups that share a multiprocessor without products of adapters, so that they do with them, too.
constexpr int least_blocks(int rows, int groups) { return groups == 2 && rows <= 32 ? 4 : 1; }

#define SKINNY_GEMM(NT, GROUPS) \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32) \
        sm90_skinny_gemm_bf16_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map, \
                                                const __grid_constant__ TensorMap x_map, const Output out, i32 k, \
                                                i32 stages, i32 parts) { \
        skinny_gemm<NT, GROUPS>(&w_map, &x_map, out, k, stages, parts, NoLowRank{}, nullptr, nullptr); \
    } \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, (least_blocks(NT, GROUPS))) sm90_skinny_gemm_low_rank_bf16_m##NT##_g##GROUPS( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Output out, i32 k, i32 stages, \
        i32 parts, const LowRank low_rank, const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap h_map) { \
        skinny_gemm<NT, GROUPS>(&w_map, &x_map, out, k, stages, parts, low_rank, &b_map, &h_map); \
    }

#define SKINNY_GEMM_GROUPS(NT) \
    SKINNY_GEMM(NT, 1) \
    SKINNY_GEMM(NT, 2) \
    SKINNY_GEMM(NT, 4)

SKINNY_GEMM_GROUPS(8)
SKINNY_GEMM_GROUPS(16)
SKINNY_GEMM_GROUPS(32)
SKINNY_GEMM_GROUPS(64)
