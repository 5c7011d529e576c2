//! Compares the CPU's small ops and attention with the reference. Each tolerance is a number of f32 roundings,
//! explained beside it.

mod cpu;

use cpu::random;
use kernels::cpu::{
    Attention, AttentionRow, Gate, Heads, Isa, KvCache, KvType, Norm, Pool, Rotation, Xielu, activate, add_norm,
    add_normed, gate, head_norm, head_squares, norm, rotate, rotate_queries, scale_heads,
};
use kernels::kv_codes::KvCodes;
use kernels::reference;

fn assert_near(found: &[f32], expected: &[f32], allowed: f32, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= allowed * expected.abs().max(1.0), "{what}, element {index}: {found} not {expected}");
    }
}

#[test]
fn rms_norm_agrees_with_the_reference() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (40, 2050)] {
        let (x, weight) = (random(1, rows * width), random(2, width));
        let mut out = vec![f32::NAN; x.len()];
        norm(&mut Pool::new(2), &mut out, &x, Norm::Rms { weight: &weight }, 1e-5);
        // A sum in 16 lanes of width / 16 additions, a square root and two products.
        let allowed = (width as f32 / 16.0 + 20.0) * 2f32.powi(-24);
        assert_near(&out, &reference::rms_norm(&x, &weight, 1e-5), allowed, "rms_norm");
    }
}

#[test]
fn layer_norm_agrees_with_the_reference() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (40, 2050)] {
        let x: Vec<f32> = random(1, rows * width).iter().map(|x| x + 3.0).collect();
        let (weight, bias) = (random(2, width), random(3, width));
        let mut out = vec![f32::NAN; x.len()];
        norm(&mut Pool::new(2), &mut out, &x, Norm::Layer { weight: &weight, bias: &bias }, 1e-5);
        // The same for two sums. Differences from a mean of 3 have its rounding error, which is divided by a deviation
        // of at least 0.3.
        let allowed = (width as f32 / 16.0 + 100.0) * 2f32.powi(-24);
        assert_near(&out, &reference::layer_norm(&x, &weight, &bias, 1e-5), allowed, "layer_norm");
    }
}

#[test]
fn heads_are_normed_in_place_and_what_follows_them_is_not() {
    let (dim, stride) = (24, 24 * 5 + 7);
    for rows in [1, 200] {
        let (q, k) = (random(2, dim), random(3, dim));
        let mut x = random(1, rows * stride);
        let expected: Vec<f32> = x
            .chunks_exact(stride)
            .flat_map(|row| {
                let q = reference::rms_norm(&row[..3 * dim], &q, 1e-6);
                let k = reference::rms_norm(&row[3 * dim..4 * dim], &k, 1e-6);
                [q, k, row[4 * dim..].to_vec()].concat()
            })
            .collect();
        let heads = Heads { stride, counts: [3, 1], dim };
        head_norm(&mut Pool::new(2), &mut x, heads, &[Norm::Rms { weight: &q }, Norm::Rms { weight: &k }], 1e-6);
        assert_near(&x, &expected, 30.0 * 2f32.powi(-24), "head_norm");
    }
}

#[test]
fn each_head_may_have_weights_of_its_own() {
    let (dim, stride, zeros) = (24, 24 * 4, vec![0.0; 24 * 3]);
    let (q, k, mut x) = (random(2, 3 * dim), random(3, dim), random(1, 5 * stride));
    let expected: Vec<f32> = x
        .chunks_exact(stride)
        .flat_map(|row| {
            let weights = q.chunks_exact(dim).chain([&k[..]]);
            let heads = row.chunks_exact(dim).zip(weights);
            heads
                .flat_map(|(head, weight)| reference::layer_norm(head, weight, &zeros[..dim], 1e-6))
                .collect::<Vec<_>>()
        })
        .collect();
    let norms = [Norm::Layer { weight: &q, bias: &zeros }, Norm::Layer { weight: &k, bias: &zeros[..dim] }];
    head_norm(&mut Pool::new(2), &mut x, Heads { stride, counts: [3, 1], dim }, &norms, 1e-6);
    assert_near(&x, &expected, 60.0 * 2f32.powi(-24), "head_norm");
}

