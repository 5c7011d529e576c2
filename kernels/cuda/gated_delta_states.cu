// gated_delta_states_bf16_w{2, 4}: goes with the state through the chunks of rows that gated_delta_chunks_bf16 prepared
// gated_delta_norm_bf16: the norm and the gate of the output
//
// out     has v, and gets O before its norm; then the result
// maths   chunks: bf16 operands (S, R and U are rounded, too), fp32 sums and S; O in bf16 before its norm. A row's result does not
//         depend on other rows, nor on the calls and steps that compute its chunks
// launch  states: W = 2 or 4 warps, grid (8 / W V, rows that may have places of the call), block 32 W, 72 KiB of dynamic shared
//         memory: a warp has 16 columns of S for itself, as the rows of S^T in its registers, and never waits for another's sums
//         norm: grid ceil(T V / 8), block 256
// needs   sizes as in gated_delta.cuh, pointers aligned to 16 bytes: checked in gated_delta.rs before launch
// bound   latency of a chunk: 232 products of 16 x 8 x 16 in each warp, whose operands are 59 KiB of shared memory
// test    tests/cuda_gated_delta.rs against reference::gated_delta
// archs: 80 90a 100a ptx
#include "gated_delta_chunks.cuh"
#include "mma.cuh"

constexpr u32 WIDE = DELTA_DIM + 8, NARROW = CHUNK + 8;

struct StateShared {
    bf16 k[2][CHUNK * WIDE];
    float2 factors[2][2 * CHUNK];
    bf16 q[CHUNK * WIDE];
    bf16 t[CHUNK * NARROW];
    bf16 p[CHUNK * NARROW];
};

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 64 rows of COLS elements to rows that are PITCH apart.
template <u32 THREADS, u32 COLS, u32 PITCH>
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from) {
    constexpr u32 PARTS = COLS / 8, ROWS = THREADS / PARTS;
    const u32 address = in_shared(to + threadIdx.x / PARTS * PITCH + threadIdx.x % PARTS * 8);
    const bf16* own = from + threadIdx.x * 8;
#pragma unroll
    for (u32 row = 0; row < CHUNK; row += ROWS) copy_async(address + row * PITCH * 2, own + row * COLS, true);
}

// Products as the first operand of the next ones: c [16, 8 N], of which a thread has rows g, g + 8 and columns 2t, 2t + 1 of each
// eight, becomes a [16, 16] N / 2 times.
template <u32 N>
__device__ __forceinline__ void pack(u32 (&a)[N / 2][4], const float (&c)[N][4]) {
#pragma unroll
    for (u32 k = 0; k < N / 2; ++k) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            a[k][2 * i] = pack_bf16x2(c[2 * k + i][0], c[2 * k + i][1]);
            a[k][2 * i + 1] = pack_bf16x2(c[2 * k + i][2], c[2 * k + i][3]);
        }
    }
}

