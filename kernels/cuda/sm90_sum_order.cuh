// The order in which products are summed over K, so that kernels for few and for many rows give the same bits.
#pragma once
#include "common.cuh"

// How K is summed, as `SumOrder` in sum_order.rs.
struct SumOrder {
    i32 slices, parts, groups;
};

// A run: slices first, first + step, ... of K.
struct Run {
    i32 first, step, count;

    __device__ Run(const SumOrder& order, i32 index) {
        const i32 part = index / order.groups, group = index % order.groups;
        const i32 begin = order.slices * part / order.parts, end = order.slices * (part + 1) / order.parts;
        first = begin + group, step = order.groups, count = max(end - first + step - 1, 0) / step;
    }
};

template <int COLS>
__device__ __forceinline__ void clear(float* acc) {
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) acc[i] = 0.0f;
}

template <bool IS_LOCAL>
struct KeptSum {
    using Type = float;
};
template <>
struct KeptSum<true> {
    using Type = volatile float;
};

// Sums of a thread that are kept beside the current ones: in registers, or in local memory where these do not suffice.
template <int COLS, bool IS_LOCAL>
struct Kept {
    typename KeptSum<IS_LOCAL>::Type values[COLS / 2];

    __device__ __forceinline__ void keep(const float* acc) {
#pragma unroll
        for (int i = 0; i < COLS / 2; ++i) values[i] = acc[i];
    }

    __device__ __forceinline__ void add_to(float* acc) const {
#pragma unroll
        for (int i = 0; i < COLS / 2; ++i) acc[i] += values[i];
    }
};

// acc = the sum of runs first .. last of K, which are whole parts. `multiply` adds the slices of a run to acc.
template <int COLS, bool IS_LOCAL, class Multiply>
__device__ __forceinline__ void sum_runs(float* acc, const SumOrder& order, i32 first, i32 last, Multiply multiply) {
    Kept<COLS, IS_LOCAL> part, parts;
    for (i32 begin = first; begin < last; begin += order.groups) {
        for (i32 i = 0; i < order.groups; ++i) {
            clear<COLS>(acc);
            multiply(Run(order, begin + i));
            if (i > 0) part.add_to(acc);
            if (i + 1 < order.groups) part.keep(acc);
        }
        if (begin > first) parts.add_to(acc);
        if (begin + order.groups < last) parts.keep(acc);
    }
}
