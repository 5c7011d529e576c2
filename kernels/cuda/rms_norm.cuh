// Norm of a row that stays in registers, with an addend.
#pragma once
#include "common.cuh"

// No addend: the row is only read.
struct Nothing {
    static constexpr bool IS_ADDED = false;
    __device__ void add(float (&)[8], u64, u32, u32) const {}
};

// Rows of `p [T, cols]`.
struct AddedRows {
    static constexpr bool IS_ADDED = true;
    const bf16* p;
    __device__ void add(float (&x)[8], u64 row, u32 column, u32 cols) const {
        const bf16x8 b = load8(p + row * cols + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += to_f32(b.v[j]);
    }
};

// No copy of y.
struct NoCopy {
    __device__ void store(const bf16x8&, u64, u32) const {}
};

// Row blockIdx.x of r gets the addend and is stored; y becomes its norm, of which `copy` gets eight columns at a time. Each thread
// has CHUNKS chunks of 8 elements. With one chunk, the weight is read before the wait, because no kernel writes it.
template <class Addend, int CHUNKS, class Copy = NoCopy>
__device__ __forceinline__ void norm_chunks(bf16* y, bf16* r, const Addend& addend, const bf16* w, u32 cols, float eps, const Copy& copy = {}) {
    __shared__ float scratch[32];
    const u64 row = blockIdx.x;
    const u32 stride = blockDim.x * 8;
    float x[CHUNKS][8];
    float sum = 0.0f;
    bf16x8 g = {};
    if (CHUNKS == 1 && threadIdx.x * 8 < cols) g = load8(w + threadIdx.x * 8);
    pdl_wait();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        bf16x8 a = load8(r + row * cols + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[c][j] = to_f32(a.v[j]);
        addend.add(x[c], row, i, cols);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sum += x[c][j] * x[c][j];
            if (Addend::IS_ADDED) a.v[j] = to_bf16(x[c][j]);
        }
        if (Addend::IS_ADDED) store8(r + row * cols + i, a);
    }
    const float scale = rsqrtf(block_sum(sum, scratch) / cols + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = c * stride + threadIdx.x * 8;
        if (i >= cols) break;
        if (CHUNKS > 1) g = load8(w + i);
        bf16x8 out;
#pragma unroll
        for (int j = 0; j < 8; ++j) out.v[j] = to_bf16(x[c][j] * scale * to_f32(g.v[j]));
        store8(y + row * cols + i, out);
        copy.store(out, row, i);
    }
}

// For blocks of up to 1024 threads and rows of up to 32768 columns.
template <class Addend, class Copy = NoCopy>
__device__ __forceinline__ void norm_row(bf16* y, bf16* r, const Addend& addend, const bf16* w, u32 cols, float eps, const Copy& copy = {}) {
    pdl_launch();
    if (cols <= blockDim.x * 8) {
        norm_chunks<Addend, 1>(y, r, addend, w, cols, eps, copy);
    } else {
        norm_chunks<Addend, 4>(y, r, addend, w, cols, eps, copy);
    }
}
