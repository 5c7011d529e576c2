// mamba2_decode_bf16_d{64, 80, 128}: one layer of Mamba-2 (mamba2.cuh) before its norm, for rows of one token
// mamba2_rows_bf16_d{64, 80, 128}:   the same for rows of several tokens, which it computes in order
// mamba2_norm_bf16:                  gates and norms their outputs
//
// slots   a decode writes the row of the history that no block of its step reads. u32::MAX marks a padding row: its output is 0.
//         Of several tokens, padding rows have none, and begin where the tokens of the other rows end
// saved   [R, 2] u32 or null: after so many tokens of a row, its state is stored in another slot, too; 0 tokens: it is not
// maths   fp32 in one order for each token, o in bf16 before its gate; so a row's result does not depend on how it is cut into steps,
//         or on other rows
// launch  decode, rows: grid (V, R), block 256. A warp holds D / 8 rows of S^T in registers, a lane four columns of them;
//         norm: grid (tokens from first_token on, norms), block up to 1024; tokens before row_starts[0] are left out
// needs   sizes as in mamba2.cuh, pointers aligned to 16 bytes: checked in mamba2.rs before launch
// bound   decode: memory, 512 D bytes for each row and value head, read and written. S is read before the inputs arrive.
//         rows: a barrier for each token
// test    tests/cuda_mamba2.rs against reference::mamba2
// archs: 80 90a 100a ptx
#include "mamba2.cuh"

constexpr u32 MAMBA_WARPS = 8, MAMBA_THREADS = 32 * MAMBA_WARPS;

// Two sets, because a thread may begin the next token while others finish this one.
template <u32 DIM>
struct alignas(16) MambaShared {
    float mixed[2][2 * MAMBA_KEYS + DIM];  // C, B, x
    float gates[2][2];                     // d, g
};

// A channel of the convolution, with its earlier inputs.
struct Channel {
    float taps[CONV_TAPS], inputs[CONV_TAPS], bias;
    u32 index;

    __device__ Channel(const MambaWeights& w, const bf16* history, u32 channels, u32 index, u32 position) : index(index) {
        bias = w.conv_bias == nullptr ? 0.0f : w.conv_bias[index];
#pragma unroll
        for (u32 j = 0; j < CONV_TAPS; ++j) taps[j] = w.conv[j * channels + index], inputs[j] = 0.0f;
#pragma unroll
        for (u32 j = 0; j + 1 < CONV_TAPS; ++j) {
            const u32 back = CONV_TAPS - 1 - j;
            if (position >= back) inputs[j] = to_f32(history[(position - back) % CONV_TAPS * channels + index]);
        }
    }

    // Takes the input of the next token.
    __device__ float mixed(bf16 input) {
        inputs[CONV_TAPS - 1] = to_f32(input);
        float sum = bias;
#pragma unroll
        for (u32 j = 0; j < CONV_TAPS; ++j) sum += taps[j] * inputs[j];
#pragma unroll
        for (u32 j = 0; j + 1 < CONV_TAPS; ++j) inputs[j] = inputs[j + 1];
        return sum * sigmoid(sum);
    }
};

