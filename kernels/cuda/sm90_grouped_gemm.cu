// sm90_grouped_gemm_bf16_m{128,192}: y[r, n] = sum_k x[r, k] * w[l, n, k] (+ bias[l, n]) for the rows r of each expert l, for many
// rows an expert
// archs: 90a
//
// x        [R, K]    bf16, rows sorted by expert, through tensor map `x_map`, box [64, 64]; rows from R on are zero. Or `tokens`
//                    [R] u32, the token of each row, and the tokens' rows [T, K] bf16
// w        [L, N, K] bf16 through tensor map `w_map` of [L N, K], box [256, 64]
// y        [R, N] bf16, also through an activation, or [R, N / 2] bf16 = act(gate) * up: grouped.cuh
// maths    fp32 in the tensor cores, K in order: no result depends on other rows, nor on the rows of a tile
// launch   one block for each multiprocessor, 384 or 512 threads, dynamic shared memory: `stages` stages, their barriers and
//          [512] u32. Tiles are 128 or 192 rows of x, all of one expert, by 256 rows of its w, divided evenly. One warpgroup keeps a
//          ring of slices filled, across the ends of tiles; two or three multiply 64 rows each. A warpgroup without rows does not
//          multiply
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up), L <= 512: checked in grouped_gemm.rs
// bound    tensor cores, 2 R N K operations. Three warpgroups have too few registers for products of 256 columns; those of 128 read
//          x twice, 96 instead of 80 bytes of shared memory a cycle of the 128 that it gives
// test     tests/cuda_experts.rs
#include "grouped_rows.cuh"
#include "sm90_run.cuh"
#include "fragment.cuh"

constexpr u32 ROWS = 64, TILE_COLS = 256;
constexpr i32 BK = 64;
constexpr u32 X_BYTES = ROWS * BK * 2, W_BYTES = TILE_COLS * BK * 2;

template <int GROUPS>
struct Stages {
    static constexpr u32 BYTES = GROUPS * X_BYTES + W_BYTES, CONSUMERS = GROUPS * 128, TILE_ROWS = GROUPS * ROWS;
    u32 base, full, empty;  // shared addresses; barriers of 8 bytes each
    i32 stages;
    bool are_gathered;  // the rows, by this block's threads

    __device__ u32 x(i32 s, int group) const { return base + s * BYTES + group * X_BYTES; }
    __device__ u32 w(i32 s) const { return base + s * BYTES + GROUPS * X_BYTES; }

    __device__ void wait_full(const Cursor& at) const {
        barrier_wait(full + 8 * at.stage, at.parity);
        if (are_gathered) products_fence();
    }
};

// The rows of the tokens; `tokens` is null if the rows are sorted.
struct TokenRows {
    const u8* x;
    const u32* tokens;
};

// One thread: loads slices of tiles, whose rows of x are sorted.
template <int GROUPS>
__device__ __forceinline__ void load_sorted(const Stages<GROUPS>& ring, const Tiles& tiles, const TensorMap* w_map, const TensorMap* x_map,
                                            const Grouped& p, u32 items, i32 slices) {
    Cursor at{0, 1};
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = tiles.tile(item);
        const i32 w_row = tile.expert * p.n + tile.column * TILE_COLS;
        const u32 boxes = (tile.rows + ROWS - 1) / ROWS;
        for (i32 i = 0; i < slices; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            const u32 full = ring.full + 8 * at.stage;
            barrier_arrive_expect(full, W_BYTES + boxes * X_BYTES);
            for (u32 b = 0; b < boxes; ++b) tensor_load(ring.x(at.stage, b), x_map, i * BK, tile.first + b * ROWS, full, EVICT_LAST);
            tensor_load(ring.w(at.stage), w_map, i * BK, w_row, full, EVICT_LAST);
            at.advance(1, ring.stages);
        }
    }
}

// One warpgroup: the same for rows of tokens.
template <int GROUPS>
__device__ __forceinline__ void load_gathered(const Stages<GROUPS>& ring, const Tiles& tiles, const TensorMap* w_map, const TokenRows& from,
                                              const Grouped& p, u32 items, i32 slices) {
    Cursor at{0, 1};
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = tiles.tile(item);
        const i32 w_row = tile.expert * p.n + tile.column * TILE_COLS;
        const GatheredRows<Stages<GROUPS>::TILE_ROWS> rows(from.tokens, tile);
        for (i32 i = 0; i < slices; ++i) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            const u32 full = ring.full + 8 * at.stage;
            if (threadIdx.x == ring.CONSUMERS) {
                barrier_arrive_expect(full, W_BYTES);
                tensor_load(ring.w(at.stage), w_map, i * BK, w_row, full, EVICT_LAST);
            }
            rows.copy(ring.x(at.stage, 0), from.x, p.k * 2, i, tile.rows);
            arrive_when_copied(full);
            at.advance(1, ring.stages);
        }
    }
}

