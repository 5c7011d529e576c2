// sm90_prefill_attention_bf16: the same as prefill_attention_bf16, for Hopper's warpgroups  (after Shah et al. 2024)
// sm90_alibi_prefill_attention_bf16: the same with slopes[h] * (j - p) added to the score of position j  (Press et al. 2022)
// archs: 90a
//
// q             through tensor map `q_map` of qkv [T, (H + 2K) D], box [128, 64]
// k, v blocks   through tensor maps `k_map`, `v_map` of one layer's [blocks * K * B, D], box [B, 64]
// the other operands and the results are the same as in prefill_attention.cu
// next_tile     u32, zero before the first launch and after each launch: blocks take tiles of 128 queries from it when
//               they are free
// launch        grid min(tiles, multiprocessors), 3 warpgroups, dynamic shared memory from the wrapper. One thread of
//               the first warpgroup loads queries, and 128 keys and values at a time, through the copy engine. The
//               other two warpgroups have 64 queries each. A warpgroup computes the product for the next scores while
//               it computes the softmax of the current ones, and its product with the values while the other warpgroup
//               computes its softmax.
// needs         16 <= B <= 128, a power of two; D 64 or 128; checked in prefill_attention.rs
// bound         arithmetic, 2 D operations per query, head and key attended to, twice: 8 x 2048 tokens, 32 heads of
//               128: 275 GFLOP
// test          tests/cuda_prefill_attention.rs
#include "sm90_prefill_attention.cuh"

struct Maps {
    const TensorMap *q, *k, *v;
};

// Loads 128 keys (or values) of a KV head from `first` on; beyond the row's end it repeats its last block.
template <int D>
__device__ __forceinline__ void load_slice(u32 dst, u32 full, const TensorMap* map, const PrefillAttention& a, const Work& w,
                                           u32 first) {
    const u32* table = a.block_tables + (u64)w.tile.row * a.max_blocks;
    const u32 kv_head = w.head / (a.heads / a.kv_heads), block = 1u << a.block_shift, last = (w.tile.end - 1) >> a.block_shift;
    barrier_arrive_expect(full, Shared<D>::TILE);
    for (u32 i = 0; i < KEYS; i += block) {
        const u32 row = (table[min((first + i) >> a.block_shift, last)] * a.kv_heads + kv_head) << a.block_shift;
#pragma unroll
        for (u32 p = 0; p < D / 64; ++p) tensor_load(dst + p * PANEL + i * 128, map, p * 64, row, full, EVICT_LAST);
    }
}

template <int D>
__device__ __forceinline__ void produce(const Shared<D>& smem, const Maps& maps, const PrefillAttention& a, const Queue& queue,
                                        volatile u32* current) {
    RingPosition k, v;
    u32 q_parity = 1;
    while (true) {
        const u32 index = queue.take();
        const Work w = work_at(a, index, queue);
        if (index < queue.works && w.count == 0) continue;
        barrier_wait(smem.q_empty(), q_parity);
        q_parity ^= 1;
        publish<D>(smem, maps.q, index, w, current);
        if (w.count == 0) return;
        for (u32 i = 0; i < w.count; ++i, k.next(), v.next()) {
            const u32 first = w.begin + i * KEYS;
            barrier_wait(smem.k_empty(k.stage), k.parity ^ 1);
            load_slice<D>(smem.k(k.stage), smem.k_full(k.stage), maps.k, a, w, first);
            barrier_wait(smem.v_empty(v.stage), v.parity ^ 1);
            load_slice<D>(smem.v(v.stage), smem.v_full(v.stage), maps.v, a, w, first);
        }
    }
}

template <int D, Scores SCORES>
__device__ __forceinline__ void prefill_attention(const Maps& maps, const PrefillAttention& a, const Queue& queue,
                                                  const float* slopes, float cap) {
    extern __shared__ u8 dynamic[];
    __shared__ u32 current;  // the current tile
    __shared__ alignas(8) u64 barriers[10];
    const Shared<D> smem{(shared_address(dynamic) + 1023) & ~1023u, shared_address(barriers)};
    pdl_launch();
    if (threadIdx.x == 0) smem.init(1);
    __syncthreads();
    pdl_wait();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) produce<D>(smem, maps, a, queue, &current);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<D, Kv::BF16, SCORES>(smem, a, queue, &current, slopes, cap);
    }
}

#define PREFILL_ATTENTION(D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                               \
        sm90_prefill_attention_bf16_d##D(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, \
                                         const __grid_constant__ TensorMap v_map, const PrefillAttention a,            \
                                         u32* next_tile, u32 tiles, u32 works) {                                       \
        prefill_attention<D, Scores::PLAIN>(Maps{&q_map, &k_map, &v_map}, a, Queue{next_tile, tiles, works}, nullptr, 0.0f); \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(384, 1) sm90_alibi_prefill_attention_bf16_d##D(                       \
        const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,                              \
        const __grid_constant__ TensorMap v_map, const PrefillAttention a, u32* next_tile, u32 tiles, u32 works,       \
        const float* slopes) {                                                                                         \
        prefill_attention<D, Scores::ALIBI>(Maps{&q_map, &k_map, &v_map}, a, Queue{next_tile, tiles, works}, slopes, 0.0f); \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(384, 1) sm90_capped_prefill_attention_bf16_d##D(                      \
        const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,                              \
        const __grid_constant__ TensorMap v_map, const PrefillAttention a, u32* next_tile, u32 tiles, u32 works,       \
        float cap) {                                                                                                   \
        prefill_attention<D, Scores::CAPPED>(Maps{&q_map, &k_map, &v_map}, a, Queue{next_tile, tiles, works}, nullptr, cap); \
    }

PREFILL_ATTENTION(64)
PREFILL_ATTENTION(128)