// Everything of one value head of one row but the history: tokens `first..end`.
template <u32 DIM, bool IS_DECODE>
__device__ __forceinline__ void mamba_head(MambaShared<DIM>& shared, bf16* out, const bf16* inputs, const bf16* dt, const MambaWeights& w,
                                           const RecurrentStates& states, const MambaShape& shape, u32 slot, u32 position, u32 first,
                                           u32 end, const u32* saved) {
    constexpr u32 ROWS = DIM / MAMBA_WARPS;  // of S^T, in a warp
    const u32 head = blockIdx.x, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 channels = shape.channels(), stride = shape.stride(), own_row = warp * ROWS;
    float4* from = reinterpret_cast<float4*>(mamba_head_state(states, shape, slot, head) + own_row * MAMBA_KEYS) + lane;
    float4 s[ROWS];
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
        s[i] = position == 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcs(from + i * (MAMBA_KEYS / 4));
    }
    // Every thread mixes a channel of C or B, the first ones also one of x.
    const u32 key_head = head / shape.group(), part = tid / MAMBA_KEYS;
    bf16* history = states.history(slot);
    Channel key(w, history, channels, (part * shape.key_heads + key_head) * MAMBA_KEYS + tid % MAMBA_KEYS, position);
    Channel value(w, history, channels, 2 * shape.key_heads * MAMBA_KEYS + head * DIM + tid % DIM, position);
    const float decay = w.decay[head], dt_bias = w.dt_bias[head], skip = w.skip[head];
    const u32 saved_tokens = IS_DECODE || saved == nullptr ? 0 : saved[0];
    pdl_wait();
    for (u32 token = first; token < end; ++token) {
        const u32 set = token & 1;
        const bf16* in = inputs + (u64)token * stride;
        float* mixed = shared.mixed[set];
        {
            const bf16 own = in[key.index];
            mixed[tid] = key.mixed(own);
            // One value head of a group stores C and B.
            if (IS_DECODE && head % shape.group() == 0) history[position % CONV_TAPS * channels + key.index] = own;
        }
        if (tid < DIM) {
            const bf16 own = in[value.index];
            mixed[2 * MAMBA_KEYS + tid] = value.mixed(own);
            if (IS_DECODE) history[position % CONV_TAPS * channels + value.index] = own;
        } else if (tid == MAMBA_THREADS - 1) {
            const float step = softplus(to_f32(dt[(u64)token * shape.value_heads + head]) + dt_bias);
            shared.gates[set][0] = step, shared.gates[set][1] = expf(decay * step);
        }
        __syncthreads();
        const float4 c = reinterpret_cast<const float4*>(mixed)[lane], b = reinterpret_cast<const float4*>(mixed + MAMBA_KEYS)[lane];
        const float step = shared.gates[set][0], g = shared.gates[set][1];
        const float* x = mixed + 2 * MAMBA_KEYS + own_row;
        float o = 0.0f;  // of row `lane`
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            const float added = step * x[i];
            s[i].x = g * s[i].x + b.x * added, s[i].y = g * s[i].y + b.y * added;
            s[i].z = g * s[i].z + b.z * added, s[i].w = g * s[i].w + b.w * added;
            const float read = warp_sum(c.x * s[i].x + c.y * s[i].y + c.z * s[i].z + c.w * s[i].w);
            if (lane == i) o = read + skip * x[i];
        }
        if (lane < ROWS) out[((u64)token * shape.value_heads + head) * DIM + own_row + lane] = to_bf16(o);
        if (!IS_DECODE && token + 1 == first + saved_tokens) {
            float4* to = reinterpret_cast<float4*>(mamba_head_state(states, shape, saved[1], head) + own_row * MAMBA_KEYS) + lane;
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i) __stcs(to + i * (MAMBA_KEYS / 4), s[i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) __stcs(from + i * (MAMBA_KEYS / 4), s[i]);
}

template <u32 DIM>
__device__ __forceinline__ void mamba_decode(bf16* out, const bf16* inputs, const bf16* dt, const MambaWeights& weights,
                                             const RecurrentStates& states, const MambaShape& shape, const u32* positions,
                                             u32 first_token) {
    __shared__ MambaShared<DIM> shared;
    pdl_launch();
    const u32 token = first_token + blockIdx.y, slot = states.slots[blockIdx.y];
    if (slot == 0xffffffffu) {
        pdl_wait();
        if (threadIdx.x < DIM) out[((u64)token * shape.value_heads + blockIdx.x) * DIM + threadIdx.x] = to_bf16(0.0f);
        return;
    }
    mamba_head<DIM, true>(shared, out, inputs, dt, weights, states, shape, slot, positions[token], token, token + 1, nullptr);
}

template <u32 DIM>
__device__ __forceinline__ void mamba_rows(bf16* out, const bf16* inputs, const bf16* dt, const MambaWeights& weights,
                                           const RecurrentStates& states, const MambaShape& shape, const u32* positions,
                                           const u32* row_starts, const u32* saved) {
    __shared__ MambaShared<DIM> shared;
    pdl_launch();
    const u32 first = row_starts[blockIdx.y], end = row_starts[blockIdx.y + 1];
    if (first >= end) {
        // There are at most as many rows as tokens, and padding comes last. So the row with the number of a padding token is padding.
        if (saved != nullptr && blockIdx.y >= first && threadIdx.x < DIM) {
            pdl_wait();
            out[((u64)blockIdx.y * shape.value_heads + blockIdx.x) * DIM + threadIdx.x] = to_bf16(0.0f);
        }
        return;
    }
    if (saved != nullptr) saved += 2 * blockIdx.y;
    const u32 slot = states.slots[blockIdx.y];
    mamba_head<DIM, false>(shared, out, inputs, dt, weights, states, shape, slot, positions[first], first, end, saved);
}

