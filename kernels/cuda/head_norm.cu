// head_norm_bf16: RMSNorm of each q head by wq and of each k head by wk, in place                (Henry et al. 2020)
//
// qkv     [T, (H + 2K) D] bf16; the v heads are not changed
// wq, wk  [D] bf16
// maths   fp32 sum and scale, one rounding on store
// launch  grid (T, ceil((H + K) / 8)), block 256; one warp per head, 8 elements per lane
// needs   D % 8 == 0, D <= 256, pointers 16-byte aligned: checked in head_norm.rs before launch
// bound   memory, 4 T (H + K) D bytes
// test    tests/cuda_decoder_ops.rs: each element within one bf16 ulp (relative 2^-7) of fp32
// archs: 80 90a 100a ptx
#include "common.cuh"

constexpr u32 WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
head_norm_bf16(bf16* qkv, const bf16* wq, const bf16* wk, u32 heads, u32 kv_heads, u32 dim, float eps) {
    const u32 head = blockIdx.y * WARPS + threadIdx.x / 32, i = threadIdx.x % 32 * 8;
    pdl_launch();
    if (head >= heads + kv_heads) return;
    const bool mine = i < dim;
    bf16x8 gain = {};
    if (mine) gain = load8((head < heads ? wq : wk) + i);
    pdl_wait();
    bf16* x = qkv + ((u64)blockIdx.x * (heads + 2 * kv_heads) + head) * dim + i;
    bf16x8 v = {};
    if (mine) v = load8(x);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += to_f32(v.v[j]) * to_f32(v.v[j]);
    const float scale = rsqrtf(warp_sum(sum) / dim + eps);
    if (!mine) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) v.v[j] = to_bf16(to_f32(v.v[j]) * scale * to_f32(gain.v[j]));
    store8(x, v);
}