#[test]
fn all_heads_may_be_normed_together() {
    let (dim, stride, rows) = (24, 24 * 5 + 7, 40);
    let (q, k, mut x) = (random(2, 3 * dim), random(3, dim), random(1, rows * stride));
    let expected: Vec<f32> = x
        .chunks_exact(stride)
        .flat_map(|row| {
            let of_q = reference::rms_norm(&row[..3 * dim], &q, 1e-6);
            let of_k = reference::rms_norm(&row[3 * dim..4 * dim], &k, 1e-6);
            [of_q, of_k, row[4 * dim..].to_vec()].concat()
        })
        .collect();
    let (mut pool, heads) = (Pool::new(2), Heads { stride, counts: [3, 1], dim });
    let sums = head_squares(&mut pool, &x, heads);
    let means: Vec<f32> = sums.iter().zip([3, 1].into_iter().cycle()).map(|(sum, n)| sum / (n * dim) as f32).collect();
    scale_heads(&mut pool, &mut x, heads, &means, [&q, &k], 1e-6);
    assert_near(&x, &expected, 40.0 * 2f32.powi(-24), "scale_heads");
}

#[test]
fn a_branch_is_normed_before_it_is_added() {
    let (rows, width) = (33, 96);
    let (branch, next) = (random(1, width), random(5, width));
    let (first, second, mut residual) = (random(2, rows * width), random(3, rows * width), random(4, rows * width));
    let sum: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a + b).collect();
    let normed = reference::rms_norm(&sum, &branch, 1e-5);
    let expected: Vec<f32> = residual.iter().zip(&normed).map(|(r, b)| r + b).collect();
    let (mut out, mut scratch) = (vec![f32::NAN; sum.len()], vec![f32::NAN; sum.len()]);
    let (branch, next) = (Norm::Rms { weight: &branch }, Norm::Rms { weight: &next });
    let partials: [&[f32]; 2] = [&first, &second];
    add_normed(&mut Pool::new(2), &mut residual, &mut scratch, &partials, branch, Some((&mut out, next)), 1e-5);
    assert_near(&residual, &expected, 30.0 * 2f32.powi(-24), "add_normed");
    let Norm::Rms { weight } = next else { unreachable!() };
    assert_near(&out, &reference::rms_norm(&expected, weight, 1e-5), 60.0 * 2f32.powi(-24), "the norm that follows");
}

type Formula = fn(f32) -> f32;

const XIELU: Xielu = Xielu { positive: 0.75, negative: 1.5, slope: 0.5, edge: -1e-6 };

const ACTIVATIONS: [(Gate, Formula); 6] = [
    (Gate::Silu, reference::silu),
    (Gate::GeluTanh, reference::gelu_tanh),
    (Gate::Gelu, reference::gelu),
    (Gate::Relu, |x| x.max(0.0)),
    (Gate::ReluSquared, |x| x.max(0.0) * x.max(0.0)),
    (Gate::Xielu(XIELU), reference::xielu),
];

#[test]
fn activations_agree_with_the_reference() {
    for (kind, function) in ACTIVATIONS {
        let mut x: Vec<f32> = random(1, 40_000).iter().map(|x| x * 12.0).collect();
        let expected: Vec<f32> = x.iter().map(|x| function(*x)).collect();
        activate(&mut Pool::new(2), &mut x, kind);
        assert_near(&x, &expected, 40.0 * 2f32.powi(-24), "activate"); // The same as for gates.
    }
}

#[test]
fn partial_sums_are_added_to_the_residual_before_the_norm() {
    let (rows, width) = (33, 96);
    let (weight, first, second) = (random(1, width), random(2, rows * width), random(3, rows * width));
    let mut residual = random(4, rows * width);
    let sum: Vec<f32> = residual.iter().zip(&first).zip(&second).map(|((r, a), b)| r + (a + b)).collect();
    let mut out = vec![f32::NAN; sum.len()];
    add_norm(&mut Pool::new(2), &mut out, &mut residual, &[&first, &second], Norm::Rms { weight: &weight }, 1e-5);
    assert_eq!(residual, sum);
    assert_near(&out, &reference::rms_norm(&sum, &weight, 1e-5), 30.0 * 2f32.powi(-24), "add_norm");
}

