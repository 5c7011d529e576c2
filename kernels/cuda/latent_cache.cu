// latent_cache_bf16: writes the rows of a step's tokens to the KV blocks of attention over latent vectors (DeepSeek-V2, 2024)
//
// latents     [T, L + 64] bf16: a latent vector of L, 256 or 512 elements, then the part of k that is rotated
// gain        [L] bf16: of the RMS norm of the latent vector
// rows        [blocks, B, L + 64] bf16, one layer: the normed vector, then the rotated part
// rotation    tables and positions, latent.cuh
// slots       [T] u32: block * B + offset; with u32::MAX nothing is written
// maths       fp32, one rounding on store
// launch      grid T, block L / 8: a thread has eight elements of the vector, and eight threads four pairs each
// needs       pointers 16-byte aligned: checked in latent_cache.rs
// bound       memory, 4 L + 256 bytes for each token
// test        tests/cuda_latent.rs, each element within one bf16 ulp of fp32
// archs: 80 90a 100a ptx
#include "latent.cuh"

template <int RANK>
__device__ __forceinline__ void latent_cache(bf16* rows, const bf16* latents, const bf16* gain, const u32* slots, const Rotation& rotation,
                                             float eps) {
    __shared__ float scratch[32];
    const u32 t = blockIdx.x, i = threadIdx.x;
    pdl_launch();
    const u32 slot = slots[t];
    const bf16x8 weight = load8(gain + 8 * i);
    pdl_wait();
    if (slot == 0xffffffffu) return;
    const bf16* from = latents + (u64)t * WIDTH<RANK>;
    bf16* to = rows + (u64)slot * WIDTH<RANK>;
    bf16x8 x = load8(from + 8 * i);
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += to_f32(x.v[j]) * to_f32(x.v[j]);
    const float scale = rsqrtf(block_sum(squares, scratch) / RANK + eps);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.v[j] = to_bf16(to_f32(x.v[j]) * scale * to_f32(weight.v[j]));
    store8(to + 8 * i, x);
    if (i < UNITS) rotate_unit(to + RANK, from + RANK, i, rotation, t, 1.0f);
}

#define LATENT_CACHE(L)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(L / 8) latent_cache_bf16_l##L(                                                  \
        bf16* rows, const bf16* latents, const bf16* gain, const u32* slots, const Rotation rotation, float eps) {               \
        latent_cache<L>(rows, latents, gain, slots, rotation, eps);                                                              \
    }

LATENT_CACHE(256)
LATENT_CACHE(512)
