// sm90_wide_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for many rows, with the sums of sm90_skinny_gemm.cu
// archs: 90a
//
// x        [M, K] bf16 through tensor map `x_map`, box [128, 64]; rows from M on are zero
// w        [N, K] bf16 through tensor map `w_map`, box [128, 224 or 256, 64]
// y        described in sm90_gemm.cuh
// maths    fp32 in the tensor cores. K is divided into P parts of slices, and the slices of a part go to G groups in turn. Each
//          of these P G runs of slices is summed in the tensor cores, in order. The groups of a part are added in order, then
//          the parts. So sums have the same bits as those of sm90_skinny_gemm.cu with P parts and G groups, for any M
// launch   384 threads, dynamic shared memory from the wrapper. Either one block for each multiprocessor, which computes tiles
//          of 128 rows of x by 128 rows of w, 224 if P G = 1, or 256; or grid (P tiles), cluster (P): a tile for each cluster, a part
//          for each block. One warp keeps a ring of slices filled, across the ends of tiles; two warpgroups multiply 64 rows
//          of x each
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in wide_gemm.rs
// bound    tensor cores, 2 M N K operations; few rows: memory, 2 N K bytes
// test     tests/cuda_wide_gemm.rs: bit for bit as sm90_skinny_gemm.cu
#include "sm90_wgmma_n224.cuh"
#include "sm90_run.cuh"
#include "sm90_wide_store.cuh"

template <int COLS>
struct WideRing {
    static constexpr u32 X_BYTES = NT * BK * 2, W_BYTES = COLS * BK * 2, STAGE_BYTES = X_BYTES + W_BYTES;
    u32 base, full, empty;  // shared addresses: stages, and barriers of 8 bytes each
    i32 stages;

    __device__ u32 x(i32 s, int group) const { return base + s * STAGE_BYTES + group * GROUP_ROWS * BK * 2; }
    __device__ u32 w(i32 s) const { return base + s * STAGE_BYTES + X_BYTES; }
    __device__ void wait_full(const Cursor& at) const { barrier_wait(full + 8 * at.stage, at.parity); }
};

// The tiles of a block, and its runs: those of all parts, or of one.
template <int COLS>
struct Work : TileOrder<COLS> {
    i32 item, step, first_run, last_run;

    __device__ Work(const Output& out, const SumOrder& order, i32 blocks) : TileOrder<COLS>(out) {
        const i32 parts = order.parts / blocks, rank = blockIdx.x % blocks;
        item = blockIdx.x / blocks, step = gridDim.x / blocks;
        first_run = rank * parts * order.groups, last_run = first_run + parts * order.groups;
    }
};

// Walks over the slices of the block's tiles.
template <int COLS>
struct Slices {
    const Work<COLS>& work;
    const SumOrder& order;
    i32 item, index, done, m0, n0;
    Run run;

    __device__ Slices(const Work<COLS>& own, const SumOrder& sums)
        : work(own), order(sums), item(own.item), index(own.first_run), done(0), m0(0), n0(0), run(sums, own.first_run) {
        if (has()) work.tile(item, m0, n0), skip_empty();
    }

    __device__ bool has() const { return item < work.items; }
    __device__ i32 slice() const { return run.first + done * run.step; }

    __device__ void next() {
        ++done;
        skip_empty();
    }

    // To the next run that has slices left. Every tile has some.
    __device__ void skip_empty() {
        while (done == run.count) {
            done = 0;
            if (++index == work.last_run) {
                index = work.first_run, item += work.step;
                if (!has()) return;
                work.tile(item, m0, n0);
            }
            run = Run(order, index);
        }
    }
};

template <int COLS>
__device__ __forceinline__ void produce(const WideRing<COLS>& ring, const TensorMap* w_map, const TensorMap* x_map, const Work<COLS>& work,
                                        const SumOrder& order) {
    const u64 w_policy = work.row_tiles > 1 ? EVICT_LAST : EVICT_FIRST;
    const auto load_weights = [&](i32 s, const Slices<COLS>& at) {
        barrier_arrive_expect(ring.full + 8 * s, WideRing<COLS>::STAGE_BYTES);
        tensor_load(ring.w(s), w_map, at.slice() * BK, at.n0, ring.full + 8 * s, w_policy);
    };
    // Weights may be read while the kernel before still runs.
    i32 early = 0;
    for (Slices<COLS> slices(work, order); slices.has() && early < ring.stages; slices.next()) load_weights(early++, slices);
    pdl_wait();
    Cursor at{0, 1};
    for (Slices<COLS> slices(work, order); slices.has(); slices.next()) {
        if (early > 0) {
            --early;
        } else {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            load_weights(at.stage, slices);
        }
        tensor_load(ring.x(at.stage, 0), x_map, slices.slice() * BK, slices.m0, ring.full + 8 * at.stage, EVICT_LAST);
        at.advance(1, ring.stages);
    }
}

// acc = the sum of the block's parts of a tile. Without HAS_RUNS there is one run.
template <int COLS, bool HAS_RUNS>
__device__ __forceinline__ void multiply_tile(float* acc, const WideRing<COLS>& ring, Cursor& at, const Work<COLS>& work,
                                              const SumOrder& order, int group) {
    if constexpr (!HAS_RUNS) {
        clear<COLS>(acc);
        multiply_run<COLS, true>(acc, ring, at, order.slices, group);
    } else {
        sum_runs<COLS, COLS == 256>(acc, order, work.first_run, work.last_run,
                                    [&](const Run& run) { multiply_run<COLS, true>(acc, ring, at, run.count, group); });
    }
}

template <int COLS, bool HAS_RUNS>
__device__ __forceinline__ void consume(const WideRing<COLS>& ring, const Output& out, const Work<COLS>& work, const SumOrder& order,
                                        i32 blocks, float* partial) {
    const int group = threadIdx.x / 128;
    pdl_wait();
    Cursor at{0, 0};
    for (i32 item = work.item; item < work.items; item += work.step) {
        i32 m0, n0;
        work.tile(item, m0, n0);
        float acc[COLS / 2];
        multiply_tile<COLS, HAS_RUNS>(acc, ring, at, work, order, group);
        if (blocks > 1) {
            store_parts<COLS>(out, blocks, partial, ring.base, m0, n0, group, acc);
        } else {
            store_sums<COLS>(out, m0, n0, group, acc);
        }
    }
}

template <int COLS, bool HAS_RUNS>
__device__ __forceinline__ void wide_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, const SumOrder& order,
                                          i32 stages, i32 blocks) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[32];
    pdl_launch();
    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u, bars = shared_address(barriers);
    const WideRing<COLS> ring{aligned, bars, bars + 8 * stages, stages};
    const Work<COLS> work(out, order, blocks);
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, CONSUMERS / 32);
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == CONSUMERS) produce(ring, w_map, x_map, work, order);
        __syncwarp();
        if (blocks > 1) cluster_sync(), cluster_sync();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume<COLS, HAS_RUNS>(ring, out, work, order, blocks, reinterpret_cast<float*>(dynamic + (aligned - raw)));
    }
}

#define WIDE_GEMM(KIND, COLS, HAS_RUNS) \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) sm90_##KIND##_bf16_n##COLS( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Output out, const SumOrder order, i32 stages, \
        i32 blocks) { \
        wide_gemm<COLS, HAS_RUNS>(&w_map, &x_map, out, order, stages, blocks); \
    }

WIDE_GEMM(wide_gemm, 128, true)
WIDE_GEMM(wide_gemm, 224, false)
WIDE_GEMM(wide_gemm, 256, false)
WIDE_GEMM(wide_gemm_of_runs, 256, true)
