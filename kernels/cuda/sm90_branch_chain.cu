// sm90_branch_chain_FORMAT, sm90_peer_branch_chain_FORMAT: the same with ADD_BRANCH links, for models with norms behind branches
// archs: 90a
// test     tests/cuda_linear_chain.rs
#include "sm90_linear_chain.cuh"

LINEAR_CHAINS(branch_chain, true, 8)
