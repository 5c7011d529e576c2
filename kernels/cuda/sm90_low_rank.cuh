// Low-rank products of adapters (low_rank.cuh) within a product for few rows on Hopper: B and h are slices behind those of K, in
// the last of its parts. The order of the other sums is that without adapters, and rows without an adapter add zeros.
#pragma once
#include "low_rank.cuh"
#include "sm90_gemm.cuh"

static_assert(SLICE == BK, "columns of h are read as slices of K are");

// No products beside that of the weight.
struct NoLowRank {
    static constexpr bool IS_THERE = false;
};

struct LowRank {
    static constexpr bool IS_THERE = true;
    const u64* in_step;
    const u64* in_layer;
    i32 cols;  // of a module in h
    Modules modules;
};

// The slices of one block.
struct LowRankSlices {
    u64 used;
    i32 count, first_module, num_modules;

    __device__ LowRankSlices(const LowRank& low_rank, i32 n0, i32 n, bool is_last_part) {
        used = is_last_part ? used_slices(low_rank.in_step, low_rank.in_layer) : 0;
        count = __popcll(used);
        first_module = low_rank.modules.group ? 0 : low_rank.modules.of(n0);
        num_modules = (low_rank.modules.group ? low_rank.modules.count - 1 : low_rank.modules.of(min(n0 + TILE, n) - 1)) + 1 - first_module;
    }

    // The column with which the next slice begins.
    __device__ i32 take() {
        const i32 slice = __ffsll((i64)used) - 1;
        used &= used - 1;
        return slice * (i32)SLICE;
    }
};

// One warpgroup: sums [64 rows of w, NT rows of x] += B h for the rows of w that belong to the module. B goes through registers, where
// the other rows become 0.
template <int NT>
__device__ __forceinline__ void multiply_low_rank(float* sums, u32 b_address, u32 h_address, const Modules& modules, i32 n0, u32 module) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 % 4 * 16 + g;
    const u32 keeps[2] = {modules.of(n0 + row) == module ? ~0u : 0, modules.of(n0 + row + 8) == module ? ~0u : 0};
    const u64 columns = tile_descriptor(h_address);
#pragma unroll
    for (int pair = 0; pair < BK / 32; ++pair) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 eight = 4 * pair + i / 2, address = b_address + (row + i % 2 * 8) * 128 + (eight ^ g) * 16 + t * 4;
            u32 v;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
            a[i / 4][i % 4] = v & keeps[i % 2];
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) wgmma_registers<NT>(sums, a[i], columns + 2 * (2 * pair + i), 1);
        wgmma_commit();
        wgmma_wait<0>();
    }
}
