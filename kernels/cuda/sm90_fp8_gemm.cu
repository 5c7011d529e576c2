// sm90_fp8_gemm: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) for x and w in e4m3
// archs: 90a
//
// x        codes [M, 128 S] through tensor map `x_map`, box [ROWS, 128], S slices of K; scales [S, M padded to 128] f32:
//          one for each row and slice. quantize_rows.cu writes both, with the columns of a slice in the order of w's codes
// w        codes through tensor map `w_map`, box [COLS, 128], and scales, as quantized.cuh describes
// y        described in sm90_gemm.cuh
// maths    the products of a slice are summed in the tensor cores. Each such sum is multiplied by the scales of the row and
//          of the block (FP8_BLOCKS), and added in fp32, slices in order; at the end times the scale of w's row (FP8_ROWS).
//          With P parts of K (1 to 3) each part is such a sum; parts are added in order. For a given P no result
//          depends on other rows. Fp8Split::for_shape chooses P by the number of rows, too; Fp8Split::invariant by the weight alone
// launch   384 threads, dynamic shared memory from the wrapper. Without a cluster: one block for each multiprocessor, which computes
//          tiles of ROWS rows of x by COLS rows of w, one part after the other (P = 1 but in kernels of parts).
//          Otherwise grid (P tiles), cluster (P), a tile for each cluster, a part for each block.
//          One warp keeps a ring of slices filled, across the ends of tiles; two warpgroups multiply 64 rows of x each, or, if
//          ROWS is not 128, half of w's rows: with 64 rows of x if COLS is 224, else with w as the 64-row operand
//          (sm90_fp8_fitted.cuh). While one adds its sums, the other one's products run
// needs    N % 8 == 0 (N % 16 == 0 for gate/up): checked in fp8_gemm.rs
// bound    shared memory, which a slice is written to once and read from once for each 64 rows of the other operand; few rows:
//          memory, N K bytes
// test     tests/cuda_fp8_gemm.rs
#include "sm90_fp8_fitted.cuh"

constexpr u32 SLICE = 128;  // columns of a slice, and bytes

template <int FORMAT, int ROWS, int COLS>
struct Fp8Ring {
    static_assert(FORMAT == FP8_ROWS || COLS % TILE == 0, "blocks with a scale begin at the tile");
    static constexpr int TILES = (COLS + TILE - 1) / TILE;
    static constexpr u32 X_BYTES = ROWS * SLICE, W_BYTES = COLS * SLICE, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr u32 X_SCALES = ROWS * 4, W_SCALES = FORMAT == FP8_BLOCKS ? TILES * 16 : 0, SCALES = X_SCALES + TILES * 16;
    u32 base, full, empty;  // shared addresses: stages, then scales of each stage, and barriers of 8 bytes each
    i32 stages;

    // From a row of the stage on.
    __device__ u32 x(i32 s, int row) const { return base + s * STAGE_BYTES + row * SLICE; }
    __device__ u32 w(i32 s, int row) const { return base + s * STAGE_BYTES + X_BYTES + row * SLICE; }
    __device__ u32 x_scales(i32 s) const { return base + stages * STAGE_BYTES + s * SCALES; }
    __device__ u32 w_scales(i32 s) const { return x_scales(s) + X_SCALES; }
};

struct Operands {
    const float* x_scales;  // [S, x_pitch]
    const u8* w_scales;
    i32 x_pitch;
    i32 slices;
    i32 parts;
    i32 blocks;  // of a cluster: 1, or as many as there are parts
};

// The first slice of a part of K.
__device__ __forceinline__ i32 part_begin(const Operands& p, i32 part) { return p.slices * part / p.parts; }

// The tiles of a block, its parts, and its slices of K.
template <int ROWS, int COLS>
struct Work : TileOrder<COLS, ROWS> {
    i32 item, step, part, parts, first, count;

    __device__ Work(const Output& out, const Operands& p) : TileOrder<COLS, ROWS>(out) {
        part = blockIdx.x % p.blocks, parts = p.parts / p.blocks;
        item = blockIdx.x / p.blocks, step = gridDim.x / p.blocks;
        first = part_begin(p, part), count = part_begin(p, part + parts) - first;
    }
};

