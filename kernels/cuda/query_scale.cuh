// The factor of queries that grows with the logarithm of their position.
#pragma once
#include "common.cuh"

// 1 + beta ln(1 + floor((position + offset) / period)); 1 if beta is 0.
struct QueryScale {
    float beta;
    u32 period, offset;

    __device__ float at(u32 position) const { return 1.0f + beta * log1pf((float)((position + offset) / period)); }
};
