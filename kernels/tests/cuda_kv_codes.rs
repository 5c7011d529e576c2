//! Keys and values in eight bits on a GPU: their bytes are those of `kernels::kv_codes`, and the simple attention reads them.

mod gpu;
#[path = "gpu/attention.rs"]
mod rows;

use gpu::{Random, floats, open, poisoned};
use half::bf16;
use kernels::cuda::DeviceBuffer;
use kernels::cuda::paged_attention::{PagedAttention, TokenTables, paged_attention};
use kernels::cuda::rope_cache::{CacheCodes, HeadShape, LayerCache, QueryScale, RopeInputs, rope_cache};
use kernels::kv_codes::KvCodes;
use rows::{CachedRows, Kind};

/// `H`, `K`, `D`, `B`.
const SHAPES: [[usize; 4]; 6] =
    [[4, 2, 128, 64], [3, 1, 80, 16], [6, 3, 96, 32], [2, 2, 256, 16], [4, 1, 64, 128], [2, 1, 512, 16]];

#[test]
fn written_codes_are_those_of_the_definition() {
    let Some((gpu, queue)) = open() else { return };
    let mut random = Random::new(31);
    for (codes, [num_heads, num_kv_heads, head_dim, block_size]) in
        KvCodes::ALL.into_iter().flat_map(|codes| SHAPES.map(|shape| (codes, shape)))
    {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size, has_kv: true };
        let (tokens, blocks, positions_max) = (37, 5, 50);
        let (cols, half) = (shape.qkv_cols(), head_dim / 2);
        let mut qkv = random.bf16s(tokens * cols, 1.0);
        // A token of zeros, and one of very different sizes.
        qkv[..cols].fill(bf16::ZERO);
        qkv[cols..2 * cols]
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = bf16::from_f32(2f32.powi(-((i % 23) as i32))));
        let angles: Vec<f32> = (0..positions_max * half).map(|_| random.unit() * 3.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let positions: Vec<u32> = (0..tokens).map(|_| random.below(positions_max) as u32).collect();
        let mut slots = random.shuffled(blocks * block_size);
        slots.truncate(tokens);
        slots[tokens / 2] = u32::MAX;
        let floats_of = |values: &[f32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let words = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dc, ds, dp, dl) = (floats_of(&cos), floats_of(&sin), words(&positions), words(&slots));
        let query_scale = Some(QueryScale { beta: 0.2, period: 4, offset: 1 });
        let gains = floats_of(&(0..head_dim).map(|_| random.unit()).collect::<Vec<f32>>());
        let (tables, query_gains) = (Some([dc.span(), ds.span()]), gains.span());
        let inputs = RopeInputs { tables, positions: dp.span(), slots: dl.span(), query_scale, query_gains };
        let (size, num_rows) = (blocks * shape.block_elements(), blocks * num_kv_heads * block_size);
        let plain = [0; 2].map(|_| poisoned::<bf16>(&gpu, &queue, size));
        let coded = [0; 2].map(|_| poisoned::<u8>(&gpu, &queue, size));
        let scales = [0; 2].map(|_| poisoned::<f32>(&gpu, &queue, num_rows));
        let qkvs = [0; 2].map(|_| DeviceBuffer::from_slice(&gpu, &qkv).unwrap());
        let cache = LayerCache { k: plain[0].span(), v: plain[1].span(), codes: None };
        rope_cache(&queue, qkvs[0].span(), cache, inputs, shape, tokens).unwrap();
        let kind = CacheCodes { kind: codes, k_scales: scales[0].span(), v_scales: scales[1].span() };
        let cache = LayerCache { k: coded[0].span(), v: coded[1].span(), codes: Some(kind) };
        rope_cache(&queue, qkvs[1].span(), cache, inputs, shape, tokens).unwrap();
        queue.wait().unwrap();
        let [one, other] = qkvs.each_ref().map(|buffer| buffer.span().read::<u16>(tokens * cols).unwrap());
        assert!(one == other, "{shape:?}, {codes:?}: q differs");
        for which in 0..2 {
            let values = floats(&plain[which].span().read::<bf16>(size).unwrap());
            let found: Vec<u8> = coded[which].span().read(size).unwrap();
            let found_scales: Vec<f32> = scales[which].span().read(num_rows).unwrap();
            let mut wrong = 0;
            for (row, values) in values.chunks(head_dim).enumerate() {
                let mut expected = vec![0xff; head_dim];
                let scale = if values[0].is_nan() { f32::NAN } else { codes.encode_all(values, &mut expected) };
                let same =
                    scale.to_bits() == found_scales[row].to_bits() || (scale.is_nan() && found_scales[row].is_nan());
                wrong += usize::from(!same || expected != found[row * head_dim..][..head_dim]);
            }
            assert_eq!(wrong, 0, "{shape:?}, {codes:?}: rows of {} are wrong", ["K", "V"][which]);
        }
    }
}

#[test]
fn the_simple_attention_reads_codes() {
    let Some((gpu, queue)) = open() else { return };
    let mut random = Random::new(37);
    let lens = [1, 70, 33, 16, 129];
    for (codes, [num_heads, num_kv_heads, head_dim, block_size]) in
        KvCodes::ALL.into_iter().flat_map(|codes| SHAPES.map(|shape| (codes, shape)))
    {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size, has_kv: true };
        let cached = CachedRows::new(&gpu, &mut random, shape, &lens).coded(&gpu, codes);
        let (cols, qkv_cols) = (num_heads * head_dim, shape.qkv_cols());
        let qkv = random.bf16s(lens.len() * qkv_cols, 1.0);
        let words = |values: Vec<u32>| DeviceBuffer::from_slice(&gpu, &values).unwrap();
        let qkv_buffer = DeviceBuffer::from_slice(&gpu, &qkv).unwrap();
        let rows = words((0..lens.len() as u32).collect());
        let positions = words(lens.iter().map(|len| *len as u32 - 1).collect());
        let slots = words(vec![0; lens.len()]);
        for kind in [Kind::Plain, Kind::Alibi, Kind::Capped, Kind::Sinks] {
            let scores = cached.scores(&gpu, kind, [50, 0]);
            let out = poisoned::<bf16>(&gpu, &queue, lens.len() * cols);
            let attention = PagedAttention {
                out: out.span(),
                qkv: qkv_buffer.span(),
                cache: cached.cache(),
                tables: TokenTables {
                    block_tables: cached.table_buffer.span(),
                    max_blocks: cached.max_blocks,
                    token_tables: rows.span(),
                    positions: positions.span(),
                    slots: slots.span(),
                },
                shape,
                scores: scores.on_gpu,
            };
            paged_attention(&queue, &attention, lens.len()).unwrap();
            queue.wait().unwrap();
            let found = floats(&out.span().read::<bf16>(lens.len() * cols).unwrap());
            for (row, len) in lens.iter().enumerate() {
                let what = format!("{shape:?}, {codes:?}, {kind:?}");
                cached.check(&what, &found[row * cols..][..cols], &qkv[row * qkv_cols..], row, len - 1, &scores);
            }
        }
    }
}