template <int FORMAT, int ROWS, int COLS>
__device__ __forceinline__ void produce(const Fp8Ring<FORMAT, ROWS, COLS>& ring, const TensorMap* w_map, const TensorMap* x_map,
                                        const Output& out, const Operands& p, const Work<ROWS, COLS>& work) {
    using R = Fp8Ring<FORMAT, ROWS, COLS>;
    const i32 last_tile = (out.n - 1) / TILE;
    const u64 w_policy = work.row_tiles > 1 ? EVICT_LAST : EVICT_FIRST;
    // Scales end with the last 128 rows, where a tile may not.
    const auto x_scales_bytes = [&](i32 m0) { return (u32)min(ROWS, p.x_pitch - m0) * 4; };
    const auto load_weights = [&](i32 s, i32 m0, i32 n0, i32 slice) {
        const u32 full = ring.full + 8 * s;
        barrier_arrive_expect(full, R::STAGE_BYTES + x_scales_bytes(m0) + R::W_SCALES);
        tensor_load(ring.w(s, 0), w_map, slice * SLICE, n0, full, w_policy);
        if constexpr (FORMAT == FP8_BLOCKS) {
#pragma unroll 1
            for (int tile = 0; tile < R::TILES; ++tile) {
                const u8* from = p.w_scales + ((i64)min(n0 / TILE + tile, last_tile) * p.slices + slice) * 16;
                bulk_load(ring.w_scales(s) + 16 * tile, from, 16, full, w_policy);
            }
        }
    };
    const auto load_rows = [&](i32 s, i32 m0, i32 slice) {
        const u32 full = ring.full + 8 * s;
        tensor_load(ring.x(s, 0), x_map, slice * SLICE, m0, full, EVICT_LAST);
        bulk_load(ring.x_scales(s), (const u8*)(p.x_scales + (i64)slice * p.x_pitch + m0), x_scales_bytes(m0), full, EVICT_LAST);
    };
    i32 m0, n0;
    // Weights may be read while the kernel before still runs.
    work.tile(work.item, m0, n0);
    const i32 early = work.item < work.items ? min(work.count, ring.stages) : 0;
    for (i32 i = 0; i < early; ++i) load_weights(i, m0, n0, work.first + i);
    pdl_wait();
    for (i32 i = 0; i < early; ++i) load_rows(i, m0, work.first + i);
    Cursor at{early % ring.stages, early == ring.stages ? 0u : 1u};
    for (i32 item = work.item, begun = early; item < work.items; item += work.step, begun = 0) {
        work.tile(item, m0, n0);
        for (i32 i = begun; i < work.count; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            load_weights(at.stage, m0, n0, work.first + i);
            load_rows(at.stage, m0, work.first + i);
            at.advance(1, ring.stages);
        }
    }
}

// One warpgroup: acc [64 rows of x, COLS rows of w] = those of the stage from x_row and w_row on, by PARTS products of each slice.
template <int FORMAT, int COLS, int PARTS, class Ring>
__device__ __forceinline__ void multiply_tile(float* acc, const Ring& ring, Cursor& at, i32 count, int x_row, int w_row) {
    constexpr int PRODUCT_COLS = COLS / PARTS;
    const int row = x_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    for (i32 i = 0; i < count; ++i) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        const u64 x = tile_descriptor(ring.x(at.stage, x_row));
        const float first = shared_load_f32(ring.x_scales(at.stage) + 4 * row), second = shared_load_f32(ring.x_scales(at.stage) + 4 * row + 32);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const u64 w = tile_descriptor(ring.w(at.stage, w_row + part * PRODUCT_COLS));
            float sums[PRODUCT_COLS / 2];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < SLICE / 32; ++k) wgmma_e4m3<PRODUCT_COLS>(sums, x + 2 * k, w + 2 * k, k > 0);
            wgmma_commit();
            constexpr int TILES = (PRODUCT_COLS + TILE - 1) / TILE;
            float scales[TILES][2][2];  // of the tile, of blocks of eight rows of w that are even and odd, of the rows of x
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    float scale = 1.0f;
                    if constexpr (FORMAT == FP8_BLOCKS) scale = shared_load_f32(ring.w_scales(at.stage) + 16 * (part * PRODUCT_COLS / TILE + tile) + 4 * odd);
                    scales[tile][odd][0] = first * scale, scales[tile][odd][1] = second * scale;
                }
            }
            wgmma_wait<0>();
            if (part == PARTS - 1) barrier_arrive(ring.empty + 8 * at.stage);
#pragma unroll
            for (int j = 0; j < PRODUCT_COLS / 8; ++j) {
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[part * PRODUCT_COLS / 2 + 4 * j + c] += scales[j / 8][j % 2][c / 2] * sums[4 * j + c];
            }
        }
        at.advance(1, ring.stages);
    }
}