// Releases a tile's stages without using them.
template <int GROUPS>
__device__ __forceinline__ void skip_tile(const Stages<GROUPS>& ring, Cursor& at, i32 slices) {
    for (i32 i = 0; i < slices; ++i) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * at.stage);
        at.advance(1, ring.stages);
    }
}

// Stores rows g and g + 8 of each 16 rows of x. A thread has two columns of each eight, for both rows.
template <u32 EPILOGUE>
__device__ __forceinline__ void store(const Grouped& p, const Tile& tile, u32 n0, int group, const float* acc) {
    constexpr bool IS_GATED = is_gated(EPILOGUE);
    constexpr u32 BLOCKS = IS_GATED ? TILE_COLS / 16 : TILE_COLS / 8;  // of eight outputs
    const u32 lane = threadIdx.x % 32, t = lane % 4, row = group * ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const bf16* bias = p.bias ? p.bias + (u64)tile.expert * p.n : nullptr;
    const u32 pitch = IS_GATED ? p.n / 2 : p.n, first = IS_GATED ? n0 / 2 : n0;
    bf16* const y = p.y + (u64)(tile.first + row) * pitch;
#pragma unroll
    for (u32 four = 0; four < BLOCKS; four += 4) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 v[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 block = four + i;
                if constexpr (IS_GATED) {
                    const float* a = acc + 8 * block + 2 * half;
                    const u32 n = n0 + 16 * block + 2 * t;
                    const float2 gate = bias_of(bias, n, p.n), up = bias_of(bias, n + 8, p.n);
                    v[i] = pack_bf16x2(gate_by<EPILOGUE>(p, a[0] + gate.x, a[4] + up.x), gate_by<EPILOGUE>(p, a[1] + gate.y, a[5] + up.y));
                } else {
                    const float* a = acc + 4 * block + 2 * half;
                    const float2 b = bias_of(bias, n0 + 8 * block + 2 * t, p.n);
                    v[i] = pack_bf16x2(plain_by<EPILOGUE>(a[0] + b.x), plain_by<EPILOGUE>(a[1] + b.y));
                }
            }
            gather_block(v, t);
            const u32 column = first + 8 * (four + t);
            if (row + 8 * half < tile.rows && column < pitch) {
                *reinterpret_cast<uint4*>(y + (u64)half * 8 * pitch + column) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

template <int GROUPS>
__device__ __forceinline__ void grouped_gemm(const TensorMap* w_map, const TensorMap* x_map, const TokenRows& from, const Grouped& p, i32 stages) {
    using Ring = Stages<GROUPS>;
    alignas(1024) extern __shared__ u8 dynamic[];
    const u32 base = shared_address(dynamic), bars = base + stages * Ring::BYTES;
    const Ring ring{base, bars, bars + 8 * stages, stages, from.tokens != nullptr};
    if (threadIdx.x == 0) {
        const u32 copying = ring.are_gathered ? 128 : 0;
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1 + copying), barrier_init(ring.empty + 8 * s, 4 * GROUPS);
        barrier_init_fence();
    }
    pdl_wait();
    pdl_launch();  // not earlier: see sum_experts.cu
    u32* const ends = reinterpret_cast<u32*>(dynamic + stages * (Ring::BYTES + 16));
    Tiles tiles{ends, p, Ring::TILE_ROWS, (p.n + TILE_COLS - 1) / TILE_COLS};
    tiles.count();
    const u32 items = tiles.total();
    const i32 slices = (p.k + BK - 1) / BK;
    const int group = threadIdx.x / 128;
    if (group == GROUPS) {
        if constexpr (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (ring.are_gathered) load_gathered(ring, tiles, w_map, from, p, items, slices);
        else if (threadIdx.x == Ring::CONSUMERS) load_sorted(ring, tiles, w_map, x_map, p, items, slices);
        return;
    }
    if constexpr (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    Cursor at{0, 0};
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = tiles.tile(item);
        if (tile.rows <= group * ROWS) {
            skip_tile(ring, at, slices);
            continue;
        }
        float acc[TILE_COLS / 2] = {};
        multiply_run<TILE_COLS, false, GROUPS == 2 ? 256 : 128>(acc, ring, at, slices, group);
        with_epilogue(p.epilogue, [&](auto epilogue) { store<epilogue.value>(p, tile, tile.column * TILE_COLS, group, acc); });
    }
}

#define GROUPED_GEMM(NAME, GROUPS) \
    extern "C" __global__ void __launch_bounds__((GROUPS + 1) * 128, 1) sm90_grouped_gemm_bf16_##NAME( \
        const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const TokenRows from, const Grouped p, i32 stages) { \
        grouped_gemm<GROUPS>(&w_map, &x_map, from, p, stages); \
    }

GROUPED_GEMM(m128, 2)
GROUPED_GEMM(m192, 3)