#[test]
fn gates_agree_with_the_reference() {
    for (rows, width) in [(1, 5), (3, 2049), (9, 4100)] {
        let x: Vec<f32> = random(1, rows * 2 * width).iter().map(|x| x * 12.0).collect();
        for (kind, function) in ACTIVATIONS {
            let row = |x: &[f32]| -> Vec<f32> { (0..width).map(|i| function(x[i]) * x[width + i]).collect() };
            let expected: Vec<f32> = x.chunks_exact(2 * width).flat_map(row).collect();
            let mut out = vec![f32::NAN; rows * width];
            gate(&mut Pool::new(2), &mut out, &x, width, kind);
            // An exponential of a rounded argument of up to 30: about 30 units in the last place.
            assert_near(&out, &expected, 40.0 * 2f32.powi(-24), "gate");
        }
    }
}

#[test]
fn rotation_agrees_with_the_reference() {
    let angles: Vec<f64> = (0..20).map(|i| f64::from(i) * 0.37).collect();
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    let mut x = random(1, 3 * 40);
    let expected: Vec<f32> = x.chunks_exact(40).flat_map(|head| reference::rotate(head, &angles)).collect();
    rotate(&mut x, &cos, &sin);
    assert_near(&x, &expected, 4.0 * 2f32.powi(-24), "rotate");
}

#[test]
fn queries_are_rotated_and_scaled_alike_with_and_without_keys() {
    let (dim, heads, tokens) = (16, 4, 300);
    let (cos, sin) = (random(5, 64 * dim / 2), random(6, 64 * dim / 2));
    let positions: Vec<u32> = (0..tokens as u32).map(|token| token * 7 % 64).collect();
    let slots: Vec<u32> = (0..tokens as u32).collect();
    let (factors, gains) = (random(7, tokens), random(9, dim));
    let rotation = |stride| Rotation {
        stride,
        num_heads: heads,
        positions: &positions,
        slots: &slots,
        angles: Some([&cos, &sin]),
        query_gains: &gains,
        query_factors: &factors,
    };
    let stride = (heads + 2) * dim;
    let mut qkv = random(8, tokens * stride);
    let own =
        |qkv: &[f32]| -> Vec<f32> { qkv.chunks_exact(stride).flat_map(|row| row[..heads * dim].to_vec()).collect() };
    let mut q = own(&qkv);
    let expected = |token: usize, head: &[f32]| -> Vec<f32> {
        let first = positions[token] as usize * dim / 2;
        let mut head = head.to_vec();
        rotate(&mut head, &cos[first..first + dim / 2], &sin[first..first + dim / 2]);
        head.iter().zip(&gains).map(|(x, gain)| x * gain * factors[token]).collect()
    };
    let rows = q.chunks_exact(heads * dim).enumerate();
    let wanted: Vec<f32> = rows.flat_map(|(t, row)| row.chunks_exact(dim).flat_map(move |h| expected(t, h))).collect();
    let mut cache = KvCache::new(KvType::F32, tokens.div_ceil(16), 1, 16, dim);
    cache.rotate_and_write(&mut Pool::new(2), &mut qkv, &rotation(stride));
    rotate_queries(&mut Pool::new(2), &mut q, dim, &rotation(heads * dim));
    assert_eq!(own(&qkv), wanted);
    assert_eq!(q, wanted);
}

