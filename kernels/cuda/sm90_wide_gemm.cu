// sm90_wide_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), for M <= 128, where sm90_skinny_gemm.cu would read x too often
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [128 rows, 64]; rows past M arrive as zero
// w        [N, K]  bf16 through tensor map `w_map`, box [NT, 64]; read once, past the L2 cache's keeping
// y        as in sm90_gemm.cuh
// maths    fp32 in the tensor cores, K in S equal parts, summed in order of the parts: no result depends on M
// launch   grid (S, ceil(N / NT)), cluster (S, 1), 288 threads, dynamic shared memory from the wrapper; at most one block a
//          multiprocessor, so that a wave takes the whole of w
//          x is the 64-row side of wgmma, once for each of two warpgroups, and NT rows of w the other: every multiprocessor reads
//          all of x's part of K, so parts of K are as dear as NT is small. One warp keeps a ring of 64-wide slices of w and x full with
//          the copy engine; slices of w are asked for before pdl_wait, as many as the ring holds.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up), NT / S a multiple of 16: checked in wide_gemm.rs
// bound    memory, 2 N K bytes, and x from the L2 cache, 256 K bytes a cluster. 22016 x 4096: 180 MB, 40 us at 4.47 TB/s (H200)
// test     tests/cuda_wide_gemm.rs, as tests/cuda_skinny_gemm.rs
#include "sm90_gemm.cuh"

constexpr i32 MT = 128;        // rows of x
constexpr int CONSUMERS = 256;  // two warpgroups

// Multiplies this warpgroup's 64 rows of x as slices come; one slice's products run while the next one is awaited.
template <int NT>
__device__ __forceinline__ void consume(const Ring<NT, MT>& ring, i32 count, i32 group, float* acc) {
    i32 s = 0, last = 0;
    u32 parity = 0;
    for (i32 i = 0; i < count; ++i) {
        barrier_wait(ring.full + 8 * s, parity);
        const u64 x = tile_descriptor(ring.x(s) + group * 64 * BK * 2), w = tile_descriptor(ring.w(s));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) wgmma<NT>(acc, x + 2 * k, w + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * last);
        last = s;
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
    wgmma_wait<0>();
}

template <int NT>
__device__ __forceinline__ void wide_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, i32 k, i32 stages,
                                          i32 parts) {
    constexpr int PITCH = NT + 8;  // floats; PITCH % 16 == 8 keeps the accumulators' stores free of bank conflicts
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[32];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const Ring<NT, MT> ring{aligned, bars, bars + 8 * stages, stages};
    const i32 part = blockIdx.x, n0 = blockIdx.y * NT;
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, CONSUMERS / 32);
        barrier_init_fence();
    }
    __syncthreads();

    const i32 slices = (k + BK - 1) / BK;
    const i32 first = slices * part / parts, count = slices * (part + 1) / parts - first;
    const i32 group = threadIdx.x / 128;
    float acc[NT / 2] = {};
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce(ring, w_map, x_map, n0, first, count);
        __syncwarp();
    } else {
        pdl_wait();
        consume<NT>(ring, count, group, acc);
    }

    __syncthreads();  // every slice is used: the ring becomes the place of the partial sums
    if (threadIdx.x < CONSUMERS) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
        float* p = reinterpret_cast<float*>(dynamic + (aligned - raw)) + row * PITCH + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
            *reinterpret_cast<float2*>(p + 8 * j) = make_float2(acc[4 * j], acc[4 * j + 1]);
            *reinterpret_cast<float2*>(p + 8 * PITCH + 8 * j) = make_float2(acc[4 * j + 2], acc[4 * j + 3]);
        }
    }
    cluster_sync();
    const Reducer<MT, 1, false> reducer{aligned, parts, PITCH, nullptr};
    const i32 columns = NT / parts;
    if (out.epilogue < SILU) {
        store_tile(reducer, out, n0, part * columns, columns);
    } else {
        store_gated(reducer, out, n0, part * columns, columns);
    }
    cluster_sync();  // no block leaves while another reads its partial sums
}

#define WIDE_GEMM(NT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32)                                                       \
        sm90_wide_gemm_bf16_n##NT(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,    \
                                  const Output out, i32 k, i32 stages, i32 parts) {                                    \
        wide_gemm<NT>(&w_map, &x_map, out, k, stages, parts);                                                          \
    }

WIDE_GEMM(32)
WIDE_GEMM(64)
WIDE_GEMM(96)
WIDE_GEMM(128)
WIDE_GEMM(176)
WIDE_GEMM(192)
WIDE_GEMM(256)
