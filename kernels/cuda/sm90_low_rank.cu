// sm90_low_rank_shrink_bf16: h[t, :] = scale * A x[t, :] of the token's adapter (low_rank.cuh)
//
// x        [T, K] bf16
// maths    bf16 products, fp32 sums: K in 8 parts of whole chunks of 32 columns, of which each warp takes every eighth; sums of warps,
//          then of parts, are added in order. Nothing depends on other tokens
// launch   grid (8, slots * modules * ceil(rank / 16), ceil(T / tile)), cluster (8, 1, 1), block 256, dynamic shared memory
//          (tile + 128) * 64 bytes. A block loads its first columns of A before pdl_wait
// needs    K % 8 == 0, rank a power of two from 8 to 64, cols % 64 == 0, tile % 16 == 0, tile <= 256: checked in low_rank.rs
// bound    memory: A of the adapters in the step, 2 modules rank K bytes each
// test     tests/cuda_low_rank.rs, against f64
// archs: 90a
#include "low_rank.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) sm90_low_rank_shrink_bf16(const Shrink shrink_) { shrink<1>(shrink_); }
