// The choice of a token's experts by one warp.
#pragma once
#include "common.cuh"

// The largest value of the warp, and the lowest index that has it.
__device__ __forceinline__ void warp_likeliest(float& value, u32& index) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const float other = __shfl_xor_sync(FULL_WARP, value, d);
        const u32 at = __shfl_xor_sync(FULL_WARP, index, d);
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
}

// A choice; lane i of a warp has the choice that is i-th in the order of `place`.
struct Choice {
    u32 expert;
    float probability;
    u32 place;  // number of lower experts among the choices
};

// How experts are chosen.
struct Router {
    const bf16* bias;  // [count], added to the logits, or null
    u32 count, top_k, is_normalized;
};

// The `top_k` likeliest experts of `logits [count]`, the lower one of equals: lane i < top_k returns one of them. Up to
// 32 OWN experts.
template <int OWN>
__device__ __forceinline__ Choice choose_experts(const float* logits, const Router& router) {
    const u32 lane = threadIdx.x % 32, count = router.count;
    float own[OWN];  // of experts lane, lane + 32, ...
    float max = -INFINITY_F;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 expert = lane + 32 * i;
        own[i] = expert < count ? logits[expert] + (router.bias ? to_f32(router.bias[expert]) : 0.0f) : -INFINITY_F;
        max = fmaxf(max, own[i]);
    }
    max = warp_max(max);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = expf(own[i] - max);
        total += own[i];
        if (lane + 32 * i >= count) own[i] = -1.0f;
    }
    total = warp_sum(total);

    Choice choice{0xffffffffu, 0.0f, 0};
    float sum = 0.0f;
    for (u32 turn = 0; turn < router.top_k; ++turn) {
        float best = -2.0f;
        u32 at = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (own[i] > best) best = own[i], at = lane + 32 * i;
        }
        warp_likeliest(best, at);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (lane + 32 * i == at) own[i] = -1.0f;
        }
        if (lane == turn) choice.expert = at, choice.probability = best / total;
        sum += best / total;
    }
    if (router.is_normalized) choice.probability /= sum;
    for (u32 i = 0; i < router.top_k; ++i) choice.place += __shfl_sync(FULL_WARP, choice.expert, i) < choice.expert;
    return choice;
}

// The same for any number of experts up to 512; no expert (`count`) for padding, whose slot is u32::MAX.
__device__ __forceinline__ Choice choose_experts(const float* logits, u32 slot, const Router& router) {
    if (slot == 0xffffffffu) return Choice{router.count, 0.0f, threadIdx.x % 32};
    return router.count <= 128 ? choose_experts<4>(logits, router) : choose_experts<16>(logits, router);
}
