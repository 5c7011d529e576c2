// sm90_latent_attention_bf16: latent_attention.cu's for tiles of 64 queries, with the products of warpgroups
//
// operands      latent_attention.cuh
// maths         scores, maxima and sums in fp32; probabilities rounded to bf16 for the product with c (Dao 2023)
// launch        grid (splits, tiles, R), 2 warpgroups, one block on a multiprocessor. 64 positions at a time pass through shared
//               memory, in panels of 64 columns as the copy engine would place them. A warpgroup has the scores of all queries
//               for 32 of the positions; the probabilities of both pass through shared memory; each adds half of the
//               result for all queries, with the positions as the rows of the second factor
// needs         as latent_attention.cu
// bound         arithmetic from about 100 heads on: 4 L + 128 operations for each query, head and position
// test          tests/cuda_latent.rs, reference::attention_with
// archs: 90a
#include "latent_attention.cuh"
#include "sm90.cuh"

constexpr int QUERIES = 64, POSITIONS = 64, THREADS = 256, WARPS = THREADS / 32;
constexpr u32 PANEL = 64 * 128;

// 64 rows: panels of 64 columns, each row of which is 128 bytes, swizzled.
struct Panels {
    u32 base;

    __device__ u32 at(u32 row, u32 column) const {
        return base + column / 64 * PANEL + row * 128 + ((2 * (column % 64)) ^ (row % 8 * 16));
    }
};

// Descriptor of a tile whose rows are elements of the sum: panels of 64 columns of the product are PANEL bytes apart, eight rows
// form a swizzle atom of 1024 bytes.
__device__ __forceinline__ u64 rows_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)(PANEL >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

// Adds a product of 64 queries and 16 positions: D[64, COLUMNS] += A[64, 16] B[16, COLUMNS], A K-major, B by rows_descriptor.
template <int COLUMNS>
__device__ __forceinline__ void wgmma_rows(float* d, u64 a, u64 b);

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)

template <>
__device__ __forceinline__ void wgmma_rows<128>(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 1;"
        : F16(0), F16(16), F16(32), F16(48)
        : "l"(a), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_rows<256>(float* d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, 0, 1;"
        : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80), F16(96), F16(112)
        : "l"(a), "l"(b));
}

#undef F4
#undef F16

