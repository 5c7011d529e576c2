// sm90_prefill_attention_fp8, sm90_prefill_attention_int8, and the same with alibi_ and capped_: as the kernels of
// sm90_prefill_attention.cu with bf16 in their name, for blocks of codes
// archs: 90a
//
// k, v blocks   [block][K][B][D] codes, and a scale for each position and KV head, [block][K][B] f32 (kv_codes.rs)
// the rest      the same as there
// arithmetic    a code times its scale in f32, rounded to bf16; the rest as for keys and values in bf16
// launch        as there. The first warpgroup loads codes to registers while it expands those before to shared memory, where the other
//               two read them as they read bf16
// needs         B from 16, a power of two; D 64 or 128; checked in prefill_attention.rs
// bound         arithmetic, as there. 128 keys and values of 128 elements are 960 instructions of each of four warps, and 128 queries
//               take about 3000 cycles for them
// test          tests/cuda_prefill_attention.rs
#include "sm90_prefill_attention.cuh"

constexpr u32 PRODUCER_WARPS = 4;

// The two f16 numbers of a word.
__device__ __forceinline__ float2 f16_pair(u32 x) {
    float2 r;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
}

// The four codes of a word as f16, which holds every code exactly: the first two in `low`.
template <Kv KV>
__device__ __forceinline__ void expand_to_f16(u32 word, u32& low, u32& high) {
    if constexpr (KV == Kv::FP8) {
        asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
            : "=r"(low), "=r"(high)
            : "r"(word));
    } else {
        // An integer plus 128 is the low byte of the mantissa of a number from 1024 on.
        constexpr u32 BASE = 0x64006400u, OFFSET = 0x64806480u;  // 1024 and 1152, twice
        const u32 biased = word ^ 0x80808080u;
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(__byte_perm(biased, BASE, 0x5150)), "r"(OFFSET));
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(__byte_perm(biased, BASE, 0x5352)), "r"(OFFSET));
    }
}

// Codes of a tile of keys, or of values, on their way to shared memory. Four threads share four rows, of which each has 16 codes of
// each 64. Threads 4 to 7 take two rows in the other order, so that eight threads write to all banks.
template <int D, Kv KV>
struct Pieces {
    static constexpr u32 PANELS = D / 64;
    uint4 codes[4][PANELS];
    float scales[4];

    __device__ static u32 row() { return threadIdx.x / 4 * 4; }
    __device__ static u32 is_odd() { return threadIdx.x / 4 % 2; }

    // Loads four rows of the blocks from `row` on.
    __device__ void load(const void* blocks, const float* scales_of_blocks, u32 row) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u64 at = row + (i ^ is_odd());
            const u8* from = static_cast<const u8*>(blocks) + at * D + threadIdx.x % 4 * 16;
#pragma unroll
            for (u32 p = 0; p < PANELS; ++p) codes[i][p] = load_once(from + 64 * p);
            scales[i] = scales_of_blocks[at];
        }
    }

    // Makes rows of the tile from `end` on zero.
    __device__ void clear_from(u32 end) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (row() + (i ^ is_odd()) < end) continue;
            scales[i] = 0.0f;
#pragma unroll
            for (u32 p = 0; p < PANELS; ++p) codes[i][p] = make_uint4(0, 0, 0, 0);
        }
    }

    // Writes the tile to `to`, for the tensor cores.
    __device__ void expand(u32 to) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 row_of_tile = row() + (i ^ is_odd());
#pragma unroll
            for (u32 p = 0; p < PANELS; ++p) {
                const u32 words[4] = {codes[i][p].x, codes[i][p].y, codes[i][p].z, codes[i][p].w};
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    u32 out[4];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        u32 low, high;
                        expand_to_f16<KV>(words[2 * half + j], low, high);
                        const float2 a = f16_pair(low), b = f16_pair(high);
                        out[2 * j] = pack_bf16x2(a.x * scales[i], a.y * scales[i]);
                        out[2 * j + 1] = pack_bf16x2(b.x * scales[i], b.y * scales[i]);
                    }
                    const u32 chunk = (threadIdx.x % 4 * 2 + half) ^ row_of_tile % 8;
                    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + p * PANEL + row_of_tile * 128 + chunk * 16),
                                 "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
                                 : "memory");
                }
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
};

// The place of this thread's rows in the blocks; beyond the end of the tile's keys, rows of the last block.
struct Places {
    const u32* table;
    u32 kv_heads, kv_head, shift, last;

    __device__ Places(const PrefillAttention& a, const Work& w)
        : table(a.block_tables + (u64)w.tile.row * a.max_blocks),
          kv_heads(a.kv_heads),
          kv_head(w.head / (a.heads / a.kv_heads)),
          shift(a.block_shift),
          last((w.tile.end - 1) >> a.block_shift) {}

