// expand_blocks_fp8, expand_blocks_int8: copies the blocks of prefilling rows from a cache of codes to one of bf16, in the order of rows
// archs: 80 90a 100a ptx
//
// a             the attention that will read them, as in prefill_attention.cu with codes: its blocks, block tables and lengths are read
// to.k, to.v    [blocks][K][B][D] bf16: a code times its scale in f32, rounded. Block i of row r is in place first(r) + i, where first(r)
//               is the number of blocks of the rows before. Positions from a row's length on are not written, nor are blocks that end
//               before the first 128 positions that hold one which a new token attends to
// to.places     [R, to.max_blocks] u32: the place of each block of a row, for the attention as its block tables
// launch        grid (most blocks of a row, K, R), block 256: one KV head of a block, K and V; a thread has 8 codes at a time
// needs         D a multiple of 8, pointers 16-byte aligned: checked in expand_blocks.rs before launch
// bound         memory, 6 bytes for each code of K and its code of V: 8 x 2048 positions, 8 heads of 128: 34 MB read and 67 MB written,
//               30 us at 3.35 TB/s (H100)
// test          tests/cuda_prefill_attention.rs
#include "kv_codes.cuh"
#include "mma.cuh"
#include "prefill_attention.cuh"

constexpr u32 THREADS = 256, EACH = 8;
constexpr u32 SLICE = 128;  // the attention reads this number of keys, or half of it, at a time

struct Expanded {
    bf16 *k, *v;
    u32* places;
    u32 max_blocks, head_dim;
};

// Eight codes times their scale.
template <Kv KV>
__device__ __forceinline__ uint4 expand8(const uint2& codes, float scale) {
    const u32 words[2] = {codes.x, codes.y};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 low, high;  // codes 0 and 2, 1 and 3
        expand_codes<KV>(words[i], low, high);
        out[2 * i] = pack_bf16x2(unpack_lo(low) * scale, unpack_lo(high) * scale);
        out[2 * i + 1] = pack_bf16x2(unpack_hi(low) * scale, unpack_hi(high) * scale);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

template <Kv KV>
__device__ __forceinline__ void expand_blocks(const PrefillAttention& a, const Expanded& to) {
    const u32 index = blockIdx.x, head = blockIdx.y, row = blockIdx.z, block = 1u << a.block_shift;
    auto blocks_of = [&](u32 positions) { return (positions + block - 1) >> a.block_shift; };
    pdl_launch();
    // Lengths and tables are inputs of the step, so no wait is needed for them.
    const u32 len = a.context_lens[row], tokens = a.row_starts[row + 1] - a.row_starts[row];
    const u32 begin = first_seen(a, len - tokens) / SLICE * SLICE;
    u32 before_row = 0;
    for (u32 before = threadIdx.x % 32; before < row; before += 32) before_row += blocks_of(a.context_lens[before]);
    const u32 place = __reduce_add_sync(FULL_WARP, before_row) + index;
    const bool is_used = index < blocks_of(len);
    const u64 from = is_used ? a.block_tables[(u64)row * a.max_blocks + index] : 0;
    pdl_wait();
    if (!is_used) return;
    if (head == 0 && threadIdx.x == 0) to.places[(u64)row * to.max_blocks + index] = place;
    if ((index + 1) << a.block_shift <= begin) return;

    // Rows of D elements of this head in both caches, and pieces of eight codes of K; those of V follow.
    const u64 from_row = (from * a.kv_heads + head) << a.block_shift, to_row = ((u64)place * a.kv_heads + head) << a.block_shift;
    const u32 in_row = to.head_dim / 8, pieces = min(len - (index << a.block_shift), block) * in_row;
    for (u32 first = threadIdx.x; first < 2 * pieces; first += EACH * THREADS) {
        uint2 codes[EACH];
        float scales[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 piece = first + i * THREADS;
            if (piece >= 2 * pieces) continue;
            const bool is_v = piece >= pieces;
            const u32 at = is_v ? piece - pieces : piece;
            codes[i] = load_once_8(static_cast<const u8*>(is_v ? a.v_blocks : a.k_blocks) + from_row * to.head_dim + at * 8);
            scales[i] = (is_v ? a.v_scales : a.k_scales)[from_row + at / in_row];
        }
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 piece = first + i * THREADS;
            if (piece >= 2 * pieces) continue;
            const bool is_v = piece >= pieces;
            const u32 at = is_v ? piece - pieces : piece;
            *reinterpret_cast<uint4*>((is_v ? to.v : to.k) + to_row * to.head_dim + at * 8) = expand8<KV>(codes[i], scales[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) expand_blocks_fp8(const PrefillAttention a, const Expanded to) {
    expand_blocks<Kv::FP8>(a, to);
}

extern "C" __global__ void __launch_bounds__(THREADS) expand_blocks_int8(const PrefillAttention a, const Expanded to) {
    expand_blocks<Kv::INT8>(a, to);
}
