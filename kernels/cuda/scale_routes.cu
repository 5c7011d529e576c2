// scale_routes_bf16: rows[places[r], :] *= probabilities[r] for each route r to an expert of this worker; probabilities[r] = 1
//
// rows          [R, E] bf16, rows sorted by expert
// places        [R] u32: the row of each route
// experts       [R] u32; routes to experts outside first .. first + L are left out
// probabilities [R] f32, overwritten: sum_experts.cu then adds outputs as they are
// maths         fp32, one rounding on store
// launch        grid R, block min(E / 8, 256); one route per block
// needs         E % 8 == 0, rows 16-byte aligned: checked in scale_routes.rs
// bound         memory, 4 R E bytes
// test          tests/cuda_experts.rs, each element is the rounded product
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
scale_routes_bf16(bf16* rows, const u32* places, const u32* experts, float* probabilities, u32 first, u32 local, u32 cols) {
    pdl_launch();
    pdl_wait();
    const u32 route = blockIdx.x;
    if (experts[route] - first >= local) return;
    const float factor = probabilities[route];
    __syncthreads();
    if (threadIdx.x == 0) probabilities[route] = 1.0f;
    bf16* row = rows + (u64)places[route] * cols;
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
        bf16x8 x = load8(row + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) x.v[j] = to_bf16(to_f32(x.v[j]) * factor);
        store8(row + i, x);
    }
}
