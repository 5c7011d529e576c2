// route_few_tokens: for few tokens, the product of the router, the experts of each token and their weights, and the order of the routes,
//                   in one kernel
//
// routed   [T, D] bf16, inputs of the router
// router   [X, D] bf16
// gate     [D] bf16 or null, the weight of one more output, and factors [T] f32, its sigmoid; not written without a gate
// experts, probabilities, slots  as route_tokens.cu describes, for logits routed . router
// places   [T, K] u32, the row of each route, as sort_routes.cu describes
// list     [1 + T K] of expert_list.cuh: the experts of this worker that tokens chose
// x        [T, E] bf16, inputs of the experts; with codes and scales they are rounded to those, as quantize_rows.cu describes
// maths    fp32 in a fixed order, products of the router in the tensor cores: no result depends on other tokens
// launch   grid 8, one cluster, block 512. The blocks take groups of 16 experts in turn, their warps columns of both operands. The first
//          2048 columns of two groups are loaded before the wait. Sums go to the shared memory of the first block, of which a warp
//          chooses for each token
// needs    T <= 8, T K <= 256, X <= 512, D % 8 == 0, E % 8 == 0: checked in route_few_tokens.rs
// bound    latency
// test     tests/cuda_routing.rs
// archs: 90a
#include "cluster.cuh"
#include "expert_list.cuh"
#include "fp8_rows.cuh"
#include "mma.cuh"
#include "routing.cuh"

constexpr u32 BLOCKS = 8, WARPS = 16, THREADS = 32 * WARPS, MAX_ROUTES = 256, MAX_EXPERTS = 512;
constexpr u32 EXPERTS = 16, GROUPS = 2;              // experts of a group, and groups of a block at the same time
constexpr u32 UNIT = 32, UNITS = 4;                  // columns that a warp loads at once, 16 bytes a lane and row, and how often
constexpr u32 COLUMNS = WARPS * UNITS * UNIT;        // of all warps at the same time
constexpr u32 SUMS = GROUPS * EXPERTS * MAX_FEW_TOKENS;

struct FewTokens {
    const bf16* routed;
    const bf16* router;
    const bf16* gate;
    float* factors;
    u32* experts;
    float* probabilities;
    const u32* slots;
    u32* places;
    const bf16* x;
    u32 num_tokens, width, cols, first, local, pitch;
    ListedExpert* list;
    u8* codes;
    float* scales;
};

__device__ __forceinline__ uint4 load_columns(const bf16* row, u32 column, u32 width, bool is_valid) {
    return is_valid && column < width ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void cluster_store(u32 address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += unpack_lo(left[j]) * unpack_lo(right[j]) + unpack_hi(left[j]) * unpack_hi(right[j]);
    return sum;
}

// The part of a product's operands that a lane loads: rows g and g + 8 of a group of experts for t-th eight columns of each unit.
struct Operands {
    uint4 w[GROUPS][UNITS][2];
    uint4 gate[UNITS];

    __device__ __forceinline__ void load(const FewTokens& p, u32 count, u32 first_group, u32 column, bool has_gate) {
        const u32 g = threadIdx.x % 32 / 4;
#pragma unroll
        for (u32 j = 0; j < GROUPS; ++j) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const u32 expert = (first_group + j * BLOCKS) * EXPERTS + g + 8 * h;
#pragma unroll
                for (u32 u = 0; u < UNITS; ++u) {
                    w[j][u][h] = load_columns(p.router + (u64)expert * p.width, column + u * UNIT, p.width, expert < count);
                }
            }
        }
#pragma unroll
        for (u32 u = 0; u < UNITS; ++u) gate[u] = load_columns(p.gate, column + u * UNIT, p.width, has_gate);
    }
};