#[test]
fn heads_of_v_are_normed_where_there_is_a_third_norm() {
    let (dim, rows) = (16, 5);
    let stride = 4 * dim; // Two query heads, a key head and a value head.
    let weights = [random(1, dim), random(2, dim), vec![1.0; dim]];
    let x = random(3, rows * stride);
    for count in 1..=3 {
        let norms: Vec<_> = weights[..count].iter().map(|weight| Norm::Rms { weight }).collect();
        let mut found = x.clone();
        head_norm(&mut Pool::new(1), &mut found, Heads { stride, counts: [2, 1], dim }, &norms, 1e-6);
        let weight_of =
            |head: usize| Some(head.saturating_sub(1)).filter(|norm| *norm < count).map(|norm| &weights[norm]);
        let norm = |(head, x): (usize, &[f32])| match weight_of(head % 4) {
            Some(weight) => reference::rms_norm(x, weight, 1e-6),
            None => x.to_vec(),
        };
        let expected: Vec<f32> = x.chunks_exact(dim).enumerate().flat_map(norm).collect();
        assert_near(&found, &expected, 30.0 * 2f32.powi(-24), "head_norm");
    }
}

/// K and V of one row, in blocks taken in descending order, with NaN around them.
#[derive(Clone)]
struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    block: usize,
    len: usize,
    window: Option<usize>,
    chunk: Option<usize>,
    slopes: Vec<f32>,
    cap: Option<f32>,
    sinks: Vec<f32>,
}

const NUM_BLOCKS: usize = 12;

impl Case {
    fn k(&self) -> Vec<f32> {
        random(11, self.len * self.kv_heads * self.dim)
    }

    fn v(&self) -> Vec<f32> {
        random(12, self.len * self.kv_heads * self.dim)
    }

    fn table(&self) -> Vec<u32> {
        (0..NUM_BLOCKS as u32).rev().collect()
    }

    fn cache(&self, kv_type: KvType) -> KvCache {
        self.cache_of(kv_type, &self.k(), &self.v())
    }

    fn cache_of(&self, kv_type: KvType, k: &[f32], v: &[f32]) -> KvCache {
        let mut cache = KvCache::new(kv_type, NUM_BLOCKS, self.kv_heads, self.block, self.dim);
        let width = self.kv_heads * self.dim;
        for slot in 0..NUM_BLOCKS * self.block {
            cache.write(slot, &vec![f32::NAN; width], &vec![1e9; width]);
        }
        // Blocks in use contain numbers everywhere, like the cache of a served model.
        for position in 0..self.len.next_multiple_of(16) {
            let slot = self.table()[position / self.block] as usize * self.block + position % self.block;
            let own = position * width..(position + 1) * width;
            match position < self.len {
                true => cache.write(slot, &k[own.clone()], &v[own]),
                false => cache.write(slot, &vec![3.0; width], &vec![1e9; width]),
            }
        }
        cache
    }

    /// Attention of tokens `first..first + count` of the row in one step.
    fn run(&self, isa: Isa, cache: &KvCache, first: usize, count: usize, threads: usize) -> Vec<f32> {
        let q = random(13, self.len * self.heads * self.dim);
        let width = self.heads * self.dim;
        let mut out = vec![f32::NAN; count * width];
        let attention = Attention {
            num_heads: self.heads,
            scale: 0.3,
            window: self.window,
            chunk: self.chunk,
            q_stride: width,
            alibi_slopes: &self.slopes,
            score_cap: self.cap,
            sinks: &self.sinks,
            isa,
        };
        let table = self.table();
        let row = AttentionRow { first_token: 0, num_tokens: count, first_position: first, block_table: &table };
        attention.run(&mut Pool::new(threads), &mut out, &q[first * width..], &[row], cache);
        out
    }

