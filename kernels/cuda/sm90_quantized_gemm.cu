// sm90_quantized_gemm: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for weights in 8 or 4 bits and few rows: M <= 64
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [NT rows, 64]; rows from M on and columns from K on are zero
// w        [N, slices * 128] bytes of codes (quantized.cuh) through tensor map `w_map`, box [64, 128]; read once
// scales   FP8_ROWS, INT8_ROWS: [N] f32. Others: for each tile of 64 rows and each slice, `meta_bytes` bytes. FP8_BLOCKS: two f32,
//          of rows r with r % 16 < 8 and of the others. INT4, INT8: [groups][64] f16 or bf16, then [groups][64] u8 zero
//          points if there are any; without them they are 8, or 0. MXFP4: [groups][64] exponents. NVFP4: [groups / 4][64][4] e4m3, and behind all
//          slices of a tile the factors of its rows, [64] f32
// y        described in sm90_gemm.cuh
// maths    codes become bf16 exactly, those of NVFP4 times their group's scale; products are summed in fp32 in the tensor cores, within a group of columns with
//          the same scale; such sums are multiplied by the scale and added in fp32 in order of K. K in S equal parts,
//          summed in order of the parts: no result depends on M
// launch   grid (S, ceil(N / 64)), cluster (S, 1), 128 GROUPS + 32 threads, dynamic shared memory from the wrapper
//          As sm90_skinny_gemm.cu, but codes go through registers: weights are the operand of wgmma that may lie there.
//          `_low_rank_`: products of adapters behind those of K, as there; a stage has a slice of B in the place of codes, and h of
//          several modules in the place of x
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in quantized_gemm.rs
// bound    memory, N K bytes or N K / 2 and the scales. 28672 x 4096 in fp8: 117 MB, 26 us at 4.47 TB/s (H200)
// test     tests/cuda_quantized_gemm.rs, reference::linear of the values in fp32, each element within 2^-8 relative of
//          its own value plus K 2^-24 of the sum of magnitudes
#include "sm90_low_rank.cuh"
#include "sm90_quantized.cuh"

// Keeps the ring filled with slices first .. first + count of K. Weights are loaded while the previous kernel runs.
template <class R>
__device__ __forceinline__ void produce(const R& ring, const TensorMap* w_map, const TensorMap* x_map, const Meta& meta, i32 n0,
                                        i32 first, i32 count, i32 slices) {
    const i32 early = min(count, ring.stages);
    for (i32 i = 0; i < early; ++i) ring.load_weights(i, w_map, meta, n0, first + i, slices, R::X_BYTES);
    pdl_wait();
    for (i32 i = 0; i < early; ++i) ring.load_rows(i, x_map, first + i);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        ring.load_weights(s, w_map, meta, n0, first + i, slices, R::X_BYTES);
        ring.load_rows(s, x_map, first + i);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

// Multiplies every GROUPS-th slice when it has arrived.
template <int FORMAT, int NT, int GROUPS>
__device__ __forceinline__ void consume(const QuantizedRing<FORMAT, NT>& ring, i32 count, i32 group, float* acc, const Meta& meta) {
    i32 s = group;
    u32 parity = 0;
    for (i32 i = group; i < count; i += GROUPS) {
        while (s >= ring.stages) s -= ring.stages, parity ^= 1;
        barrier_wait(ring.full + 8 * s, parity);
        ring.multiply(acc, s, meta);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * s);
        s += GROUPS;
    }
}

// Loads the slices of B and h behind `count` slices of K.
template <class R>
__device__ __forceinline__ void produce_low_rank(const R& ring, const TensorMap* b_map, const TensorMap* h_map, i32 n0, i32 count,
                                                 i32 cols, LowRankSlices slices) {
    Cursor at{0, 1};
    at.jump(count, ring.stages);
    for (i32 i = 0; i < slices.count; ++i) {
        const i32 column = slices.take();
        for (i32 m = 0; m < slices.num_modules; m += R::BOXES, at.advance(1, ring.stages)) {
            const i32 modules = min(R::BOXES, slices.num_modules - m);
            const u32 full = ring.full + 8 * at.stage;
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            barrier_arrive_expect(full, R::TILE_BYTES + modules * R::BOX_BYTES);
            tensor_load(ring.w(at.stage), b_map, column, n0, full, EVICT_FIRST);
            for (i32 box = 0; box < modules; ++box) {
                tensor_load(ring.x(at.stage, box), h_map, (slices.first_module + m + box) * cols + column, 0, full, EVICT_LAST);
            }
        }
    }
}

