// sm90_skinny_gemm_bf16: y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), for few rows: M <= 64
// sm90_skinny_gemm_norm_bf16: the same with half an RMSNorm at either end. Before: x comes unscaled, sums are multiplied by
//          rsqrt(mean of the row's squares + eps). After, epilogue ADD_NORM: residual[m, n] += sum, y[m, n] = residual[m, n] * gain[n]
//          unscaled, and each block leaves its columns' squares for the product that takes y
// archs: 90a
//
// x        [M, K]  bf16 through tensor map `x_map`, box [NT rows, 64]; rows past M arrive as zero
// w        [N, K]  bf16 through tensor map `w_map`, box [64, 64]; read once, past the L2 cache's keeping
// y        epilogue STORE [M, N] bf16; STORE_F32 [M, N] f32; SILU, GELU [M, N / 2] bf16 = act(gate) * up
// gate/up  rows 16 b + i of w are gate row 8 b + i for i < 8 and up row 8 b + i - 8 for i >= 8
// squares  [M, slices] f32; a slice is what one block stores: S of them for each 64 columns
// maths    fp32 in the tensor cores, K in S equal parts, summed in order of the parts: no result depends on M. ADD_NORM takes squares
//          and y from the fp32 sum, as add_rms_norm does, and rounds y once; the scale meets the fp32 sum of the next product
// stages   of the ring, a multiple of GROUPS
// launch   grid (S, ceil(N / 64)), cluster (S, 1), 128 GROUPS + 32 threads, 32 more with norm, dynamic shared memory from the wrapper
//          Weights are the 64-row side of wgmma, x the narrow side. One warp keeps a ring of 64-wide slices of w and x full
//          with the copy engine; GROUPS warpgroups multiply, each every GROUPS-th slice. Slices of w are asked for before pdl_wait, as
//          many as the ring holds: they stream while the kernel before this one runs.
//          The parts of K lie in one cluster and are summed through its shared memory.
// needs    K % 8 == 0, N % 8 == 0 (N % 16 == 0 for gate/up): checked in skinny_gemm.rs
// bound    memory, 2 N K bytes. 22016 x 4096: 180 MB, 40 us at 4.47 TB/s (H200)
// test     tests/cuda_skinny_gemm.rs, reference::linear in fp32, each element within 2^-8 relative of its own value plus
//          K 2^-24 of the sum of magnitudes
#include "sm90.cuh"
#include "activation.cuh"

constexpr i32 BK = 64;    // columns of a slice of K
constexpr i32 TILE = 64;  // rows of w that a cluster takes

enum Epilogue : i32 { STORE = 0, STORE_F32 = 1, SILU = 2, GELU = 3, ADD_NORM = 4 };

struct Output {
    void* y;
    const bf16* bias;  // [N] or null
    i32 m, n;
    i32 epilogue;
};

struct Norm {
    const float* squares_in;  // [M, slices_in], or null: x is as it should be
    bf16* residual;           // [M, N], of ADD_NORM
    const bf16* gain;         // [N], of ADD_NORM
    float* squares_out;       // [M, slices_out], of ADD_NORM
    i32 slices_in, slices_out;
    float inverse_cols, eps;
};

// Sums of a tile over the cluster's blocks and their groups.
template <int NT, int GROUPS, bool NORM>
struct Reducer {
    static constexpr int PITCH = TILE + 4;  // floats; PITCH % 16 == 4 keeps the accumulators' stores free of bank conflicts
    u32 partial;                          // this block's, [GROUPS][NT][PITCH] f32; the others' lie at the same place
    i32 parts;
    const float* scales;  // [NT] of rows, with norm

    __device__ float4 sum(int m, int r) const {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        const u32 offset = (u32)(m * PITCH + r) * 4;
        for (int p = 0; p < parts; ++p) {
            const u32 there = cluster_map(partial + offset, p);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const float4 v = cluster_load(there + g * NT * PITCH * 4);
                total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
        }
        if (NORM) {
            const float scale = scales[m];
            total.x *= scale, total.y *= scale, total.z *= scale, total.w *= scale;
        }
        return total;
    }
};