#define MAMBA2(DIM) \
    extern "C" __global__ void __launch_bounds__(MAMBA_THREADS) mamba2_decode_bf16_d##DIM( \
        bf16* out, const bf16* inputs, const bf16* dt, MambaWeights weights, RecurrentStates states, MambaShape shape, \
        const u32* positions, u32 first_token) { \
        mamba_decode<DIM>(out, inputs, dt, weights, states, shape, positions, first_token); \
    } \
    extern "C" __global__ void __launch_bounds__(MAMBA_THREADS) mamba2_rows_bf16_d##DIM( \
        bf16* out, const bf16* inputs, const bf16* dt, MambaWeights weights, RecurrentStates states, MambaShape shape, \
        const u32* positions, const u32* row_starts, const u32* saved) { \
        mamba_rows<DIM>(out, inputs, dt, weights, states, shape, positions, row_starts, saved); \
    }

MAMBA2(64)
MAMBA2(80)
MAMBA2(128)

// y of eight neighbouring elements. Where o is 0, so is y: the gates of padding may be anything.
__device__ __forceinline__ void gate8(float (&y)[8], const bf16* out, const bf16* gates) {
    const uint4 o = *reinterpret_cast<const uint4*>(out), z = *reinterpret_cast<const uint4*>(gates);
    const u32 os[4] = {o.x, o.y, o.z, o.w}, zs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const float own[2] = {unpack_lo(os[i]), unpack_hi(os[i])}, gate[2] = {unpack_lo(zs[i]), unpack_hi(zs[i])};
#pragma unroll
        for (u32 e = 0; e < 2; ++e) y[2 * i + e] = own[e] == 0.0f ? 0.0f : own[e] * gate[e] * sigmoid(gate[e]);
    }
}

// Vectors of eight elements of a thread, so that a norm has up to 16 384 elements.
constexpr u32 NORM_THREADS = 1024, NORM_PARTS = 2;

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    mamba2_norm_bf16(bf16* out, const bf16* inputs, const float* norm, MambaShape shape, u32 norm_width, float eps, u32 first_token,
                     const u32* row_starts) {
    __shared__ float sums[NORM_THREADS / 32];
    pdl_launch();
    const u32 token = first_token + blockIdx.x, first = blockIdx.y * norm_width, tid = threadIdx.x, warps = blockDim.x / 32;
    pdl_wait();
    if (row_starts != nullptr && token < row_starts[0]) return;
    bf16* own = out + (u64)token * shape.width() + first;
    const bf16* gates = inputs + (u64)token * shape.stride() + shape.channels() + first;
    float y[NORM_PARTS][8], squares = 0.0f;
#pragma unroll
    for (u32 part = 0; part < NORM_PARTS; ++part) {
        const u32 i = 8 * (part * blockDim.x + tid);
        if (i >= norm_width) break;
        gate8(y[part], own + i, gates + i);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) squares += y[part][e] * y[part][e];
    }
    squares = warp_sum(squares);
    if (tid % 32 == 0) sums[tid / 32] = squares;
    __syncthreads();
    const float sum = warp_sum(tid % 32 < warps ? sums[tid % 32] : 0.0f), scale = rsqrtf(sum / norm_width + eps);
#pragma unroll
    for (u32 part = 0; part < NORM_PARTS; ++part) {
        const u32 i = 8 * (part * blockDim.x + tid);
        if (i >= norm_width) break;
        const float4* weights = reinterpret_cast<const float4*>(norm + first + i);
        const float4 a = weights[0], b = weights[1];
        const float* x = y[part];
        uint4 normed;
        normed.x = pack_bf16x2(x[0] * scale * a.x, x[1] * scale * a.y), normed.y = pack_bf16x2(x[2] * scale * a.z, x[3] * scale * a.w);
        normed.z = pack_bf16x2(x[4] * scale * b.x, x[5] * scale * b.y), normed.w = pack_bf16x2(x[6] * scale * b.z, x[7] * scale * b.w);
        *reinterpret_cast<uint4*>(own + i) = normed;
    }
}
