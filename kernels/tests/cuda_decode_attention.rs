//! Compares decode attention with the plain formula, for various head shapes, lengths, windows and divisions.

mod gpu;
#[path = "gpu/attention.rs"]
mod rows;

use gpu::{Random, assert_close, floats, poisoned};
use half::bf16;
use kernels::cuda::decode_attention::{
    DecodeAttention, DecodeRows, Positions, RopeTables, RotatedNorms, decode_attention, decode_attention_ring,
    decode_attention_split, has_ring, rotates,
};
use kernels::cuda::decode_division::{DecodeWorkspace, Division, Splits};
use kernels::cuda::head_norm::{HeadNorm, HeadNormWeights, head_norm};
use kernels::cuda::rope_cache::{HeadShape, RopeInputs, rope_cache};
use kernels::cuda::scores::{ALIBI_HEAD_DIMS, CAPPED_HEAD_DIMS, HEAD_DIMS};
use kernels::cuda::{CudaError, DeviceBuffer, Queue, Span};
use kernels::kv_codes::KvCodes;
use rows::{CachedRows, Kind};

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

const FINE: Splits = Splits { splits: 16, blocks: 16, min_chunk: 64, cluster: 1, whole_len: 0 };
const JOINED: Splits = Splits { cluster: 8, whole_len: 1000, ..FINE };
const SHARED: Splits = Splits { blocks: 3, ..FINE };

fn decode_rows(cached: &CachedRows, num_rows: usize) -> DecodeRows {
    DecodeRows {
        block_tables: cached.table_buffer.span(),
        max_blocks: cached.max_blocks,
        context_lens: cached.len_buffer.span(),
        num_rows,
    }
}

type Kernel = fn(&Queue, &DecodeAttention<'_>, Splits) -> Result<(), CudaError>;

const FEW_ROWS: [&[usize]; 4] = [&[1], &[5, 0, 17, 16], &[255, 256, 257], &[1000, 3, 2049, 700]];

#[test]
fn rows_of_any_length_attend_as_the_formula_says() {
    attends_as_the_formula_says(3, Kind::Plain, None, decode_attention_split, &FEW_ROWS);
}

#[test]
fn alibi_penalizes_distance_as_the_formula_says() {
    attends_as_the_formula_says(5, Kind::Alibi, None, decode_attention_split, &FEW_ROWS);
}

#[test]
fn capped_scores_and_sinks_are_attended_to_as_the_formula_says() {
    for kind in [Kind::Capped, Kind::Sinks] {
        attends_as_the_formula_says(9, kind, None, decode_attention_split, &FEW_ROWS);
    }
}

#[test]
fn the_ring_attends_as_the_formula_says() {
    for kind in [Kind::Plain, Kind::Alibi, Kind::Capped, Kind::Sinks] {
        attends_as_the_formula_says(13, kind, None, decode_attention_ring, &FEW_ROWS);
    }
}

#[test]
fn a_block_of_the_ring_goes_over_many_rows() {
    let lens: Vec<usize> = (0..160).map(|row| [40, 0, 1, 16, 130, 17, 333, 64, 65, 2500][row * 7 % 10]).collect();
    for kind in [Kind::Plain, Kind::Alibi, Kind::Capped, Kind::Sinks] {
        attends_as_the_formula_says(17, kind, None, decode_attention_ring, &[&lens]);
    }
}

#[test]
fn rows_of_codes_attend_as_the_formula_says() {
    for (codes, kind) in every_kind_of_codes() {
        attends_as_the_formula_says(19, kind, Some(codes), decode_attention_split, &FEW_ROWS);
    }
}

fn every_kind_of_codes() -> impl Iterator<Item = (KvCodes, Kind)> {
    let kinds = [Kind::Plain, Kind::Alibi, Kind::Capped, Kind::Sinks];
    KvCodes::ALL.into_iter().flat_map(move |codes| kinds.map(|kind| (codes, kind)))
}

fn attends_as_the_formula_says(seed: u64, kind: Kind, codes: Option<KvCodes>, kernel: Kernel, lens: &[&[usize]]) {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(seed);
    for [num_heads, num_kv_heads, head_dim, block_size] in SHAPES {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size, has_kv: true };
        let ring = kernel as usize == decode_attention_ring as Kernel as usize;
        let supported = match kind {
            Kind::Plain | Kind::Sinks => HEAD_DIMS.as_slice(),
            Kind::Alibi => ALIBI_HEAD_DIMS.as_slice(),
            Kind::Capped => CAPPED_HEAD_DIMS.as_slice(),
        };
        if !supported.contains(&head_dim) || (ring && !has_ring(&gpu, shape)) {
            continue;
        }
        for &lens in lens {
            let cached = CachedRows::new(&gpu, &mut random, shape, lens);
            let cached = match codes {
                Some(codes) => cached.coded(&gpu, codes),
                None => cached,
            };
            let workspace = DecodeWorkspace::new(&gpu, lens.len().max(64), &[shape], Division::ByRows).expect("memory");
            let cols = num_heads * head_dim;
            let qkv = random.bf16s(lens.len() * shape.qkv_cols(), 1.0);
            let qkv_buffer = DeviceBuffer::from_slice(&gpu, &qkv).expect("memory");
            let default = Splits::for_rows(lens.len(), shape);
            let bounds = [[0, 0], [100, 0], [0, 64], [30, 100]];
            for (splits, bounds) in
                [default, FINE, JOINED, SHARED].into_iter().flat_map(|splits| bounds.map(|b| (splits, b)))
            {
                let is_few =
                    codes.is_some() && !(matches!(kind, Kind::Plain | Kind::Sinks) && [64, 128].contains(&head_dim));
                if splits == SHARED && (gpu.capability().0 != 9 || is_few) {
                    continue; // There are no such kernels.
                }
                if lens.len() > 64 && splits != default {
                    continue; // The workspace is for few rows.
                }
                let scores = cached.scores(&gpu, kind, bounds);
                let out = poisoned::<bf16>(&gpu, &queue, lens.len() * cols);
                let attention = DecodeAttention {
                    out: out.span(),
                    qkv: qkv_buffer.span(),
                    cache: cached.cache(),
                    positions: Positions::Known,
                    rows: decode_rows(&cached, lens.len()),
                    shape,
                    scores: scores.on_gpu,
                    workspace: &workspace,
                };
                // Runs twice: the second run needs the counters that the first one reset. Nothing is written meanwhile.
                for positions in [Positions::Known, Positions::Late] {
                    kernel(&queue, &DecodeAttention { positions, ..attention }, splits).expect("a launch");
                }
                queue.wait().expect("the kernel runs");
                let found = floats(&out.span().read::<bf16>(lens.len() * cols).expect("a copy"));
                for (row, &len) in lens.iter().enumerate() {
                    let found = &found[row * cols..(row + 1) * cols];
                    if len == 0 {
                        assert!(found.iter().all(|&x| x == 0.0), "a padded row gives zeros");
                        continue;
                    }
                    let what =
                        format!("{shape:?}, {codes:?}, {kind:?}, {lens:?}, {splits:?}, window and chunk {bounds:?}");
                    let q = &qkv[row * shape.qkv_cols()..];
                    cached.check(&what, found, q, row, len - 1, &scores);
                }
            }
        }
    }
}

