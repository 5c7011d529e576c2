// grouped_gemm_bf16: y[r, n] = sum_k x[r, k] * w[l, n, k] (+ bias[l, n]) for the rows r of each expert l; the simple
// version, for any GPU
// archs: 80 90a 100a ptx
//
// x        [R, K]    bf16, rows sorted by expert
// w        [L, N, K] bf16
// y        [R, N] bf16, also through an activation, or [R, N / 2] bf16 = act(gate) * up: grouped.cuh
// maths    fp32 in mma.sync, K in eight interleaved parts, summed in order: no result depends on other rows
// launch   grid ceil(N / 16) times an upper bound of the number of tiles of NT rows, block 256: a block has 16 rows of an
//          expert's w. Each of its 8 warps has every eighth run of 32 columns, loaded directly from memory into the
//          registers of mma.sync
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up), L <= 512, pointers 16-byte aligned: checked in grouped_gemm.rs
// bound    memory, 2 N K bytes for each expert that has rows
// test     tests/cuda_experts.rs
#include "grouped.cuh"
#include "mma.cuh"

constexpr int WARPS = 8, ROWS = 16, RUN = 32, AHEAD = 4;

template <int NT>
__device__ __forceinline__ float tile_sum(const float* partial, int m, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[(w * NT + m) * (ROWS + 1) + n];
    return sum;
}

template <int NT>
__device__ __forceinline__ void grouped_gemm(const Grouped& p, const bf16* x, const bf16* w) {
    extern __shared__ float partial[];  // [WARPS][NT][ROWS + 1]
    __shared__ u32 ends[MAX_GROUPS];
    pdl_wait();
    pdl_launch();  // not earlier: see sum_experts.cu
    Tiles tiles{ends, p, NT, (p.n + ROWS - 1) / ROWS};
    tiles.count();
    if (blockIdx.x >= tiles.total()) return;
    const Tile tile = tiles.tile(blockIdx.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 n0 = tile.column * ROWS, k = p.k;
    w += (u64)tile.expert * p.n * k;
    x += (u64)tile.first * k;
    const bf16* const rows[2] = {n0 + g < p.n ? w + (u64)(n0 + g) * k : nullptr, n0 + g + 8 < p.n ? w + (u64)(n0 + g + 8) * k : nullptr};

    float acc[NT / 8][4] = {};
    const u32 runs = (k + RUN - 1) / RUN;
    for (u32 run = warp; run < runs; run += AHEAD * WARPS) {
        uint4 a[AHEAD][2];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const u32 column = (run + i * WARPS) * RUN + 8 * t;
#pragma unroll
            for (int h = 0; h < 2; ++h) a[i][h] = rows[h] && column < k ? load_stream(rows[h] + column) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const u32 column = (run + i * WARPS) * RUN + 8 * t;
#pragma unroll
            for (int j = 0; j < NT / 8; ++j) {
                const u32 row = 8 * j + g;
                uint4 b = make_uint4(0, 0, 0, 0);
                if (row < tile.rows && column < k) b = *reinterpret_cast<const uint4*>(x + (u64)row * k + column);
                mma_16x8x16(acc[j], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b.x, b.y);
                mma_16x8x16(acc[j], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b.z, b.w);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            partial[(warp * NT + 8 * j + 2 * t + e % 2) * (ROWS + 1) + g + e / 2 * 8] = acc[j][e];
        }
    }
    __syncthreads();

    const bf16* bias = p.bias ? p.bias + (u64)tile.expert * p.n : nullptr;
    with_epilogue(p.epilogue, [&](auto epilogue) {
        constexpr bool IS_GATED = is_gated(epilogue.value);
        constexpr u32 COLUMNS = IS_GATED ? ROWS / 2 : ROWS;
        for (u32 i = threadIdx.x; i < tile.rows * COLUMNS; i += blockDim.x) {
            const u32 row = i / COLUMNS, c = i % COLUMNS;
            if (n0 + c >= p.n) continue;
            const float v = tile_sum<NT>(partial, row, c) + (bias ? to_f32(bias[n0 + c]) : 0.0f);
            if constexpr (IS_GATED) {
                const float up = tile_sum<NT>(partial, row, c + 8) + (bias ? to_f32(bias[n0 + c + 8]) : 0.0f);
                p.y[(u64)(tile.first + row) * (p.n / 2) + n0 / 2 + c] = to_bf16(gate_by<epilogue.value>(p, v, up));
            } else {
                p.y[(u64)(tile.first + row) * p.n + n0 + c] = to_bf16(plain_by<epilogue.value>(v));
            }
        }
    });
}

#define GROUPED_GEMM(NT)                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                 \
        grouped_gemm_bf16_m##NT(const Grouped p, const bf16* x, const bf16* w) {                             \
        grouped_gemm<NT>(p, x, w);                                                                           \
    }

GROUPED_GEMM(8)
GROUPED_GEMM(16)
GROUPED_GEMM(32)
GROUPED_GEMM(64)