template <int RANK>
__device__ __forceinline__ void latent_attention(const LatentAttention& a) {
    constexpr int COLUMNS = RANK / 2;
    constexpr u32 TILE_BYTES = WIDTH<RANK> / 64 * PANEL;
    extern __shared__ uint4 dynamic[];
    const u32 tile_index = gridDim.y - 1 - blockIdx.y;
    const Tile tile(a, blockIdx.z, tile_index, QUERIES);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int group = warp / 4, m0 = warp % 4 * 16, n0 = group * (POSITIONS / 2);
    pdl_launch();
    pdl_wait();
    if (tile.queries == 0) return;
    bf16* own = a.rows + tile.query * WIDTH<RANK>;
    if (tile.end == 0) return clear<RANK, THREADS>(own, tile.queries);
    if (blockIdx.x >= tile.active) return;
    const u32 begin = blockIdx.x * tile.chunk, end = min(begin + tile.chunk, tile.end);
    const u32 base = (shared_address(dynamic) + 1023) / 1024 * 1024;
    const Panels queries{base};
    const u32 ring = base + TILE_BYTES, p_base = ring + 2 * TILE_BYTES;
    float* maxima = reinterpret_cast<float*>(reinterpret_cast<u8*>(dynamic) + (p_base + PANEL - shared_address(dynamic)));  // [2][64]
    const Panels probabilities{p_base};

    const Positions<RANK> positions(a, tile.row, end);
    auto load = [&](u32 stage, u32 first) {
        load_rows<RANK, POSITIONS, WARPS>(Panels{ring + stage * TILE_BYTES},
                                          [&](u32 row, bool& valid) { return positions.row(first, row, valid); });
    };
    load_rows<RANK, QUERIES, WARPS>(queries, [&](u32 row, bool& valid) {
        valid = row < tile.queries;
        return own + (u64)(valid ? row : 0) * WIDTH<RANK>;
    });
    load(0, begin);
    copy_async_commit();

    const float scale = a.scale * LOG2E;
    u32 limit[2];  // the last position that queries g and g + 8 attend to here
#pragma unroll
    for (int r = 0; r < 2; ++r) limit[r] = min(tile.position_of(m0 + g + 8 * r), end - 1);
    float top[2] = {-INFINITY_F, -INFINITY_F}, denominator[2] = {0.0f, 0.0f};  // of this thread's positions only
    float sum[COLUMNS / 2] = {};
    u32 stage = 0;
    for (u32 first = begin; first < end; first += POSITIONS, stage ^= 1) {
        copy_async_wait<0>();
        products_fence();
        __syncthreads();
        if (first + POSITIONS < end) load(stage ^ 1, first + POSITIONS);
        copy_async_commit();

        const u32 rows = ring + stage * TILE_BYTES;
        float s[16] = {};
        const u64 q = tile_descriptor(queries.base), k = tile_descriptor(rows + n0 * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < WIDTH<RANK> / 16; ++i) {
            const u32 at = (i / 4 * PANEL + i % 4 * 32) >> 4;
            wgmma_n32(s, q + at, k + at);
        }
        wgmma_commit();
        wgmma_wait<0>();
        float most[2] = {-INFINITY_F, -INFINITY_F};
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const int r = j % 4 / 2;
            const u32 key = first + n0 + j / 4 * 8 + 2 * t + j % 2;
            s[j] = key <= limit[r] ? s[j] * scale : -INFINITY_F;
            most[r] = fmaxf(most[r], s[j]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(FULL_WARP, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(FULL_WARP, most[r], 2));
            if (t == 0) maxima[group * QUERIES + m0 + g + 8 * r] = most[r];
        }
        __syncthreads();
        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = m0 + g + 8 * r;
            const float m = fmaxf(top[r], fmaxf(maxima[query], maxima[QUERIES + query]));
            const float origin = m == -INFINITY_F ? 0.0f : m;  // no position attended to yet
            correction[r] = exp2_fast(top[r] - origin);
            top[r] = m;
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = exp2_fast(s[4 * j + 2 * r] - origin), high = exp2_fast(s[4 * j + 2 * r + 1] - origin);
                total += low + high;
                const u32 at = probabilities.at(query, n0 + 8 * j + 2 * t);
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(pack_bf16x2(low, high)) : "memory");
            }
            denominator[r] = denominator[r] * correction[r] + total;
        }
        products_fence();
        __syncthreads();
        if (!__all_sync(FULL_WARP, correction[0] == 1.0f && correction[1] == 1.0f)) {
#pragma unroll
            for (int j = 0; j < COLUMNS / 2; ++j) sum[j] *= correction[j % 4 / 2];
        }
        const u64 p = tile_descriptor(p_base), v = rows_descriptor(rows + group * (COLUMNS / 64) * PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < POSITIONS / 16; ++i) wgmma_rows<COLUMNS>(sum, p + ((32 * i) >> 4), v + ((i * 16 * 128) >> 4));
        wgmma_commit();
        wgmma_wait<0>();
    }

    // The denominators of both warpgroups. The maxima have been read.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        denominator[r] += __shfl_xor_sync(FULL_WARP, denominator[r], 1);
        denominator[r] += __shfl_xor_sync(FULL_WARP, denominator[r], 2);
        if (t == 0) maxima[group * QUERIES + m0 + g + 8 * r] = denominator[r];
    }
    __syncthreads();
    const bool is_whole = tile.active == 1;
    const u64 part = ((u64)(tile.row * gridDim.y + tile_index) * a.splits + blockIdx.x) * QUERIES;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 query = m0 + g + 8 * r, column = group * COLUMNS + 2 * t;
        if (query >= tile.queries) continue;
        const float total = maxima[query] + maxima[QUERIES + query], inverse = 1.0f / total;
        if (!is_whole && group == 0 && t == 0) a.stats[part + query] = make_float2(top[r], total);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const float low = sum[4 * j + 2 * r], high = sum[4 * j + 2 * r + 1];
            if (is_whole) {
                *reinterpret_cast<u32*>(own + (u64)query * WIDTH<RANK> + column + 8 * j) = pack_bf16x2(low * inverse, high * inverse);
            } else {
                *reinterpret_cast<float2*>(a.partial + (part + query) * RANK + column + 8 * j) = make_float2(low, high);
            }
        }
    }
}

#define LATENT_ATTENTION(L)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_latent_attention_bf16_l##L(const LatentAttention a) {  \
        latent_attention<L>(a);                                                                                           \
    }

LATENT_ATTENTION(256)
LATENT_ATTENTION(512)