    __device__ u32 operator()(u32 key) const {
        return ((table[min(key >> shift, last)] * kv_heads + kv_head) << shift) + (key & ((1u << shift) - 1));
    }
};

// `taken` has the tile of this round and of the one before.
template <int D, Kv KV>
__device__ __forceinline__ void produce(const Shared<D>& smem, const TensorMap* q_map, const PrefillAttention& a, const Queue& queue,
                                        volatile u32* taken, volatile u32* current) {
    RingPosition ring;  // of keys and values
    u32 q_parity = 1;
    for (u32 turn = 0;; turn ^= 1) {
        if (threadIdx.x == 0) {
            u32 index = queue.take();
            while (index < queue.works && work_at(a, index, queue).count == 0) index = queue.take();
            taken[turn] = index;
        }
        asm volatile("bar.sync 3, 128;" ::: "memory");
        const u32 index = taken[turn];
        const Work w = work_at(a, index, queue);
        auto publish_tile = [&] {
            if (threadIdx.x == 0) {
                barrier_wait(smem.q_empty(), q_parity);
                publish<D>(smem, q_map, index, w, current);
            }
            q_parity ^= 1;
        };
        if (w.count == 0) return publish_tile();
        const Places places(a, w);
        Pieces<D, KV> pieces;
        u32 row = places(w.begin + pieces.row()), ahead = 0;
        pieces.load(a.k_blocks, a.k_scales, row);
#pragma unroll 1
        for (u32 i = 0; i < 2 * w.count; ++i) {  // keys of a slice, then its values
            const bool is_v = i % 2;
            const u32 first = w.begin + i / 2 * KEYS, stage = ring.stage;
            if (is_v) row = ahead;
            else ahead = places(first + KEYS + pieces.row());
            barrier_wait(is_v ? smem.v_empty(stage) : smem.k_empty(stage), ring.parity ^ 1);
            if (first + KEYS > w.tile.end) pieces.clear_from(w.tile.end - first);
            pieces.expand(is_v ? smem.v(stage) : smem.k(stage));
            release(is_v ? smem.v_full(stage) : smem.k_full(stage));
            pieces.load(is_v ? a.k_blocks : a.v_blocks, is_v ? a.k_scales : a.v_scales, row);
            if (i == 0) publish_tile();
            if (is_v) ring.next();
        }
    }
}

template <int D, Kv KV, Scores SCORES>
__device__ __forceinline__ void prefill_attention(const TensorMap* q_map, const PrefillAttention& a, const Queue& queue,
                                                  const float* slopes, float cap) {
    extern __shared__ u8 dynamic[];
    __shared__ u32 current, taken[2];  // the current tile, and that of the first warpgroup
    __shared__ alignas(8) u64 barriers[10];
    const Shared<D> smem{(shared_address(dynamic) + 1023) & ~1023u, shared_address(barriers)};
    pdl_launch();
    if (threadIdx.x == 0) smem.init(PRODUCER_WARPS);
    __syncthreads();
    pdl_wait();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        produce<D, KV>(smem, q_map, a, queue, taken, &current);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        consume<D, KV, SCORES>(smem, a, queue, &current, slopes, cap);
    }
}

#define PARAMETERS const __grid_constant__ TensorMap q_map, const PrefillAttention a, u32 *next_tile, u32 tiles, u32 works

#define PREFILL_ATTENTION(NAME, KV, D)                                                                                  \
    extern "C" __global__ void __launch_bounds__(384, 1) sm90_prefill_attention_##NAME##_d##D(PARAMETERS) {             \
        prefill_attention<D, KV, Scores::PLAIN>(&q_map, a, Queue{next_tile, tiles, works}, nullptr, 0.0f);              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                                \
        sm90_alibi_prefill_attention_##NAME##_d##D(PARAMETERS, const float* slopes) {                                   \
        prefill_attention<D, KV, Scores::ALIBI>(&q_map, a, Queue{next_tile, tiles, works}, slopes, 0.0f);               \
    }

#define CAPPED_PREFILL_ATTENTION(NAME, KV, D)                                                                           \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                                \
        sm90_capped_prefill_attention_##NAME##_d##D(PARAMETERS, float cap) {                                            \
        prefill_attention<D, KV, Scores::CAPPED>(&q_map, a, Queue{next_tile, tiles, works}, nullptr, cap);              \
    }

#define FOR_CODES(NAME, KV)                                                                                             \
    PREFILL_ATTENTION(NAME, KV, 64)                                                                                     \
    PREFILL_ATTENTION(NAME, KV, 128)                                                                                    \
    CAPPED_PREFILL_ATTENTION(NAME, KV, 128)

FOR_CODES(fp8, Kv::FP8)
FOR_CODES(int8, Kv::INT8)