// c [16, 64] += a [16, 16 STEPS] b^T; b [64, 16 STEPS] is stored as rows of PITCH elements. IS_LOWER: b is lower triangular.
template <u32 STEPS, u32 PITCH, bool IS_LOWER>
__device__ __forceinline__ void add_product(float (&c)[8][4], const u32 (&a)[STEPS][4], const bf16* rows) {
    const u32 lane = threadIdx.x % 32;
    const u32 from = in_shared(rows + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
    // The fragments of the next step are loaded while this one's are multiplied.
    u32 f[2][4][4];
    const auto load = [&](u32 k) {
#pragma unroll
        for (u32 n = IS_LOWER ? k : 0; n < 4; ++n) load_matrices(f[k % 2][n], from + (n * 16 * PITCH + k * 16) * 2);
    };
    load(0);
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) {
        if (k + 1 < STEPS) load(k + 1);
#pragma unroll
        for (u32 n = IS_LOWER ? k : 0; n < 4; ++n) {
            const u32* b = f[k % 2][n];
            mma_16x8x16(c[2 * n], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
            mma_16x8x16(c[2 * n + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }
    }
}

// s [16, 128] += a [16, 64] k; k [64, 128].
__device__ __forceinline__ void add_keys(float (&s)[16][4], const u32 (&a)[4][4], const bf16* keys) {
    const u32 lane = threadIdx.x % 32;
    const u32 from = in_shared(keys + (lane / 8 % 2 * 8 + lane % 8) * WIDE + lane / 16 * 8);
    u32 f[2][4][4];
    const auto load = [&](u32 step) {
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            load_matrices_transposed(f[step % 2][n], from + (step / 2 * 16 * WIDE + (step % 2 * 4 + n) * 16) * 2);
        }
    };
    load(0);
#pragma unroll
    for (u32 step = 0; step < 8; ++step) {
        if (step + 1 < 8) load(step + 1);
        const u32* own = a[step / 2];
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            const u32* b = f[step % 2][n];
            const u32 column = step % 2 * 8 + 2 * n;
            mma_16x8x16(s[column], own[0], own[1], own[2], own[3], b[0], b[1]);
            mma_16x8x16(s[column + 1], own[0], own[1], own[2], own[3], b[2], b[3]);
        }
    }
}

// Elements of v or O of a warp's 16 columns, from the first token of a chunk on. A thread has columns 2t, 2t + 1 of each eight, of the
// tokens 8 n + g < count.
struct Elements {
    bf16* base;
    u32 stride, count;

    __device__ u32* own() const {
        return reinterpret_cast<u32*>(base + threadIdx.x % 32 / 4 * stride) + threadIdx.x % 4;
    }

    __device__ void load(u32 (&v)[8][2]) const {
        const u32* from = own();
#pragma unroll
        for (u32 n = 0; n < 8; ++n, from += 4 * stride) {
            const bool is_valid = 8 * n + threadIdx.x % 32 / 4 < count;
            v[n][0] = is_valid ? from[0] : 0, v[n][1] = is_valid ? from[4] : 0;
        }
    }

    __device__ void store(const float (&o)[8][4]) const {
        u32* to = own();
#pragma unroll
        for (u32 n = 0; n < 8; ++n, to += 4 * stride) {
            const u32 first = transpose_8x8(pack_bf16x2(o[n][0], o[n][1])), second = transpose_8x8(pack_bf16x2(o[n][2], o[n][3]));
            if (8 * n + threadIdx.x % 32 / 4 < count) to[0] = first, to[4] = second;
        }
    }
};

// A block has 16 WARPS columns of S.
template <u32 WARPS>
__device__ __forceinline__ void delta_states(bf16* out, const DeltaStates& states, const DeltaShape& shape, const u32* positions,
                                             const u32* row_starts, u32 rows, const DeltaScratch& scratch) {
    constexpr u32 THREADS = 32 * WARPS, BLOCKS = DELTA_DIM / 16 / WARPS;  // of a head
    extern __shared__ __align__(16) unsigned char memory[];
    StateShared& m = *reinterpret_cast<StateShared*>(memory);
    pdl_launch();
    const u32 head = blockIdx.x / BLOCKS, key_head = head / shape.group(), warp = threadIdx.x / 32;
    const u32 first_column = (blockIdx.x % BLOCKS * WARPS + warp) * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 index = row_of_place(row_starts, rows, scratch.first_place) + blockIdx.y;
    if (index >= rows) return;
    const DeltaRow row = delta_row(row_starts, positions, index);
    // The row's chunks that have places of this call.
    const u32 first_place = row.first_place(), end_place = scratch.first_place + scratch.num_places;
    if (first_place >= end_place) return;
    const u32 first = max(scratch.first_place, first_place) - first_place, end = min(row.chunks(), end_place - first_place);
    if (first >= end) return;
    const u32 place = first_place + first - scratch.first_place;
    const auto load_keys = [&](u32 chunk) {
        copy_rows<THREADS, DELTA_DIM, WIDE>(m.k[chunk % 2], scratch.key(shape, place + chunk - first, key_head));
        const float2* factors = scratch.factors(shape, place + chunk - first, head) + 2 * threadIdx.x;
        if (threadIdx.x < CHUNK) copy_async(in_shared(&m.factors[chunk % 2][2 * threadIdx.x]), factors, true);
        copy_async_commit();
    };
    const auto load_others = [&](u32 chunk) {
        copy_rows<THREADS, DELTA_DIM, WIDE>(m.q, scratch.key(shape, place + chunk - first, key_head) + CHUNK * DELTA_DIM);
        const bf16* matrices = scratch.matrices(shape, place + chunk - first, head);
        copy_rows<THREADS, CHUNK, NARROW>(m.t, matrices);
        copy_rows<THREADS, CHUNK, NARROW>(m.p, matrices + CHUNK * CHUNK);
        copy_async_commit();
    };
    const auto elements = [&](u32 chunk) {
        bf16* base = out + ((u64)row.start(chunk) * shape.value_heads + head) * DELTA_DIM + first_column;
        return Elements{base, shape.value_heads * DELTA_DIM, row.count(chunk)};
    };
    pdl_wait();
    load_keys(first);
    load_others(first);
    u32 v[8][2];
    elements(first).load(v);
    // S^T: rows g and g + 8 of the warp's columns, columns 8 n + 2 t and + 1.
    float* stored = states.head(states.slots[index], shape, head) + first_column + g;
    float s[16][4] = {};
    if (row.position > 0 || first > 0) {
#pragma unroll
        for (u32 n = 0; n < 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) s[n][i] = stored[(8 * n + 2 * t + i % 2) * DELTA_DIM + i / 2 * 8];
        }
    }
    for (u32 chunk = first; chunk < end; ++chunk) {
        const bf16* keys = m.k[chunk % 2];
        // Of positions 8 n + 2 t and + 1: before and behind the system.
        const auto factor = [&](u32 n, u32 part) {
            return *reinterpret_cast<const float4*>(&m.factors[chunk % 2][part * CHUNK + 8 * n + 2 * t]);
        };
        copy_async_wait<1>();
        __syncthreads();
        if (chunk + 1 < end) load_keys(chunk + 1);
        else copy_async_commit();
        u32 by_state[8][4], r[4][4];
        pack<16>(by_state, s);
        {
            float known[8][4] = {};
            add_product<8, WIDE, false>(known, by_state, keys);
#pragma unroll
            for (u32 n = 0; n < 8; ++n) {
                const float4 own = factor(n, 0);
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u32 pair = transpose_8x8(v[n][half]);
                    known[n][2 * half] = own.x * unpack_lo(pair) - own.y * known[n][2 * half];
                    known[n][2 * half + 1] = own.z * unpack_hi(pair) - own.w * known[n][2 * half + 1];
                }
            }
            pack<8>(r, known);
        }
        if (chunk + 1 < end) elements(chunk + 1).load(v);
        copy_async_wait<1>();
        __syncthreads();
        float o[8][4] = {};
        add_product<8, WIDE, false>(o, by_state, m.q);
        u32 u[4][4], late_u[4][4];
        {
            float sums[8][4] = {};
            add_product<4, NARROW, true>(sums, r, m.t);
            pack<8>(u, sums);
#pragma unroll
            for (u32 n = 0; n < 8; ++n) {
                const float4 own = factor(n, 1);
                o[n][0] *= own.x, o[n][1] *= own.z, o[n][2] *= own.x, o[n][3] *= own.z;
                sums[n][0] *= own.y, sums[n][1] *= own.w, sums[n][2] *= own.y, sums[n][3] *= own.w;
            }
            pack<8>(late_u, sums);
        }
        add_product<4, NARROW, true>(o, u, m.p);
        const float grown = m.factors[chunk % 2][2 * CHUNK - 1].x;
        __syncthreads();
        if (chunk + 1 < end) load_others(chunk + 1);
        else copy_async_commit();
        elements(chunk).store(o);
#pragma unroll
        for (u32 n = 0; n < 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) s[n][i] *= grown;
        }
        add_keys(s, late_u, keys);
    }