// Multiplies those of them that are this warpgroup's.
template <int FORMAT, int NT, int GROUPS>
__device__ __forceinline__ void consume_low_rank(const QuantizedRing<FORMAT, NT>& ring, i32 count, i32 group, float* acc,
                                                 const Modules& modules, i32 n0, const LowRankSlices& slices) {
    constexpr i32 BOXES = QuantizedRing<FORMAT, NT>::BOXES;
    Cursor at{0, 0};
    at.jump(count, ring.stages);
    i32 turn = count;
    for (i32 i = 0; i < slices.count; ++i) {
        for (i32 m = 0; m < slices.num_modules; m += BOXES, ++turn, at.advance(1, ring.stages)) {
            if (turn % GROUPS != group) continue;
            barrier_wait(ring.full + 8 * at.stage, at.parity);
            for (i32 box = 0; box < min(BOXES, slices.num_modules - m); ++box) {
                multiply_low_rank<NT>(acc, ring.w(at.stage), ring.x(at.stage, box), modules, n0, slices.first_module + m + box);
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
        }
    }
}

template <int FORMAT, int NT, int GROUPS, class Low>
__device__ __forceinline__ void quantized_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, const Meta& meta,
                                               i32 k, i32 stages, i32 parts, const Low& low_rank, const TensorMap* b_map,
                                               const TensorMap* h_map) {
    constexpr int CONSUMERS = GROUPS * 128;
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const QuantizedRing<FORMAT, NT> ring{aligned, bars, bars + 8 * stages, stages};
    const i32 part = blockIdx.x, n0 = blockIdx.y * TILE;
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, 4);
        barrier_init_fence();
    }
    __syncthreads();

    const i32 slices = (k + Codes<FORMAT>::COLUMNS - 1) / Codes<FORMAT>::COLUMNS;
    const i32 first = slices * part / parts, count = slices * (part + 1) / parts - first;
    const i32 group = threadIdx.x / 128;
    float acc[NT / 2] = {};
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) {
            produce(ring, w_map, x_map, meta, n0, first, count, slices);
            if constexpr (Low::IS_THERE) {
                const LowRankSlices of_adapters(low_rank, n0, out.n, part == parts - 1);
                produce_low_rank(ring, b_map, h_map, n0, count, low_rank.cols, of_adapters);
            }
        }
        __syncwarp();
    } else {
        pdl_wait();
        consume<FORMAT, NT, GROUPS>(ring, count, group, acc, meta);
        ring.scale_rows(acc, meta, n0, slices);
        if constexpr (Low::IS_THERE) {
            const LowRankSlices of_adapters(low_rank, n0, out.n, part == parts - 1);
            consume_low_rank<FORMAT, NT, GROUPS>(ring, count, group, acc, low_rank.modules, n0, of_adapters);
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

#define QUANTIZED_GEMM(NAME, FORMAT, NT, GROUPS) \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32) \
        sm90_quantized_gemm_##NAME##_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map, \
                                                       const __grid_constant__ TensorMap x_map, const Output out, \
                                                       const Meta meta, i32 k, i32 stages, i32 parts) { \
        quantized_gemm<FORMAT, NT, GROUPS>(&w_map, &x_map, out, meta, k, stages, parts, NoLowRank{}, nullptr, nullptr); \
    } \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32) sm90_quantized_gemm_low_rank_##NAME##_m##NT##_g##GROUPS( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Output out, const Meta meta, i32 k, \
        i32 stages, i32 parts, const LowRank low_rank, const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap h_map) { \
        quantized_gemm<FORMAT, NT, GROUPS>(&w_map, &x_map, out, meta, k, stages, parts, low_rank, &b_map, &h_map); \
    }

// Four warpgroups have too few registers for 64 rows.
#define QUANTIZED_GEMMS(NAME, FORMAT) \
    QUANTIZED_GEMM(NAME, FORMAT, 8, 2) \
    QUANTIZED_GEMM(NAME, FORMAT, 8, 4) \
    QUANTIZED_GEMM(NAME, FORMAT, 16, 2) \
    QUANTIZED_GEMM(NAME, FORMAT, 16, 4) \
    QUANTIZED_GEMM(NAME, FORMAT, 32, 2) \
    QUANTIZED_GEMM(NAME, FORMAT, 32, 4) \
    QUANTIZED_GEMM(NAME, FORMAT, 64, 2)

QUANTIZED_GEMMS(fp8_rows, FP8_ROWS)
QUANTIZED_GEMMS(fp8_blocks, FP8_BLOCKS)
QUANTIZED_GEMMS(int4_g128, INT4_128)
QUANTIZED_GEMMS(int4_g32, INT4_32)
QUANTIZED_GEMMS(mxfp4, MXFP4)
QUANTIZED_GEMMS(nvfp4, NVFP4)
QUANTIZED_GEMMS(int8_rows, INT8_ROWS)
QUANTIZED_GEMMS(int8_g128, INT8_128)
QUANTIZED_GEMMS(int8_g32, INT8_32)
