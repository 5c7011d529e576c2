// rms_norm_bf16:     y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * w           (Zhang & Sennrich 2019)
// add_rms_norm_bf16: r[t, :] = r[t, :] + p[t, :]; y[t, :] = rms_norm(r[t, :])
//
// x, y, r, p  [T, E] bf16, row-major, contiguous; y may be x; y may not be r
// w           [E]    bf16
// maths       fp32 sum and scale; add_rms_norm normalizes the fp32 sum and rounds r on store
// launch      grid T, block E / 8 rounded up to a warp, at most 1024; 16-byte loads; a row stays in registers
// needs       E % 8 == 0, E <= 32768, pointers 16-byte aligned: checked in rms_norm.rs before launch
// bound       memory, 4*T*E bytes (add: 8*T*E)
// test        tests/cuda_ops.rs: each element within one bf16 ulp (relative 2^-7) of fp32
// archs: 80 90a 100a ptx
#include "rms_norm.cuh"

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_bf16(bf16* y, const bf16* x, const bf16* w, u32 cols, float eps) {
    norm_row(y, const_cast<bf16*>(x), Nothing{}, w, cols, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm_bf16(bf16* y, bf16* r, const bf16* p, const bf16* w, u32 cols, float eps) {
    norm_row(y, r, AddedRows{p}, w, cols, eps);
}
