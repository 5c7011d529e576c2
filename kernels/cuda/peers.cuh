// Packets between the ranks of a group through peer memory: four bytes of data and a four-byte epoch, so that a reader
// detects their arrival without a fence.
#pragma once
#include "common.cuh"

constexpr int MAX_RANKS = 8;

struct AllReduce {
    u8* peers[MAX_RANKS];
    u32* epochs;
    u32* status;
    u64 patience_ns;
    u32 rank, ranks, max_rows, cols;
    u32 two_shots;
    u32 pitch;  // columns from one row of an exchange buffer to the next

    // Packets of row t from part `part`, in the exchange buffer of `owner`.
    __device__ u8* row(u32 owner, u32 parity, u32 part, u32 t) const {
        return peers[owner] + (((u64)parity * (ranks + 1) + part) * max_rows + t) * pitch * 4;
    }
};

// Eight bf16 numbers as four words.
using Words = uint4;

// Four bf16 numbers.
__device__ __forceinline__ void send_half(u8* p, const uint2& x, u32 epoch) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(epoch) : "memory");
}

__device__ __forceinline__ void send(u8* row, u32 index, const Words& x, u32 epoch) {
    u8* p = row + (u64)index * 32;
    send_half(p, make_uint2(x.x, x.y), epoch);
    send_half(p + 16, make_uint2(x.z, x.w), epoch);
}

__device__ __forceinline__ uint4 load_volatile(const u8* p) {
    uint4 r;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p)
                 : "memory");
    return r;
}

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Called by a waiting rank after every 1024 polls; returns true if it should stop waiting.
__device__ __forceinline__ bool times_out(const AllReduce& a, u64& start, u32 from) {
    const u64 now = now_ns();
    if (start == 0) start = now;
    if (*(volatile u32*)a.status != 0) return true;
    if (now - start > a.patience_ns) *(volatile u32*)a.status = 1 + from;
    return false;
}

__device__ __forceinline__ Words receive(const AllReduce& a, const u8* row, u32 index, u32 epoch, u32 from) {
    const u8* p = row + (u64)index * 32;
    u64 start = 0;
    for (u32 spins = 1;; ++spins) {
        const uint4 x = load_volatile(p), y = load_volatile(p + 16);
        const bool here = x.y == epoch && x.w == epoch && y.y == epoch && y.w == epoch;
        if (here) return make_uint4(x.x, x.z, y.x, y.z);
        if (spins % 1024 == 0 && times_out(a, start, from)) return make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ uint2 receive_half(const AllReduce& a, const u8* p, u32 epoch, u32 from) {
    u64 start = 0;
    for (u32 spins = 1;; ++spins) {
        const uint4 x = load_volatile(p);
        if (x.y == epoch && x.w == epoch) return make_uint2(x.x, x.z);
        if (spins % 1024 == 0 && times_out(a, start, from)) return make_uint2(0, 0);
    }
}

__device__ __forceinline__ void add_words(float (&sum)[8], const Words& x) {
    sum[0] += unpack_lo(x.x), sum[1] += unpack_hi(x.x), sum[2] += unpack_lo(x.y), sum[3] += unpack_hi(x.y);
    sum[4] += unpack_lo(x.z), sum[5] += unpack_hi(x.z), sum[6] += unpack_lo(x.w), sum[7] += unpack_hi(x.w);
}

__device__ __forceinline__ Words pack_words(const float (&x)[8]) {
    return make_uint4(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]), pack_bf16x2(x[4], x[5]), pack_bf16x2(x[6], x[7]));
}