__device__ __forceinline__ void add_bias(float4& v, const bf16* bias, int n) {
    if (!bias) return;
    const uint2 b = *reinterpret_cast<const uint2*>(bias + n);
    v.x += unpack_lo(b.x), v.y += unpack_hi(b.x), v.z += unpack_lo(b.y), v.w += unpack_hi(b.y);
}

__device__ __forceinline__ uint2 pack4(const float4& v) {
    return make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
}

// Rows first .. first + count of the tile whose row 0 is n0; all threads of the block take part.
template <class Parts>
__device__ __forceinline__ void store_tile(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count) {
    const int quads = count / 4;
    for (int i = threadIdx.x; i < out.m * quads; i += blockDim.x) {
        const int m = i / quads, r = first + i % quads * 4, n = n0 + r;
        if (n >= out.n) continue;
        float4 v = parts.sum(m, r);
        add_bias(v, out.bias, n);
        if (out.epilogue == STORE) {
            *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * out.n + n) = pack4(v);
        } else {
            *reinterpret_cast<float4*>((float*)out.y + (i64)m * out.n + n) = v;
        }
    }
}

// The same for gate/up: eight gate rows, then their up rows, become eight columns of y.
template <class Parts>
__device__ __forceinline__ void store_gated(const Parts& parts, const Output& out, i32 n0, i32 first, i32 count) {
    const int quads = count / 8;
    for (int i = threadIdx.x; i < out.m * quads; i += blockDim.x) {
        const int m = i / quads, q = i % quads, r = first + q / 2 * 16 + q % 2 * 4, n = n0 + r;
        if (n >= out.n) continue;
        float4 gate = parts.sum(m, r), up = parts.sum(m, r + 8);
        add_bias(gate, out.bias, n);
        add_bias(up, out.bias, n + 8);
        const float4 v = out.epilogue == SILU ? gated<silu>(gate, up) : gated<gelu_tanh>(gate, up);
        const int column = n / 16 * 8 + n % 16;
        *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * (out.n / 2) + column) = pack4(v);
    }
}

// Rows first .. first + count of the tile onto the residual; `slice` is this block's place in the sums of squares.
template <class Parts>
__device__ __forceinline__ void store_add_norm(const Parts& parts, const Output& out, const Norm& norm, i32 n0, i32 first,
                                               i32 count, i32 slice) {
    const int quads = count / 4, lane = threadIdx.x % 32;  // 4, 8 or 16 quads: those of a row lie side by side in a warp
    for (int warp_first = threadIdx.x - lane; warp_first < out.m * quads; warp_first += blockDim.x) {
        const int i = warp_first + lane, m = i / quads, r = first + i % quads * 4, n = n0 + r;
        float squares = 0.0f;
        if (m < out.m && n < out.n) {
            float4 v = parts.sum(m, r);
            add_bias(v, out.bias, n);
            uint2* residual = reinterpret_cast<uint2*>(norm.residual + (i64)m * out.n + n);
            const uint2 old = *residual, gain = *reinterpret_cast<const uint2*>(norm.gain + n);
            v.x += unpack_lo(old.x), v.y += unpack_hi(old.x), v.z += unpack_lo(old.y), v.w += unpack_hi(old.y);
            *residual = pack4(v);
            squares = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            v.x *= unpack_lo(gain.x), v.y *= unpack_hi(gain.x), v.z *= unpack_lo(gain.y), v.w *= unpack_hi(gain.y);
            *reinterpret_cast<uint2*>((bf16*)out.y + (i64)m * out.n + n) = pack4(v);
        }
        for (int d = quads / 2; d > 0; d /= 2) squares += __shfl_xor_sync(FULL_WARP, squares, d);
        if (i % quads == 0 && m < out.m) norm.squares_out[(i64)m * norm.slices_out + slice] = squares;
    }
}

