// mamba2_states_bf16_w{2, 4}: goes with the state through the chunks of rows that mamba2_chunks_bf16 prepared
//
// out     has x, and gets O before its gate and norm, which mamba2_norm_bf16 adds
// maths   bf16 operands (S, P, X and e^(G_end - G) d X are rounded, too), fp32 sums and S; O in bf16. A row's result does not depend on
//         other rows, nor on the calls and steps that compute its chunks
// launch  W = 2 or 4 warps, grid (ceil(D / 16 W) V, rows that may have places of the call), block 32 W, 80 KiB of dynamic shared memory:
//         a warp has 16 columns of S for itself, as rows of S^T in its registers. P is computed together
// needs   sizes as in mamba2.cuh, D a multiple of 16, pointers aligned to 16 bytes: checked in mamba2.rs before launch
// bound   latency of a chunk: 148 products of 16 x 8 x 16 in each warp, and 2 080 exponentials in each block
// test    tests/cuda_mamba2.rs against reference::mamba2
// archs: 80 90a 100a ptx
#include "mamba2_chunks.cuh"
#include "recurrent_products.cuh"

constexpr u32 EXACT = CHUNK + 4;

struct StateShared {
    bf16 b[2][CHUNK * WIDE];
    float4 factors[2][CHUNK];
    bf16 c[CHUNK * WIDE];
    float products[CHUNK * EXACT];
    bf16 p[CHUNK * NARROW];
};

// A block has 16 WARPS columns of S.
template <u32 WARPS>
__device__ __forceinline__ void mamba_states(bf16* out, const MambaWeights& w, const RecurrentStates& states, const MambaShape& shape,
                                             const u32* positions, const u32* row_starts, u32 rows, const MambaScratch& scratch) {
    constexpr u32 THREADS = 32 * WARPS;
    extern __shared__ __align__(16) unsigned char memory[];
    StateShared& m = *reinterpret_cast<StateShared*>(memory);
    pdl_launch();
    const u32 blocks = (shape.value_dim + 16 * WARPS - 1) / (16 * WARPS);  // of a head
    const u32 head = blockIdx.x / blocks, key_head = head / shape.group(), tid = threadIdx.x, warp = tid / 32;
    const u32 first_column = (blockIdx.x % blocks * WARPS + warp) * 16, g = tid % 32 / 4, t = tid % 4;
    // A warp without columns copies and computes P with the others.
    const bool has_columns = first_column < shape.value_dim;
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
        copy_rows<THREADS, KEY_DIM, WIDE>(m.b[chunk % 2], scratch.key(shape, place + chunk - first, key_head));
        const float4* factors = scratch.factors(shape, place + chunk - first, head) + tid;
        if (tid < CHUNK) copy_async(in_shared(&m.factors[chunk % 2][tid]), factors, true);
        copy_async_commit();
    };
    const auto load_others = [&](u32 chunk) {
        copy_rows<THREADS, KEY_DIM, WIDE>(m.c, scratch.key(shape, place + chunk - first, key_head) + CHUNK * KEY_DIM);
        // Rows of floats are copied as twice as many bf16.
        const float* products = scratch.products(shape, place + chunk - first, key_head);
        copy_rows<THREADS, 2 * CHUNK, 2 * EXACT>(reinterpret_cast<bf16*>(m.products), reinterpret_cast<const bf16*>(products));
        copy_async_commit();
    };
    const auto elements = [&](u32 chunk) {
        bf16* base = out + (u64)row.start(chunk) * shape.width() + head * shape.value_dim + first_column;
        return Elements{base, shape.width(), has_columns ? row.count(chunk) : 0};
    };
    const float skip = w.skip[head];
    pdl_wait();
    load_keys(first);
    load_others(first);
    u32 v[8][2];
    elements(first).load(v);
    // S^T: rows g and g + 8 of the warp's columns, columns 8 n + 2 t and + 1.
    float* stored = mamba_head_state(states, shape, states.slots[index], head) + (first_column + g) * KEY_DIM + 2 * t;
    float s[16][4] = {};
    if (has_columns && (row.position > 0 || first > 0)) {
#pragma unroll
        for (u32 n = 0; n < 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const float2 pair = *reinterpret_cast<const float2*>(stored + i * 8 * KEY_DIM + 8 * n);
                s[n][2 * i] = pair.x, s[n][2 * i + 1] = pair.y;
            }
        }
    }
    for (u32 chunk = first; chunk < end; ++chunk) {
        const float4* factors = m.factors[chunk % 2];
        copy_async_wait<0>();
        __syncthreads();
        if (chunk + 1 < end) load_keys(chunk + 1);
        // A warp has every WARPS-th row of P, a lane two columns.
        const u32 j = tid % 32 * 2;
        const float4 even = factors[j], odd = factors[j + 1];
#pragma unroll 8
        for (u32 own = warp; own < CHUNK; own += WARPS) {
            const float2 product = *reinterpret_cast<const float2*>(&m.products[own * EXACT + j]);
            const float sum = factors[own].z;
            const float p = j <= own ? product.x * __expf(sum - even.z) * even.w : 0.0f;
            const float next = j < own ? product.y * __expf(sum - odd.z) * odd.w : 0.0f;
            *reinterpret_cast<u32*>(&m.p[own * NARROW + j]) = pack_bf16x2(p, next);
        }
        u32 x[4][4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) x[k][i] = transpose_8x8(v[2 * k + i / 2][i % 2]);
        }
        if (chunk + 1 < end) elements(chunk + 1).load(v);
        float o[8][4] = {};
        {
            u32 by_state[8][4];
            pack<16>(by_state, s);
            add_product<8, WIDE, false>(o, by_state, m.c);
        }
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
            const float own[2] = {factors[8 * n + 2 * t].x, factors[8 * n + 2 * t + 1].x};
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 pair = x[n / 2][n % 2 * 2 + half];
                o[n][2 * half] = own[0] * o[n][2 * half] + skip * unpack_lo(pair);
                o[n][2 * half + 1] = own[1] * o[n][2 * half + 1] + skip * unpack_hi(pair);
            }
        }
        __syncthreads();
        // C and the products of this chunk were read by all.
        if (chunk + 1 < end) load_others(chunk + 1);
        add_product<4, NARROW, true>(o, x, m.p);
        elements(chunk).store(o);
        // X becomes e^(G_end - G) d X.
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
            const float late[2] = {factors[8 * n + 2 * t].y, factors[8 * n + 2 * t + 1].y};
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u32& pair = x[n / 2][n % 2 * 2 + half];
                pair = pack_bf16x2(late[0] * unpack_lo(pair), late[1] * unpack_hi(pair));
            }
        }
        const float grown = factors[CHUNK - 1].x;
#pragma unroll
        for (u32 n = 0; n < 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) s[n][i] *= grown;
        }
        add_keys(s, x, m.b[chunk % 2]);
    }
    if (!has_columns) return;
#pragma unroll
    for (u32 n = 0; n < 16; ++n) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            *reinterpret_cast<float2*>(stored + i * 8 * KEY_DIM + 8 * n) = make_float2(s[n][2 * i], s[n][2 * i + 1]);
        }
    }
}

#define MAMBA_STATES(WARPS) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) mamba2_states_bf16_w##WARPS( \
        bf16* out, MambaWeights weights, RecurrentStates states, MambaShape shape, const u32* positions, const u32* row_starts, u32 rows, \
        MambaScratch scratch) { \
        mamba_states<WARPS>(out, weights, states, shape, positions, row_starts, rows, scratch); \
    }

MAMBA_STATES(2)
MAMBA_STATES(4)
