// sm90_quantized_gemm: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for weights in 8 or 4 bits and few rows: M <= 64
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [NT rows, 64]; rows from M on and columns from K on are zero
// w        [N, slices * 128] bytes of codes (quantized.cuh) through tensor map `w_map`, box [64, 128]; read once
// scales   FP8_ROWS: [N] f32. Others: for each tile of 64 rows and each slice, `meta_bytes` bytes. FP8_BLOCKS: two f32,
//          of rows r with r % 16 < 8 and of the others. INT4: [groups][64] f16 or bf16, then [groups][64] u8 zero points
//          if there are any; without them they are 8
// y        described in sm90_gemm.cuh
// maths    codes become bf16 exactly, products are summed in fp32 in the tensor cores, within a group of columns with
//          the same scale; such sums are multiplied by the scale and added in fp32 in order of K. K in S equal parts,
//          summed in order of the parts: no result depends on M
// launch   grid (S, ceil(N / 64)), cluster (S, 1), 128 GROUPS + 32 threads, dynamic shared memory from the wrapper
//          As sm90_skinny_gemm.cu, but codes go through registers: weights are the operand of wgmma that may lie there.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in quantized_gemm.rs
// bound    memory, N K bytes or N K / 2 and the scales. 28672 x 4096 in fp8: 117 MB, 26 us at 4.47 TB/s (H200)
// test     tests/cuda_quantized_gemm.rs, reference::linear of the values in fp32, each element within 2^-8 relative of
//          its own value plus K 2^-24 of the sum of magnitudes
#include "sm90_gemm.cuh"
#include "quantized.cuh"

constexpr u32 W_BYTES = TILE * 128;
static_assert(TILE == SCALE_TILE, "a block needs the scales of one tile");

template <int FORMAT, int NT>
struct QuantizedRing {
    static constexpr int BOXES = Codes<FORMAT>::COLUMNS / BK;  // of x, each BK columns
    static constexpr u32 BOX_BYTES = NT * BK * 2, STAGE_BYTES = W_BYTES + BOXES * BOX_BYTES;
    static_assert(BOX_BYTES % 1024 == 0, "swizzle atoms are 1024 bytes");
    u32 base, full, empty;  // shared addresses: stages, and barriers of 8 bytes each
    i32 stages;
    u32 meta_bytes;

    __device__ u32 w(i32 s) const { return base + s * STAGE_BYTES; }
    __device__ u32 x(i32 s, i32 box) const { return base + s * STAGE_BYTES + W_BYTES + box * BOX_BYTES; }
    __device__ u32 meta(i32 s) const { return base + stages * STAGE_BYTES + s * meta_bytes; }
};

