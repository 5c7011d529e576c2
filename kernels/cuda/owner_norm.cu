// owner_norm_bf16: r[t, :] = r[t, :] + sum over the group of p[t, :]; y[t, :] = rms_norm(r[t, :]) on every rank
// owner_rows_bf16: y[t, :] of every rank = y[t, :] of the rank that owns row t
// archs: 80 90a 100a ptx
//
// p, y        [T, E] bf16 of each rank, mapped into all (`rows.partial`, `rows.y`)
// r           [T, E] bf16 of this rank; only rows that it owns, t % ranks == rank, are read and written
// w           [E] bf16
// peers       described in peers.cuh; a rank's exchange buffer contains flags [2][ranks][MAX_BLOCKS] u32 here, zero
//             before the first call: the call that block b of rank r has begun, and the call that it has ended
// epochs      [MAX_BLOCKS] u32, zero before the first call: the number of runs of each block
// maths       fp32 sum in order of ranks, then the same as add_rms_norm_bf16; all ranks receive the owner's bits
// launch      grid min(rows of an owner, MAX_BLOCKS), block E / 8 rounded up to a warp, at most 1024
//             A block reads its rows from all ranks after the same block of each rank has signalled that its earlier
//             work has ended. It writes the results to all ranks, and ends after the same block of each rank has done
//             so. So no rank continues before all of y has arrived, and none overwrites p before it has been read.
//             owner_rows_bf16 waits at the same two places, for y alone; p, r and w are not read.
//             Blocks run in the same order on all ranks, so each one's counterparts run eventually.
// needs       E % 8 == 0, E <= 16384, pointers 16-byte aligned: checked in owner_norm.rs before launch
// bound       NVLink: 2 T E (ranks - 1) / ranks bytes in, and the same number out of each rank, for each half;
//             owner_rows_bf16 is the second half
// test        tests/cuda_all_reduce.rs
#include "peers.cuh"

constexpr u32 MAX_BLOCKS = 512;  // the same as MAX_FLAG_BLOCKS in all_reduce.rs
constexpr int MAX_CHUNKS = 2;    // 8 elements per thread each

struct Rows {
    const u8* partial[MAX_RANKS];
    u8* y[MAX_RANKS];
    bf16* residual;
    const bf16* w;
    u32 count;
    float eps;
};

__device__ __forceinline__ void store_release(u32* p, u32 x) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 x;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// Signals to every rank that this block has reached this point, and waits for the same block of each. Writes of the
// block's threads before are visible to the other ranks' threads after.
__device__ __forceinline__ void rank_barrier(const AllReduce& a, u32 stage, u32 epoch) {
    __syncthreads();
    const u32 r = threadIdx.x;
    if (r < a.ranks && r != a.rank) {
        auto flag = [&](u32 owner, u32 from) {
            return reinterpret_cast<u32*>(a.peers[owner]) + (stage * a.ranks + from) * MAX_BLOCKS + blockIdx.x;
        };
        store_release(flag(r, a.rank), epoch);
        const u32* theirs = flag(a.rank, r);
        u64 start = 0;
        // A rank may be one call ahead.
        for (u32 spins = 1; (i32)(load_acquire(theirs) - epoch) < 0; ++spins) {
            if (spins % 1024 == 0 && times_out(a, start, r)) break;
        }
    }
    __syncthreads();
}

template <int RANKS>
__device__ __forceinline__ void owner_norm(const AllReduce& a, const Rows& rows) {
    __shared__ float scratch[32];
    pdl_launch();
    const u32 chunks = a.cols / 8;
    pdl_wait();
    const u32 epoch = a.epochs[blockIdx.x] + 1;
    rank_barrier(a, 0, epoch);
    for (u32 t = a.rank + RANKS * blockIdx.x; t < rows.count; t += RANKS * gridDim.x) {
        const u64 row = (u64)t * a.cols;
        float x[MAX_CHUNKS][8];
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < MAX_CHUNKS; ++c) {
            const u32 i = c * blockDim.x + threadIdx.x;
            if (i >= chunks) break;
            Words parts[RANKS];
#pragma unroll
            for (int r = 0; r < RANKS; ++r) parts[r] = load_volatile(rows.partial[r] + (row + 8 * i) * 2);
            Words* residual = reinterpret_cast<Words*>(rows.residual + row + 8 * i);
            const Words old = *residual;
#pragma unroll
            for (int j = 0; j < 8; ++j) x[c][j] = 0.0f;
#pragma unroll
            for (int r = 0; r < RANKS; ++r) add_words(x[c], parts[r]);
            add_words(x[c], old);
            *residual = pack_words(x[c]);
#pragma unroll
            for (int j = 0; j < 8; ++j) squares += x[c][j] * x[c][j];
        }
        const float scale = rsqrtf(block_sum(squares, scratch) / a.cols + rows.eps);
#pragma unroll
        for (int c = 0; c < MAX_CHUNKS; ++c) {
            const u32 i = c * blockDim.x + threadIdx.x;
            if (i >= chunks) break;
            const bf16x8 g = load8(rows.w + 8 * i);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[c][j] *= scale * to_f32(g.v[j]);
            const Words y = pack_words(x[c]);
#pragma unroll
            for (int r = 0; r < RANKS; ++r) *reinterpret_cast<Words*>(rows.y[(a.rank + r) % RANKS] + (row + 8 * i) * 2) = y;
        }
    }
    rank_barrier(a, 1, epoch);
    if (threadIdx.x == 0) a.epochs[blockIdx.x] = epoch;
}

template <int RANKS>
__device__ __forceinline__ void owner_rows(const AllReduce& a, const Rows& rows) {
    pdl_launch();
    const u32 chunks = a.cols / 8;
    pdl_wait();
    const u32 epoch = a.epochs[blockIdx.x] + 1;
    rank_barrier(a, 0, epoch);
    for (u32 t = a.rank + RANKS * blockIdx.x; t < rows.count; t += RANKS * gridDim.x) {
        for (u32 i = threadIdx.x; i < chunks; i += blockDim.x) {
            const u64 at = ((u64)t * a.cols + 8 * i) * 2;
            const Words own = *reinterpret_cast<const Words*>(rows.y[a.rank] + at);
#pragma unroll
            for (int r = 1; r < RANKS; ++r) *reinterpret_cast<Words*>(rows.y[(a.rank + r) % RANKS] + at) = own;
        }
    }
    rank_barrier(a, 1, epoch);
    if (threadIdx.x == 0) a.epochs[blockIdx.x] = epoch;
}

#define OWNER_NORM(RANKS)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024)                                                                           \
        owner_norm_bf16_r##RANKS(const __grid_constant__ AllReduce a, const __grid_constant__ Rows rows) {                       \
        owner_norm<RANKS>(a, rows);                                                                                              \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                                                           \
        owner_rows_bf16_r##RANKS(const __grid_constant__ AllReduce a, const __grid_constant__ Rows rows) {                       \
        owner_rows<RANKS>(a, rows);                                                                                              \
    }

OWNER_NORM(2)
OWNER_NORM(4)
OWNER_NORM(8)