// The logits of all tokens, in `logits` [T, X] of the first block of the cluster.
__device__ __forceinline__ void multiply(const FewTokens& p, u32 count, float* logits) {
    __shared__ float sums[WARPS][SUMS], gate_sums[WARPS][MAX_FEW_TOKENS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rank = blockIdx.x;
    const u32 first_column = warp * UNITS * UNIT + t * 8;
    const bool has_gate = p.gate && rank == BLOCKS - 1;
    Operands operands;
    operands.load(p, count, rank, first_column, has_gate);
    cluster_arrive();
    pdl_wait();
    cluster_wait();
    for (u32 base = 0; base * EXPERTS < count; base += BLOCKS * GROUPS) {
        float acc[GROUPS][4] = {}, gate_sum = 0.0f;
        for (u32 pass = 0; pass < p.width; pass += COLUMNS) {
            if (base || pass) operands.load(p, count, base + rank, pass + first_column, has_gate && !base);
            uint4 x[UNITS];
#pragma unroll
            for (u32 u = 0; u < UNITS; ++u) {
                x[u] = load_columns(p.routed + (u64)g * p.width, pass + first_column + u * UNIT, p.width, g < p.num_tokens);
            }
#pragma unroll
            for (u32 u = 0; u < UNITS; ++u) {
#pragma unroll
                for (u32 j = 0; j < GROUPS; ++j) {
                    const uint4 &low = operands.w[j][u][0], &high = operands.w[j][u][1];
                    mma_16x8x16(acc[j], low.x, high.x, low.y, high.y, x[u].x, x[u].y);
                    mma_16x8x16(acc[j], low.z, high.z, low.w, high.w, x[u].z, x[u].w);
                }
                if (has_gate) gate_sum += dot8(operands.gate[u], x[u]);
            }
        }
        if (base) __syncthreads();
#pragma unroll
        for (u32 j = 0; j < GROUPS; ++j) {
            float* to = sums[warp] + j * EXPERTS * MAX_FEW_TOKENS + g * MAX_FEW_TOKENS + 2 * t;
            *reinterpret_cast<float2*>(to) = make_float2(acc[j][0], acc[j][1]);
            *reinterpret_cast<float2*>(to + 8 * MAX_FEW_TOKENS) = make_float2(acc[j][2], acc[j][3]);
        }
        if (has_gate && !base) {
            gate_sum += __shfl_xor_sync(FULL_WARP, gate_sum, 1);
            gate_sum += __shfl_xor_sync(FULL_WARP, gate_sum, 2);
            if (t == 0) gate_sums[warp][g] = gate_sum;
        }
        __syncthreads();
        const u32 token = threadIdx.x % MAX_FEW_TOKENS, row = threadIdx.x / MAX_FEW_TOKENS % EXPERTS;
        const u32 expert = (base + rank + threadIdx.x / (EXPERTS * MAX_FEW_TOKENS) * BLOCKS) * EXPERTS + row;
        if (threadIdx.x < SUMS && token < p.num_tokens && expert < count) {
            float sum = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) sum += sums[w][threadIdx.x];
            cluster_store(cluster_map(shared_address(logits + token * count + expert), 0), sum);
        }
        if (has_gate && !base && threadIdx.x < p.num_tokens) {
            float sum = 0.0f;
            for (u32 w = 0; w < WARPS; ++w) sum += gate_sums[w][threadIdx.x];
            p.factors[threadIdx.x] = sigmoid(sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) route_few_tokens(const FewTokens p, const Router router) {
    __shared__ float logits[MAX_FEW_TOKENS * MAX_EXPERTS];
    __shared__ u32 chosen[MAX_ROUTES], used[MAX_EXPERTS / 32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_launch();
    multiply(p, router.count, logits);
    const u32 slot = warp < p.num_tokens ? p.slots[warp] : 0;
    cluster_arrive();
    if (p.codes) {
        const u32 slices = (p.cols + SLICE - 1) / SLICE;
        for (u32 i = blockIdx.x * WARPS + warp; i < p.num_tokens * slices; i += BLOCKS * WARPS) {
            SliceValues values;
            values.load(p.x + (u64)(i / slices) * p.cols, i % slices, p.cols);
            values.store(p.codes, p.scales, i / slices, i % slices, slices, p.pitch);
        }
    }
    if (threadIdx.x < MAX_EXPERTS / 32) used[threadIdx.x] = 0;
    __syncthreads();
    cluster_wait();
    if (blockIdx.x > 0) return;

    if (warp < p.num_tokens) {
        const Choice choice = choose_experts(logits + warp * router.count, slot, router);
        if (lane < router.top_k) {
            const u32 to = warp * router.top_k + choice.place, local = choice.expert - p.first;
            chosen[to] = choice.expert;
            p.experts[to] = choice.expert, p.probabilities[to] = choice.probability;
            if (local < p.local) atomicOr(used + local / 32, 1u << local % 32);
        }
    }
    __syncthreads();
    const u32 route = threadIdx.x, routes = p.num_tokens * router.top_k;
    if (route < routes) {
        const u32 expert = chosen[route], token = route / router.top_k, local = expert - p.first;
        u32 lower = 0, tokens = 0;  // routes in front of this one, and tokens of the same expert
        for (u32 other = 0, r = 0; other < p.num_tokens; ++other) {
            for (u32 k = 0; k < router.top_k; ++k, ++r) {
                const u32 at = chosen[r];
                lower += at >= p.first && (at < expert || (at == expert && r < route));
                if (at == expert) tokens |= 1u << other;
            }
        }
        if (local < p.local) {
            p.places[route] = lower;
            u32 index = __popc(used[local / 32] & ((1u << local % 32) - 1));
            for (u32 word = 0; word < local / 32; ++word) index += __popc(used[word]);
            const bool is_first = (tokens & ((1u << token) - 1)) == 0;
            if (is_first) p.list[1 + index] = ListedExpert{local, lower, tokens, 0};
        }
    }
    if (warp == WARPS - 1) {
        const u32 count = __reduce_add_sync(FULL_WARP, lane < MAX_EXPERTS / 32 ? __popc(used[lane]) : 0);
        if (lane == 0) p.list[0] = ListedExpert{count, 0, 0, 0};
    }
}
