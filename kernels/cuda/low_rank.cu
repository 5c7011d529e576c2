// low_rank_shrink_bf16: h[t, :] = scale * A x[t, :] of the token's adapter, as sm90_low_rank.cu on any GPU (low_rank.cuh)
// low_rank_expand_bf16: y[t, n] += sum_c B[n, c] * h[t, module of n, c] over the columns of the token's adapter
//
// y        [T, N] bf16; rows without an adapter stay as they are. N and modules of any size; N % 8 == 0 is faster
// maths    shrink: as there, bit for bit. expand: bf16 products, fp32 sums, y is added last, one rounding on store
// launch   shrink: grid (1, slots * modules * ceil(rank / 16), ceil(T / tile)), block 256, (tile + 128) * 64 bytes
//          expand: grid (ceil(N / 64), ceil(T / 64)), block 128; a warp has 16 tokens and takes their adapters in turn
// needs    as sm90_low_rank.cu
// bound    memory: expand 4 T N bytes, and 2 N rank for each adapter of 16 tokens
// test     tests/cuda_low_rank.rs, against f64
// archs: 80 90a 100a ptx
#include "low_rank.cuh"

extern "C" __global__ void __launch_bounds__(256) low_rank_shrink_bf16(const Shrink shrink_) { shrink<K_PARTS>(shrink_); }

struct Expand {
    bf16* y;
    const bf16* h;
    const bf16* b;
    const u32* slots;
    const u64* in_layer;
    u32 tokens, n, rank, cols;
    Modules modules;
};

// Four columns of a row from `col` on; zeros from `end` on.
__device__ __forceinline__ uint2 quad_of(const bf16* row, u32 col, u32 end) {
    if (!row || col >= end) return make_uint2(0, 0);
    return *reinterpret_cast<const uint2*>(row + col);
}

extern "C" __global__ void __launch_bounds__(128) low_rank_expand_bf16(const Expand e) {
    pdl_launch();
    const i32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 token0 = blockIdx.y * 64 + threadIdx.x / 32 * 16, n0 = blockIdx.x * 64;
    u32 slot = lane < 16 && token0 + lane < e.tokens ? e.slots[token0 + lane] : NO_SLOT;
    if (slot != NO_SLOT && !(*e.in_layer >> (slot * e.rank / SLICE) & 1)) slot = NO_SLOT;
    u32 left = __ballot_sync(FULL_WARP, slot != NO_SLOT);
    pdl_wait();
    if (!left) return;

    // Output 2 j + i of lane t's sixteen is column 2 t + i of tile j, so that a lane stores 32 bytes of a row.
    float acc[8][4] = {};
    const u32 tokens[2] = {token0 + g, token0 + g + 8};
    const u64 pitch = (u64)e.modules.count * e.cols;
    const u32 first_module = e.modules.group ? 0 : e.modules.of(n0);
    const u32 last_module = e.modules.group ? e.modules.count - 1 : e.modules.of(min(n0 + 63, e.n - 1));
    while (left) {
        const u32 turn = __shfl_sync(FULL_WARP, slot, __ffs(left) - 1);
        left &= ~__ballot_sync(FULL_WARP, slot == turn);
        for (u32 module = first_module; module <= last_module; ++module) {
            for (u32 r = 0; r < e.rank; r += 16) {
                uint2 rows[2];
#pragma unroll
                for (i32 i = 0; i < 2; ++i) {
                    const bf16* row = tokens[i] < e.tokens ? e.h + tokens[i] * pitch + module * e.cols + turn * e.rank : nullptr;
                    rows[i] = quad_of(row, r + 4 * t, e.rank);
                }
#pragma unroll
                for (i32 j = 0; j < 8; ++j) {
                    const u32 n = n0 + g / 2 * 16 + 2 * j + g % 2;
                    const bool is_there = n < e.n && e.modules.of(n) == module;
                    const uint2 b = quad_of(is_there ? e.b + (u64)n * e.cols + turn * e.rank : nullptr, r + 4 * t, e.rank);
                    mma_16x8x16(acc[j], rows[0].x, rows[1].x, rows[0].y, rows[1].y, b.x, b.y);
                }
            }
        }
    }
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const u32 own = __shfl_sync(FULL_WARP, slot, g + 8 * i);
        if (own == NO_SLOT) continue;
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const u32 n = n0 + t * 16 + half * 8;
            if (n >= e.n) continue;
            bf16* to = e.y + (u64)tokens[i] * e.n + n;
            const auto sum = [&](bf16 before, i32 j) { return to_bf16(to_f32(before) + acc[half * 4 + j / 2][2 * i + j % 2]); };
            if (e.n % 8) {
#pragma unroll
                for (i32 j = 0; j < 8; ++j)
                    if (n + j < e.n) to[j] = sum(to[j], j);
                continue;
            }
            bf16x8 v = load8(to);
#pragma unroll
            for (i32 j = 0; j < 8; ++j) v.v[j] = sum(v.v[j], j);
            store8(to, v);
        }
    }
}
