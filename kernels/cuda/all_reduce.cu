// all_reduce_bf16:          y[t, :] = sum over the group of p[t, :]
// all_reduce_add_norm_bf16: r[t, :] = r[t, :] + sum over the group of p[t, :]; y[t, :] = rms_norm(r[t, :])
// all_gather_bf16:          z[g, t, :] = z[g, t, :] of rank g
// archs: 80 90a 100a ptx
//
// p, y, r     [T, E] bf16 of this rank, contiguous; y may be p; the results r and y have the same bits on all ranks
// w           [E] bf16
// z           [ranks, T, E] in 16-byte units of any type; this rank's part is filled before, the other parts are
//             written
// peers       each rank's exchange buffer, mapped here, zero before the first call: packets [2][ranks +
//             1][max_rows][pitch], E <= pitch. The location of a row does not depend on E, so whatever is stored there
//             was sent with the row's own epochs. A packet has four bytes of data and a four-byte epoch, so a reader
//             detects its arrival without a fence (the "LL" protocol of NCCL). Part r < ranks contains what rank r
//             sent, the last part the sum computed by a row's owner
// epochs      [max_rows] u32, zero before the first call: the number of reductions of each row; its parity selects one
//             of two buffers. No rank can be one call ahead of another rank's last read, because a call completes only
//             after packets from all ranks
// status      u32 in host memory, zero: a rank that has waited `patience_ns` writes 1 + the missing rank and stops
//             waiting
// one shot    every rank sends its row to all others and sums. two shots: every rank sends to the row's owner, t %
//             ranks, which sums and sends the sum, rounded to bf16, to all
// maths       fp32 sum in order of ranks, then the same as add_rms_norm_bf16
// launch      grid T, block E / 8 rounded up to a warp, at most 1024; a row stays in registers. A block waits for the
//             same block of the other ranks; blocks run in the same order on all ranks. all_gather: block at most 128
// needs       E % 8 == 0, E <= 16384, T <= max_rows, pointers 16-byte aligned: checked in all_reduce.rs before launch
// bound       latency; for larger sizes NVLink: 4 T E (ranks - 1) bytes out of each rank, with two shots 8 T E (ranks -
//             1) / ranks
// test        tests/cuda_all_reduce.rs
#include "peers.cuh"

constexpr int MAX_CHUNKS = 2;  // 8 elements per thread each

// The sum over all ranks of elements 8 index .. 8 index + 8 of row t. Waits until they have arrived; `own` is this
// rank's part.
__device__ __forceinline__ void sum_ranks(float (&sum)[8], const AllReduce& a, u32 t, u32 index, u32 epoch, const Words& own) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
    for (u32 r = 0; r < a.ranks; ++r) {
        add_words(sum, r == a.rank ? own : receive(a, a.row(a.rank, epoch & 1, r, t), index, epoch, r));
    }
}

__device__ __forceinline__ void send_row(const AllReduce& a, u32 t, u32 index, u32 epoch, const Words& own) {
    const u32 owner = t % a.ranks;
    for (u32 i = 1; i < a.ranks; ++i) {
        const u32 r = (a.rank + i) % a.ranks;
        if (!a.two_shots || r == owner) send(a.row(r, epoch & 1, a.rank, t), index, own, epoch);
    }
}

