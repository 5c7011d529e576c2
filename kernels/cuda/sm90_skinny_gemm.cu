// sm90_skinny_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), for few rows: M <= 64
// sm90_skinny_gemm_norm_bf16: the same of an x that comes unscaled: sums are multiplied by rsqrt(mean of the row's squares + eps)
// sm90_skinny_gemm_peer_norm_bf16: of a product whose other parts of K lie with the other ranks of a group. Each block sends its columns
//          to the same block of every rank and adds what comes (`peers.cuh`, one shot). residual[m, n] += sum over the group,
//          y[m, n] = residual[m, n] * gain[n], unscaled, and each block leaves its columns' squares for the product that takes y
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [NT rows, 64]; rows past M arrive as zero
// w        [N, K]  bf16 through tensor map `w_map`, box [64, 64]; read once, past the L2 cache's keeping
// y        as in sm90_gemm.cuh
// squares  [M, slices] f32; a slice is what one block stores: S of them for each 64 columns
// peers    as in all_reduce.cu, of a buffer of its own, with a pitch of N; epochs [N / 16] u32, how often 16 columns have been summed.
//          All ranks launch the same grid, so that each finds its like at work sooner or later
// maths    fp32 in the tensor cores, K in S equal parts, summed in order of the parts: no result depends on M. Each rank's part is
//          rounded to bf16 and summed in fp32 in order of ranks: all have the same bits. Squares and y are taken from the fp32 sum, as
//          add_rms_norm does, and y is rounded once; the scale meets the fp32 sum of the next product
// stages   of the ring, a multiple of GROUPS
// launch   grid (S, ceil(N / 64)), cluster (S, 1), 128 GROUPS + 32 threads, 32 more with norm, dynamic shared memory from the wrapper
//          Weights are the 64-row side of wgmma, x the narrow side. One warp keeps a ring of 64-wide slices of w and x full
//          with the copy engine; GROUPS warpgroups multiply, each every GROUPS-th slice. Slices of w are asked for before pdl_wait, as
//          many as the ring holds: they stream while the kernel before this one runs.
//          The parts of K lie in one cluster and are summed through its shared memory.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in skinny_gemm.rs
// bound    memory, 2 N K bytes. 22016 x 4096: 180 MB, 40 us at 4.47 TB/s (H200)
// test     tests/cuda_skinny_gemm.rs, reference::linear in fp32, each element within 2^-8 relative of its own value plus
//          K 2^-24 of the sum of magnitudes
#include "sm90_gemm.cuh"

constexpr i32 TILE = 64;          // rows of w that a cluster takes
constexpr i32 PITCH = TILE + 4;  // floats of a row of partial sums; PITCH % 16 == 4 keeps their stores free of bank conflicts

// What each row of x is still to be multiplied by: one warp's work, beside the products.
template <int NT>
__device__ __forceinline__ void scale_rows(float* scales, const Norm& norm, i32 rows) {
    constexpr int ROWS = 8;  // at a time, so that loads do not wait for each other
    const int lane = threadIdx.x % 32;
    for (i32 first = 0; first < rows; first += ROWS) {
        float sums[ROWS] = {};
        if (norm.squares_in) {
#pragma unroll 2
            for (i32 i = lane; i < norm.slices_in; i += 32) {
#pragma unroll
                for (int j = 0; j < ROWS; ++j) {
                    if (first + j < rows) sums[j] += __ldcg(norm.squares_in + (i64)(first + j) * norm.slices_in + i);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            const float sum = warp_sum(sums[j]);
            if (lane == 0 && first + j < rows) {
                scales[first + j] = norm.squares_in ? rsqrtf(sum * norm.inverse_cols + norm.eps) : 1.0f;
            }
        }
    }
}

// Multiplies every GROUPS-th slice as it comes.
template <int NT, int GROUPS>
__device__ __forceinline__ void consume(const Ring<TILE, NT>& ring, i32 count, i32 group, float* acc) {
    i32 s = group;
    u32 parity = 0;
    for (i32 i = group; i < count; i += GROUPS) {
        while (s >= ring.stages) s -= ring.stages, parity ^= 1;
        barrier_wait(ring.full + 8 * s, parity);
        const u64 w = tile_descriptor(ring.w(s)), x = tile_descriptor(ring.x(s));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) wgmma<NT>(acc, w + 2 * k, x + 2 * k);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * s);
        s += GROUPS;
    }
}

