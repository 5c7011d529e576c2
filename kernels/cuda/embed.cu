// embed_bf16: out[t, :] = scale * table[id(t) - first, :], or zeros if id(t) is not in this worker's rows
//
// out         [T, E] bf16
// table       [V, E] bf16, tokens first .. first + V
// token_ids   [T]    u32; u32::MAX means the last token of the row, last_tokens[token_rows[t]]
// token_rows  [T]    u32
// launch      grid T, block min(E / 8, 256); 16-byte loads
// needs       E % 8 == 0, pointers 16-byte aligned: checked in embed.rs before launch
// bound       memory, 4*T*E bytes
// maths       fp32 product, one rounding on store
// test        tests/cuda_ops.rs, exact
// archs: 80 90a 100a ptx
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
embed_bf16(bf16* out, const bf16* table, const u32* token_ids, const u32* token_rows, const u32* last_tokens,
           u32 first, u32 vocab, u32 cols, float scale) {
    pdl_launch();
    pdl_wait();
    const u32 t = blockIdx.x;
    u32 id = token_ids[t];
    if (id == 0xffffffffu) id = last_tokens[token_rows[t]];
    const u32 row = id - first; // wraps if id is below `first`, and is then not below vocab
    const bool mine = row < vocab;
    for (u32 i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
        bf16x8 x = {};
        if (mine) x = load8(table + (u64)row * cols + i);
        if (scale != 1.0f) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x.v[j] = to_bf16(to_f32(x.v[j]) * scale);
        }
        store8(out + (u64)t * cols + i, x);
    }
}
