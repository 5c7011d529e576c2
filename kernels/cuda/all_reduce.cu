// all_reduce_bf16:          y[t, :] = sum over the group of p[t, :]
// all_reduce_add_norm_bf16: r[t, :] = r[t, :] + sum over the group of p[t, :]; y[t, :] = rms_norm(r[t, :])
// all_gather_bf16:          z[g, t, :] = z[g, t, :] of rank g
// archs: 80 90a 100a ptx
//
// p, y, r     [T, E] bf16 of this rank, contiguous; y may be p; r and y of all ranks end with the same bits
// w           [E] bf16
// z           [ranks, T, E] of any 16-byte units; this rank's part is filled, the others' are written
// peers       each rank's exchange buffer, mapped here, zero before the first call: packets [2][ranks + 1][max_rows][pitch], E <= pitch:
//             a row has one place whatever E is, so that what lies there was sent under the row's own epochs. Packets
//             carry four bytes of data and a four-byte epoch, so a reader knows without a fence that they have come (the
//             "LL" protocol of NCCL). Part r < ranks holds what rank r sent, the last part what a row's owner summed
// epochs      [max_rows] u32, zero before the first call: how often a row has been reduced; its parity picks one of two buffers.
//             Nobody is a call ahead of another rank's last read: to finish a call takes a packet of everyone's
// status      u32 in host memory, zero: a rank that waited `patience_ns` writes 1 + the rank it missed and waits no more
// one shot    every rank sends its row to all others and sums; two shots: to the row's owner, t % ranks, who sums and sends the
//             sum, rounded to bf16, to all
// maths       fp32 sum in order of ranks, then as add_rms_norm_bf16
// launch      grid T, block E / 8 rounded up to a warp, at most 1024; a row stays in registers. Blocks wait for the same block of
//             other ranks: these run in the same order everywhere. all_gather: block at most 128
// needs       E % 8 == 0, E <= 16384, T <= max_rows, pointers 16-byte aligned: checked in all_reduce.rs before launch
// bound       latency; beyond it NVLink: 4 T E (ranks - 1) bytes out of each rank, two shots 8 T E (ranks - 1) / ranks
// test        tests/cuda_all_reduce.rs
#include "peers.cuh"

constexpr int MAX_CHUNKS = 2;  // 8 elements a thread each

// The sum over all ranks of elements 8 index .. 8 index + 8 of row t, all of which have been sent; own is this rank's share.
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

// Two shots: the owner sums and passes the sum on; the others wait for it. All have the rounded sum then.
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

// One shot: what the ranks chose from is too small for anything but latency to count.
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
