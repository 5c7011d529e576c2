// head_norm_bf16: norm of each q head by wq, of each k head by wk and of each v head by wv, in place  (Henry et al. 2020)
//
// qkv         [T, (H + 2K) D] bf16, or [T, H D] with K = 0; the v heads are not changed if wv is null
// wq, wk, wv  [D] bf16; wq and wk [H D] and [K D] if each head has its own
// norm        RMS norm, or layer norm without a bias
// maths       fp32 sums and scale, one rounding on store; the variance is computed from the differences to the mean
// launch      grid (T, ceil(heads / 8)), block 256; one warp per head, 8 or 16 elements per lane
// needs       D % 8 == 0, D <= 512, pointers 16-byte aligned: checked in head_norm.rs before launch
// bound       memory, 4 T (H + K) D bytes
// test        tests/cuda_decoder_ops.rs: each element within one bf16 ulp (relative 2^-7) of fp32
// archs: 80 90a 100a ptx
#include "common.cuh"

constexpr u32 WARPS = 8;

struct HeadNorm {
    bf16* qkv;
    const bf16* wq;
    const bf16* wk;
    const bf16* wv;
    u32 heads, kv_heads, dim;
    u32 has_each;  // whether each head of q and k has weights of its own
    u32 is_layer;  // whether the mean is subtracted
    float eps;

    // Heads of q, k and v that are normed.
    __device__ u32 count() const { return heads + kv_heads + (wv ? kv_heads : 0); }

    __device__ const bf16* weight(u32 head) const {
        if (head < heads) return wq + (has_each ? head * dim : 0);
        if (head < heads + kv_heads) return wk + (has_each ? (head - heads) * dim : 0);
        return wv;
    }
};

// A warp norms a head of up to 256 CHUNKS elements.
template <int CHUNKS>
__device__ __forceinline__ void norm_head(const HeadNorm& n, u32 head) {
    const u32 lane = threadIdx.x % 32;
    const bf16* w = n.weight(head);
    bf16x8 gain[CHUNKS] = {}, v[CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = (c * 32 + lane) * 8;
        if (i < n.dim) gain[c] = load8(w + i);
    }
    pdl_wait();
    bf16* x = n.qkv + ((u64)blockIdx.x * (n.heads + 2 * n.kv_heads) + head) * n.dim;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = (c * 32 + lane) * 8;
        if (i < n.dim) v[c] = load8(x + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += to_f32(v[c].v[j]);
    }
    const float mean = n.is_layer ? warp_sum(sum) / n.dim : 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if ((c * 32 + lane) * 8 >= n.dim) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += (to_f32(v[c].v[j]) - mean) * (to_f32(v[c].v[j]) - mean);
    }
    const float scale = rsqrtf(warp_sum(squares) / n.dim + n.eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 i = (c * 32 + lane) * 8;
        if (i >= n.dim) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[c].v[j] = to_bf16((to_f32(v[c].v[j]) - mean) * scale * to_f32(gain[c].v[j]));
        store8(x + i, v[c]);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) head_norm_bf16(const HeadNorm n) {
    const u32 head = blockIdx.y * WARPS + threadIdx.x / 32;
    pdl_launch();
    if (head >= n.count()) return;
    if (n.dim <= 256) {
        norm_head<1>(n, head);
    } else {
        norm_head<2>(n, head);
    }
}
