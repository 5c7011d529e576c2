// gated_delta_chunks_bf16: what chunks of a layer of Gated DeltaNet are without the state (gated_delta_chunks.cuh)
//
// out     gets v behind its convolution, which gated_delta_states_bf16 replaces by the result
// scratch the call's places, as DeltaScratch says
// maths   convolution, norms and gates in fp32. The products k k and q k have bf16 operands and fp32 sums; T is computed from A in
//         fp32: its diagonal blocks of 16 x 16 column by column, then T_ij = -T_ii (sum over k of A_ik T_kj). K, Q, V, P and T are
//         rounded to bf16. No result depends on other chunks, nor on the call that computes a chunk
// launch  grid (V, places), block 256, 54 KiB of dynamic shared memory
// needs   sizes as in gated_delta.cuh, pointers aligned to 16 bytes: checked in gated_delta.rs before launch
// bound   latency: the inputs, the exponentials of 24 576 channels, and 14 barriers for T, of which several blocks of a
//         multiprocessor do different ones
// test    tests/cuda_gated_delta.rs against reference::gated_delta
// archs: 80 90a 100a ptx
#include "gated_delta_chunks.cuh"
#include "recurrent_conv.cuh"
#include "recurrent_products.cuh"

constexpr u32 CHUNK_THREADS = 256, EXACT = CHUNK + 4, BLOCK = 16;

struct ChunkShared {
    bf16 k[CHUNK * WIDE];
    union {
        bf16 q[CHUNK * WIDE];
        // T. A block above the diagonal has the sum for its mirror image.
        float t[CHUNK * EXACT];
    };
    float a[CHUNK * EXACT];
    float sums[CHUNK];  // G
    float beta[CHUNK];
};

// acc[4] of row `row` and columns first .. first + 4 of x y, over `count` of their common index, both stored as rows of EXACT.
__device__ __forceinline__ float4 block_product(const float* x, const float* y, u32 count) {
    float4 sum{};
    for (u32 k = 0; k < count; k += 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + k);
        const float factor[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float4 b = *reinterpret_cast<const float4*>(y + (k + i) * EXACT);
            sum.x += factor[i] * b.x, sum.y += factor[i] * b.y, sum.z += factor[i] * b.z, sum.w += factor[i] * b.w;
        }
    }
    return sum;
}