// Copies `bytes` bytes, a multiple of 16, to shared memory.
__device__ __forceinline__ void bulk_load(u32 dst, const u8* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

template <class R>
__device__ __forceinline__ void load_weights(const R& ring, const TensorMap* w_map, const u8* meta, i32 n0, i32 slice, i32 s) {
    barrier_arrive_expect(ring.full + 8 * s, R::STAGE_BYTES + ring.meta_bytes);
    tensor_load(ring.w(s), w_map, slice * 128, n0, ring.full + 8 * s, EVICT_FIRST);
    if (ring.meta_bytes) {
        bulk_load(ring.meta(s), meta + (i64)slice * ring.meta_bytes, ring.meta_bytes, ring.full + 8 * s, EVICT_FIRST);
    }
}

template <class R>
__device__ __forceinline__ void load_rows(const R& ring, const TensorMap* x_map, i32 slice, i32 s) {
#pragma unroll
    for (int box = 0; box < R::BOXES; ++box) {
        tensor_load(ring.x(s, box), x_map, (slice * R::BOXES + box) * BK, 0, ring.full + 8 * s, EVICT_LAST);
    }
}

// Keeps the ring filled with slices first .. first + count of K; `meta` belongs to the tile. Weights are loaded while the
// previous kernel runs.
template <class R>
__device__ __forceinline__ void produce(const R& ring, const TensorMap* w_map, const TensorMap* x_map, const u8* meta, i32 n0,
                                        i32 first, i32 count) {
    const i32 early = min(count, ring.stages);
    for (i32 i = 0; i < early; ++i) load_weights(ring, w_map, meta, n0, first + i, i);
    pdl_wait();
    for (i32 i = 0; i < early; ++i) load_rows(ring, x_map, first + i, i);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        load_weights(ring, w_map, meta, n0, first + i, s);
        load_rows(ring, x_map, first + i, s);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

__device__ __forceinline__ uint4 shared_load16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float shared_load_f32(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u16 shared_load_u16(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u32 shared_load_u8(u32 address) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// `row`: the first row within the tile.
template <int FORMAT>
__device__ __forceinline__ RowScales row_scales(u32 meta, u32 meta_bytes, int group, int row, bool is_f16) {
    if constexpr (FORMAT == FP8_BLOCKS) return {shared_load_f32(meta), shared_load_f32(meta + 4), 0, 0};
    constexpr u32 SCALE_BYTES = Codes<FORMAT>::GROUPS * SCALE_TILE * 2;
    const u32 scale = meta + (group * TILE + row) * 2, zero = meta + SCALE_BYTES + group * TILE + row;
    const bool has_zeros = meta_bytes > SCALE_BYTES;
    return {group_scale(shared_load_u16(scale), is_f16), group_scale(shared_load_u16(scale + 16), is_f16),
            negative_zero_point(has_zeros ? shared_load_u8(zero) : 8), negative_zero_point(has_zeros ? shared_load_u8(zero + 8) : 8)};
}

// One warpgroup: acc [64 rows of w, NT rows of x] += slice `s` of w times that of x.
template <int FORMAT, int NT>
__device__ __forceinline__ void multiply_slice(float* acc, const QuantizedRing<FORMAT, NT>& ring, i32 s, bool is_f16) {
    using C = Codes<FORMAT>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 % 4 * 16 + g;
    u32 words[2][8];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 v = shared_load16(ring.w(s) + (row + 8 * r) * 128 + ((2 * t + h) ^ g) * 16);
            words[r][4 * h] = v.x, words[r][4 * h + 1] = v.y, words[r][4 * h + 2] = v.z, words[r][4 * h + 3] = v.w;
        }
    }
    float sums[FORMAT == FP8_ROWS ? 1 : NT / 2];
#pragma unroll
    for (int group = 0; group < C::GROUPS; ++group) {
        RowScales scales{};
        if constexpr (FORMAT != FP8_ROWS) scales = row_scales<FORMAT>(ring.meta(s), ring.meta_bytes, group, row, is_f16);
        u32 a[C::GROUP_STEPS][4];
#pragma unroll
        for (int i = 0; i < C::GROUP_STEPS; ++i) expand<FORMAT>(a[i], words, group * C::GROUP_STEPS + i, scales);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::GROUP_STEPS; ++i) {
            const int step = group * C::GROUP_STEPS + i;
            const u64 x = tile_descriptor(ring.x(s, step / 4)) + 2 * (step % 4);
            if constexpr (FORMAT == FP8_ROWS) {
                wgmma_registers<NT>(acc, a[i], x, 1);
            } else {
                wgmma_registers<NT>(sums, a[i], x, i > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if constexpr (FORMAT != FP8_ROWS) {
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) acc[i] += (i % 4 < 2 ? scales.first : scales.second) * sums[i];
        }
    }
}

// Multiplies every GROUPS-th slice when it has arrived.
template <int FORMAT, int NT, int GROUPS>
__device__ __forceinline__ void consume(const QuantizedRing<FORMAT, NT>& ring, i32 count, i32 group, float* acc, bool is_f16) {
    i32 s = group;
    u32 parity = 0;
    for (i32 i = group; i < count; i += GROUPS) {
        while (s >= ring.stages) s -= ring.stages, parity ^= 1;
        barrier_wait(ring.full + 8 * s, parity);
        multiply_slice<FORMAT, NT>(acc, ring, s, is_f16);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * s);
        s += GROUPS;
    }
}

template <int FORMAT, int NT, int GROUPS>
__device__ __forceinline__ void quantized_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, const Meta& meta,
                                               i32 k, i32 stages, i32 parts) {
    constexpr int CONSUMERS = GROUPS * 128;
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const QuantizedRing<FORMAT, NT> ring{aligned, bars, bars + 8 * stages, stages, (u32)meta.bytes};
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
        const u8* own = meta.values + (i64)blockIdx.y * slices * meta.bytes;
        if (threadIdx.x == CONSUMERS) produce(ring, w_map, x_map, own, n0, first, count);
        __syncwarp();
    } else {
        pdl_wait();
        consume<FORMAT, NT, GROUPS>(ring, count, group, acc, meta.is_f16 != 0);
    }
    if constexpr (FORMAT == FP8_ROWS) {
        if (threadIdx.x < CONSUMERS) {
            const float* scales = reinterpret_cast<const float*>(meta.values) + n0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
            const float first_scale = scales[0], second_scale = scales[8];
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) acc[i] *= i % 4 < 2 ? first_scale : second_scale;
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
        quantized_gemm<FORMAT, NT, GROUPS>(&w_map, &x_map, out, meta, k, stages, parts); \
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