#[test]
fn rows_divided_by_length_have_the_same_bits_beside_any_others() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(23);
    let lens: Vec<usize> = (0..300).map(|row| [40, 0, 1, 16, 130, 17, 333, 64, 1000, 2500][row * 7 % 10]).collect();
    for [num_heads, num_kv_heads, head_dim, block_size] in SHAPES {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size, has_kv: true };
        let cached = CachedRows::new(&gpu, &mut random, shape, &lens);
        let workspace = DecodeWorkspace::new(&gpu, lens.len(), &[shape], Division::ByLength).expect("memory");
        let (cols, qkv_cols) = (num_heads * head_dim, shape.qkv_cols());
        let qkv = random.bf16s(lens.len() * qkv_cols, 1.0);
        let qkv_buffer = DeviceBuffer::from_slice(&gpu, &qkv).expect("memory");
        let scores = cached.scores(&gpu, Kind::Plain, [0, 0]);
        let attend = |first: usize, count: usize| {
            let (out, all) = (poisoned::<bf16>(&gpu, &queue, count * cols), decode_rows(&cached, count));
            let attention = DecodeAttention {
                out: out.span(),
                qkv: qkv_buffer.span().elements::<bf16>(first * qkv_cols, count * qkv_cols),
                cache: cached.cache(),
                positions: Positions::Known,
                rows: DecodeRows {
                    block_tables: all.block_tables.elements::<u32>(first * all.max_blocks, count * all.max_blocks),
                    context_lens: all.context_lens.elements::<u32>(first, count),
                    ..all
                },
                shape,
                scores: scores.on_gpu,
                workspace: &workspace,
            };
            for positions in [Positions::Known, Positions::Late] {
                decode_attention(&queue, &DecodeAttention { positions, ..attention }).expect("a launch");
            }
            queue.wait().expect("the kernel runs");
            out.span().read::<bf16>(count * cols).expect("a copy")
        };
        let all = attend(0, lens.len());
        for (row, &len) in lens.iter().enumerate().take(30).filter(|(_, len)| **len > 0) {
            let found = floats(&all[row * cols..(row + 1) * cols]);
            cached.check(&format!("{shape:?}, row {row}"), &found, &qkv[row * qkv_cols..], row, len - 1, &scores);
        }
        for (first, count) in [(0, 1), (1, 1), (2, 1), (7, 1), (12, 1), (0, 8), (40, 100), (250, 50)] {
            let own = &all[first * cols..(first + count) * cols];
            let is_same = attend(first, count).iter().zip(own).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(is_same, "{shape:?}: {count} rows from {first} on have other bits alone");
        }
    }
}

