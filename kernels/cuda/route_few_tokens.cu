// route_few_tokens: for few tokens, the product of the router, the experts of each token and their weights, the order of the routes
//                   and the rows of each expert, in one kernel
//
// routed   [T, D] bf16, inputs of the router
// router   [X, D] bf16
// gate     [D] bf16 or null, the weight of one more output, and factors [T] f32, its sigmoid; not written without a gate
// logits   [T, X] f32, routed . router
// experts, probabilities, slots  as route_tokens.cu describes
// offsets, tokens, places, rows, x  as sort_routes.cu describes
// codes, scales  with codes the rows of each expert go there instead of `rows`, as quantize_rows.cu describes them
// barrier  two u32, the first of which is zero between launches
// maths    fp32 in a fixed order: no result depends on other tokens
// launch   grid ceil((X + 1) / 16), block 512. A warp multiplies a row of the router, whose first 2048 columns are loaded before the
//          wait. When all blocks have stored their logits, each chooses for all tokens, a warp for a token, and copies a part of
//          the rows; the first block stores the choices, the last one the order
// needs    T <= 16, T K <= 512, D % 8 == 0, all blocks resident at the same time: checked in route_few_tokens.rs
// bound    latency
// test     tests/cuda_routing.rs
// archs: 80 90a 100a ptx
#include "fp8_rows.cuh"
#include "grid_barrier.cuh"
#include "routing.cuh"

constexpr u32 WARPS = 16, THREADS = 32 * WARPS, MAX_ROUTES = 512;
constexpr u32 CHUNK = 8;  // loads of a lane that do not wait for each other

struct FewTokens {
    const bf16* routed;
    const bf16* router;
    const bf16* gate;
    float* factors;
    float* logits;
    u32* experts;
    float* probabilities;
    const u32* slots;
    u32* offsets;
    u32* tokens;
    u32* places;
    bf16* rows;
    const bf16* x;
    u32* barrier;
    u32 num_tokens, width, cols, first, local, pitch;
    u8* codes;
    float* scales;
};

__device__ __forceinline__ void load_chunk(uint4 (&to)[CHUNK], const bf16* row, u32 first, u32 width) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) {
        const u32 column = first + (i * 32 + threadIdx.x % 32) * 8;
        to[i] = column < width ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
    }
}

// Two sums, so that additions do not wait for each other.
__device__ __forceinline__ void add_products(float (&sum)[2], const uint4& a, const uint4& b) {
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        sum[0] += unpack_lo(left[j]) * unpack_lo(right[j]);
        sum[1] += unpack_hi(left[j]) * unpack_hi(right[j]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) route_few_tokens(const FewTokens p, const Router router) {
    __shared__ u32 chosen[MAX_ROUTES], row_of[MAX_ROUTES];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = blockIdx.x * WARPS + warp;
    pdl_launch();
    const bool is_gate = own == router.count && p.gate, multiplies = own < router.count || is_gate;
    const bf16* row = is_gate ? p.gate : p.router + (u64)own * p.width;
    uint4 begin[CHUNK] = {};
    if (multiplies) load_chunk(begin, row, 0, p.width);
    pdl_wait();
    const u32 slot = warp < p.num_tokens ? p.slots[warp] : 0;
    const u32 generation = threadIdx.x == 0 ? load_acquire(p.barrier + 1) : 0;
    if (multiplies) {
        for (u32 token = 0; token < p.num_tokens; ++token) {
            const bf16* x = p.routed + (u64)token * p.width;
            float sum[2] = {};
            uint4 left[CHUNK];
            load_chunk(left, x, 0, p.width);
#pragma unroll
            for (u32 i = 0; i < CHUNK; ++i) add_products(sum, left[i], begin[i]);
            for (u32 first = CHUNK * 256; first < p.width; first += CHUNK * 256) {
                uint4 right[CHUNK];
                load_chunk(right, row, first, p.width);
                load_chunk(left, x, first, p.width);
#pragma unroll
                for (u32 i = 0; i < CHUNK; ++i) add_products(sum, left[i], right[i]);
            }
            const float dot = warp_sum(sum[0] + sum[1]);
            if (lane > 0) continue;
            if (is_gate) p.factors[token] = sigmoid(dot);
            else p.logits[(u64)token * router.count + own] = dot;
        }
    }
    wait_for_all(p.barrier, generation);

    const u32 routes = p.num_tokens * router.top_k;
    if (warp < p.num_tokens) {
        const Choice choice = choose_experts(p.logits + (u64)warp * router.count, slot, router);
        if (lane < router.top_k) {
            const u32 to = warp * router.top_k + choice.place;
            chosen[to] = choice.expert;
            if (blockIdx.x == 0) p.experts[to] = choice.expert, p.probabilities[to] = choice.probability;
        }
    }
    __syncthreads();
    const bool stores_order = blockIdx.x == gridDim.x - 1;
    if (threadIdx.x < routes) {
        const u32 route = threadIdx.x, expert = chosen[route];
        u32 lower = 0;  // routes in front of this one
        for (u32 r = 0; r < routes; ++r) {
            const u32 other = chosen[r];
            lower += other >= p.first && (other < expert || (other == expert && r < route));
        }
        const bool is_local = expert - p.first < p.local;
        row_of[route] = is_local ? lower : 0xffffffffu;
        if (stores_order && is_local) p.tokens[lower] = route / router.top_k, p.places[route] = lower;
    }
    if (stores_order) {
        for (u32 l = threadIdx.x; l <= p.local; l += THREADS) {
            u32 lower = 0;
            for (u32 r = 0; r < routes; ++r) lower += chosen[r] >= p.first && chosen[r] < p.first + l;
            p.offsets[l] = lower;
        }
    }
    __syncthreads();
    if (p.codes) {
        const u32 slices = (p.cols + SLICE - 1) / SLICE;
        for (u32 i = own; i < routes * slices; i += gridDim.x * WARPS) {
            const u32 route = i / slices, slice = i % slices, to = row_of[route];
            if (to == 0xffffffffu) continue;
            SliceValues values;
            values.load(p.x + (u64)(route / router.top_k) * p.cols, slice, p.cols);
            values.store(p.codes, p.scales, to, slice, slices, p.pitch);
        }
        return;
    }
    const u32 chunks = p.cols / 8;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < routes * chunks; i += gridDim.x * THREADS) {
        const u32 route = i / chunks, column = i % chunks * 8;
        if (row_of[route] == 0xffffffffu) continue;
        store8(p.rows + (u64)row_of[route] * p.cols + column, load8(p.x + (u64)(route / router.top_k) * p.cols + column));
    }
}
