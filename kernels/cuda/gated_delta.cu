// gated_delta_decode_bf16: one layer of Gated DeltaNet (Yang et al. 2024) behind its projections, for rows of one token
// gated_delta_rows_bf16:   the same for rows of several tokens, which it computes in order
// gated_delta_chunks_bf16: the same in chunks of 64 positions on tensor cores, without the norm, which gated_delta_norm_bf16 computes
// gated_delta_history_bf16: stores the last inputs of rows of several tokens
//
// conv    x[t, c] = silu(sum over j of w[j, c] * in[t - 3 + j, c]) for the channels q | k | v
// heads   q, k = x / sqrt(sum x^2 + 1e-6), q = q / sqrt(128); neighbouring value heads share a key head
// gates   beta = sigmoid(b), g = exp(decay * softplus(a + dt_bias)), decay = -exp(A_log)
// state   S = g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q
// out     o * rsqrt(mean(o^2) + eps) * norm * silu(z)
//
// qkvz    [T, C + 128 V] bf16: q of K key heads, k, v of V value heads, z;  C = 256 K + 128 V
// ba      [T, 2 V] bf16: b, a
// out     [T, 128 V] bf16
// slots   of a layer: the history [4, C] bf16, where the input of position p is in row p % 4; then, behind 3 C words, S [V, 128, 128]
//         f32. A decode writes the row of the history that no block of its step reads. u32::MAX marks a padding row: its output is 0
// weights conv [4, C], decay [V], dt_bias [V], norm [128], all f32
// maths   decode, rows: fp32 in one order for each token, so a row's result does not depend on how it is cut into steps
//         chunks: bf16 operands, fp32 sums and S, triangular systems in fp32; output in bf16 before its norm. Chunks end at multiples of
//         64 positions, so steps that are cut there give the same
//         no result depends on other rows
// launch  decode, rows: grid (V, R), block 512: four threads for a column of S, 32 elements each, in registers;
//         chunks: grid (2 V, R), block 256, 96 KiB of dynamic shared memory; norm: grid ceil(T V / 8), block 256
//         history: grid (ceil(C / 256), R), block 256
// needs   sizes as above, pointers aligned to their elements: checked in gated_delta.rs before launch
// bound   decode: memory, 128 KiB for each row and value head. S is read before the inputs arrive.
//         rows: about 1 000 clocks for each token
// test    tests/cuda_gated_delta.rs against reference::gated_delta
// archs: 80 90a 100a ptx
#include "mma.cuh"

constexpr u32 DELTA_DIM = 128, DELTA_TAPS = 4;
// Threads that hold a column of S, the rows 16 i + 4 part + j.
constexpr u32 DELTA_PARTS = 4, DELTA_THREADS = DELTA_DIM * DELTA_PARTS;
constexpr u32 DELTA_ROWS = DELTA_DIM / DELTA_PARTS;

struct DeltaShape {
    u32 key_heads, value_heads;

    __device__ u32 group() const { return value_heads / key_heads; }
    __device__ u32 channels() const { return (2 * key_heads + value_heads) * DELTA_DIM; }
    __device__ u32 stride() const { return channels() + value_heads * DELTA_DIM; }
};

struct DeltaWeights {
    const float *conv, *decay, *dt_bias, *norm;
    float eps;
};

// States of one layer; slots are `pitch` floats apart.
struct DeltaStates {
    float* base;
    u64 pitch;
    const u32* slots;

