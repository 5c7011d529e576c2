// sm90_quantized_wide_gemm: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for weights in 8 or 4 bits and more than 64 rows
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [128 rows, 64]; rows from M on and columns from K on are zero
// w        codes through tensor map `w_map`, box [128, 128], and scales, as sm90_quantized_gemm.cu describes
// y        described in sm90_gemm.cuh
// maths    as sm90_quantized_gemm.cu with P parts and G groups: the same bits, for any M. Each of the P G runs of slices is
//          summed in order, and multiplied by the scales of rows; the groups of a part are added in order, then the parts
// launch   grid B ceil(M / 128) ceil(N / 128), cluster B, 384 threads, dynamic shared memory from the wrapper.
//          B = P: a block for each part. B = 1: a block computes all parts, one after the other
//          A block has 128 rows of w and 128 of x. One warp keeps the ring filled; each of two warpgroups expands 64 rows
//          of w in its registers while the other one's products run in the tensor cores. Tiles are in the order of `TileOrder`, so
//          that w comes from the L2 cache for all but the first of its blocks, and x, too.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in quantized_gemm.rs
// bound    tensor cores, 2 M N K operations in bf16. 512 x 28672 x 4096: 160 us at 754 TFLOP/s (H200)
// test     tests/cuda_quantized_gemm.rs, tolerance as of sm90_quantized_gemm.cu
#include "sm90_quantized.cuh"
#include "sm90_sum_order.cuh"
#include "sm90_wide_tile.cuh"

constexpr int TILES = 2, CONSUMERS = TILES * 128;

template <int FORMAT>
using WideRing = QuantizedRing<FORMAT, NT, TILES>;

// What a block computes: its first rows of w and x, and runs of K.
struct Work {
    SumOrder order;
    i32 n0, m0, first_run, last_run, last_tile;
};

// Walks over the slices of a block's runs.
struct Slices {
    const Work& work;
    i32 index, done;
    Run run;

    __device__ explicit Slices(const Work& own) : work(own), index(own.first_run), done(0), run(own.order, own.first_run) { skip_empty(); }

    __device__ bool has() const { return index < work.last_run; }
    __device__ i32 slice() const { return run.first + done * run.step; }

    __device__ void next() {
        ++done;
        skip_empty();
    }

    __device__ void skip_empty() {
        while (done == run.count) {
            done = 0;
            if (++index == work.last_run) return;
            run = Run(work.order, index);
        }
    }
};

template <int FORMAT>
__device__ __forceinline__ void produce(const WideRing<FORMAT>& ring, const TensorMap* w_map, const TensorMap* x_map, const Meta& meta,
                                        const Work& work) {
    using R = WideRing<FORMAT>;
    const auto load_weights = [&](i32 s, i32 slice) {
        ring.load_weights(s, w_map, meta, work.n0, slice, work.order.slices, R::X_BYTES, work.last_tile);
    };
    // Weights may be read while the kernel before still runs.
    i32 early = 0;
    for (Slices at(work); at.has() && early < ring.stages; at.next()) load_weights(early++, at.slice());
    pdl_wait();
    Cursor to{0, 1};
    for (Slices at(work); at.has(); at.next(), to.advance(1, ring.stages)) {
        if (early > 0) {
            --early;
        } else {
            barrier_wait(ring.empty + 8 * to.stage, to.parity);
            load_weights(to.stage, at.slice());
        }
        ring.load_rows(to.stage, x_map, at.slice(), work.m0);
    }
}

// acc = the sum of the block's runs for a tile of w.
template <int FORMAT>
__device__ __forceinline__ void multiply(float* acc, const WideRing<FORMAT>& ring, const Meta& meta, const Work& work, i32 tile) {
    const bool has_rows = work.n0 / TILE + tile <= work.last_tile;
    Cursor at{0, 0};
    sum_runs<NT, true>(acc, work.order, work.first_run, work.last_run, [&](const Run& run) {
        for (i32 i = 0; i < run.count; ++i, at.advance(1, ring.stages)) {
            barrier_wait(ring.full + 8 * at.stage, at.parity);
            ring.multiply(acc, at.stage, meta, tile);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
        }
        if (has_rows) ring.scale_rows(acc, meta, work.n0 + tile * TILE, work.order.slices);
    });
}

template <int FORMAT>
__device__ __forceinline__ void wide_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, const Meta& meta,
                                          const SumOrder& order, i32 stages, i32 blocks) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[16];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const WideRing<FORMAT> ring{aligned, bars, bars + 8 * stages, stages};
    const i32 runs = order.parts / blocks * order.groups, first_run = (i32)blockIdx.x % blocks * runs;
    Work work{order, 0, 0, first_run, first_run + runs, (out.n - 1) / TILE};
    TileOrder<TILES * TILE>(out).tile(blockIdx.x / blocks, work.m0, work.n0);
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, CONSUMERS / 32);
        barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == CONSUMERS) produce<FORMAT>(ring, w_map, x_map, meta, work);
        __syncwarp();
        cluster_sync(), cluster_sync();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const i32 tile = threadIdx.x / 128;
        float acc[NT / 2];
        pdl_wait();
        multiply<FORMAT>(acc, ring, meta, work, tile);
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // all slices are used: the ring's memory now holds the partial sums
        store_partial<NT>(reinterpret_cast<float*>(dynamic + (aligned - raw)) + tile * NT * PITCH, acc);
        cluster_sync();
        store_share(aligned, blocks, rows_of(out, work.m0), work.n0, TILES * TILE, CONSUMERS);
        cluster_sync();  // no block may exit while another reads its partial sums
    }
}

#define WIDE_GEMM(NAME, FORMAT) \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) sm90_quantized_wide_gemm_##NAME( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Output out, const Meta meta, \
        i32 slices, i32 parts, i32 groups, i32 stages, i32 blocks) { \
        wide_gemm<FORMAT>(&w_map, &x_map, out, meta, SumOrder{slices, parts, groups}, stages, blocks); \
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
