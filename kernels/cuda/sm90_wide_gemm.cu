// sm90_wide_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), for M <= 128, where sm90_skinny_gemm.cu would read x too often
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [128 / C rows, 64]; rows past M arrive as zero
// w        [N, K]  bf16 through tensor map `w_map`, box [NT, 64]; read once, past the L2 cache's keeping
// y        as in sm90_gemm.cuh
// maths    fp32 in the tensor cores, all of K in one block: no result depends on M
// launch   grid (C, ceil(N / NT / C)), cluster (C, 1), 288 threads, dynamic shared memory from the wrapper; at most one block a
//          multiprocessor, so that a wave takes the whole of w
//          x is the 64-row side of wgmma, once for each of two warpgroups, and NT rows of w the other. What a multiprocessor can bring in
//          is the bound, and all need all of x: each block of a cluster asks for a C-th of it, for all of them. One warp keeps a
//          ring of 64-wide slices of w and x full with the copy engine; slices of w are asked for before pdl_wait, as many as the ring
//          holds. A slice's place is free once the consumers of every block of the cluster have said so.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in wide_gemm.rs
// bound    memory, 2 N K bytes. 22016 x 4096: 180 MB, 40 us at 4.47 TB/s (H200)
// test     tests/cuda_skinny_gemm.rs
#include "sm90_gemm.cuh"

constexpr i32 MT = 128;        // rows of x
constexpr int CONSUMERS = 256;  // two warpgroups

// Keeps the ring full with all slices of K, of rows n0 .. of w and of all rows of x, of which this block brings a share to all.
template <int NT>
__device__ __forceinline__ void produce_shared(const Ring<NT, MT>& ring, const TensorMap* w_map, const TensorMap* x_map, i32 n0,
                                               i32 count, i32 blocks) {
    using R = Ring<NT, MT>;
    const i32 rank = (i32)cluster_rank(), share = MT / blocks, mask = (1 << blocks) - 1;
    auto load_x = [&](i32 stage, i32 slice) {
        tensor_load_all(ring.x(stage) + rank * share * BK * 2, x_map, slice * BK, rank * share, ring.full + 8 * stage, EVICT_LAST, mask);
    };
    const i32 early = min(count, ring.stages);
    for (i32 i = 0; i < early; ++i) load_x(i, i);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        barrier_arrive_expect(ring.full + 8 * s, R::STAGE_BYTES);
        tensor_load(ring.w(s), w_map, i * BK, n0, ring.full + 8 * s, EVICT_FIRST);
        load_x(s, i);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

// Multiplies this warpgroup's 64 rows of x as slices come; one slice's products run while the next one is awaited.
template <int NT>
__device__ __forceinline__ void consume(const Ring<NT, MT>& ring, i32 count, i32 group, i32 blocks, float* acc) {
    i32 s = 0, last = 0;
    u32 parity = 0;
    const i32 lane = threadIdx.x % 32;
    for (i32 i = 0; i < count; ++i) {
        barrier_wait(ring.full + 8 * s, parity);
        const u64 x = tile_descriptor(ring.x(s) + group * 64 * BK * 2), w = tile_descriptor(ring.w(s));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) wgmma<NT>(acc, x + 2 * k, w + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && lane < blocks) cluster_arrive(cluster_map(ring.empty + 8 * last, lane));
        last = s;
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
    wgmma_wait<0>();
}

template <int NT>
__device__ __forceinline__ void wide_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, i32 k, i32 stages,
                                          i32 blocks) {
    constexpr int PITCH = NT + 8;  // floats; PITCH % 16 == 8 keeps the accumulators' stores free of bank conflicts
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[32];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const Ring<NT, MT> ring{aligned, bars, bars + 8 * stages, stages};
    const i32 n0 = (blockIdx.y * blocks + blockIdx.x) * NT, count = (k + BK - 1) / BK;
    if (threadIdx.x == CONSUMERS) {
        for (i32 s = 0; s < stages; ++s) {
            barrier_init(ring.full + 8 * s, 1);
            barrier_init(ring.empty + 8 * s, blocks * CONSUMERS / 32);
        }
        barrier_init_fence();
        for (i32 i = 0; i < min(count, stages); ++i) {
            barrier_arrive_expect(ring.full + 8 * i, Ring<NT, MT>::STAGE_BYTES);
            tensor_load(ring.w(i), w_map, i * BK, n0, ring.full + 8 * i, EVICT_FIRST);
        }
    }
    __syncwarp();
    cluster_sync();  // every block's barriers stand, and expect

    float acc[NT / 2] = {};
    pdl_wait();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce_shared(ring, w_map, x_map, n0, count, blocks);
        __syncwarp();
    } else {
        consume<NT>(ring, count, threadIdx.x / 128, blocks, acc);
    }

    __syncthreads();  // every slice is used: the ring becomes the place of the sums
    if (threadIdx.x < CONSUMERS) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
        float* p = reinterpret_cast<float*>(dynamic + (aligned - raw)) + row * PITCH + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
            *reinterpret_cast<float2*>(p + 8 * j) = make_float2(acc[4 * j], acc[4 * j + 1]);
            *reinterpret_cast<float2*>(p + 8 * PITCH + 8 * j) = make_float2(acc[4 * j + 2], acc[4 * j + 3]);
        }
    }
    __syncthreads();
    const Reducer<MT, 1, false> reducer{aligned, 1, PITCH, nullptr, cluster_rank()};
    if (out.epilogue < SILU) {
        store_tile(reducer, out, n0, 0, NT);
    } else {
        store_gated(reducer, out, n0, 0, NT);
    }
    cluster_sync();  // no block leaves while another tells its barriers
}

#define WIDE_GEMM(NT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32)                                                       \
        sm90_wide_gemm_bf16_n##NT(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,    \
                                  const Output out, i32 k, i32 stages, i32 blocks) {                                   \
        wide_gemm<NT>(&w_map, &x_map, out, k, stages, blocks);                                                         \
    }

WIDE_GEMM(64)
WIDE_GEMM(96)
WIDE_GEMM(128)
WIDE_GEMM(176)
WIDE_GEMM(256)