    fn expected(&self, token: usize) -> Vec<f32> {
        let (k, v, q) = (self.k(), self.v(), random(13, self.len * self.heads * self.dim));
        let in_chunk = token - token % self.chunk.unwrap_or(usize::MAX);
        let start = (token + 1).saturating_sub(self.window.unwrap_or(usize::MAX)).max(in_chunk);
        let head = |head: usize| {
            let kv_head = head / (self.heads / self.kv_heads);
            let of = |x: &[f32]| -> Vec<f32> {
                (start..=token)
                    .flat_map(|s| x[(s * self.kv_heads + kv_head) * self.dim..][..self.dim].to_vec())
                    .collect()
            };
            let q = &q[(token * self.heads + head) * self.dim..][..self.dim];
            let scores = reference::Scores {
                scale: 0.3,
                slope: self.slopes.get(head).copied().unwrap_or(0.0),
                cap: self.cap,
                sink: self.sinks.get(head).copied(),
            };
            reference::attention_with(q, &of(&k), &of(&v), scores)
        };
        (0..self.heads).flat_map(head).collect()
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads, dim) in
        [(4, 4, 64), (8, 2, 80), (3, 1, 8), (20, 1, 96), (4, 2, 128), (2, 2, 256), (6, 1, 512), (2, 1, 320)]
    {
        for (block, len, window) in [(16, 1, None), (16, 16, Some(5)), (32, 67, None), (16, 70, Some(20))] {
            let (slopes, sinks) = (vec![], vec![]);
            let case = Case { heads, kv_heads, dim, block, len, window, chunk: None, slopes, cap: None, sinks };
            let slopes = (0..heads as i32).map(|head| 0.5f32.powi(head + 1)).collect();
            cases.push(Case { slopes, ..case.clone() });
            cases.push(Case { cap: Some(0.7), ..case.clone() });
            cases.push(Case { chunk: Some(24), ..case.clone() });
            cases.push(Case { sinks: random(14, heads), ..case.clone() });
            cases.push(case);
        }
    }
    cases
}

/// Blocks of codes give what blocks of f32 with the same numbers give.
#[test]
fn attention_to_codes_is_that_to_their_numbers() {
    for (case, kind) in cases().into_iter().flat_map(|case| KvCodes::ALL.map(|kind| (case.clone(), kind))) {
        let rounded = |values: Vec<f32>| -> Vec<f32> {
            let head = |values: &[f32]| {
                let mut codes = vec![0; values.len()];
                let scale = kind.encode_all(values, &mut codes);
                codes.into_iter().map(move |code| kind.decode(code) * scale).collect::<Vec<_>>()
            };
            values.chunks(case.dim).flat_map(head).collect()
        };
        let (k, v) = (rounded(case.k()), rounded(case.v()));
        let numbers = case.cache_of(KvType::F32, &k, &v);
        let mut codes = case.cache(KvType::Codes(kind));
        // A block that was copied has the same codes and scales; block 0 is in use by nothing but this copy.
        let table = case.table();
        codes.copy_block(table[0] as usize, 0);
        codes.copy_block(0, table[0] as usize);
        for isa in Isa::available() {
            let expected = case.run(isa, &numbers, 0, case.len, 2);
            assert_eq!(case.run(isa, &codes, 0, case.len, 2), expected, "{kind:?}, {isa:?}");
        }
    }
}

#[test]
fn attention_agrees_with_the_reference_and_sees_nothing_beyond_its_row() {
    for case in cases() {
        for kv_type in [KvType::Bf16, KvType::F32] {
            let expected: Vec<f32> = (0..case.len).flat_map(|token| case.expected(token)).collect();
            let cache = case.cache(kv_type);
            for isa in Isa::available() {
                let found = case.run(isa, &cache, 0, case.len, 2);
                // A score is a sum of up to D terms below 1. Its error enters an exponential, and sums over as many
                // values as positions.
                let allowed = (case.dim as f32 + case.len as f32) * 2f32.powi(-24) * 2.0;
                assert_near(&found, &expected, allowed, "attention");
            }
        }
    }
}

#[test]
fn a_token_attends_with_the_same_bits_in_any_chunk() {
    for case in cases() {
        let cache = case.cache(KvType::Bf16);
        let isa = Isa::detect();
        let whole = case.run(isa, &cache, 0, case.len, 3);
        let width = case.heads * case.dim;
        for chunk in [1, 3, 17] {
            for first in (0..case.len).step_by(chunk) {
                let count = chunk.min(case.len - first);
                assert!(case.run(isa, &cache, first, count, 1) == whole[first * width..(first + count) * width]);
            }
        }
    }
}