// What each row of x is still to be multiplied by: one warp's work, beside the products.
template <int NT>
__device__ __forceinline__ void scale_rows(float* scales, const Norm& norm, i32 rows) {
    constexpr int ROWS = 8;  // at a time, so that loads do not wait for each other
    const int lane = threadIdx.x % 32;
    for (i32 first = 0; first < rows; first += ROWS) {
        float sums[ROWS] = {};
        if (norm.squares_in) {
#pragma unroll 2
            for (i32 i = lane; i < norm.slices_in; i += 32) {
#pragma unroll
                for (int j = 0; j < ROWS; ++j) {
                    if (first + j < rows) sums[j] += __ldcg(norm.squares_in + (i64)(first + j) * norm.slices_in + i);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            const float sum = warp_sum(sums[j]);
            if (lane == 0 && first + j < rows) {
                scales[first + j] = norm.squares_in ? rsqrtf(sum * norm.inverse_cols + norm.eps) : 1.0f;
            }
        }
    }
}

template <int NT>
struct Ring {
    static constexpr u32 W_BYTES = TILE * BK * 2, X_BYTES = NT * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES;
    static_assert(STAGE_BYTES % 1024 == 0, "swizzle atoms are 1024 bytes");
    u32 base, full, empty;  // shared addresses: stages, and barriers of 8 bytes each
    i32 stages;

    __device__ u32 w(i32 s) const { return base + s * STAGE_BYTES; }
    __device__ u32 x(i32 s) const { return base + s * STAGE_BYTES + W_BYTES; }
};

// Keeps the ring full with slices first .. first + count of K.
template <int NT>
__device__ __forceinline__ void produce(const Ring<NT>& ring, const TensorMap* w_map, const TensorMap* x_map, i32 n0,
                                        i32 first, i32 count) {
    const i32 early = min(count, ring.stages);
    for (i32 i = 0; i < early; ++i) {
        barrier_arrive_expect(ring.full + 8 * i, Ring<NT>::STAGE_BYTES);
        tensor_load(ring.w(i), w_map, (first + i) * BK, n0, ring.full + 8 * i, EVICT_FIRST);
    }
    pdl_wait();
    for (i32 i = 0; i < early; ++i) tensor_load(ring.x(i), x_map, (first + i) * BK, 0, ring.full + 8 * i, EVICT_LAST);
    i32 s = 0;
    u32 parity = 0;
    for (i32 i = early; i < count; ++i) {
        barrier_wait(ring.empty + 8 * s, parity);
        barrier_arrive_expect(ring.full + 8 * s, Ring<NT>::STAGE_BYTES);
        tensor_load(ring.w(s), w_map, (first + i) * BK, n0, ring.full + 8 * s, EVICT_FIRST);
        tensor_load(ring.x(s), x_map, (first + i) * BK, 0, ring.full + 8 * s, EVICT_LAST);
        if (++s == ring.stages) s = 0, parity ^= 1;
    }
}

// Multiplies every GROUPS-th slice as it comes.
template <int NT, int GROUPS>
__device__ __forceinline__ void consume(const Ring<NT>& ring, i32 count, i32 group, float* acc) {
    i32 s = group;
    u32 parity = 0;
    for (i32 i = group; i < count; i += GROUPS) {
        while (s >= ring.stages) s -= ring.stages, parity ^= 1;
        barrier_wait(ring.full + 8 * s, parity);
        const u64 w = tile_descriptor(ring.w(s)), x = tile_descriptor(ring.x(s));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) wgmma<NT>(acc, w + 2 * k, x + 2 * k);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * s);
        s += GROUPS;
    }
}

template <int NT>
__device__ __forceinline__ void store_partial(float* partial, const float* acc) {
    constexpr int PITCH = TILE + 4;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
        float* p = partial + (8 * j + column) * PITCH + row;
        p[0] = acc[4 * j];
        p[PITCH] = acc[4 * j + 1];
        p[8] = acc[4 * j + 2];
        p[PITCH + 8] = acc[4 * j + 3];
    }
}