// Two shots: the owner computes the sum and sends it; the others wait for it. All ranks then have the rounded sum.
__device__ __forceinline__ void sum_at_owner(float (&sum)[8], const AllReduce& a, u32 t, u32 index, u32 epoch, const Words& own) {
    const u32 owner = t % a.ranks;
    Words total;
    if (owner == a.rank) {
        sum_ranks(sum, a, t, index, epoch, own);
        total = pack_words(sum);
        for (u32 i = 1; i < a.ranks; ++i) send(a.row((a.rank + i) % a.ranks, epoch & 1, a.ranks, t), index, total, epoch);
    } else {
        total = receive(a, a.row(a.rank, epoch & 1, a.ranks, t), index, epoch, owner);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
    add_words(sum, total);
}

template <bool NORM>
__device__ __forceinline__ void all_reduce_row(const AllReduce& a, bf16* y, bf16* residual, const bf16* p, const bf16* w, float eps) {
    __shared__ float scratch[32];
    pdl_launch();
    const u32 t = blockIdx.x;
    const u64 row = (u64)t * a.cols;
    const u32 chunks = a.cols / 8;
    pdl_wait();
    const u32 epoch = a.epochs[t] + 1;
    Words own[MAX_CHUNKS];
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        const u32 i = c * blockDim.x + threadIdx.x;
        if (i >= chunks) break;
        own[c] = *reinterpret_cast<const Words*>(p + row + 8 * i);
        send_row(a, t, i, epoch, own[c]);
    }
    float x[MAX_CHUNKS][8];
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        const u32 i = c * blockDim.x + threadIdx.x;
        if (i >= chunks) break;
        Words r = make_uint4(0, 0, 0, 0);
        if (NORM) r = *reinterpret_cast<const Words*>(residual + row + 8 * i);
        if (a.two_shots) {
            sum_at_owner(x[c], a, t, i, epoch, own[c]);
        } else {
            sum_ranks(x[c], a, t, i, epoch, own[c]);
        }
        if (!NORM) {
            *reinterpret_cast<Words*>(y + row + 8 * i) = pack_words(x[c]);
            continue;
        }
        add_words(x[c], r);
        *reinterpret_cast<Words*>(residual + row + 8 * i) = pack_words(x[c]);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += x[c][j] * x[c][j];
    }
    if (NORM) {
        const float scale = rsqrtf(block_sum(squares, scratch) / a.cols + eps);
#pragma unroll
        for (int c = 0; c < MAX_CHUNKS; ++c) {
            const u32 i = c * blockDim.x + threadIdx.x;
            if (i >= chunks) break;
            const bf16x8 g = load8(w + 8 * i);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[c][j] *= scale * to_f32(g.v[j]);
            *reinterpret_cast<Words*>(y + row + 8 * i) = pack_words(x[c]);
        }
    }
    __syncthreads();  // all threads have read the epoch
    if (threadIdx.x == 0) a.epochs[t] = epoch;
}

extern "C" __global__ void __launch_bounds__(1024) all_reduce_bf16(const __grid_constant__ AllReduce a, bf16* y, const bf16* p) {
    all_reduce_row<false>(a, y, nullptr, p, nullptr, 0.0f);
}

extern "C" __global__ void __launch_bounds__(1024)
all_reduce_add_norm_bf16(const __grid_constant__ AllReduce a, bf16* y, bf16* residual, const bf16* p, const bf16* w, float eps) {
    all_reduce_row<true>(a, y, residual, p, w, eps);
}

// All-gather in one shot: the data is so small that only latency matters.
extern "C" __global__ void __launch_bounds__(128) all_gather_bf16(const __grid_constant__ AllReduce a, bf16* z, u32 rows) {
    pdl_launch();
    const u32 t = blockIdx.x;
    const u32 chunks = a.cols / 8;
    pdl_wait();
    const u32 epoch = a.epochs[t] + 1;
    for (u32 i = threadIdx.x; i < chunks; i += blockDim.x) {
        const Words own = *reinterpret_cast<const Words*>(z + ((u64)a.rank * rows + t) * a.cols + 8 * i);
        for (u32 r = 0; r < a.ranks; ++r) {
            if (r != a.rank) send(a.row(r, epoch & 1, a.rank, t), i, own, epoch);
        }
        for (u32 r = 0; r < a.ranks; ++r) {
            if (r == a.rank) continue;
            const Words x = receive(a, a.row(a.rank, epoch & 1, r, t), i, epoch, r);
            *reinterpret_cast<Words*>(z + ((u64)r * rows + t) * a.cols + 8 * i) = x;
        }
    }
    __syncthreads();  // all threads have read the epoch
    if (threadIdx.x == 0) a.epochs[t] = epoch;
}