#[test]
fn rotation_inside_attention_writes_the_bits_of_rotation_before_it_and_attends_alike() {
    let Some((gpu, queue)) = gpu::open() else { return };
    const MAX_POSITIONS: usize = 2100;
    for [num_heads, num_kv_heads, head_dim, block_size] in SHAPES {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size, has_kv: true };
        if !rotates(shape) {
            continue;
        }
        let mut random = Random::new(7);
        let angles: Vec<f32> = (0..MAX_POSITIONS * head_dim / 2).map(|_| random.unit() * 3.0).collect();
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&a| f(a)).collect();
            DeviceBuffer::from_slice(&gpu, &values).expect("memory")
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        for lens in [&[1][..], &[5, 0, 17, 16], &[255, 256, 257], &[1000, 3, 2049, 700]] {
            let workspace = DecodeWorkspace::new(&gpu, 64, &[shape], Division::ByRows).expect("memory");
            let default = Splits::for_rows(lens.len(), shape);
            let cases =
                [(default, 0, false), (FINE, 0, false), (JOINED, 0, true), (FINE, 100, true), (default, 0, true)];
            for (splits, window, has_norms) in cases {
                let kind = if window == 0 { Kind::Plain } else { Kind::Sinks };
                let gains = [random.bf16s(head_dim, 1.0), random.bf16s(head_dim, 1.0)];
                let gains = gains.map(|gain| DeviceBuffer::from_slice(&gpu, &gain).expect("memory"));
                let weights = HeadNormWeights { q: gains[0].span(), k: gains[1].span() };
                let run = |fused: bool| {
                    let mut random = Random::new(11);
                    let cached = CachedRows::new(&gpu, &mut random, shape, lens);
                    let scores = cached.scores(&gpu, kind, [window, 0]);
                    let qkv = random.bf16s(lens.len() * shape.qkv_cols(), 1.0);
                    let qkv = DeviceBuffer::from_slice(&gpu, &qkv).expect("memory");
                    let count = lens.len() * num_heads * head_dim;
                    let out = poisoned::<bf16>(&gpu, &queue, count);
                    let attention = DecodeAttention {
                        out: out.span(),
                        qkv: qkv.span(),
                        cache: cached.cache(),
                        positions: Positions::Rope(
                            RopeTables { cos: cos.span(), sin: sin.span() },
                            has_norms.then_some(RotatedNorms { weights, eps: 1e-5 }),
                        ),
                        rows: decode_rows(&cached, lens.len()),
                        shape,
                        scores: scores.on_gpu,
                        workspace: &workspace,
                    };
                    let cache = attention.cache;
                    if fused {
                        decode_attention_split(&queue, &attention, splits).expect("a launch");
                    } else {
                        let positions: Vec<u32> = lens.iter().map(|&len| len.saturating_sub(1) as u32).collect();
                        let slots: Vec<u32> =
                            lens.iter().enumerate().map(|(row, &len)| cached.newest_slot(row, len)).collect();
                        let positions = DeviceBuffer::from_slice(&gpu, &positions).expect("memory");
                        let slots = DeviceBuffer::from_slice(&gpu, &slots).expect("memory");
                        let inputs = RopeInputs {
                            tables: Some([cos.span(), sin.span()]),
                            positions: positions.span(),
                            slots: slots.span(),
                            query_scale: None,
                            query_gains: Span::NULL,
                        };
                        if has_norms {
                            let (v, has_each, is_layer) = (Span::NULL, false, false);
                            let norm = HeadNorm { weights, v, has_each, is_layer, eps: 1e-5 };
                            head_norm(&queue, qkv.span(), &norm, shape, lens.len()).expect("a launch");
                        }
                        rope_cache(&queue, qkv.span(), cache, inputs, shape, lens.len()).expect("a launch");
                        let attention = DecodeAttention { positions: Positions::Known, ..attention };
                        decode_attention_split(&queue, &attention, splits).expect("a launch");
                        queue.wait().expect("the kernels run");
                    }
                    queue.wait().expect("the kernels run");
                    let bits = |span: Span| span.read::<u16>(span.count::<u16>()).expect("a copy");
                    [bits(out.span()), bits(cache.k), bits(cache.v)]
                };
                let (fused, apart) = (run(true), run(false));
                let what = |what: &str| {
                    format!("{what} of {shape:?}, {lens:?}, {splits:?}, window {window}, norms {has_norms}")
                };
                for (name, index) in [("keys", 1), ("values", 2)] {
                    let differ = fused[index].iter().zip(&apart[index]).position(|(a, b)| a != b);
                    assert_eq!(differ, None, "{}", what(name));
                }
                // Here the newest position is added first, there it is added last.
                let values = |bits: &[u16]| bits.iter().map(|&b| bf16::from_bits(b).to_f32()).collect::<Vec<f32>>();
                assert_close(&what("attention"), &values(&fused[0]), &values(&apart[0]), 1.0 / 128.0, 1.0 / 64.0);
            }
        }
    }
}