template <int NT, int GROUPS, bool NORM>
__device__ __forceinline__ void skinny_gemm(const TensorMap* w_map, const TensorMap* x_map, const Output& out, i32 k,
                                            i32 stages, i32 parts, const Norm& norm) {
    constexpr int CONSUMERS = GROUPS * 128, PRODUCER = CONSUMERS + 32;
    extern __shared__ u8 dynamic[];
    __shared__ alignas(8) u64 barriers[64];
    __shared__ float scales[NORM ? NT : 1];
    pdl_launch();

    const u32 raw = shared_address(dynamic), aligned = (raw + 1023) & ~1023u;
    const u32 bars = shared_address(barriers);
    const Ring<NT> ring{aligned, bars, bars + 8 * stages, stages};
    const i32 part = blockIdx.x, n0 = blockIdx.y * TILE;
    if (threadIdx.x == 0) {
        for (i32 s = 0; s < stages; ++s) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, 4);
        barrier_init_fence();
    }
    __syncthreads();

    const i32 slices = (k + BK - 1) / BK;
    const i32 first = slices * part / parts, count = slices * (part + 1) / parts - first;
    const i32 group = threadIdx.x / 128;
    float acc[NT / 2] = {};
    if (NORM && threadIdx.x >= PRODUCER) {
        pdl_wait();
        scale_rows<NT>(scales, norm, out.m);
    } else if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce(ring, w_map, x_map, n0, first, count);
        __syncwarp();
    } else {
        pdl_wait();
        consume<NT, GROUPS>(ring, count, group, acc);
    }

    __syncthreads();  // every slice is used: the ring becomes the place of the partial sums; rows' scales are there
    const Reducer<NT, GROUPS, NORM> reducer{aligned, parts, scales};
    float* partial = reinterpret_cast<float*>(dynamic + (aligned - raw)) + group * NT * reducer.PITCH;
    if (threadIdx.x < CONSUMERS) store_partial<NT>(partial, acc);
    cluster_sync();
    const i32 rows = TILE / parts;
    if (NORM && out.epilogue == ADD_NORM) {
        store_add_norm(reducer, out, norm, n0, part * rows, rows, (i32)blockIdx.y * parts + part);
    } else if (out.epilogue < SILU) {
        store_tile(reducer, out, n0, part * rows, rows);
    } else {
        store_gated(reducer, out, n0, part * rows, rows);
    }
    cluster_sync();  // no block leaves while another reads its partial sums
}

#define SKINNY_GEMM(NT, GROUPS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32)                                                    \
        sm90_skinny_gemm_bf16_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map,                               \
                                                const __grid_constant__ TensorMap x_map, const Output out, i32 k,      \
                                                i32 stages, i32 parts) {                                               \
        skinny_gemm<NT, GROUPS, false>(&w_map, &x_map, out, k, stages, parts, Norm{});                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 64)                                                    \
        sm90_skinny_gemm_norm_bf16_m##NT##_g##GROUPS(const __grid_constant__ TensorMap w_map,                          \
                                                     const __grid_constant__ TensorMap x_map, const Output out, i32 k, \
                                                     i32 stages, i32 parts, const __grid_constant__ Norm norm) {       \
        skinny_gemm<NT, GROUPS, true>(&w_map, &x_map, out, k, stages, parts, norm);                                    \
    }

#define SKINNY_GEMM_GROUPS(NT) \
    SKINNY_GEMM(NT, 1)         \
    SKINNY_GEMM(NT, 2)         \
    SKINNY_GEMM(NT, 4)

SKINNY_GEMM_GROUPS(8)
SKINNY_GEMM_GROUPS(16)
SKINNY_GEMM_GROUPS(32)
SKINNY_GEMM_GROUPS(64)
