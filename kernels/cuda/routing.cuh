// The choice of a token's experts by one warp.
#pragma once
#include "common.cuh"

// Integers in the order of values, above 0; 0 for negative infinity and for what is not a number. -0 is 0.
__device__ __forceinline__ u32 order_key(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return value > -INFINITY_F ? bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u) : 0;
}

__device__ __forceinline__ float value_of(u32 key) { return key ? __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)) : -INFINITY_F; }

// The largest key of the warp, and the lowest index that has it.
__device__ __forceinline__ void warp_largest(u32& key, u32& index) {
    const u32 own = key;
    key = __reduce_max_sync(FULL_WARP, own);
    index = __reduce_min_sync(FULL_WARP, own == key ? index : 0xffffffffu);
}

// The two largest values of the warp.
__device__ __forceinline__ void warp_best_two(float& first, float& second) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const float other_first = __shfl_xor_sync(FULL_WARP, first, d);
        const float other_second = __shfl_xor_sync(FULL_WARP, second, d);
        second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
        first = fmaxf(first, other_first);
    }
}

// A choice; lane i of a warp has the choice that is i-th in the order of `place`.
struct Choice {
    u32 expert;
    float probability;
    u32 place;  // number of lower experts among the choices
};

// How weights follow from logits. SPARSE_MIXER: a weight is the share of its logit in the softmax over those that are near it and
// were not chosen before.
enum Scoring : u32 { SOFTMAX = 0, SIGMOID = 1, SPARSE_MIXER = 2 };

// How experts are chosen.
struct Router {
    const bf16* bias;             // [count], added to the logits, or null
    const float* selection_bias;  // [count], added to the weights while experts are chosen, or null
    const float* scales;          // [count], multiply the weights at the end, or null
    u32 count, top_k;
    u32 is_normalized, scoring;
    u32 groups, chosen_groups;    // experts form `groups` groups of equal size, in order; 0 means none
    float scale;                  // multiplies the weights of the chosen experts
    u32 is_best;                  // groups are chosen by their best expert, otherwise by the sum of the two best
    float tolerance;              // of SPARSE_MIXER: s is near the largest m if m - s <= tolerance * max(|s|, m)

    __device__ float logit(const float* logits, u32 expert) const {
        return logits[expert] + (bias ? to_f32(bias[expert]) : 0.0f);
    }
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Sets the values of all groups but those with the largest scores to negative infinity; the lower group of equals is chosen.
// Lane l has the values of experts l, l + 32, ...
template <int OWN>
__device__ __forceinline__ void keep_groups(float (&own)[OWN], const Router& router) {
    const u32 lane = threadIdx.x % 32, size = router.count / router.groups;
    float score = -INFINITY_F;  // of group `lane`
    for (u32 group = 0; group < router.groups; ++group) {
        float first = -INFINITY_F, second = -INFINITY_F;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if ((lane + 32 * i) / size != group) continue;
            second = fmaxf(second, fminf(first, own[i]));
            first = fmaxf(first, own[i]);
        }
        warp_best_two(first, second);
        if (lane == group) score = router.is_best ? first : first + second;
    }
    u32 chosen = 0;  // a bit for each group
    for (u32 turn = 0; turn < router.chosen_groups; ++turn) {
        u32 best = order_key(score), at = lane;
        warp_largest(best, at);
        chosen |= 1u << at;
        if (lane == at) score = -INFINITY_F;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 group = (lane + 32 * i) / size;
        if (group >= router.groups || !(chosen >> group & 1u)) own[i] = -INFINITY_F;
    }
}

// The `top_k` experts with the largest sums of weight and selection bias, the lower one of equals: lane i < top_k returns
// one of them. Up to 32 OWN experts.
template <int OWN>
__device__ __forceinline__ Choice choose_experts(const float* logits, const Router& router) {
    const u32 lane = threadIdx.x % 32, count = router.count;
    float own[OWN];  // of experts lane, lane + 32, ...
    float max = -INFINITY_F, total = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 expert = lane + 32 * i;
        own[i] = expert < count ? router.logit(logits, expert) : -INFINITY_F;
        max = fmaxf(max, own[i]);
    }
    if (router.scoring == SOFTMAX) {
        max = warp_max(max);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            own[i] = expf(own[i] - max);
            total += own[i];
        }
        total = warp_sum(total);
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 expert = lane + 32 * i;
        if (router.scoring == SOFTMAX) own[i] /= total;
        else if (router.scoring == SIGMOID) own[i] = sigmoid(own[i]);
        if (router.selection_bias && expert < count) own[i] += router.selection_bias[expert];
        if (expert >= count) own[i] = -INFINITY_F;
    }
    if (router.groups) keep_groups(own, router);

    u32 keys[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) keys[i] = order_key(own[i]);
    Choice choice{0xffffffffu, 0.0f, 0};
    u32 was_chosen = 0;  // a bit for each own expert
    for (u32 turn = 0; turn < router.top_k; ++turn) {
        u32 most = 0, at = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < OWN; ++i) most = ::max(most, keys[i]);
        most = __reduce_max_sync(FULL_WARP, most);
#pragma unroll
        for (int i = OWN - 1; i >= 0; --i) at = keys[i] == most ? lane + 32 * i : at;
        // Nothing is left to choose.
        at = __reduce_min_sync(FULL_WARP, most > 0 ? at : 0xffffffffu);
        float weight = value_of(most);
        if (router.scoring == SPARSE_MIXER) {
            const float best = weight;
            float near = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float value = value_of(keys[i]), limit = router.tolerance * fmaxf(fabsf(value), best);
                if (value > -INFINITY_F && best - value <= limit) near += expf(value - best);
            }
            weight = 1.0f / warp_sum(near);
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (lane + 32 * i == at) keys[i] = 0, was_chosen |= 1u << i;
        }
        if (lane == turn) choice.expert = at, choice.probability = weight;
    }
    // Logits that are not numbers choose no expert.
    const bool is_chosen = choice.expert < count;
    if (!is_chosen) choice.probability = 0.0f;
    if (router.selection_bias && is_chosen && router.scoring != SPARSE_MIXER) {
        const float logit = router.logit(logits, choice.expert);
        choice.probability = router.scoring == SIGMOID ? sigmoid(logit) : expf(logit - max) / total;
    }
    const float sum = warp_sum(lane < router.top_k ? choice.probability : 0.0f);
    choice.place = is_chosen ? 0 : lane;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 mask = __ballot_sync(FULL_WARP, was_chosen >> i & 1u);
        const u32 below = choice.expert > 32u * i + 31 ? mask : choice.expert >= 32u * i ? mask & ((1u << choice.expert % 32) - 1) : 0;
        if (is_chosen) choice.place += __popc(below);
    }
    // Sigmoids can all be 0.
    if (router.is_normalized) choice.probability /= sum + 1e-20f;
    choice.probability *= router.scale;
    if (router.scales && is_chosen) choice.probability *= router.scales[choice.expert];
    return choice;
}

// The same for any number of experts up to 512; no expert (`count`) for padding, whose slot is u32::MAX.
__device__ __forceinline__ Choice choose_experts(const float* logits, u32 slot, const Router& router) {
    if (slot == 0xffffffffu) return Choice{router.count, 0.0f, threadIdx.x % 32};
    if (router.count <= 128) return choose_experts<4>(logits, router);
    return router.count <= 256 ? choose_experts<8>(logits, router) : choose_experts<16>(logits, router);
}
