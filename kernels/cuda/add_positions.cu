// add_positions_bf16: x[t, :] = x[t, :] + table[positions[t], :]
//
// x          [T, E] bf16
// table      [positions, E] bf16
// positions  [T] u32, below the number of rows of the table: asserted when the step is packed
// maths      fp32 sum, one rounding on store
// launch     grid T, block min(E / 8, 256); 16-byte loads
// needs      E % 8 == 0, pointers 16-byte aligned: checked in add_positions.rs before launch
// bound      memory, 6*T*E bytes
// test       tests/cuda_decoder_ops.rs, exact
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
add_positions_bf16(bf16* x, const bf16* table, const u32* positions, u32 cols) {
    pdl_launch();
    // The step's inputs are written before the first kernel of the step, so no wait is needed for them.
    const u64 t = blockIdx.x, position = positions[t];
    pdl_wait();
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
        bf16x8 a = load8(x + t * cols + i);
        const bf16x8 b = load8(table + position * cols + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) a.v[j] = to_bf16(to_f32(a.v[j]) + to_f32(b.v[j]));
        store8(x + t * cols + i, a);
    }
}
