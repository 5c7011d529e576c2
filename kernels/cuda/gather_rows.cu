// gather_rows_bf16: y[s, :] = x[index[s], :]
//
// x       [T, E] bf16
// y       [S, E] bf16
// index   [S] u32, below T
// launch  grid S, block min(E / 8, 256)
// needs   E % 8 == 0, pointers 16-byte aligned: checked in gather_rows.rs before launch
// bound   memory, 4*S*E bytes
// test    tests/cuda_ops.rs, exact
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
gather_rows_bf16(bf16* y, const bf16* x, const u32* index, u32 cols) {
    pdl_launch();
    pdl_wait();
    const u64 from = index[blockIdx.x], to = blockIdx.x;
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) store8(y + to * cols + i, load8(x + from * cols + i));
}
