// add_rms_norm_fp8: add_rms_norm_bf16 of rms_norm.cu that also stores its rows y in e4m3, as quantize_rows.cu does
// archs: 90a
//
// y, r, p, w  as rms_norm.cu describes them; codes, scales and pitch as quantize_rows.cu does
// maths       the rows in e4m3 have the bits that quantize_rows.cu makes of y
// launch      grid T, block E / 8 rounded up to a warp, at most 1024. Sixteen lanes have a slice
// needs       E % 128 == 0, and what rms_norm.cu needs: checked in rms_norm.rs before launch
// bound       memory, 9*T*E bytes
// test        tests/cuda_fp8_gemm.rs
#include "fp8_rows.cuh"
#include "rms_norm.cuh"

struct Fp8Copy {
    u8* codes;
    float* scales;
    u32 slices, pitch;

    // Columns i .. i + 8 of a row. Half of a warp has a slice, and a lane half of the 16 columns of a step.
    __device__ void store(const bf16x8& out, u64 row, u32 i) const {
        const u32 lane = threadIdx.x % 32, half_warp = 0xffffu << (lane & 16), odd = lane % 2;
        float size = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) size = fmaxf(size, fabsf(to_f32(out.v[j])));
#pragma unroll
        for (int d = 8; d > 0; d >>= 1) size = fmaxf(size, __shfl_xor_sync(half_warp, size, d));
        const u32 exponent = scale_exponent(size);
        const float inverse = __uint_as_float((254 - exponent) << 23);
        u32 pairs[2];  // this lane's columns 0 to 3, and 4 to 7
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bf16* v = out.v + 4 * j;
            pairs[j] = e4m3_pair(to_f32(v[0]) * inverse, to_f32(v[1]) * inverse) | e4m3_pair(to_f32(v[2]) * inverse, to_f32(v[3]) * inverse) << 16;
        }
        // The even lane of two stores the words of threads 0 and 1 of quantized.cuh, the odd one those of threads 2 and 3.
        const u32 got = __shfl_xor_sync(half_warp, odd ? pairs[0] : pairs[1], 1);
        const u32 low = odd ? got : pairs[0], high = odd ? pairs[1] : got;
        const u32 slice = i / SLICE, step = i % SLICE / 16, t = 2 * odd;
        u32* to = reinterpret_cast<u32*>(codes + (row * slices + slice) * SLICE) + (2 * t + step / 4) * 4 + step % 4;
        to[0] = __byte_perm(low, high, 0x5140);
        to[8] = __byte_perm(low, high, 0x7362);
        if (lane % 16 == 0) scales[(u64)slice * pitch + row] = __uint_as_float(exponent << 23);
    }
};

extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm_fp8(bf16* y, bf16* r, const bf16* p, const bf16* w, u32 cols, float eps, u8* codes, float* scales, u32 pitch) {
    norm_row(y, r, AddedRows{p}, w, cols, eps, Fp8Copy{codes, scales, cols / SLICE, pitch});
}
