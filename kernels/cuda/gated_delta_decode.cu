// gated_delta_decode_bf16:  one layer of Gated DeltaNet (gated_delta.cuh) for rows of one token
// gated_delta_rows_bf16:    the same for rows of several tokens, which it computes in order
//
// slots   a decode writes the row of the history that no block of its step reads. u32::MAX marks a padding row: its output is 0.
//         Of several tokens, padding rows have none, and begin where the tokens of the other rows end
// saved   [R, 2] u32 or null: after so many tokens of a row, its state is stored in another slot, too; 0 tokens: it is not
// maths   fp32 in one order for each token, so a row's result does not depend on how it is cut into steps, or on other rows
// launch  grid (V, R), block 512. A warp holds eight rows of S in registers, a lane four columns of them
// needs   sizes as in gated_delta.cuh, pointers aligned to 16 bytes: checked in gated_delta.rs before launch
// bound   decode: memory, 128 KiB for each row and value head. S is read before the inputs arrive, and two blocks of a
//         multiprocessor take turns with the memory. rows: three barriers for each token
// test    tests/cuda_gated_delta.rs against reference::gated_delta
// archs: 80 90a 100a ptx
#include "gated_delta.cuh"

constexpr u32 DELTA_WARPS = 16, DELTA_THREADS = 32 * DELTA_WARPS;
constexpr u32 DELTA_ROWS = DELTA_DIM / DELTA_WARPS;  // of S, in a warp
// Threads that add the warps' sums of a column. Their distance in memory avoids bank conflicts.
constexpr u32 DELTA_ADDERS = DELTA_THREADS / DELTA_DIM, DELTA_ADDED = DELTA_WARPS / DELTA_ADDERS;

struct alignas(16) DeltaShared {
    // Two sets, because a thread may begin the next token while others finish this one.
    float mixed[2][3 * DELTA_DIM];
    float squares[2][8];
    float gates[2][2];
    float sums[DELTA_WARPS * 2 * DELTA_DIM + DELTA_ADDERS * 8];  // of each warp: S^T k, S^T q
    float both[DELTA_WARPS];                                     // k q
    float added[DELTA_DIM];
    float out_squares[DELTA_WARPS];

    __device__ float* warp_sums(u32 warp) { return sums + warp * 2 * DELTA_DIM + warp / DELTA_ADDED * 8; }
};

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& v) {
    sum.x += factor * v.x, sum.y += factor * v.y, sum.z += factor * v.z, sum.w += factor * v.w;
}

// Everything of one value head of one row but the history: tokens `first..end`.
template <bool IS_DECODE>
__device__ __forceinline__ void delta_head(DeltaShared& shared, bf16* out, const bf16* qkvz, const bf16* ba, const DeltaWeights& w,
                                           const RecurrentStates& states, const DeltaShape& shape, u32 slot, u32 position, u32 first,
                                           u32 end, const u32* saved) {
    const u32 head = blockIdx.x, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 channels = shape.channels(), stride = shape.stride();
    float4* from = reinterpret_cast<float4*>(delta_head_state(states, shape, slot, head) + warp * DELTA_ROWS * DELTA_DIM) + lane;
    float4 s[DELTA_ROWS];
#pragma unroll
    for (u32 i = 0; i < DELTA_ROWS; ++i) {
        s[i] = position == 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcs(from + i * (DELTA_DIM / 4));
    }
    // Threads of the convolution: their channel, its taps and its earlier inputs.
    const bool mixes = tid < 3 * DELTA_DIM;
    const u32 channel = mixes ? delta_channel(shape, head, tid) : 0;
    float taps[CONV_TAPS], inputs[CONV_TAPS] = {};
    if (mixes) {
#pragma unroll
        for (u32 j = 0; j < CONV_TAPS; ++j) taps[j] = w.conv[j * channels + channel];
        const bf16* history = states.history(slot) + channel;
#pragma unroll
        for (u32 j = 0; j + 1 < CONV_TAPS; ++j) {
            const u32 back = CONV_TAPS - 1 - j;
            if (position >= back) inputs[j] = to_f32(history[(position - back) % CONV_TAPS * channels]);
        }
    }
    const u32 saved_tokens = IS_DECODE || saved == nullptr ? 0 : saved[0];
    // Threads that add: the column of S, and the warps whose sums this thread adds.
    const u32 column = tid / DELTA_ADDERS, adder = tid % DELTA_ADDERS;
    pdl_wait();
    for (u32 token = first; token < end; ++token) {
        const u32 set = token & 1;
        const bf16* in = qkvz + (u64)token * stride;
        if (mixes) {
            const bf16 own = in[channel];
            inputs[CONV_TAPS - 1] = to_f32(own);
            float sum = 0.0f;
#pragma unroll
            for (u32 j = 0; j < CONV_TAPS; ++j) sum += taps[j] * inputs[j];
            sum *= sigmoid(sum);
#pragma unroll
            for (u32 j = 0; j + 1 < CONV_TAPS; ++j) inputs[j] = inputs[j + 1];
            shared.mixed[set][tid] = sum;
            const float squares = warp_sum(sum * sum);
            if (lane == 0 && tid < 2 * DELTA_DIM) shared.squares[set][warp] = squares;
            // One value head of a group stores q and k.
            const bool stores = tid >= 2 * DELTA_DIM || head % shape.group() == 0;
            if (IS_DECODE && stores) states.history(slot)[position % CONV_TAPS * channels + channel] = own;
        } else if (tid == 3 * DELTA_DIM) {
            const bf16* row = ba + (u64)token * 2 * shape.value_heads;
            shared.gates[set][0] = expf(w.decay[head] * softplus(to_f32(row[shape.value_heads + head]) + w.dt_bias[head]));
            shared.gates[set][1] = sigmoid(to_f32(row[head]));
        }
        __syncthreads();
        const float* q = shared.mixed[set] + warp * DELTA_ROWS;
        const float* k = q + DELTA_DIM;
        {
            float4 known{}, read{};
            float both = 0.0f;
#pragma unroll
            for (u32 i = 0; i < DELTA_ROWS; ++i) {
                add_scaled(known, k[i], s[i]), add_scaled(read, q[i], s[i]);
                both += k[i] * q[i];
            }
            float4* sums = reinterpret_cast<float4*>(shared.warp_sums(warp)) + lane;
            sums[0] = known, sums[DELTA_DIM / 4] = read;
            if (lane == 0) shared.both[warp] = both;
        }
        __syncthreads();
        const float* squares = shared.squares[set];
        const float q_scale = rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + 1e-6f) * DELTA_QUERY_SCALE;
        const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + 1e-6f);
        const float g = shared.gates[set][0], beta = shared.gates[set][1];
        float known = 0.0f, read = 0.0f, both = 0.0f;