    __device__ bf16* history(u32 slot) const { return reinterpret_cast<bf16*>(base + slot * pitch); }
    __device__ float* head(u32 slot, const DeltaShape& shape, u32 head) const {
        return base + slot * pitch + 3 * shape.channels() + (u64)head * DELTA_DIM * DELTA_DIM;
    }
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// The channel of element `i` of q | k | v of a value head.
__device__ __forceinline__ u32 delta_channel(const DeltaShape& shape, u32 head, u32 i) {
    const u32 key_head = head / shape.group(), part = i / DELTA_DIM, own = i % DELTA_DIM;
    if (part == 2) return (2 * shape.key_heads + head) * DELTA_DIM + own;
    return (part * shape.key_heads + key_head) * DELTA_DIM + own;
}

struct DeltaShared {
    // Two sets, because a thread may begin the next token while others finish this one.
    float mixed[2][3 * DELTA_DIM];
    float squares[2][8];
    float gates[2][2];
    float out_squares[2][DELTA_THREADS / 32];
};

// Everything of one value head of one row but the history: tokens `first..end`.
template <bool IS_DECODE>
__device__ __forceinline__ void delta_head(DeltaShared& shared, bf16* out, const bf16* qkvz, const bf16* ba, const DeltaWeights& w,
                                           const DeltaStates& states, const DeltaShape& shape, u32 slot, u32 position, u32 first,
                                           u32 end) {
    const u32 head = blockIdx.x, tid = threadIdx.x, column = tid / DELTA_PARTS, part = tid % DELTA_PARTS, lane = tid % 32;
    const u32 channels = shape.channels(), stride = shape.stride();
    float* from = states.head(slot, shape, head) + column;
    float s[DELTA_ROWS];
#pragma unroll
    for (u32 i = 0; i < DELTA_ROWS; ++i) {
        const u32 row = i / 4 * 16 + part * 4 + i % 4;
        s[i] = position == 0 ? 0.0f : __ldcs(from + row * DELTA_DIM);
    }
    // Threads of the convolution: their channel, its taps and its earlier inputs.
    const bool mixes = tid < 3 * DELTA_DIM;
    const u32 channel = mixes ? delta_channel(shape, head, tid) : 0;
    float taps[DELTA_TAPS], inputs[DELTA_TAPS] = {};
    if (mixes) {
#pragma unroll
        for (u32 j = 0; j < DELTA_TAPS; ++j) taps[j] = w.conv[j * channels + channel];
        const bf16* history = states.history(slot) + channel;
#pragma unroll
        for (u32 j = 0; j + 1 < DELTA_TAPS; ++j) {
            const u32 back = DELTA_TAPS - 1 - j;
            if (position >= back) inputs[j] = to_f32(history[(position - back) % DELTA_TAPS * channels]);
        }
    }
    const float decay = w.decay[head], dt_bias = w.dt_bias[head], gain = w.norm[column];
    pdl_wait();
    for (u32 token = first; token < end; ++token) {
        const u32 set = token & 1;
        const bf16* in = qkvz + (u64)token * stride;
        if (mixes) {
            const bf16 own = in[channel];
            inputs[DELTA_TAPS - 1] = to_f32(own);
            float sum = 0.0f;
#pragma unroll
            for (u32 j = 0; j < DELTA_TAPS; ++j) sum += taps[j] * inputs[j];
            sum *= sigmoid(sum);
#pragma unroll
            for (u32 j = 0; j + 1 < DELTA_TAPS; ++j) inputs[j] = inputs[j + 1];
            shared.mixed[set][tid] = sum;
            const float squares = warp_sum(sum * sum);
            if (lane == 0 && tid < 2 * DELTA_DIM) shared.squares[set][tid / 32] = squares;
            // One value head of a group stores q and k.
            const bool stores = tid >= 2 * DELTA_DIM || head % shape.group() == 0;
            if (IS_DECODE && stores) states.history(slot)[position % DELTA_TAPS * channels + channel] = own;
        } else if (tid == 3 * DELTA_DIM) {
            const bf16* row = ba + (u64)token * 2 * shape.value_heads;
            shared.gates[set][0] = expf(decay * softplus(to_f32(row[shape.value_heads + head]) + dt_bias));
            shared.gates[set][1] = sigmoid(to_f32(row[head]));
        }
        const float z = part == 0 ? to_f32(in[channels + head * DELTA_DIM + column]) : 0.0f;
        __syncthreads();
        const float* squares = shared.squares[set];
        const float q_scale = rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + 1e-6f) * 0.08838834764831845f;
        const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + 1e-6f);
        float known = 0.0f, read = 0.0f, both = 0.0f;
#pragma unroll
        for (u32 i = 0; i < DELTA_ROWS; i += 4) {
            const u32 row = i * 4 + part * 4;
            const float4 q = *reinterpret_cast<const float4*>(&shared.mixed[set][row]);
            const float4 k = *reinterpret_cast<const float4*>(&shared.mixed[set][DELTA_DIM + row]);
            known += s[i] * k.x + s[i + 1] * k.y + s[i + 2] * k.z + s[i + 3] * k.w;
            read += s[i] * q.x + s[i + 1] * q.y + s[i + 2] * q.z + s[i + 3] * q.w;
            both += k.x * q.x + k.y * q.y + k.z * q.z + k.w * q.w;
        }
#pragma unroll
        for (u32 d = 1; d < DELTA_PARTS; d *= 2) {
            known += __shfl_xor_sync(FULL_WARP, known, d);
            read += __shfl_xor_sync(FULL_WARP, read, d);
            both += __shfl_xor_sync(FULL_WARP, both, d);
        }
        const float g = shared.gates[set][0], beta = shared.gates[set][1];
        const float added = beta * (shared.mixed[set][2 * DELTA_DIM + column] - g * k_scale * known);
        const float k_added = k_scale * added;
#pragma unroll
        for (u32 i = 0; i < DELTA_ROWS; i += 4) {
            const float4 k = *reinterpret_cast<const float4*>(&shared.mixed[set][DELTA_DIM + i * 4 + part * 4]);
            s[i] = g * s[i] + k.x * k_added;
            s[i + 1] = g * s[i + 1] + k.y * k_added;
            s[i + 2] = g * s[i + 2] + k.z * k_added;
            s[i + 3] = g * s[i + 3] + k.w * k_added;
        }
        const float o = q_scale * (g * read + both * k_added);
        const float out_squares = warp_sum(part == 0 ? o * o : 0.0f);
        if (lane == 0) shared.out_squares[set][tid / 32] = out_squares;
        __syncthreads();
        if (part == 0) {
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < DELTA_THREADS / 32; ++i) sum += shared.out_squares[set][i];
            const float normed = o * rsqrtf(sum / DELTA_DIM + w.eps) * gain;
            out[((u64)token * shape.value_heads + head) * DELTA_DIM + column] = to_bf16(normed * z * sigmoid(z));
        }
    }
