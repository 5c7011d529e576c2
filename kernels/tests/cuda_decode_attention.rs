//! Decode attention against the plain formula over head shapes, lengths, windows and divisions.

mod gpu;
#[path = "gpu/attention.rs"]
mod rows;

use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::DeviceBuffer;
use kernels::cuda::decode_attention::{DecodeRows, DecodeWorkspace, Splits, decode_attention_split};
use kernels::cuda::rope_cache::HeadShape;
use rows::CachedRows;

const SHAPES: [[usize; 4]; 8] = [
    [4, 4, 128, 64],
    [8, 1, 128, 32],
    [12, 4, 64, 16],
    [6, 2, 96, 16],
    [16, 1, 128, 128],
    [4, 2, 256, 32],
    [20, 2, 128, 16],
    [3, 3, 64, 64],
];

#[test]
fn rows_of_any_length_attend_as_the_formula_says() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(3);
    for [num_heads, num_kv_heads, head_dim, block_size] in SHAPES {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size };
        for lens in [&[1][..], &[5, 0, 17, 16], &[255, 256, 257], &[1000, 3, 2049, 700]] {
            let cached = CachedRows::new(&gpu, &mut random, shape, lens);
            let workspace = DecodeWorkspace::new(&gpu, 64, shape).expect("memory");
            let cols = num_heads * head_dim;
            let qkv = random.bf16s(lens.len() * shape.qkv_cols(), 1.0);
            let qkv_buffer = DeviceBuffer::from_slice(&gpu, &qkv).expect("memory");
            let decode_rows = DecodeRows {
                block_tables: cached.table_buffer.span(),
                max_blocks: cached.max_blocks,
                context_lens: cached.len_buffer.span(),
                num_rows: lens.len(),
            };
            let default = Splits::for_rows(lens.len(), shape);
            let fine = Splits { splits: 16, min_chunk: 64 };
            for (splits, window) in [(default, 0), (fine, 0), (default, 100), (fine, 100)] {
                let out = poisoned::<bf16>(&gpu, &queue, lens.len() * cols);
                let (cache, scale) = (cached.cache(), (head_dim as f32).powf(-0.5));
                // Twice: the second finds the counters that the first set back.
                for _ in 0..2 {
                    decode_attention_split(
                        &queue,
                        out.span(),
                        qkv_buffer.span(),
                        cache,
                        decode_rows,
                        shape,
                        scale,
                        window,
                        &workspace,
                        splits,
                    )
                    .expect("a launch");
                }
                queue.wait().expect("the kernel runs");
                let found = floats(&out.span().read::<bf16>(lens.len() * cols).expect("a copy"));
                for (row, &len) in lens.iter().enumerate() {
                    let found = &found[row * cols..(row + 1) * cols];
                    if len == 0 {
                        assert!(found.iter().all(|&x| x == 0.0), "a padded row gives zeros");
                        continue;
                    }
                    let what = format!("{shape:?}, {lens:?}, {splits:?}, window {window}");
                    let q = &qkv[row * shape.qkv_cols()..];
                    cached.check(&what, found, q, row, len - 1, window as usize);
                }
            }
        }
    }
}