#pragma unroll
    for (u32 n = 0; n < 16; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) stored[(8 * n + 2 * t + i % 2) * DELTA_DIM + i / 2 * 8] = s[n][i];
    }
}

#define DELTA_STATES(WARPS) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) gated_delta_states_bf16_w##WARPS( \
        bf16* out, DeltaStates states, DeltaShape shape, const u32* positions, const u32* row_starts, u32 rows, DeltaScratch scratch) { \
        delta_states<WARPS>(out, states, shape, positions, row_starts, rows, scratch); \
    }

DELTA_STATES(2)
DELTA_STATES(4)

// out[t, h] = out[t, h] * rsqrt(mean(out[t, h]^2) + eps) * norm * silu(z[t, h]), a warp for each head of a token.
extern "C" __global__ void __launch_bounds__(256)
    gated_delta_norm_bf16(bf16* out, const bf16* qkvz, DeltaWeights w, DeltaShape shape, u32 count) {
    const u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    pdl_launch();
    pdl_wait();
    if (item >= count) return;
    const u32 token = item / shape.value_heads, head = item % shape.value_heads;
    u32* to = reinterpret_cast<u32*>(out + (u64)item * DELTA_DIM) + lane * 2;
    const bf16* gates = qkvz + (u64)token * shape.stride() + shape.channels() + head * DELTA_DIM;
    const uint2 from = *reinterpret_cast<const uint2*>(to), z = *(reinterpret_cast<const uint2*>(gates) + lane);
    float x[4] = {unpack_lo(from.x), unpack_hi(from.x), unpack_lo(from.y), unpack_hi(from.y)};
    const float gate[4] = {unpack_lo(z.x), unpack_hi(z.x), unpack_lo(z.y), unpack_hi(z.y)};
    const float scale = rsqrtf(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) / DELTA_DIM + w.eps);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) x[i] *= scale * w.norm[lane * 4 + i] * gate[i] * sigmoid(gate[i]);
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]));
}
