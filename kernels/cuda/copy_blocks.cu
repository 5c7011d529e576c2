// copy_blocks: blocks[l][to[i]] = blocks[l][from[i]] for i in order, in all layers l, of K and of V
//
// k, v    [L][blocks][block_size] in units of 16 bytes
// pairs   up to 32 pairs of source and destination; a later pair may read what an earlier one wrote, or overwrite what
//         it read
// launch  grid (ceil(units of a block / 256), L, 2, or 1 without v), block 256; a thread copies its unit of every pair in turn, which
//         keeps the order
// needs   pointers 16-byte aligned: checked in copy_blocks.rs before launch
// bound   memory, 4 bytes for each bf16 copied
// test    tests/cuda_copy_blocks.rs, exact
// archs: 80 90a 100a ptx
#include "common.cuh"

struct Pairs {
    u32 from[32], to[32];
};

extern "C" __global__ void __launch_bounds__(256)
copy_blocks(uint4* k, uint4* v, const Pairs pairs, u32 count, u64 layer_units, u32 block_units) {
    const u32 unit = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch();
    pdl_wait();
    if (unit >= block_units) return;
    uint4* layer = (blockIdx.z ? v : k) + blockIdx.y * layer_units;
    for (u32 i = 0; i < count; ++i) {
        layer[(u64)pairs.to[i] * block_units + unit] = layer[(u64)pairs.from[i] * block_units + unit];
    }
}
