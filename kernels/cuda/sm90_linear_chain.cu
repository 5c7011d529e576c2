// sm90_linear_chain_FORMAT, sm90_peer_linear_chain_FORMAT: chains of products, alone and in a group, as sm90_linear_chain.cuh describes
// archs: 90a
// test     tests/cuda_linear_chain.rs
#include "sm90_linear_chain.cuh"

LINEAR_CHAINS(linear_chain, false, 8)
LINEAR_CHAINS(linear_chain, false, 16)