// One warpgroup: acc [64 rows of w, ROWS rows of x] = its rows times the tile's.
template <int FORMAT, int ROWS>
__device__ __forceinline__ void multiply_fitted_tile(float* acc, const Fp8Ring<FORMAT, ROWS, GROUPS * TILE>& ring, Cursor& at, i32 count, int group) {
    constexpr int PARTS = ROWS > 128 ? 2 : 1, N = ROWS / PARTS;  // products of a slice, and their rows of x
    for (i32 i = 0; i < count; ++i) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        const u32 rows = ring.w(at.stage, group * TILE);
        u32 fragments[4][4];  // for several products
        if constexpr (PARTS > 1) load_fragments(fragments, rows);
        float first = 1.0f, second = 1.0f;
        if constexpr (FORMAT == FP8_BLOCKS) {
            first = shared_load_f32(ring.w_scales(at.stage) + 16 * group), second = shared_load_f32(ring.w_scales(at.stage) + 16 * group + 4);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const u64 x = tile_descriptor(ring.x(at.stage, part * N));
            float sums[N / 2];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < SLICE / 32; ++k) {
                if constexpr (PARTS > 1) wgmma_registers_e4m3<N>(sums, fragments[k], x + 2 * k, k > 0);
                else wgmma_e4m3<N>(sums, tile_descriptor(rows) + 2 * k, x + 2 * k, k > 0);
            }
            wgmma_commit();
            float2 scales[N / 8];
#pragma unroll
            for (int j = 0; j < N / 8; ++j) scales[j] = shared_load_f32x2(ring.x_scales(at.stage) + 4 * (part * N + 8 * j + threadIdx.x % 4 * 2));
            wgmma_wait<0>();
            if (part == PARTS - 1) barrier_arrive(ring.empty + 8 * at.stage);
            add_scaled<N>(acc + part * N / 2, sums, scales, first, second);
        }
        at.advance(1, ring.stages);
    }
}

// Multiplies by the scales of w's rows, which this warpgroup's threads loaded: thread `i` those of rows 2 i and 2 i + 1.
template <int COLS>
__device__ __forceinline__ void scale_columns(float* acc, float2* shared, float2 loaded, int group) {
    float2* own = shared + group * COLS / 2;
    if (threadIdx.x % 128 < COLS / 2) own[threadIdx.x % 128] = loaded;
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
#pragma unroll
    for (int j = 0; j < COLS / 8; ++j) {
        const float2 v = own[4 * j + threadIdx.x % 4];
        // Rounded before a sum of parts, as where parts lie in different blocks.
        acc[4 * j] = __fmul_rn(acc[4 * j], v.x), acc[4 * j + 1] = __fmul_rn(acc[4 * j + 1], v.y);
        acc[4 * j + 2] = __fmul_rn(acc[4 * j + 2], v.x), acc[4 * j + 3] = __fmul_rn(acc[4 * j + 3], v.y);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");  // the next tile's scales overwrite these
}

template <int FORMAT, int ROWS, int COLS, bool OF_PARTS>
__device__ __forceinline__ void consume(const Fp8Ring<FORMAT, ROWS, COLS>& ring, const Output& out, const Operands& p, const Work<ROWS, COLS>& work,
                                        float* partial, float2* column_scales) {
    constexpr bool HAS_ROW_GROUPS = ROWS == NT;  // otherwise each warpgroup has half of w's rows
    constexpr int GROUP_COLS = HAS_ROW_GROUPS ? COLS : COLS / GROUPS;
    const int group = threadIdx.x / 128, row_group = HAS_ROW_GROUPS ? group : 0, w_row = HAS_ROW_GROUPS ? 0 : group * GROUP_COLS;
    Cursor at{0, 0};
    for (i32 item = work.item; item < work.items; item += work.step) {
        i32 m0, n0;
        work.tile(item, m0, n0);
        n0 += w_row;
        float2 scales{};
        if constexpr (FORMAT == FP8_ROWS) {
            const i32 n = n0 + (i32)threadIdx.x % 128 * 2;
            if (n < min(n0 + GROUP_COLS, out.n)) scales = *reinterpret_cast<const float2*>(p.w_scales + 4 * n);
        }
        float acc[GROUP_COLS / 2];
        // Two products of a slice leave registers for the sum of the parts before.
        constexpr int PRODUCTS = OF_PARTS || GROUP_COLS > 128 ? 2 : 1;
        const auto multiply = [&](i32 count) {
            clear<GROUP_COLS>(acc);
            multiply_tile<FORMAT, GROUP_COLS, PRODUCTS>(acc, ring, at, count, row_group * GROUP_ROWS, w_row);
            if constexpr (FORMAT == FP8_ROWS) scale_columns<GROUP_COLS>(acc, column_scales, scales, group);
        };
        if constexpr (OF_PARTS) {
            Kept<GROUP_COLS, GROUP_COLS == 256> kept;
#pragma unroll 1
            for (i32 part = 0; part < p.parts; ++part) {
                multiply(part_begin(p, part + 1) - part_begin(p, part));
                if (part > 0) kept.add_to(acc);
                if (part + 1 < p.parts) kept.keep(acc);
            }
        } else {
            multiply(work.count);
        }
        if (p.blocks > 1) {
            store_parts<GROUP_COLS>(out, p.blocks, partial, ring.base, m0, n0, row_group, acc);
        } else {
            store_sums<GROUP_COLS>(out, m0, n0, row_group, acc);
        }
    }
}

// The same with w as the 64-row operand.
template <int FORMAT, int ROWS>
__device__ __forceinline__ void consume_fitted(const Fp8Ring<FORMAT, ROWS, GROUPS * TILE>& ring, const Output& out, const Operands& p,
                                               const Work<ROWS, GROUPS * TILE>& work, float* partial) {
    const int group = threadIdx.x / 128;
    Cursor at{0, 0};
    for (i32 item = work.item; item < work.items; item += work.step) {
        i32 m0, n0;
        work.tile(item, m0, n0);
        const i32 warp_n = n0 + (i32)threadIdx.x / 32 * 16, n = warp_n + (i32)threadIdx.x % 32 / 4;
        float first = 1.0f, second = 1.0f;
        if (FORMAT == FP8_ROWS && warp_n < out.n) {
            const float* scales = reinterpret_cast<const float*>(p.w_scales) + n;
            first = scales[0], second = scales[8];
        }
        float acc[ROWS / 2] = {};
        multiply_fitted_tile<FORMAT, ROWS>(acc, ring, at, work.count, group);
        if constexpr (FORMAT == FP8_ROWS) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) acc[i] *= i % 4 < 2 ? first : second;
        }
        if (p.blocks > 1) {
            store_fitted_parts<ROWS>(out, p.blocks, partial, ring.base, m0, n0, group, acc);
        } else {
            store_fitted<ROWS>(out, m0, warp_n, acc);
        }
    }
}