#pragma unroll
    for (u32 i = 0; i < DELTA_ROWS; ++i) __stcs(from + (i / 4 * 16 + part * 4 + i % 4) * DELTA_DIM, s[i]);
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 1)
    gated_delta_decode_bf16(bf16* out, const bf16* qkvz, const bf16* ba, DeltaWeights weights, DeltaStates states, DeltaShape shape,
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
    delta_head<true>(shared, out, qkvz, ba, weights, states, shape, slot, positions[token], token, token + 1);
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 1)
    gated_delta_rows_bf16(bf16* out, const bf16* qkvz, const bf16* ba, DeltaWeights weights, DeltaStates states, DeltaShape shape,
                          const u32* positions, const u32* row_starts) {
    __shared__ DeltaShared shared;
    pdl_launch();
    const u32 first = row_starts[blockIdx.y], end = row_starts[blockIdx.y + 1];
    if (first >= end) return;
    delta_head<false>(shared, out, qkvz, ba, weights, states, shape, states.slots[blockIdx.y], positions[first], first, end);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_history_bf16(const bf16* qkvz, DeltaStates states, DeltaShape shape, const u32* positions, const u32* row_starts) {
    pdl_launch();
    const u32 first = row_starts[blockIdx.y], end = row_starts[blockIdx.y + 1], channels = shape.channels();
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (first >= end) return;
    pdl_wait();
    if (channel >= channels) return;
    bf16* history = states.history(states.slots[blockIdx.y]) + channel;
    for (u32 token = end - min(end - first, DELTA_TAPS - 1); token < end; ++token) {
        history[positions[token] % DELTA_TAPS * channels] = qkvz[(u64)token * shape.stride() + channel];
    }
}

// The same as gated_delta_rows_bf16 in chunks of 64 positions, on tensor cores. With G the running sum of log g in a chunk:
//   (I + A) U = beta (V - e^G K S),  A[t, j] = beta_t e^(G_t - G_j) (k_t . k_j) for j < t
//   O = e^G Q S + P U,               P[t, j] = e^(G_t - G_j) (q_t . k_j) for j <= t
//   S = e^G_end S + K^T (e^(G_end - G) U)
// A block has half of the columns of S in its registers.
constexpr u32 CHUNK = 64, HALF = DELTA_DIM / 2, WIDE = DELTA_DIM + 8, NARROW = HALF + 8, EXACT = HALF + 4;

struct DeltaChunk {
    bf16 k[CHUNK * WIDE];  // without the factor of its norm, as q
    union {
        bf16 q[CHUNK * WIDE];
        bf16 u[CHUNK * NARROW];
    };
    union {
        bf16 s[DELTA_DIM * NARROW];
        bf16 late_u[CHUNK * NARROW];  // times e^(G_end - G) and the factor of k
    };
    bf16 p[CHUNK * NARROW];
    float a[CHUNK * EXACT];
    float r[CHUNK * EXACT];  // v, then the right side, then U
    float sums[CHUNK];       // G
    float beta[CHUNK];
    float k_scale[CHUNK], q_scale[CHUNK];
};

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// c [16, 64] += a [16, 16 STEPS] b [16 STEPS, 64]; b is stored as rows of its first index.
template <u32 STEPS>
__device__ __forceinline__ void add_product(float (&c)[8][4], const u32 (&a)[STEPS][4], const bf16* b, u32 lane) {
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) {
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            u32 f[4];
            load_matrices_transposed(f, in_shared(b + (k * 16 + lane / 8 % 2 * 8 + lane % 8) * NARROW + n * 16 + lane / 16 * 8));
            mma_16x8x16(c[2 * n], a[k][0], a[k][1], a[k][2], a[k][3], f[0], f[1]);
            mma_16x8x16(c[2 * n + 1], a[k][0], a[k][1], a[k][2], a[k][3], f[2], f[3]);
        }
    }
}

