// sample_argmax_f32, sample_greedy: the likeliest token of each row that its mask allows, lowest id on a tie
// sample_join: computes a row's token counts when a sequence takes the row
//
// logits       [S, P] f32: this worker's share of P tokens
// pairs        [G, S, C] u64: order-preserving bits of the value, then the complement of the token; C chunks of the share of each of G workers
// rows, num_generated, params, last_tokens, history, counts, outputs, masks: as sample_any.cu describes
// determinism  the largest pair does not depend on any order, so workers with equal logits choose equal tokens
// launch       sample_argmax_f32: grid (S, C), block 256; sample_greedy: grid S, block 32; sample_join: grid 1, block 1024
// bound        memory: 4 V bytes a row
// test         tests/cuda_sample.rs
// archs: 80 90a 100a ptx
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(256)
sample_argmax_f32(u64* pairs, const float* logits, u32 share, u32 stride, u32 first_token, const u32* mask_rows,
                  const u32* masks, u32 mask_words) {
    __shared__ u64 scratch[32];
    const u32 s = blockIdx.x, chunks = gridDim.y;
    const u32 length = (share + chunks - 1) / chunks, begin = blockIdx.y * length;
    const u32 end = begin + length < share ? begin + length : share;
    const float* row = logits + (u64)s * stride;
    pdl_launch();
    pdl_wait();
    u64 best = 0;
    const u32* mask = mask_rows == nullptr || mask_rows[s] == NO_MASK ? nullptr : masks + (u64)mask_rows[s] * mask_words;
    if (mask == nullptr) {
#pragma unroll 4
        for (u32 v = begin + threadIdx.x; v < end; v += 256) best = max_u64(best, pair_of(row[v], first_token + v));
    } else {
#pragma unroll 4
        for (u32 v = begin + threadIdx.x; v < end; v += 256) {
            const u32 token = first_token + v;
            const bool allowed = mask[token / 32] >> token % 32 & 1;
            best = max_u64(best, pair_of(allowed ? row[v] : -INFINITY_F, token));
        }
    }
    best = block_max_u64(best, scratch);
    if (threadIdx.x == 0) pairs[(u64)s * chunks + blockIdx.y] = best;
}

extern "C" __global__ void __launch_bounds__(32) sample_greedy(SampleArgs a, const u64* pairs, u32 groups, u32 chunks) {
    const u32 s = blockIdx.x;
    pdl_launch();
    pdl_wait();
    u64 best = 0;
    for (u32 i = threadIdx.x; i < groups * chunks; i += 32)
        best = max_u64(best, pairs[((u64)(i / chunks) * a.num_samples + s) * chunks + i % chunks]);
    best = warp_max_u64(best);
    if (threadIdx.x != 0) return;
    append(a, s, token_of(best));
    *output_of(a, s).token = token_of(best);
}

extern "C" __global__ void __launch_bounds__(1024)
sample_join(u32* counts, const u32* history, u32 vocab, u32 num_prompt, u32 num_tokens) {
    pdl_launch();
    pdl_wait();
    for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) counts[v] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < num_tokens; i += blockDim.x) {
        if (history[i] >= vocab) continue;
        if (i < num_prompt)
            atomicOr(counts + history[i], PROMPT_BIT);
        else
            atomicAdd(counts + history[i], 1u);
    }
}
