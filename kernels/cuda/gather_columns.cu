// gather_columns_bf16: y[m, i] = x[m, order[i]]
//
// x       [M, K] bf16
// y       [M, K] bf16
// order   [K] u32, below K; a part of a weight
// launch  grid (M, ceil(K / 2048)), block min(K / 8, 256) in whole warps; 16-byte stores
// needs   K % 8 == 0, y and order 16-byte aligned: checked in gather_columns.rs before launch
// bound   memory, 4*M*K bytes
// test    tests/cuda_decoder_ops.rs, exact
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
gather_columns_bf16(bf16* y, const bf16* x, const u32* order, u32 cols) {
    pdl_launch();
    const u32 first = (blockIdx.y * 256 + threadIdx.x) * 8;
    const bool is_inside = first < cols;
    uint4 from[2] = {};
    if (is_inside) {
        // A weight does not change, so no wait is needed for it.
        from[0] = *reinterpret_cast<const uint4*>(order + first);
        from[1] = *reinterpret_cast<const uint4*>(order + first + 4);
    }
    pdl_wait();
    if (!is_inside) return;
    const u64 row = (u64)blockIdx.x * cols;
    bf16x8 out;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        out.v[4 * i] = x[row + from[i].x];
        out.v[4 * i + 1] = x[row + from[i].y];
        out.v[4 * i + 2] = x[row + from[i].z];
        out.v[4 * i + 3] = x[row + from[i].w];
    }
    store8(y + row + first, out);
}