// m.t = (I + m.a)^-1 in its lower triangle.
__device__ __forceinline__ void invert(ChunkShared& m, u32 tid) {
    constexpr u32 BLOCKS = CHUNK / BLOCK;
    if (tid < CHUNK) {
        const u32 first = tid / BLOCK * BLOCK, column = tid % BLOCK;
        float t[BLOCK];
#pragma unroll
        for (u32 i = 0; i < BLOCK; ++i) {
            float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (u32 k = 0; k < i; ++k) sum -= m.a[(first + i) * EXACT + first + k] * t[k];
            t[i] = sum;
            m.t[(first + i) * EXACT + first + column] = sum;
        }
    }
    __syncthreads();
    const u32 row = tid % 64 / 4, column = tid % 4 * 4;
    for (u32 distance = 1; distance < BLOCKS; ++distance) {
        const u32 j = tid / 64 * BLOCK, i = j + distance * BLOCK;
        const bool has_block = tid / 64 + distance < BLOCKS;
        if (has_block) {
            const float4 sum = block_product(&m.a[(i + row) * EXACT + j], &m.t[j * EXACT + j + column], distance * BLOCK);
            *reinterpret_cast<float4*>(&m.t[(j + row) * EXACT + i + column]) = sum;
        }
        __syncthreads();
        if (has_block) {
            const float4 sum = block_product(&m.t[(i + row) * EXACT + i], &m.t[j * EXACT + i + column], BLOCK);
            *reinterpret_cast<float4*>(&m.t[(i + row) * EXACT + j + column]) = make_float4(-sum.x, -sum.y, -sum.z, -sum.w);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 3)
    gated_delta_chunks_bf16(bf16* out, const bf16* qkvz, const bf16* ba, DeltaWeights w, RecurrentStates states, DeltaShape shape,
                            const u32* positions, const u32* row_starts, u32 rows, DeltaScratch scratch) {
    extern __shared__ __align__(16) unsigned char memory[];
    ChunkShared& m = *reinterpret_cast<ChunkShared*>(memory);
    pdl_launch();
    const u32 head = blockIdx.x, key_head = head / shape.group(), place = blockIdx.y;
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, channels = shape.channels();
    const ChunkRow row = chunk_row(row_starts, positions, row_of_place(row_starts, rows, scratch.first_place + place));
    const u32 chunk = scratch.first_place + place - row.first_place();
    if (chunk >= row.chunks()) return;
    const u32 start = row.start(chunk), count = row.count(chunk);
    const bf16* history = states.history(states.slots[row.index]);
    const Conv conv{qkvz, shape.stride(), channels, w.conv, nullptr};
    pdl_wait();
    const u32 first_token = warp * TOKENS;
#pragma unroll 1
    for (u32 part = 0; part < 3; ++part) {
        const u32 channel = delta_channel(shape, head, part * DELTA_DIM + lane * 4);
        const ConvInputs inputs(conv, history, row, start, count, first_token, channel);
        bf16* to = (part == 0 ? m.q : m.k) + first_token * WIDE + lane * 4;
        bf16* kept = scratch.key(shape, place, key_head) + (part == 0 ? CHUNK * DELTA_DIM : 0) + first_token * DELTA_DIM + lane * 4;
        bf16* values = out + ((u64)(start + first_token) * shape.value_heads + head) * DELTA_DIM + lane * 4;
#pragma unroll
        for (u32 i = 0; i < TOKENS; ++i) {
            const bool is_token = first_token + i < count;
            float x[4];
            inputs.mixed(x, i);
            if (part == 2) {
                if (is_token) *reinterpret_cast<uint2*>(values + i * shape.value_heads * DELTA_DIM) = pack4(x);
                continue;
            }
            const float squares = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
            const float scale = is_token ? rsqrtf(squares + 1e-6f) * (part == 0 ? DELTA_QUERY_SCALE : 1.0f) : 0.0f;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) x[c] *= scale;
            const uint2 packed = pack4(x);
            *reinterpret_cast<uint2*>(to + i * WIDE) = packed;
            if (head % shape.group() == 0) *reinterpret_cast<uint2*>(kept + i * DELTA_DIM) = packed;
        }
    }
    if (warp == 0) {
        float log_decay[2], beta[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 token = 2 * lane + i;
            const bf16* from = ba + (u64)(start + min(token, count - 1)) * 2 * shape.value_heads + head;
            log_decay[i] = token < count ? w.decay[head] * softplus(to_f32(from[shape.value_heads]) + w.dt_bias[head]) : 0.0f;
            beta[i] = token < count ? sigmoid(to_f32(from[0])) : 0.0f;
        }
        float sum = log_decay[0] + log_decay[1];
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const float before = __shfl_up_sync(FULL_WARP, sum, d);
            if (lane >= d) sum += before;
        }
        const float end_sum = __shfl_sync(FULL_WARP, sum, 31), sums[2] = {sum - log_decay[1], sum};
        float2* factors = scratch.factors(shape, place, head) + 2 * lane;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            m.sums[2 * lane + i] = sums[i], m.beta[2 * lane + i] = beta[i];
            const float grown = expf(sums[i]);
            factors[i] = make_float2(beta[i], beta[i] * grown);
            factors[CHUNK + i] = make_float2(grown, expf(end_sum - sums[i]));
        }
    }
    __syncthreads();
    bf16* t_matrix = scratch.matrices(shape, place, head);
    bf16* p_matrix = t_matrix + CHUNK * CHUNK;
    {
        // Warps 0 to 3 multiply sixteen rows of K each, the others of Q, by the rows of K up to their last one.
        const u32 block = warp % 4, first = block * BLOCK;
        const bool has_q = warp >= 4;
        u32 a[8][4];
        const bf16* from = (has_q ? m.q : m.k) + (first + lane / 8 % 2 * 8 + lane % 8) * WIDE + lane / 16 * 8;
#pragma unroll
        for (u32 k = 0; k < 8; ++k) load_matrices(a[k], in_shared(from + k * 16));
        const float own_sum[2] = {m.sums[first + g], m.sums[first + g + 8]};
#pragma unroll 1
        for (u32 n = 0; n <= block; ++n) {
            float product[2][4] = {};
#pragma unroll
            for (u32 k = 0; k < 8; ++k) {
                u32 f[4];
                load_matrices(f, in_shared(&m.k[(n * 16 + lane / 16 * 8 + lane % 8) * WIDE + k * 16 + lane / 8 % 2 * 8]));
                mma_16x8x16(product[0], a[k][0], a[k][1], a[k][2], a[k][3], f[0], f[1]);
                mma_16x8x16(product[1], a[k][0], a[k][1], a[k][2], a[k][3], f[2], f[3]);
            }
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const u32 j = n * 16 + c * 8 + 2 * t;
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 own = first + g + i * 8;
                    float found[2];
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) {
                        const bool is_before = has_q ? j + e <= own : j + e < own;
                        found[e] = is_before ? product[c][2 * i + e] * expf(own_sum[i] - m.sums[j + e]) : 0.0f;
                    }
                    if (has_q) {
                        *reinterpret_cast<u32*>(p_matrix + own * CHUNK + j) = pack_bf16x2(found[0], found[1]);
                    } else {
                        const float beta = m.beta[own];
                        *reinterpret_cast<float2*>(&m.a[own * EXACT + j]) = make_float2(beta * found[0], beta * found[1]);
                    }
                }
            }
        }
    }
    __syncthreads();
    invert(m, tid);
    const u32 own = tid / 4, first = tid % 4 * BLOCK;
    if (first > own) return;
#pragma unroll
    for (u32 i = 0; i < BLOCK; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(&m.t[own * EXACT + first + i]);
        const float x[4] = {v.x, v.y, v.z, v.w};
        *reinterpret_cast<uint2*>(t_matrix + own * CHUNK + first + i) = pack4(x);
    }
}
