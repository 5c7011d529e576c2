// recurrent_history_bf16: stores the last inputs of a layer's convolution (recurrent.cuh) for rows of several tokens
//
// inputs  [T, stride] bf16, of which the first `channels` columns are mixed
// saved   [R, 2] u32 or null: the inputs before so many tokens of a row are stored in another slot, too; 0 tokens: they are not
// launch  grid (ceil(C / 256), R), block 256
// needs   checked in recurrent.rs and by the callers' checks of states
// bound   latency
// test    tests/cuda_gated_delta.rs, tests/cuda_mamba2.rs: rows in several steps
// archs: 80 90a 100a ptx
#include "recurrent.cuh"

struct HistorySizes {
    u32 channels, stride;
};

extern "C" __global__ void __launch_bounds__(256)
    recurrent_history_bf16(const bf16* inputs, RecurrentStates states, HistorySizes sizes, const u32* positions, const u32* row_starts,
                           const u32* saved) {
    pdl_launch();
    const u32 first = row_starts[blockIdx.y], end = row_starts[blockIdx.y + 1], channels = sizes.channels;
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (first >= end) return;
    pdl_wait();
    if (channel >= channels) return;
    bf16* history = states.history(states.slots[blockIdx.y]) + channel;
    const u32 saved_tokens = saved == nullptr ? 0 : saved[2 * blockIdx.y];
    if (saved_tokens > 0) {
        // Inputs before the step are in the row's own history, which is written below.
        bf16* to = states.history(saved[2 * blockIdx.y + 1]) + channel;
        const u32 next = positions[first] + saved_tokens;
        for (u32 back = 1; back < CONV_TAPS && back <= next; ++back) {
            const u32 place = (next - back) % CONV_TAPS * channels;
            to[place] = back <= saved_tokens ? inputs[(u64)(first + saved_tokens - back) * sizes.stride + channel] : history[place];
        }
    }
    for (u32 token = end - min(end - first, CONV_TAPS - 1); token < end; ++token) {
        history[positions[token] % CONV_TAPS * channels] = inputs[(u64)token * sizes.stride + channel];
    }
}
