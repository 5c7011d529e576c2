// mamba2_chunks_bf16: what chunks of a layer of Mamba-2 are without the state (mamba2_chunks.cuh)
//
// out     gets x behind its convolution, which mamba2_states_bf16 replaces by the result
// scratch the call's places, as MambaScratch says
// maths   convolution and gates in fp32; C, B and x are rounded to bf16, their products have fp32 sums. No result depends on other
//         chunks, nor on the call that computes a chunk
// launch  grid (K + ceil(V D / 128) + ceil(V / 8), places), block 256, 34 KiB of dynamic shared memory. The first K blocks of a chunk
//         have a key head each, the next 128 channels of x, the last the gates of 8 heads, a warp each
// needs   sizes as in mamba2.cuh, pointers aligned to 16 bytes: checked in mamba2.rs before launch
// bound   latency of the inputs and exponentials
// test    tests/cuda_mamba2.rs against reference::mamba2
// archs: 80 90a 100a ptx
#include "mamba2_chunks.cuh"
#include "recurrent_conv.cuh"
#include "recurrent_products.cuh"

constexpr u32 CHUNK_THREADS = 256, BLOCK = 16;

struct ChunkShared {
    bf16 c[CHUNK * WIDE], b[CHUNK * WIDE];
};

// C and B of a key head: `parts` of the convolution, 0 and 1, in shared and scratch memory.
__device__ __forceinline__ void mix_keys(ChunkShared& m, bf16* kept, const Conv& conv, const bf16* history, const ChunkRow& row, u32 start,
                                         u32 count, u32 first_token, u32 key_head, u32 key_heads) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 part = 0; part < 2; ++part) {
        const u32 channel = (part * key_heads + key_head) * MAMBA_KEYS + lane * 4;
        const ConvInputs inputs(conv, history, row, start, count, first_token, channel);
        bf16* to = (part == 0 ? m.c : m.b) + first_token * WIDE + lane * 4;
        bf16* kept_rows = kept + (part == 0 ? CHUNK * MAMBA_KEYS : 0) + first_token * MAMBA_KEYS + lane * 4;
#pragma unroll
        for (u32 i = 0; i < TOKENS; ++i) {
            float x[4];
            inputs.mixed(x, i);
            const uint2 packed = first_token + i < count ? pack4(x) : uint2{};
            *reinterpret_cast<uint2*>(to + i * WIDE) = packed;
            *reinterpret_cast<uint2*>(kept_rows + i * MAMBA_KEYS) = packed;
        }
    }
}

// The products of C and B on and below the diagonal. Two warps have 16 rows.
__device__ __forceinline__ void multiply_keys(const ChunkShared& m, float* products) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = warp % 4, first = block * BLOCK;
    u32 a[8][4];
    const bf16* from = m.c + (first + lane / 8 % 2 * 8 + lane % 8) * WIDE + lane / 16 * 8;
#pragma unroll
    for (u32 k = 0; k < 8; ++k) load_matrices(a[k], in_shared(from + k * 16));
#pragma unroll 1
    for (u32 n = warp / 4; n <= block; n += 2) {
        float product[2][4] = {};
#pragma unroll
        for (u32 k = 0; k < 8; ++k) {
            u32 f[4];
            load_matrices(f, in_shared(&m.b[(n * 16 + lane / 16 * 8 + lane % 8) * WIDE + k * 16 + lane / 8 % 2 * 8]));
            mma_16x8x16(product[0], a[k][0], a[k][1], a[k][2], a[k][3], f[0], f[1]);
            mma_16x8x16(product[1], a[k][0], a[k][1], a[k][2], a[k][3], f[2], f[3]);
        }
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            float* to = products + (first + g) * CHUNK + n * 16 + c * 8 + 2 * t;
            *reinterpret_cast<float2*>(to) = make_float2(product[c][0], product[c][1]);
            *reinterpret_cast<float2*>(to + 8 * CHUNK) = make_float2(product[c][2], product[c][3]);
        }
    }
}

// The gates of a value head, by a warp: two tokens for each lane.
__device__ __forceinline__ void add_gates(float4* factors, const bf16* dt, u32 stride, float decay, float dt_bias, u32 start, u32 count) {
    const u32 lane = threadIdx.x % 32;
    float step[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 token = 2 * lane + i;
        step[i] = token < count ? softplus(to_f32(dt[(u64)(start + token) * stride]) + dt_bias) : 0.0f;
    }
    float sum = decay * step[0] + decay * step[1];
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const float before = __shfl_up_sync(FULL_WARP, sum, d);
        if (lane >= d) sum += before;
    }
    const float end_sum = __shfl_sync(FULL_WARP, sum, 31), sums[2] = {sum - decay * step[1], sum};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        factors[2 * lane + i] = make_float4(expf(sums[i]), step[i] * expf(end_sum - sums[i]), sums[i], step[i]);
    }
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 3)
    mamba2_chunks_bf16(bf16* out, const bf16* inputs, const bf16* dt, MambaWeights w, RecurrentStates states, MambaShape shape,
                       const u32* positions, const u32* row_starts, u32 rows, MambaScratch scratch) {
    extern __shared__ __align__(16) unsigned char memory[];
    pdl_launch();
    const u32 place = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const ChunkRow row = chunk_row(row_starts, positions, row_of_place(row_starts, rows, scratch.first_place + place));
    const u32 chunk = scratch.first_place + place - row.first_place();
    if (chunk >= row.chunks()) return;
    const u32 start = row.start(chunk), count = row.count(chunk), first_token = warp * TOKENS;
    const bf16* history = states.history(states.slots[row.index]);
    const Conv conv{inputs, shape.stride(), shape.channels(), w.conv, w.conv_bias};
    u32 index = blockIdx.x;
    pdl_wait();
    if (index < shape.key_heads) {
        ChunkShared& m = *reinterpret_cast<ChunkShared*>(memory);
        mix_keys(m, scratch.key(shape, place, index), conv, history, row, start, count, first_token, index, shape.key_heads);
        __syncthreads();
        multiply_keys(m, scratch.products(shape, place, index));
        return;
    }
    index -= shape.key_heads;
    const u32 blocks = (shape.width() + 127) / 128;
    if (index < blocks) {
        const u32 own = index * 128 + lane * 4;
        if (own >= shape.width()) return;
        const ConvInputs values(conv, history, row, start, count, first_token, 2 * shape.key_heads * MAMBA_KEYS + own);
        bf16* to = out + (u64)(start + first_token) * shape.width() + own;
#pragma unroll
        for (u32 i = 0; i < TOKENS; ++i, to += shape.width()) {
            float x[4];
            values.mixed(x, i);
            if (first_token + i < count) *reinterpret_cast<uint2*>(to) = pack4(x);
        }
        return;
    }
    const u32 head = (index - blocks) * (CHUNK_THREADS / 32) + warp;
    if (head >= shape.value_heads) return;
    add_gates(scratch.factors(shape, place, head), dt + head, shape.value_heads, w.decay[head], w.dt_bias[head], start, count);
}
