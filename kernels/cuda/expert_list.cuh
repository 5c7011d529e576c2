// The experts of few tokens, as route_few_tokens.cu lists them.
#pragma once
#include "common.cuh"

constexpr u32 MAX_FEW_TOKENS = 8;

// An expert that at least one token chose. Experts are in ascending order; the first element of a list has their number as its `expert`.
struct alignas(16) ListedExpert {
    u32 expert;  // among those of this worker
    u32 first;   // its first row, if there is a row for each token and expert, sorted by expert and then by token
    u32 tokens;  // a bit for each token that chose it
    u32 unused;

};

// Element `i` of a list.
__device__ __forceinline__ ListedExpert load_listed(const ListedExpert* list, u32 i) {
    ListedExpert e;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(e.expert), "=r"(e.first), "=r"(e.tokens), "=r"(e.unused) : "l"(list + i));
    return e;
}