template <int FORMAT, int ROWS, int COLS, bool OF_PARTS>
__device__ __forceinline__ void fp8_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, const Operands& p, i32 stages) {
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[16];
    constexpr bool IS_FITTED = ROWS != NT && COLS == GROUPS * TILE;
    __shared__ float2 column_scales[FORMAT == FP8_ROWS && !IS_FITTED ? GROUPS * COLS / 2 : 1];
    pdl_launch();
    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u, bars = shared_address(barriers);
    const Fp8Ring<FORMAT, ROWS, COLS> ring{aligned, bars, bars + 8 * stages, stages};
    const Work<ROWS, COLS> work(out, p);
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, CONSUMERS);
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == CONSUMERS) produce(ring, w_map, x_map, out, p, work);
        __syncwarp();
        if (p.blocks > 1) cluster_sync(), cluster_sync();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        float* partial = reinterpret_cast<float*>(dynamic + (aligned - raw));
        pdl_wait();
        if constexpr (IS_FITTED) consume_fitted<FORMAT, ROWS>(ring, out, p, work, partial);
        else consume<FORMAT, ROWS, COLS, OF_PARTS>(ring, out, p, work, partial, column_scales);
    }
}

#define FP8_KERNEL(KIND, FORMAT, ROWS, COLS, OF_PARTS) \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) sm90_##KIND##_m##ROWS##_n##COLS( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const Output out, const Operands p, i32 stages) { \
        fp8_gemm<FORMAT, ROWS, COLS, OF_PARTS>(&w_map, &x_map, out, p, stages); \
    }
#define FP8_GEMM(NAME, FORMAT, ROWS, COLS) FP8_KERNEL(fp8_gemm_##NAME, FORMAT, ROWS, COLS, false)
#define FP8_GEMM_OF_PARTS(NAME, FORMAT, ROWS, COLS) FP8_KERNEL(fp8_gemm_of_parts_##NAME, FORMAT, ROWS, COLS, true)

FP8_GEMM(rows, FP8_ROWS, 64, 128)
FP8_GEMM(rows, FP8_ROWS, 64, 224)
FP8_GEMM(rows, FP8_ROWS, 128, 128)
FP8_GEMM(rows, FP8_ROWS, 128, 224)
FP8_GEMM(rows, FP8_ROWS, 128, 256)
FP8_GEMM(rows, FP8_ROWS, 160, 128)
FP8_GEMM_OF_PARTS(rows, FP8_ROWS, 128, 128)
FP8_GEMM_OF_PARTS(rows, FP8_ROWS, 128, 256)
FP8_GEMM(blocks, FP8_BLOCKS, 64, 128)
FP8_GEMM(blocks, FP8_BLOCKS, 128, 128)
FP8_GEMM(blocks, FP8_BLOCKS, 128, 256)
FP8_GEMM(blocks, FP8_BLOCKS, 160, 128)
FP8_GEMM_OF_PARTS(blocks, FP8_BLOCKS, 128, 128)
FP8_GEMM_OF_PARTS(blocks, FP8_BLOCKS, 128, 256)
