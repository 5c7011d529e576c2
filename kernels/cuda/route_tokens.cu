// route_tokens_f32: the experts of each token and their probabilities
//
// logits        [T, X]  f32, products of the router for X experts
// bias          [X]     bf16 or null, added to the logits
// slots         [T] u32; a token whose slot is u32::MAX is padding and goes to no expert
// experts       [T, K]  u32: the K likeliest experts of a token, the lower one of equals, in ascending order; X for padding
// probabilities [T, K]  f32: softmax over all experts; if normalized, divided by the sum of the K
// maths         fp32 in a fixed order: no result depends on other tokens
// launch        grid ceil(T / 4), block 128: one warp for each token
// needs         K <= 32, K <= X <= 512: checked in route_tokens.rs
// bound         latency
// test          tests/cuda_experts.rs, compared with a sort in f32
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
