// short_conv_decode_bf16: one layer of LFM2 with a short convolution, behind its projections, for rows of one token
// short_conv_rows_bf16:   the same for rows of several tokens
//
// in      in[t, c] = x[t, c] * B[t, c]
// out     out[t, c] = C[t, c] * (bias[c] + sum over j of taps[j, c] * in[t - 2 + j, c])
//
// inputs  [T, 2 W] bf16: x, B
// gates   [T, W] bf16: C
// out     [T, W] bf16
// weights taps [3, W], bias [W] or null, f32
// slots   of a layer: in [2, W] f32, that of position p in row p % 2. u32::MAX marks a padding row: its output is 0. Of several
//         tokens, padding rows have none, and begin where the tokens of the other rows end
// saved   [R, 2] u32 or null: after so many tokens of a row, its state is stored in another slot, too; 0 tokens: it is not
// maths   fp32 in one order for each token, and in is exact, so a row's result does not depend on how it is cut into steps, or on
//         other rows
// launch  a thread has eight channels, a block the first or next eight tokens of a row. decode: grid (R, ceil(W / 512)), block 64;
//         rows: grid (T / 8 + R, ceil(W / 512)), block 64
// races   only the thread with a row's first tokens reads and writes its channels of the row's slot and of a saved one; the others
//         take the inputs before theirs from the step
// needs   W % 8 == 0, pointers aligned to 16 bytes, slots that differ: checked in short_conv.rs before launch
// bound   memory: rows 8 W bytes for each token, decode 20 W
// test    tests/cuda_short_conv.rs against reference::short_conv
// archs: 80 90a 100a ptx
#include "recurrent.cuh"

constexpr u32 TAPS = 3, EARLIER = TAPS - 1, CHANNELS = 8, TILE = 8, THREADS = 64;

struct Channels {
    float v[CHANNELS];
};

__device__ __forceinline__ Channels load(const float* from) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

__device__ __forceinline__ void store(float* to, const Channels& x) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

struct ShortConv {
    bf16* out;
    const bf16 *inputs, *gates;
    const float *taps, *bias;
    RecurrentStates states;
    const u32* positions;
    u32 width;

    __device__ Channels input(u32 token, u32 channel) const {
        const bf16* from = inputs + (u64)token * 2 * width + channel;
        const bf16x8 x = load8(from), gate = load8(from + width);
        Channels product;
#pragma unroll
        for (u32 c = 0; c < CHANNELS; ++c) product.v[c] = to_f32(x.v[c]) * to_f32(gate.v[c]);
        return product;
    }

    __device__ float* history(u32 slot, u32 position, u32 channel) const {
        return states.base + slot * states.pitch + position % EARLIER * width + channel;
    }
};

// Tokens from `start + TILE * tile` on of a row of tokens `start..end`.
__device__ __forceinline__ void short_conv_tile(const ShortConv& layer, u32 channel, u32 slot, u32 start, u32 end, u32 tile,
                                                const u32* saved) {
    const u32 position = layer.positions[start], first = start + tile * TILE, stop = min(first + TILE, end);
    Channels taps[TAPS], bias = {}, earlier[EARLIER] = {};  // oldest first
#pragma unroll
    for (u32 j = 0; j < TAPS; ++j) taps[j] = load(layer.taps + j * layer.width + channel);
    if (layer.bias != nullptr) bias = load(layer.bias + channel);
    if (tile == 0) {
#pragma unroll
        for (u32 j = 0; j < EARLIER; ++j) {
            const u32 back = EARLIER - j;
            if (position >= back) earlier[j] = load(layer.history(slot, position - back, channel));
        }
    }
    pdl_wait();
    if (tile > 0) {
#pragma unroll
        for (u32 j = 0; j < EARLIER; ++j) earlier[j] = layer.input(first - EARLIER + j, channel);
    }
    for (u32 token = first; token < stop; ++token) {
        const u64 place = (u64)token * layer.width + channel;
        const Channels own = layer.input(token, channel);
        const bf16x8 gate = load8(layer.gates + place);
        bf16x8 out;
#pragma unroll
        for (u32 c = 0; c < CHANNELS; ++c) {
            float sum = bias.v[c];
#pragma unroll
            for (u32 j = 0; j < EARLIER; ++j) sum = fmaf(taps[j].v[c], earlier[j].v[c], sum);
            sum = fmaf(taps[EARLIER].v[c], own.v[c], sum);
            out.v[c] = to_bf16(to_f32(gate.v[c]) * sum);
        }
        store8(layer.out + place, out);
#pragma unroll
        for (u32 j = 0; j + 1 < EARLIER; ++j) earlier[j] = earlier[j + 1];
        earlier[EARLIER - 1] = own;
    }
    if (tile > 0) return;
    const u32 saved_tokens = saved == nullptr ? 0 : saved[0];
    if (saved_tokens > 0) {
        // Inputs before the step are in the row's own slot, which is written below.
        const u32 next = position + saved_tokens;
        for (u32 back = 1; back <= EARLIER && back <= next; ++back) {
            const bool is_new = back <= saved_tokens;
            store(layer.history(saved[1], next - back, channel),
                  is_new ? layer.input(start + saved_tokens - back, channel) : load(layer.history(slot, next - back, channel)));
        }
    }
    const u32 next = position + (end - start);
#pragma unroll
    for (u32 j = 0; j < EARLIER; ++j) {
        const u32 back = EARLIER - j;
        if (back > end - start) continue;
        store(layer.history(slot, next - back, channel), stop < end ? layer.input(end - back, channel) : earlier[j]);
    }
}

__device__ __forceinline__ void store_zeros(const ShortConv& layer, u32 token, u32 channel) {
    pdl_wait();
    store8(layer.out + (u64)token * layer.width + channel, bf16x8{});
}

extern "C" __global__ void __launch_bounds__(THREADS) short_conv_decode_bf16(ShortConv layer, u32 first_token) {
    pdl_launch();
    const u32 channel = (blockIdx.y * THREADS + threadIdx.x) * CHANNELS;
    if (channel >= layer.width) return;
    const u32 token = first_token + blockIdx.x, slot = layer.states.slots[blockIdx.x];
    if (slot == 0xffffffffu) return store_zeros(layer, token, channel);
    short_conv_tile(layer, channel, slot, token, token + 1, 0, nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_rows_bf16(ShortConv layer, const u32* row_starts, u32 rows, const u32* saved) {
    pdl_launch();
    const u32 channel = (blockIdx.y * THREADS + threadIdx.x) * CHANNELS;
    if (channel >= layer.width) return;
    // Row r has the blocks from first_block(r) on: at least one, and one for each tile. The last row that begins at or before this one:
    const auto first_block = [&](u32 row) { return (row_starts[row] - row_starts[0]) / TILE + row; };
    u32 row = 0;
    for (u32 end = rows; end - row > 1;) {
        const u32 middle = (row + end) / 2;
        if (first_block(middle) <= blockIdx.x) {
            row = middle;
        } else {
            end = middle;
        }
    }
    const u32 start = row_starts[row], end = row_starts[row + 1], tile = blockIdx.x - first_block(row);
    if (start >= end) {
        // There are at most as many rows as tokens, and padding comes last. So the row with the number of a padding token is padding.
        if (saved != nullptr && row >= start && tile == 0) store_zeros(layer, row, channel);
        return;
    }
    if (start + tile * TILE >= end) return;
    short_conv_tile(layer, channel, layer.states.slots[row], start, end, tile, saved == nullptr ? nullptr : saved + 2 * row);
}
