// skinny_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), for few rows: M <= 64; the simple version, for any GPU
// archs: 80 90a 100a ptx
//
// x        [M, K]  bf16
// w        [N, K]  bf16
// y        epilogue STORE [M, N] bf16; STORE_F32 [M, N] f32; SILU, GELU [M, N / 2] bf16 = act(gate) * up
// gate/up  rows 16 b + i of w are gate row 8 b + i for i < 8 and up row 8 b + i - 8 for i >= 8
// maths    fp32 in mma.sync, K in eight interleaved parts, summed in order: no result depends on M
// launch   grid ceil(N / 16), block 256: a block has 16 rows of w. Each of its 8 warps has every eighth run of 32
//          columns, loaded directly from memory into the registers of mma.sync
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up), pointers 16-byte aligned: checked in skinny_gemm.rs
// bound    memory, 2 N K bytes; sm90_skinny_gemm.cu is closer to this bound
// test     tests/cuda_skinny_gemm.rs: each element within 2^-8 relative of its own value plus K 2^-24 of the sum of
//          magnitudes
#include "simple_gemm.cuh"

constexpr int RUN = 32;

// One run of 32 columns of rows g and g + 8; zero outside the matrix.
__device__ __forceinline__ void load_run(uint4 (&w)[2], const bf16* const (&rows)[2], u32 column, u32 k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w[i] = rows[i] && column < k ? load_stream(rows[i] + column) : make_uint4(0, 0, 0, 0);
    }
}

template <int NT>
__device__ __forceinline__ void multiply(float (&acc)[NT / 8][4], const uint4 (&w)[2], const bf16* x, u32 m, u32 column,
                                         u32 k, int g) {
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
        const u32 row = 8 * j + g;
        uint4 b = make_uint4(0, 0, 0, 0);
        if (row < m && column < k) b = *reinterpret_cast<const uint4*>(x + (u64)row * k + column);
        mma_16x8x16(acc[j], w[0].x, w[1].x, w[0].y, w[1].y, b.x, b.y);
        mma_16x8x16(acc[j], w[0].z, w[1].z, w[0].w, w[1].w, b.z, b.w);
    }
}

template <int NT>
__device__ __forceinline__ void skinny_gemm(void* y, const bf16* x, const bf16* w, const bf16* bias, u32 m, u32 n, u32 k,
                                            i32 epilogue) {
    extern __shared__ float partial[];  // [WARPS][NT][ROWS + 1]
    pdl_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 n0 = blockIdx.x * ROWS;
    const bf16* const rows[2] = {n0 + g < n ? w + (u64)(n0 + g) * k : nullptr, n0 + g + 8 < n ? w + (u64)(n0 + g + 8) * k : nullptr};
    pdl_wait();

    float acc[NT / 8][4] = {};
    const u32 runs = (k + RUN - 1) / RUN;
    constexpr int AHEAD = 4;
    for (u32 run = warp; run < runs; run += AHEAD * WARPS) {
        uint4 a[AHEAD][2];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load_run(a[i], rows, (run + i * WARPS) * RUN + 8 * t, k);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) multiply<NT>(acc, a[i], x, m, (run + i * WARPS) * RUN + 8 * t, k, g);
    }
    store_tile<NT>(partial, acc, y, bias, m, n, n0, epilogue);
}

#define SKINNY_GEMM(NT)                                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                           \
        skinny_gemm_bf16_m##NT(void* y, const bf16* x, const bf16* w, const bf16* bias, u32 m, u32 n, u32 k,           \
                               i32 epilogue) {                                                                         \
        skinny_gemm<NT>(y, x, w, bias, m, n, k, epilogue);                                                             \
    }

SKINNY_GEMM(8)
SKINNY_GEMM(16)
SKINNY_GEMM(32)
SKINNY_GEMM(64)
