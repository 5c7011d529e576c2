// The convolution of a layer with a recurrent state over the tokens of a chunk.
//
// x[t, c] = silu(bias[c] + sum over j of w[j, c] * in[t - 3 + j, c])
#pragma once
#include "recurrent.cuh"
#include "recurrent_chunks.cuh"

__device__ __forceinline__ float silu_fast(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ uint2 load4(const bf16* p) { return *reinterpret_cast<const uint2*>(p); }

__device__ __forceinline__ uint2 pack4(const float (&x)[4]) { return make_uint2(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3])); }

// Inputs [T, stride], of which the first `channels` columns are mixed, and weights [4, channels], [channels] or null.
struct Conv {
    const bf16* inputs;
    u32 stride, channels;
    const float *weights, *bias;
};

// Tokens of a chunk whose convolution a warp computes for 128 channels, four for each lane.
constexpr u32 TOKENS = 8;

struct ConvInputs {
    uint2 x[TOKENS + 3];
    float taps[CONV_TAPS][4], bias[4];

    // From the token that is `first` behind the first of the chunk, at `start`, which has `count`.
    __device__ ConvInputs(const Conv& conv, const bf16* history, const ChunkRow& row, u32 start, u32 count, u32 first, u32 channel) {
        const bf16* from = conv.inputs + (u64)(start + first) * conv.stride + channel;
#pragma unroll
        for (u32 j = 0; j < TOKENS; ++j, from += conv.stride) x[j + 3] = first + j < count ? load4(from) : uint2{};
#pragma unroll
        for (u32 j = 0; j < 3; ++j) {
            const u32 back = 3 - j;
            x[j] = uint2{};
            if (first >= count) continue;
            if (start + first >= row.first + back) {
                x[j] = load4(conv.inputs + (u64)(start + first - back) * conv.stride + channel);
            } else if (row.position + start + first >= row.first + back) {
                const u32 position = row.position + start + first - row.first - back;
                x[j] = load4(history + position % CONV_TAPS * conv.channels + channel);
            }
        }
        const auto load = [&](float (&to)[4], const float* from) {
            const float4 v = *reinterpret_cast<const float4*>(from + channel);
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        };
#pragma unroll
        for (u32 j = 0; j < CONV_TAPS; ++j) load(taps[j], conv.weights + j * conv.channels);
        if (conv.bias != nullptr) {
            load(bias, conv.bias);
        } else {
            bias[0] = bias[1] = bias[2] = bias[3] = 0.0f;
        }
    }

    // silu of the convolution at token i.
    __device__ void mixed(float (&y)[4], u32 i) const {
#pragma unroll
        for (u32 c = 0; c < 4; ++c) y[c] = bias[c];
#pragma unroll
        for (u32 j = 0; j < CONV_TAPS; ++j) {
            y[0] += taps[j][0] * unpack_lo(x[i + j].x), y[1] += taps[j][1] * unpack_hi(x[i + j].x);
            y[2] += taps[j][2] * unpack_lo(x[i + j].y), y[3] += taps[j][3] * unpack_hi(x[i + j].y);
        }
#pragma unroll
        for (u32 c = 0; c < 4; ++c) y[c] = silu_fast(y[c]);
    }
};
