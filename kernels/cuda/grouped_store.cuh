// Stores what a warpgroup has summed of an expert's product, if weights are the 64-row operand.
#pragma once
#include "grouped.cuh"

// Stores the sums of 64 rows of w for rows of x; tiles of listed experts have at most 8. A thread has rows g, g + 8 of each 16 rows of w:
// gate and up of a column.
template <int NT>
__device__ __forceinline__ void store(const Grouped& p, const Tile& tile, u32 n0, const float* acc) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n = n0 + threadIdx.x / 32 % 4 * 16 + g;
    const bool has_low = n < p.n, has_high = n + 8 < p.n;
    const bf16* bias = p.bias ? p.bias + (u64)tile.expert * p.n : nullptr;
    const float low_bias = bias && has_low ? to_f32(bias[n]) : 0.0f, high_bias = bias && has_high ? to_f32(bias[n + 8]) : 0.0f;
    with_epilogue(p.epilogue, [&](auto epilogue) {
#pragma unroll
        for (int i = 0; i < NT / 4; ++i) {
            const u32 row = i / 2 * 8 + 2 * t + i % 2;
            if (NT == 8 ? !tile.has(row) : row >= tile.rows) continue;
            const float low = acc[i / 2 * 4 + i % 2] + low_bias, high = acc[i / 2 * 4 + 2 + i % 2] + high_bias;
            const u64 r = NT == 8 ? tile.place(row) : tile.first + row;
            if constexpr (!is_gated(epilogue.value)) {
                if (has_low) p.y[r * p.n + n] = to_bf16(plain_by<epilogue.value>(low));
                if (has_high) p.y[r * p.n + n + 8] = to_bf16(plain_by<epilogue.value>(high));
            } else if (has_high) {
                p.y[r * (p.n / 2) + (n - g) / 2 + g] = to_bf16(gate_by<epilogue.value>(p, low, high));
            }
        }
    });
}