template <int NT>
__device__ __forceinline__ void store_partial(float* partial, const float* acc) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
        float* p = partial + (8 * j + column) * PITCH + row;
        p[0] = acc[4 * j];
        p[PITCH] = acc[4 * j + 1];
        p[8] = acc[4 * j + 2];
        p[PITCH + 8] = acc[4 * j + 3];
    }
}

template <int NT, int GROUPS, bool NORM, bool PEERS>
__device__ __forceinline__ void skinny_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, i32 k,
                                            i32 stages, i32 parts, const Norm& norm, const AllReduce& peers) {
    constexpr int CONSUMERS = GROUPS * 128, PRODUCER = CONSUMERS + 32;
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    __shared__ float scales[NORM ? NT : 1];
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
    if (NORM && threadIdx.x >= PRODUCER) {
        pdl_wait();
        scale_rows<NT>(scales, norm, out.m);
    } else if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce(ring, w_map, x_map, n0, first, count);
        __syncwarp();
    } else {
        pdl_wait();
        consume<NT, GROUPS>(ring, count, group, acc);
    }

    __syncthreads();  // every slice is used: the ring becomes the place of the partial sums; rows' scales are there
    const Reducer<NT, GROUPS, NORM> reducer{aligned, parts, PITCH, scales};
    float* partial = reinterpret_cast<float*>(dynamic + (aligned - raw)) + group * NT * PITCH;
    if (threadIdx.x < CONSUMERS) store_partial<NT>(partial, acc);
    cluster_sync();
    const i32 rows = TILE / parts;
    if constexpr (PEERS) {
        constexpr int THREADS = PRODUCER + 32, ITEMS = (NT * TILE / 4 + THREADS - 1) / THREADS;
        store_peer_norm<ITEMS>(reducer, out, norm, peers, n0, part * rows, rows, (i32)blockIdx.y * parts + part);
    } else if (out.epilogue < SILU) {
        store_tile(reducer, out, n0, part * rows, rows);
    } else {
        store_gated(reducer, out, n0, part * rows, rows);
    }
    cluster_sync();  // no block leaves while another reads its partial sums
}

#define SKINNY_GEMM(NT, GROUPS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32)                                                    \
        sm90_skinny_gemm_bf16_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map,                               \
                                                const __grid_constant__ TensorMap x_map, const Output out, i32 k,      \
                                                i32 stages, i32 parts) {                                               \
        skinny_gemm<NT, GROUPS, false, false>(&w_map, &x_map, out, k, stages, parts, Norm{}, AllReduce{});             \
    }

#define SKINNY_GEMM_GROUPS(NT) \
    SKINNY_GEMM(NT, 1)         \
    SKINNY_GEMM(NT, 2)         \
    SKINNY_GEMM(NT, 4)

SKINNY_GEMM_GROUPS(8)
SKINNY_GEMM_GROUPS(16)
SKINNY_GEMM_GROUPS(32)
SKINNY_GEMM_GROUPS(64)

#define SKINNY_GEMM_NORM(NT, GROUPS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 64)                                                    \
        sm90_skinny_gemm_norm_bf16_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map,                          \
                                                     const __grid_constant__ TensorMap x_map, const Output out, i32 k, \
                                                     i32 stages, i32 parts, const __grid_constant__ Norm norm) {       \
        skinny_gemm<NT, GROUPS, true, false>(&w_map, &x_map, out, k, stages, parts, norm, AllReduce{});                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 64)                                                    \
        sm90_skinny_gemm_peer_norm_bf16_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map,                     \
                                                          const __grid_constant__ TensorMap x_map, const Output out,   \
                                                          i32 k, i32 stages, i32 parts,                                \
                                                          const __grid_constant__ Norm norm,                           \
                                                          const __grid_constant__ AllReduce peers) {                   \
        skinny_gemm<NT, GROUPS, true, true>(&w_map, &x_map, out, k, stages, parts, norm, peers);                       \
    }

SKINNY_GEMM_NORM(8, 1)
SKINNY_GEMM_NORM(8, 2)
SKINNY_GEMM_NORM(8, 4)
