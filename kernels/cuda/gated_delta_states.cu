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
#include "recurrent_products.cuh"

struct StateShared {
    bf16 k[2][CHUNK * WIDE];
    float2 factors[2][2 * CHUNK];
    bf16 q[CHUNK * WIDE];
    bf16 t[CHUNK * NARROW];
    bf16 p[CHUNK * NARROW];
};

// A block has 16 WARPS columns of S.
template <u32 WARPS>
__device__ __forceinline__ void delta_states(bf16* out, const RecurrentStates& states, const DeltaShape& shape, const u32* positions,
                                             const u32* row_starts, u32 rows, const DeltaScratch& scratch) {
    constexpr u32 THREADS = 32 * WARPS, BLOCKS = DELTA_DIM / 16 / WARPS;  // of a head
    extern __shared__ __align__(16) unsigned char memory[];
    StateShared& m = *reinterpret_cast<StateShared*>(memory);
    pdl_launch();
    const u32 head = blockIdx.x / BLOCKS, key_head = head / shape.group(), warp = threadIdx.x / 32;
    const u32 first_column = (blockIdx.x % BLOCKS * WARPS + warp) * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 index = row_of_place(row_starts, rows, scratch.first_place) + blockIdx.y;
    if (index >= rows) return;
    const ChunkRow row = chunk_row(row_starts, positions, index);
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
    float* stored = delta_head_state(states, shape, states.slots[index], head) + first_column + g;
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
        bf16* out, RecurrentStates states, DeltaShape shape, const u32* positions, const u32* row_starts, u32 rows, DeltaScratch scratch) { \
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