// Solves (I + a) u = r in place, in fp32: sixteen rows at a time, first what earlier rows add, then the rows one after the other.
__device__ __forceinline__ void solve(DeltaChunk& m, u32 tid) {
    const u32 column = tid % HALF, part = tid / HALF;
#pragma unroll 1
    for (u32 first = 0; first < CHUNK; first += 16) {
        if (first > 0) {
            float sum[4] = {};
            for (u32 j = 0; j < first; j += 4) {
                float u[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) u[i] = m.r[(j + i) * EXACT + column];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const float4 a = *reinterpret_cast<const float4*>(&m.a[(first + part * 4 + i) * EXACT + j]);
                    sum[i] += a.x * u[0] + a.y * u[1] + a.z * u[2] + a.w * u[3];
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) m.r[(first + part * 4 + i) * EXACT + column] -= sum[i];
            __syncthreads();
        }
        if (part == 0) {
            float u[16];
#pragma unroll
            for (u32 i = 0; i < 16; ++i) {
                u[i] = m.r[(first + i) * EXACT + column];
                const float* a = &m.a[(first + i) * EXACT + first];
#pragma unroll
                for (u32 j = 0; j < i; ++j) u[i] -= a[j] * u[j];
                m.r[(first + i) * EXACT + column] = u[i];
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    gated_delta_chunks_bf16(bf16* out, const bf16* qkvz, const bf16* ba, DeltaWeights w, DeltaStates states, DeltaShape shape,
                            const u32* positions, const u32* row_starts) {
    extern __shared__ __align__(16) unsigned char memory[];
    DeltaChunk& m = *reinterpret_cast<DeltaChunk*>(memory);
    const u32 head = blockIdx.x / 2, first_column = blockIdx.x % 2 * HALF;
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const u32 first = row_starts[blockIdx.y], end = row_starts[blockIdx.y + 1];
    pdl_launch();
    if (first >= end) return;
    const u32 slot = states.slots[blockIdx.y], first_position = positions[first];
    const u32 channels = shape.channels(), stride = shape.stride();
    // Rows warp * 16 + g and + 8 of S, columns 8 n + 2 t and + 1.
    float* stored = states.head(slot, shape, head) + (warp * 16 + g) * DELTA_DIM + first_column + 2 * t;
    float s[8][4] = {};
    if (first_position > 0) {
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const float2 pair = *reinterpret_cast<const float2*>(stored + i * 8 * DELTA_DIM + n * 8);
                s[n][2 * i] = pair.x, s[n][2 * i + 1] = pair.y;
            }
        }
    }
    // A thread has a channel of q or k, whose last inputs it keeps, and a quarter of the tokens of a channel of v.
    const u32 channel = delta_channel(shape, head, tid);
    const u32 value = tid % HALF, value_channel = delta_channel(shape, head, 2 * DELTA_DIM + first_column + value);
    float taps[DELTA_TAPS], value_taps[DELTA_TAPS], x[DELTA_TAPS] = {};
#pragma unroll
    for (u32 j = 0; j < DELTA_TAPS; ++j) {
        taps[j] = w.conv[j * channels + channel], value_taps[j] = w.conv[j * channels + value_channel];
    }
    const bf16* history = states.history(slot);
    const float decay = w.decay[head], dt_bias = w.dt_bias[head];
    // The input of a channel at a token, or before the row's first one.
    auto input = [&](u32 token, u32 back, u32 of) {
        if (token >= first + back) return to_f32(qkvz[(u64)(token - back) * stride + of]);
        const u32 ago = first + back - token;
        return first_position >= ago ? to_f32(history[(first_position - ago) % DELTA_TAPS * channels + of]) : 0.0f;
    };
#pragma unroll
    for (u32 j = 1; j < DELTA_TAPS; ++j) x[j] = input(first, DELTA_TAPS - j, channel);
    pdl_wait();
    u32 count;
    for (u32 start = first; start < end; start += count) {
        count = min(end - start, CHUNK - (first_position + start - first) % CHUNK);
        // S for the products, and the convolution. Rows behind the last token are 0.
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                u32* to = reinterpret_cast<u32*>(&m.s[(warp * 16 + g + i * 8) * NARROW + n * 8 + 2 * t]);
                *to = pack_bf16x2(s[n][2 * i], s[n][2 * i + 1]);
            }
        }
        bf16* mixed = (tid < DELTA_DIM ? m.q : m.k) + tid % DELTA_DIM;
        for (u32 i = 0; i < CHUNK; i += 8) {
            bf16 own[8];
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                if (i + j < count) own[j] = qkvz[(u64)(start + i + j) * stride + channel];
            }
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                float sum = 0.0f;
                if (i + j < count) {
#pragma unroll
                    for (u32 tap = 0; tap + 1 < DELTA_TAPS; ++tap) x[tap] = x[tap + 1];
                    x[DELTA_TAPS - 1] = to_f32(own[j]);
#pragma unroll
                    for (u32 tap = 0; tap < DELTA_TAPS; ++tap) sum += taps[tap] * x[tap];
                }
                mixed[(i + j) * WIDE] = to_bf16(sum * sigmoid(sum));
            }
        }
        for (u32 i = tid / HALF * 16; i < tid / HALF * 16 + 16; ++i) {
            float sum = 0.0f;
            if (i < count) {
#pragma unroll
                for (u32 tap = 0; tap < DELTA_TAPS; ++tap) {
                    sum += value_taps[tap] * input(start + i, DELTA_TAPS - 1 - tap, value_channel);
                }
            }
            m.r[i * EXACT + value] = sum * sigmoid(sum);
        }
        if (warp == 0) {
            float log_decay[2];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const u32 token = 2 * lane + i;
                const bf16* row = ba + (u64)(start + min(token, count - 1)) * 2 * shape.value_heads + head;
                log_decay[i] = token < count ? decay * softplus(to_f32(row[shape.value_heads]) + dt_bias) : 0.0f;
                m.beta[token] = token < count ? sigmoid(to_f32(row[0])) : 0.0f;
            }
            float sum = log_decay[0] + log_decay[1];
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const float before = __shfl_up_sync(FULL_WARP, sum, d);
                if (lane >= d) sum += before;
            }
            m.sums[2 * lane] = sum - log_decay[1];
            m.sums[2 * lane + 1] = sum;
        }
        __syncthreads();
        {
            const u32 row = tid / 2 % CHUNK;
            const bf16* from = (tid < 2 * CHUNK ? m.k : m.q) + row * WIDE + tid % 2 * HALF;
            float squares = 0.0f;
#pragma unroll
            for (u32 i = 0; i < HALF; i += 8) {
                const bf16x8 part = load8(from + i);
#pragma unroll
                for (u32 j = 0; j < 8; ++j) squares += to_f32(part.v[j]) * to_f32(part.v[j]);
            }
            squares += __shfl_xor_sync(FULL_WARP, squares, 1);
            const float scale = rsqrtf(squares + 1e-6f);
            if (tid < 2 * CHUNK) m.k_scale[row] = scale;
            else m.q_scale[row] = scale * 0.08838834764831845f;
        }
        __syncthreads();
        // Warps 0 to 3 multiply sixteen rows of K each, the others of Q: by K, and by S.
        const u32 row = warp % 4 * 16;
        const bool has_q = warp >= 4;
        float by_state[8][4] = {};
        {
            u32 a[8][4];
            const bf16* rows = (has_q ? m.q : m.k) + (row + lane / 8 % 2 * 8 + lane % 8) * WIDE + lane / 16 * 8;
#pragma unroll
            for (u32 k = 0; k < 8; ++k) load_matrices(a[k], in_shared(rows + k * 16));
            add_product<8>(by_state, a, m.s, lane);
            const float* scales = has_q ? m.q_scale : m.k_scale;
            const float own_sum[2] = {m.sums[row + g], m.sums[row + g + 8]};
            const float own_scale[2] = {scales[row + g], scales[row + g + 8]};
            const float beta[2] = {m.beta[row + g], m.beta[row + g + 8]};
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                float by_key[2][4] = {};
#pragma unroll
                for (u32 k = 0; k < 8; ++k) {
                    u32 f[4];
                    load_matrices(f, in_shared(&m.k[(n * 16 + lane / 16 * 8 + lane % 8) * WIDE + k * 16 + lane / 8 % 2 * 8]));
                    mma_16x8x16(by_key[0], a[k][0], a[k][1], a[k][2], a[k][3], f[0], f[1]);
                    mma_16x8x16(by_key[1], a[k][0], a[k][1], a[k][2], a[k][3], f[2], f[3]);
                }
#pragma unroll
                for (u32 c = 0; c < 2; ++c) {
                    const u32 j = n * 16 + c * 8 + 2 * t;
#pragma unroll
                    for (u32 i = 0; i < 2; ++i) {
                        const u32 own = row + g + i * 8;
                        float product[2];
#pragma unroll
                        for (u32 e = 0; e < 2; ++e) {
                            const bool is_before = has_q ? j + e <= own : j + e < own;
                            const float factor = own_scale[i] * m.k_scale[j + e] * expf(own_sum[i] - m.sums[j + e]);
                            product[e] = is_before ? by_key[c][2 * i + e] * factor : 0.0f;
                        }
                        if (has_q) {
                            *reinterpret_cast<u32*>(&m.p[own * NARROW + j]) = pack_bf16x2(product[0], product[1]);
                        } else {
                            m.a[own * EXACT + j] = beta[i] * product[0], m.a[own * EXACT + j + 1] = beta[i] * product[1];
                        }
                    }
                }
            }