#pragma unroll
        for (u32 i = 0; i < DELTA_ADDED; ++i) {
            const float* sums = shared.warp_sums(adder * DELTA_ADDED + i) + column;
            known += sums[0], read += sums[DELTA_DIM], both += shared.both[adder * DELTA_ADDED + i];
        }
#pragma unroll
        for (u32 d = 1; d < DELTA_ADDERS; d *= 2) {
            known += __shfl_xor_sync(FULL_WARP, known, d);
            read += __shfl_xor_sync(FULL_WARP, read, d);
            both += __shfl_xor_sync(FULL_WARP, both, d);
        }
        const float k_added = k_scale * beta * (shared.mixed[set][2 * DELTA_DIM + column] - g * k_scale * known);
        const float o = q_scale * (g * read + both * k_added);
        const float out_squares = warp_sum(adder == 0 ? o * o : 0.0f);
        if (adder == 0) shared.added[column] = k_added;
        if (lane == 0) shared.out_squares[warp] = out_squares;
        __syncthreads();
        const float4 added = reinterpret_cast<const float4*>(shared.added)[lane];
#pragma unroll
        for (u32 i = 0; i < DELTA_ROWS; ++i) {
            s[i].x = g * s[i].x + k[i] * added.x, s[i].y = g * s[i].y + k[i] * added.y;
            s[i].z = g * s[i].z + k[i] * added.z, s[i].w = g * s[i].w + k[i] * added.w;
        }
        if (!IS_DECODE && token + 1 == first + saved_tokens) {
            float4* to = reinterpret_cast<float4*>(delta_head_state(states, shape, saved[1], head) + warp * DELTA_ROWS * DELTA_DIM) + lane;
#pragma unroll
            for (u32 i = 0; i < DELTA_ROWS; ++i) __stcs(to + i * (DELTA_DIM / 4), s[i]);
        }
        if (adder == 0) {
            const float z = to_f32(in[channels + head * DELTA_DIM + column]);
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < DELTA_WARPS; ++i) sum += shared.out_squares[i];
            const float normed = o * rsqrtf(sum / DELTA_DIM + w.eps) * w.norm[column];
            out[((u64)token * shape.value_heads + head) * DELTA_DIM + column] = to_bf16(normed * z * sigmoid(z));
        }
    }
#pragma unroll
    for (u32 i = 0; i < DELTA_ROWS; ++i) __stcs(from + i * (DELTA_DIM / 4), s[i]);
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 2)
    gated_delta_decode_bf16(bf16* out, const bf16* qkvz, const bf16* ba, DeltaWeights weights, RecurrentStates states, DeltaShape shape,
                            const u32* positions, u32 first_token) {
    __shared__ DeltaShared shared;
    pdl_launch();
    const u32 token = first_token + blockIdx.y, slot = states.slots[blockIdx.y];
    if (slot == 0xffffffffu) {
        pdl_wait();
        if (threadIdx.x < DELTA_DIM) {
            out[((u64)token * shape.value_heads + blockIdx.x) * DELTA_DIM + threadIdx.x] = to_bf16(0.0f);
        }
        return;
    }
    delta_head<true>(shared, out, qkvz, ba, weights, states, shape, slot, positions[token], token, token + 1, nullptr);
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 1)
    gated_delta_rows_bf16(bf16* out, const bf16* qkvz, const bf16* ba, DeltaWeights weights, RecurrentStates states, DeltaShape shape,
                          const u32* positions, const u32* row_starts, const u32* saved) {
    __shared__ DeltaShared shared;
    pdl_launch();
    const u32 first = row_starts[blockIdx.y], end = row_starts[blockIdx.y + 1];
    if (first >= end) {
        // There are at most as many rows as tokens, and padding comes last. So the row with the number of a padding token is padding.
        if (saved != nullptr && blockIdx.y >= first && threadIdx.x < DELTA_DIM) {
            pdl_wait();
            out[((u64)blockIdx.y * shape.value_heads + blockIdx.x) * DELTA_DIM + threadIdx.x] = to_bf16(0.0f);
        }
        return;
    }
    if (saved != nullptr) saved += 2 * blockIdx.y;
    delta_head<false>(shared, out, qkvz, ba, weights, states, shape, states.slots[blockIdx.y], positions[first], first, end, saved);
}
