// sm90_quantized_wide_gemm: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for weights in 8 or 4 bits and more than 64 rows
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [128 rows, 64]; rows from M on and columns from K on are zero
// w        codes through tensor map `w_map`, box [128, 128], and scales, as sm90_quantized_gemm.cu describes
// y        described in sm90_gemm.cuh
// maths    as sm90_quantized_gemm.cu: K in S equal parts, which depend on N and K alone: no result depends on M
// launch   grid (S, ceil(M / 128), ceil(N / 128)), cluster (S, 1, 1), 288 threads, dynamic shared memory from the wrapper
//          A block has 128 rows of w and 128 of x. One warp keeps the ring filled; each of two warpgroups expands 64 rows
//          of w in its registers while the other one's products run in the tensor cores. Blocks with the same rows of w
//          are adjacent, so that w comes from the L2 cache for all but the first.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in quantized_gemm.rs
// bound    tensor cores, 2 M N K operations in bf16. 512 x 28672 x 4096: 160 us at 754 TFLOP/s (H200)
// test     tests/cuda_quantized_gemm.rs, tolerance as of sm90_quantized_gemm.cu
#include "sm90_quantized.cuh"
#include "sm90_wide_tile.cuh"

constexpr int TILES = 2, CONSUMERS = TILES * 128;

template <int FORMAT>
using WideRing = QuantizedRing<FORMAT, NT, TILES>;

// What a block computes: its first rows of w and x, and slices first .. first + count of K.
struct Work {
    i32 n0, m0, first, count, slices, last_tile;
};

template <int FORMAT>
__device__ __forceinline__ void produce(const WideRing<FORMAT>& ring, const TensorMap* w_map, const TensorMap* x_map, const Meta& meta,
                                        const Work& work) {
    using R = WideRing<FORMAT>;
    const auto load_weights = [&](i32 i, i32 s) {
        ring.load_weights(s, w_map, meta, work.n0, work.first + i, work.slices, R::X_BYTES, work.last_tile);
    };
    const i32 early = min(work.count, ring.stages);
    for (i32 i = 0; i < early; ++i) load_weights(i, i);
    pdl_wait();
    for (i32 i = 0; i < early; ++i) ring.load_rows(i, x_map, work.first + i, work.m0);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < work.count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        load_weights(i, s);
        ring.load_rows(s, x_map, work.first + i, work.m0);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

template <int FORMAT>
__device__ __forceinline__ void wide_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, const Meta& meta, i32 k,
                                          i32 stages, i32 parts) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[16];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const WideRing<FORMAT> ring{aligned, bars, bars + 8 * stages, stages};
    Work work;
    work.n0 = blockIdx.z * TILES * TILE, work.m0 = blockIdx.y * NT;
    work.slices = (k + Codes<FORMAT>::COLUMNS - 1) / Codes<FORMAT>::COLUMNS;
    work.first = work.slices * (i32)blockIdx.x / parts, work.count = work.slices * ((i32)blockIdx.x + 1) / parts - work.first;
    work.last_tile = (out.n - 1) / TILE;
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, CONSUMERS / 32);
        barrier_init_fence();
    }
    __syncthreads();

    const i32 tile = threadIdx.x / 128;
    float acc[NT / 2] = {};
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce<FORMAT>(ring, w_map, x_map, meta, work);
        __syncwarp();
    } else {
        pdl_wait();
        i32 s = 0;
        u32 parity = 0;
        for (i32 i = 0; i < work.count; ++i) {
            barrier_wait(ring.full + 8 * s, parity);
            ring.multiply(acc, s, meta, tile);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * s);
            if (++s == ring.stages) s = 0, parity ^= 1;
        }
        if (work.n0 / TILE + tile <= work.last_tile) ring.scale_rows(acc, meta, work.n0 + tile * TILE, work.slices);
    }

    __syncthreads();  // all slices are used: the ring's memory now holds the partial sums
    float* partial = reinterpret_cast<float*>(dynamic + (aligned - raw)) + tile * NT * PITCH;
    if (threadIdx.x < CONSUMERS) store_partial<NT>(partial, acc);
    cluster_sync();
    store_share(aligned, parts, rows_of(out, work.m0), work.n0, TILES * TILE, blockDim.x);
    cluster_sync();  // no block may exit while another reads its partial sums
}

#define WIDE_GEMM(NAME, FORMAT) \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) sm90_quantized_wide_gemm_##NAME( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Output out, const Meta meta, i32 k, \
        i32 stages, i32 parts) { \
        wide_gemm<FORMAT>(&w_map, &x_map, out, meta, k, stages, parts); \
    }

WIDE_GEMM(fp8_rows, FP8_ROWS)
WIDE_GEMM(fp8_blocks, FP8_BLOCKS)
WIDE_GEMM(int4_g128, INT4_128)
WIDE_GEMM(int4_g32, INT4_32)
WIDE_GEMM(mxfp4, MXFP4)
WIDE_GEMM(nvfp4, NVFP4)
WIDE_GEMM(int8_rows, INT8_ROWS)
WIDE_GEMM(int8_g128, INT8_128)
WIDE_GEMM(int8_g32, INT8_32)
