// latent_queries_bf16: rows[t, h, :] = factor[t] [q[t, h, :key_dim] K_h | rotated q[t, h, key_dim:]]
// latent_values_bf16:  out[t, h, :]  = V_h rows[t, h, :L]
// before and behind attention over latent vectors, so that no k and no v of a position is computed   (DeepSeek-V2, 2024)
//
// q           [T, H, key_dim + 64] bf16
// rows        [T, H, L + 64] bf16; L is 256 or 512
// K_h, V_h    rows h (key_dim + value_dim) and on of `weight [H (key_dim + value_dim), L]` bf16
// out         [T, H, value_dim] bf16
// factor      1, or that of the token's position, query_scale.cuh
// maths       bf16 products, sums in fp32 in the order of k, one rounding on store
// launch      grid (tiles of 64 columns, H, tiles of M tokens), 4 warps; of queries, one more tile of columns is the rotated part.
//             M is 16 or 64: `_m16` divides the columns among the warps, `_m64` tokens and columns. Slices of 64 elements of the
//             sum pass through shared memory in three stages
// needs       key_dim and value_dim multiples of 8, pointers 16-byte aligned: checked in latent_product.rs
// bound       few tokens: memory, 2 L H (key_dim + value_dim) bytes in both; many: arithmetic
// test        tests/cuda_latent.rs, reference::linear
// archs: 80 90a 100a ptx
#include "latent.cuh"
#include "mma.cuh"

constexpr int THREADS = 128, COLUMNS = 64, SLICE = 64, STAGES = 3;
constexpr u32 PITCH = 2 * SLICE + 16;  // eight rows are in different banks

struct LatentProduct {
    const bf16* x;
    const bf16* weight;
    bf16* out;
    u32 tokens, heads, key_dim, value_dim;
    Rotation rotation;  // of queries
};

// Sizes of one of the two products.
template <int RANK, bool KEYS>
struct Sizes {
    u32 x_width, out_width;  // elements between heads
    u32 inner, outer;        // elements of the sum; columns
    u32 first_row;           // of the weight of a head

    __device__ Sizes(const LatentProduct& p, u32 head) {
        first_row = head * (p.key_dim + p.value_dim) + (KEYS ? 0 : p.key_dim);
        x_width = KEYS ? p.key_dim + ROTARY : WIDTH<RANK>;
        out_width = KEYS ? WIDTH<RANK> : p.value_dim;
        inner = KEYS ? p.key_dim : RANK;
        outer = KEYS ? RANK : p.value_dim;
    }
};

template <int RANK, int M, bool KEYS>
__device__ __forceinline__ void latent_product(const LatentProduct& p) {
    extern __shared__ uint4 dynamic[];
    constexpr int ALONG = M == 64 ? 2 : 1;              // warps that divide the tokens
    constexpr int MT = M / 16 / ALONG;                  // tiles of 16 tokens of a warp
    constexpr int NP = COLUMNS / (4 / ALONG) / 16;      // pairs of tiles of 8 columns of a warp
    constexpr u32 STAGE = (M + COLUMNS) * PITCH;
    const u32 head = blockIdx.y, first = blockIdx.z * M, column = blockIdx.x * COLUMNS;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Sizes<RANK, KEYS> sizes(p, head);
    pdl_launch();
    pdl_wait();
    const bf16* x = p.x + ((u64)first * p.heads + head) * sizes.x_width;
    bf16* out = p.out + ((u64)first * p.heads + head) * sizes.out_width;
    const u64 x_stride = (u64)p.heads * sizes.x_width, out_stride = (u64)p.heads * sizes.out_width;
    const u32 count = min((u32)M, p.tokens - first);
    if (KEYS && column == RANK) {
        for (u32 i = thread; i < count * UNITS; i += THREADS) {
            const u32 t = i / UNITS;
            const float factor = p.rotation.factor(first + t);
            rotate_unit(out + t * out_stride + RANK, x + t * x_stride + p.key_dim, i % UNITS, p.rotation, first + t, factor);
        }
        return;
    }
    const u32 base = (u32)__cvta_generic_to_shared(dynamic);
    const u32 slices = (sizes.inner + SLICE - 1) / SLICE;
    auto load = [&](u32 slice) {
        const u32 to = base + slice % STAGES * STAGE, k = slice * SLICE, c = thread % 8 * 8;
#pragma unroll
        for (int row = thread / 8; row < M; row += THREADS / 8) {
            const bool valid = row < count && k + c < sizes.inner;
            copy_async(to + row * PITCH + 2 * c, valid ? x + row * x_stride + k + c : x, valid);
        }
#pragma unroll
        for (int row = thread / 8; row < 64; row += THREADS / 8) {  // of K_h: elements of the sum; of V_h: columns
            const bool valid = KEYS ? k + row < sizes.inner : column + row < sizes.outer;
            const u64 at = KEYS ? (u64)(sizes.first_row + k + row) * RANK + column + c
                                : (u64)(sizes.first_row + column + row) * RANK + k + c;
            copy_async(to + (M + row) * PITCH + 2 * c, valid ? p.weight + at : p.weight, valid);
        }
    };
#pragma unroll
    for (u32 slice = 0; slice < STAGES - 1; ++slice) {
        if (slice < slices) load(slice);
        copy_async_commit();
    }
    const int m0 = (ALONG == 2 ? warp / 2 : 0) * 16 * MT, n0 = (ALONG == 2 ? warp % 2 : warp) * 16 * NP;
    float sum[MT][2 * NP][4] = {};
    for (u32 slice = 0; slice < slices; ++slice) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (slice + STAGES - 1 < slices) load(slice + STAGES - 1);
        copy_async_commit();
        const u32 a_base = base + slice % STAGES * STAGE, b_base = a_base + M * PITCH;
#pragma unroll
        for (int k = 0; k < SLICE; k += 16) {
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) load_matrices(a[m], a_base + (m0 + 16 * m + lane % 16) * PITCH + 2 * (k + lane / 16 * 8));
#pragma unroll
            for (int n = 0; n < NP; ++n) {
                u32 b[4];
                const int from = n0 + 16 * n;
                if (KEYS) load_matrices_transposed(b, b_base + (k + lane % 16) * PITCH + 2 * (from + lane / 16 * 8));
                else load_matrices(b, b_base + (from + lane / 16 * 8 + lane % 8) * PITCH + 2 * (k + lane / 8 % 2 * 8));
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_16x8x16(sum[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma_16x8x16(sum[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 row = m0 + 16 * m + lane / 4 + 8 * r;
            if (row >= count) continue;
            const float factor = KEYS ? p.rotation.factor(first + row) : 1.0f;
#pragma unroll
            for (int n = 0; n < 2 * NP; ++n) {
                const u32 at = column + n0 + 8 * n + lane % 4 * 2;
                if (at >= sizes.outer) continue;
                *reinterpret_cast<u32*>(out + row * out_stride + at) = pack_bf16x2(sum[m][n][2 * r] * factor, sum[m][n][2 * r + 1] * factor);
            }
        }
    }
}

#define LATENT_PRODUCT(NAME, L, M, KEYS)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_bf16_l##L##_m##M(const LatentProduct p) {              \
        latent_product<L, M, KEYS>(p);                                                                                  \
    }
#define LATENT_PRODUCTS(L)                      \
    LATENT_PRODUCT(latent_queries, L, 16, true) \
    LATENT_PRODUCT(latent_queries, L, 64, true) \
    LATENT_PRODUCT(latent_values, L, 16, false) \
    LATENT_PRODUCT(latent_values, L, 64, false)

LATENT_PRODUCTS(256)
LATENT_PRODUCTS(512)
