// route_tokens_f32: the experts of each token and their weights
//
// logits         [T, X]  f32, products of the router for X experts
// bias           [X]     bf16 or null, added to the logits
// selection_bias [X]     f32 or null, added to the weights while experts are chosen      (Wang et al. 2024)
// scales         [X]     f32 or null, multiply the weights at the end
// slots          [T] u32; a token whose slot is u32::MAX is padding and goes to no expert
// experts        [T, K]  u32: the K experts of a token with the largest sums of weight and selection bias, the lower one of equals,
//                in ascending order; X for padding. With groups, only those of the groups whose best experts, or the sums of
//                whose two best, are the largest
// probabilities  [T, K]  f32: weights, the softmax over all experts, the sigmoid of each, or those of SparseMixer (Liu et al. 2024);
//                if normalized, divided by the sum of the K; times a factor
// maths          fp32 in a fixed order: no result depends on other tokens
// launch         grid ceil(T / 4), block 128: one warp for each token
// needs          K <= 32, K <= X <= 512, groups of equal size, at most 32: checked in route_tokens.rs
// bound          latency
// test           tests/cuda_routing.rs, compared with a sort in fp64
// archs: 80 90a 100a ptx
#include "routing.cuh"

extern "C" __global__ void __launch_bounds__(128)
route_tokens_f32(u32* experts, float* probabilities, const float* logits, const u32* slots, u32 tokens, const Router router) {
    pdl_launch();
    pdl_wait();
    const u32 token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token >= tokens) return;
    const Choice choice = choose_experts(logits + (u64)token * router.count, slots[token], router);
    if (threadIdx.x % 32 >= router.top_k) return;
    const u64 to = (u64)token * router.top_k + choice.place;
    experts[to] = choice.expert, probabilities[to] = choice.probability;
}