#pragma unroll
            for (u32 n = 0; n < 8; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    by_state[n][i] *= own_scale[i / 2] * expf(own_sum[i / 2]);
                    float* r = &m.r[(row + g + i / 2 * 8) * EXACT + n * 8 + 2 * t + i % 2];
                    if (!has_q) *r = beta[i / 2] * (*r - by_state[n][i]);
                }
            }
        }
        __syncthreads();
        solve(m, tid);
        const float end_sum = m.sums[CHUNK - 1];
        for (u32 i = tid / HALF; i < CHUNK; i += 4) {
            const float u = m.r[i * EXACT + value];
            m.u[i * NARROW + value] = to_bf16(u);
            m.late_u[i * NARROW + value] = to_bf16(u * m.k_scale[i] * expf(end_sum - m.sums[i]));
        }
        __syncthreads();
        if (has_q) {
            u32 a[4][4];
            const bf16* rows = m.p + (row + lane / 8 % 2 * 8 + lane % 8) * NARROW + lane / 16 * 8;
#pragma unroll
            for (u32 k = 0; k < 4; ++k) load_matrices(a[k], in_shared(rows + k * 16));
            add_product<4>(by_state, a, m.u, lane);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                if (row + g + i * 8 >= count) continue;
                bf16* to = out + ((u64)(start + row + g + i * 8) * shape.value_heads + head) * DELTA_DIM + first_column + 2 * t;
#pragma unroll
                for (u32 n = 0; n < 8; ++n) {
                    *reinterpret_cast<u32*>(to + n * 8) = pack_bf16x2(by_state[n][2 * i], by_state[n][2 * i + 1]);
                }
            }
        }
        {
            const float factor = expf(end_sum);
#pragma unroll
            for (u32 n = 0; n < 8; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) s[n][i] *= factor;
            }
            u32 a[4][4];
            const bf16* columns = m.k + (lane / 16 * 8 + lane % 8) * WIDE + warp * 16 + lane / 8 % 2 * 8;
#pragma unroll
            for (u32 k = 0; k < 4; ++k) load_matrices_transposed(a[k], in_shared(columns + k * 16 * WIDE));
            add_product<4>(s, a, m.late_u, lane);
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            *reinterpret_cast<float2*>(stored + i * 8 * DELTA_DIM + n * 8) = make_float2(s[n][2 * i], s[n][2 * i + 1]);
        }
    }
}

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
