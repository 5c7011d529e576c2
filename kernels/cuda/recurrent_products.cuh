// Products of chunks of 64 positions with states of layers whose keys have 128 elements, on tensor cores. A warp has 16 columns of S, as
// rows of S^T.
#pragma once
#include "mma.cuh"
#include "recurrent_chunks.cuh"

// Elements from one row to the next in shared memory, of 128 and of 64 columns.
constexpr u32 KEY_DIM = 128, WIDE = KEY_DIM + 8, NARROW = CHUNK + 8;

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 64 rows of COLS elements to rows that are PITCH apart.
template <u32 THREADS, u32 COLS, u32 PITCH>
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from) {
    constexpr u32 PARTS = COLS / 8, ROWS = THREADS / PARTS;
    const u32 address = in_shared(to + threadIdx.x / PARTS * PITCH + threadIdx.x % PARTS * 8);
    const bf16* own = from + threadIdx.x * 8;
#pragma unroll
    for (u32 row = 0; row < CHUNK; row += ROWS) copy_async(address + row * PITCH * 2, own + row * COLS, true);
}

// Products as the first operand of the next ones: c [16, 8 N], of which a thread has rows g, g + 8 and columns 2t, 2t + 1 of each
// eight, becomes a [16, 16] N / 2 times.
template <u32 N>
__device__ __forceinline__ void pack(u32 (&a)[N / 2][4], const float (&c)[N][4]) {
#pragma unroll
    for (u32 k = 0; k < N / 2; ++k) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            a[k][2 * i] = pack_bf16x2(c[2 * k + i][0], c[2 * k + i][1]);
            a[k][2 * i + 1] = pack_bf16x2(c[2 * k + i][2], c[2 * k + i][3]);
        }
    }
}

// c [16, 64] += a [16, 16 STEPS] b^T; b [64, 16 STEPS] is stored as rows of PITCH elements. IS_LOWER: b is lower triangular.
template <u32 STEPS, u32 PITCH, bool IS_LOWER>
__device__ __forceinline__ void add_product(float (&c)[8][4], const u32 (&a)[STEPS][4], const bf16* rows) {
    const u32 lane = threadIdx.x % 32;
    const u32 from = in_shared(rows + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
    // The fragments of the next step are loaded while this one's are multiplied.
    u32 f[2][4][4];
    const auto load = [&](u32 k) {
#pragma unroll
        for (u32 n = IS_LOWER ? k : 0; n < 4; ++n) load_matrices(f[k % 2][n], from + (n * 16 * PITCH + k * 16) * 2);
    };
    load(0);
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) {
        if (k + 1 < STEPS) load(k + 1);
#pragma unroll
        for (u32 n = IS_LOWER ? k : 0; n < 4; ++n) {
            const u32* b = f[k % 2][n];
            mma_16x8x16(c[2 * n], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
            mma_16x8x16(c[2 * n + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }
    }
}

// s [16, 128] += a [16, 64] k; k [64, 128].
__device__ __forceinline__ void add_keys(float (&s)[16][4], const u32 (&a)[4][4], const bf16* keys) {
    const u32 lane = threadIdx.x % 32;
    const u32 from = in_shared(keys + (lane / 8 % 2 * 8 + lane % 8) * WIDE + lane / 16 * 8);
    u32 f[2][4][4];
    const auto load = [&](u32 step) {
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            load_matrices_transposed(f[step % 2][n], from + (step / 2 * 16 * WIDE + (step % 2 * 4 + n) * 16) * 2);
        }
    };
    load(0);
#pragma unroll
    for (u32 step = 0; step < 8; ++step) {
        if (step + 1 < 8) load(step + 1);
        const u32* own = a[step / 2];
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            const u32* b = f[step % 2][n];
            const u32 column = step % 2 * 8 + 2 * n;
            mma_16x8x16(s[column], own[0], own[1], own[2], own[3], b[0], b[1]);
            mma_16x8x16(s[column + 1], own[0], own[1], own[2], own[3], b[2], b[3]);
        }
    }
}

// Elements of v or O of a warp's 16 columns, from the first token of a chunk on. A thread has columns 2t, 2t + 1 of each eight, of the
// tokens 8 n + g < count.
struct Elements {
    bf16* base;
    u32 stride, count;

    __device__ u32* own() const {
        return reinterpret_cast<u32*>(base + threadIdx.x % 32 / 4 * stride) + threadIdx.x % 4;
    }

    __device__ void load(u32 (&v)[8][2]) const {
        const u32* from = own();
#pragma unroll
        for (u32 n = 0; n < 8; ++n, from += 4 * stride) {
            const bool is_valid = 8 * n + threadIdx.x % 32 / 4 < count;
            v[n][0] = is_valid ? from[0] : 0, v[n][1] = is_valid ? from[4] : 0;
        }
    }

    __device__ void store(const float (&o)[8][4]) const {
        u32* to = own();
#pragma unroll
        for (u32 n = 0; n < 8; ++n, to += 4 * stride) {
            const u32 first = transpose_8x8(pack_bf16x2(o[n][0], o[n][1])), second = transpose_8x8(pack_bf16x2(o[n][2], o[n][3]));
            if (8 * n + threadIdx.x % 32 / 4 < count) to[0] = first, to[4] = second;
        }
    }
};
