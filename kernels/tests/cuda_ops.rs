//! Compares the small CUDA ops with plain formulas in fp32, for odd shapes. Outputs are filled with NaN first.

mod gpu;

use gpu::{Random, assert_close, floats, open, poisoned};
use half::bf16;
use kernels::cuda::embed::{Table, TokenSource, embed};
use kernels::cuda::gated_activation::{GateActivation, gated_activation};
use kernels::cuda::gather_rows::gather_rows;
use kernels::cuda::library_gemm::{GemmBuffers, GemmShape, LibraryGemm};
use kernels::cuda::paged_attention::{PagedAttention, TokenTables, paged_attention};
use kernels::cuda::rms_norm::{add_rms_norm, rms_norm};
use kernels::cuda::rope_cache::{HeadShape, LayerCache, QueryScale, RopeInputs, rope_cache};
use kernels::cuda::scores::{ScoreChange, Scores};
use kernels::cuda::{DeviceBuffer, Span};
use kernels::reference;

/// One bf16 rounding.
const ULP: f32 = 1.0 / 128.0;

#[test]
fn rms_norm_and_its_sum_agree_with_fp32() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(1);
    for (rows, cols) in [(1, 8), (3, 40), (1, 4096), (7, 4104), (2, 8192), (5, 16384), (1, 32768), (257, 64)] {
        let (x, p, w) = (random.bf16s(rows * cols, 2.0), random.bf16s(rows * cols, 1.0), random.bf16s(cols, 1.0));
        let on_device = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dx, dp, dw, y) = (on_device(&x), on_device(&p), on_device(&w), poisoned::<bf16>(&gpu, &q, rows * cols));
        let normed = |x: &[f32]| -> Vec<f32> {
            x.chunks(cols)
                .flat_map(|row| {
                    let mean = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / cols as f64;
                    let scale = (1.0 / (mean + 1e-5).sqrt()) as f32;
                    row.iter().zip(&w).map(move |(v, w)| v * scale * w.to_f32()).collect::<Vec<_>>()
                })
                .collect()
        };
        rms_norm(&q, y.span(), dx.span(), dw.span(), rows, cols, 1e-5).unwrap();
        q.wait().unwrap();
        let found = floats(&y.span().read(rows * cols).unwrap());
        assert_close(&format!("rms_norm {rows} x {cols}"), &found, &normed(&floats(&x)), ULP, 1e-6);

        q.fill(y.span(), 0xff).unwrap();
        add_rms_norm(&q, y.span(), dx.span(), dp.span(), dw.span(), rows, cols, 1e-5).unwrap();
        q.wait().unwrap();
        let sum: Vec<f32> = x.iter().zip(&p).map(|(x, p)| x.to_f32() + p.to_f32()).collect();
        let found = floats(&y.span().read(rows * cols).unwrap());
        assert_close(&format!("add_rms_norm {rows} x {cols}"), &found, &normed(&sum), ULP, 1e-6);
        let residual: Vec<bf16> = dx.span().read(rows * cols).unwrap();
        let rounded: Vec<bf16> = sum.iter().map(|&v| bf16::from_f32(v)).collect();
        assert!(residual == rounded, "the residual is the rounded sum, {rows} x {cols}");
    }
}

#[test]
fn embedding_takes_given_and_sampled_tokens_and_zeros_for_other_workers() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(2);
    for (vocab, cols, first, tokens) in [(10, 8, 0, 1), (100, 264, 50, 33), (7, 4096, 3, 5)] {
        let table = random.bf16s(vocab * cols, 1.0);
        let last: Vec<u32> = (0..4).map(|_| random.below(vocab + first + 5) as u32).collect();
        let ids: Vec<u32> =
            (0..tokens).map(|t| if t % 3 == 2 { u32::MAX } else { random.below(vocab + first + 5) as u32 }).collect();
        let rows: Vec<u32> = (0..tokens).map(|_| random.below(4) as u32).collect();
        let words = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dt, di, dr, dl) =
            (DeviceBuffer::from_slice(&gpu, &table).unwrap(), words(&ids), words(&rows), words(&last));
        let source = TokenSource { token_ids: di.span(), token_rows: dr.span(), last_tokens: dl.span() };
        for scale in [1.0, 61.96] {
            let out = poisoned::<bf16>(&gpu, &q, tokens * cols);
            let part = Table { values: dt.span(), first_token: first as u32, cols, scale };
            embed(&q, out.span(), part, source, tokens).unwrap();
            q.wait().unwrap();
            let found: Vec<bf16> = out.span().read(tokens * cols).unwrap();
            for t in 0..tokens {
                let id = if ids[t] == u32::MAX { last[rows[t] as usize] } else { ids[t] } as usize;
                let row = &found[t * cols..(t + 1) * cols];
                let scaled =
                    |r: usize| table[r * cols..(r + 1) * cols].iter().map(|x| bf16::from_f32(x.to_f32() * scale));
                match id.checked_sub(first).filter(|&r| r < vocab) {
                    Some(r) => assert!(row.iter().copied().eq(scaled(r)), "token {id}"),
                    None => assert!(row.iter().all(|v| v.to_bits() == 0), "token {id} is another worker's"),
                }
            }
        }
    }
}

#[test]
fn rope_rotates_and_fills_exactly_its_slots() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(3);
    for (heads, kv_heads, dim, block, tokens, beta, [has_kv, has_gains]) in [
        (4, 2, 64, 16, 5, 0.0, [true, false]),
        (32, 32, 128, 16, 1, 0.0, [true, true]),
        (6, 1, 96, 32, 19, 0.5, [true, true]),
        (3, 3, 256, 64, 40, 0.0, [false, true]),
        (2, 1, 16, 16, 3, 0.25, [true, false]),
        (4, 1, 512, 16, 7, 0.4, [false, false]),
    ] {
        let shape = HeadShape { num_heads: heads, num_kv_heads: kv_heads, head_dim: dim, block_size: block, has_kv };
        let (blocks, positions_max, cols) = (9, 50, shape.qkv_cols());
        let size = blocks * shape.block_elements();
        let (k_blocks, v_blocks) = (poisoned::<bf16>(&gpu, &q, size), poisoned::<bf16>(&gpu, &q, size));
        let qkv = random.bf16s(tokens * cols, 1.0);
        let half = dim / 2;
        let angles: Vec<f32> = (0..positions_max * half).map(|_| random.unit() * 3.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let positions: Vec<u32> = (0..tokens).map(|_| random.below(positions_max) as u32).collect();
        let mut slots = random.shuffled(blocks * block);
        slots.truncate(tokens);
        slots[tokens / 2] = u32::MAX;
        let dq = DeviceBuffer::from_slice(&gpu, &qkv).unwrap();
        let (dc, ds) = (DeviceBuffer::from_slice(&gpu, &cos).unwrap(), DeviceBuffer::from_slice(&gpu, &sin).unwrap());
        let (dp, dl) =
            (DeviceBuffer::from_slice(&gpu, &positions).unwrap(), DeviceBuffer::from_slice(&gpu, &slots).unwrap());
        let query_scale = (beta != 0.0).then_some(QueryScale { beta, period: 4, offset: 1 });
        let tables = Some([dc.span(), ds.span()]);
        let gains: Vec<f32> = (0..dim).map(|_| if has_gains { random.unit() * 2.0 } else { 1.0 }).collect();
        let dg = DeviceBuffer::from_slice(&gpu, &gains).unwrap();
        let query_gains = if has_gains { dg.span() } else { Span::NULL };
        let inputs = RopeInputs { tables, positions: dp.span(), slots: dl.span(), query_scale, query_gains };
        let cache = LayerCache { k: k_blocks.span(), v: v_blocks.span(), codes: None };
        rope_cache(&q, dq.span(), cache, inputs, shape, tokens).unwrap();
        q.wait().unwrap();

        let rotated = |t: usize, head: usize, d: usize| -> f32 {
            let x = |d: usize| qkv[t * cols + head * dim + d].to_f32();
            let at = positions[t] as usize * half + d % half;
            if d < half { x(d) * cos[at] - x(d + half) * sin[at] } else { x(d) * cos[at] + x(d - half) * sin[at] }
        };
        let found = floats(&dq.span().read(tokens * cols).unwrap());
        let mut expected = floats(&qkv);
        let factor = |t: usize| 1.0 + beta * (((positions[t] + 1) / 4) as f32).ln_1p();
        for (t, h, d) in (0..tokens).flat_map(|t| (0..heads * dim).map(move |i| (t, i / dim, i % dim))) {
            expected[t * cols + h * dim + d] = factor(t) * gains[d] * rotated(t, h, d);
        }
        assert_close("q, and k and v as they were", &found, &expected, ULP, 4e-6);
        let (mut k, mut v) = (vec![f32::NAN; size], vec![f32::NAN; size]);
        for t in (0..tokens).filter(|&t| has_kv && slots[t] != u32::MAX) {
            let (b, offset) = (slots[t] as usize / block, slots[t] as usize % block);
            for (h, d) in (0..kv_heads * dim).map(|i| (i / dim, i % dim)) {
                let at = ((b * kv_heads + h) * block + offset) * dim + d;
                k[at] = rotated(t, heads + h, d);
                v[at] = qkv[t * cols + (heads + kv_heads + h) * dim + d].to_f32();
            }
        }
        for (name, buffer, expected) in [("k", &k_blocks, &k), ("v", &v_blocks, &v)] {
            let found = floats(&buffer.span().read(size).unwrap());
            let untouched = |(f, e): (&f32, &f32)| f.is_nan() == e.is_nan();
            assert!(found.iter().zip(expected).all(untouched), "{name}: a slot is missing or one too many was written");
            let clean = |values: &[f32]| values.iter().map(|v| if v.is_nan() { 0.0 } else { *v }).collect::<Vec<_>>();
            assert_close(name, &clean(&found), &clean(expected), ULP, 1e-6);
        }
    }
}

#[test]
fn queries_that_are_not_rotated_are_scaled_by_position_and_gains() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(9);
    let shape = HeadShape { num_heads: 4, num_kv_heads: 2, head_dim: 64, block_size: 16, has_kv: true };
    let (tokens, cols) = (9, shape.qkv_cols());
    let size = 2 * shape.block_elements();
    let (k_blocks, v_blocks) = (poisoned::<bf16>(&gpu, &q, size), poisoned::<bf16>(&gpu, &q, size));
    let qkv = random.bf16s(tokens * cols, 1.0);
    let positions: Vec<u32> = (0..tokens as u32).map(|t| 1000 * t).collect();
    let slots: Vec<u32> = (0..tokens as u32).collect();
    let dq = DeviceBuffer::from_slice(&gpu, &qkv).unwrap();
    let words = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
    let (dp, dl) = (words(&positions), words(&slots));
    let query_scale = Some(QueryScale { beta: 0.1, period: 1000, offset: 0 });
    let gains: Vec<f32> = (0..64).map(|_| random.unit() * 2.0).collect();
    let dg = DeviceBuffer::from_slice(&gpu, &gains).unwrap();
    let query_gains = dg.span();
    let inputs = RopeInputs { tables: None, positions: dp.span(), slots: dl.span(), query_scale, query_gains };
    let cache = LayerCache { k: k_blocks.span(), v: v_blocks.span(), codes: None };
    rope_cache(&q, dq.span(), cache, inputs, shape, tokens).unwrap();
    q.wait().unwrap();
    let found = floats(&dq.span().read(tokens * cols).unwrap());
    let scale = |i: usize| (1.0 + 0.1 * ((i / cols) as f32).ln_1p()) * gains[i % 64];
    let factor = |i: usize| if i % cols < 4 * 64 { scale(i) } else { 1.0 };
    let expected: Vec<f32> = qkv.iter().enumerate().map(|(i, x)| x.to_f32() * factor(i)).collect();
    assert_close("q, and k and v as they were", &found, &expected, ULP, 1e-6);
    let k: Vec<bf16> = k_blocks.span().read(size).unwrap();
    for (t, head) in (0..tokens).flat_map(|t| [(t, 0), (t, 1)]) {
        let (own, from) = ((head * 16 + t) * 64, t * cols + (4 + head) * 64);
        assert!(k[own..own + 64] == qkv[from..from + 64], "k of token {t} is not scaled");
    }
}

#[test]
fn gated_activation_agrees_with_fp32_stacked_and_interleaved() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(4);
    for (rows, cols, group) in [(1, 8, 8), (3, 2056, 2056), (5, 11008, 8), (2, 48, 16)] {
        let x = random.bf16s(rows * 2 * cols, 4.0);
        let dx = DeviceBuffer::from_slice(&gpu, &x).unwrap();
        use GateActivation::{Gelu, GeluTanh, Relu, ReluSquared, Silu};
        for activation in [Silu, GeluTanh, Gelu, Relu, ReluSquared] {
            let y = poisoned::<bf16>(&gpu, &q, rows * cols);
            gated_activation(&q, y.span(), dx.span(), activation, rows, cols, group).unwrap();
            q.wait().unwrap();
            let expected: Vec<f32> = (0..rows * cols)
                .map(|i| {
                    let (t, f) = (i / cols, i % cols);
                    let at = t * 2 * cols + f / group * 2 * group + f % group;
                    let (gate, up) = (x[at].to_f64(), x[at + group].to_f64());
                    let gated = match activation {
                        Silu => f64::from(reference::silu(gate as f32)),
                        GeluTanh => f64::from(reference::gelu_tanh(gate as f32)),
                        Gelu => f64::from(reference::gelu(gate as f32)),
                        Relu => gate.max(0.0),
                        ReluSquared => gate.max(0.0).powi(2),
                    };
                    (gated * up) as f32
                })
                .collect();
            let found = floats(&y.span().read(rows * cols).unwrap());
            // 1 - 2 / (e + 1) has a cancellation error: up to 2^-23 of gate and up, which are below 64 here.
            assert_close(&format!("{activation:?} {rows} x {cols}"), &found, &expected, ULP, 2e-5);
        }
    }
}

#[test]
fn gathered_rows_are_the_ones_asked_for() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(5);
    for (tokens, rows, cols) in [(1, 1, 8), (9, 4, 4104), (300, 300, 72)] {
        let x = random.bf16s(tokens * cols, 1.0);
        let index: Vec<u32> = (0..rows).map(|_| random.below(tokens) as u32).collect();
        let (dx, di) = (DeviceBuffer::from_slice(&gpu, &x).unwrap(), DeviceBuffer::from_slice(&gpu, &index).unwrap());
        let y = poisoned::<bf16>(&gpu, &q, rows * cols);
        gather_rows(&q, y.span(), dx.span(), di.span(), rows, cols).unwrap();
        q.wait().unwrap();
        let expected: Vec<bf16> =
            index.iter().flat_map(|&i| x[i as usize * cols..(i as usize + 1) * cols].iter().copied()).collect();
        assert!(y.span().read::<bf16>(rows * cols).unwrap() == expected);
    }
}

#[test]
fn paged_attention_agrees_with_fp64() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(6);
    for (heads, kv_heads, dim, block, window, chunk) in [
        (4, 2, 64, 16, 0, 0),
        (8, 8, 128, 32, 0, 0),
        (6, 1, 96, 16, 20, 0),
        (2, 1, 256, 64, 0, 0),
        (3, 3, 80, 16, 7, 0),
        (2, 1, 512, 32, 0, 0),
        (4, 2, 320, 16, 40, 50),
        (2, 2, 64, 16, 0, 37),
    ] {
        // Rows of some have q alone.
        let has_kv = ![96, 512].contains(&dim);
        let shape = HeadShape { num_heads: heads, num_kv_heads: kv_heads, head_dim: dim, block_size: block, has_kv };
        let (blocks, max_blocks, cols, scale) = (40, 9, shape.qkv_cols(), (dim as f32).powf(-0.5));
        let size = blocks * shape.block_elements();
        let (k, v) = (random.bf16s(size, 1.0), random.bf16s(size, 1.0));
        let tables: Vec<u32> = (0..4 * max_blocks).map(|_| random.below(blocks) as u32).collect();
        let tokens = 11;
        let rows: Vec<u32> = (0..tokens).map(|_| random.below(4) as u32).collect();
        let positions: Vec<u32> =
            (0..tokens).map(|t| if t == 0 { 0 } else { random.below(max_blocks * block) as u32 }).collect();
        let slots: Vec<u32> = (0..tokens as u32).map(|t| if t == 3 { u32::MAX } else { t }).collect();
        let qkv = random.bf16s(tokens * cols, 1.0);
        let words = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dt, dr, dp, ds) = (words(&tables), words(&rows), words(&positions), words(&slots));
        let (dk, dv) = (DeviceBuffer::from_slice(&gpu, &k).unwrap(), DeviceBuffer::from_slice(&gpu, &v).unwrap());
        let dq = DeviceBuffer::from_slice(&gpu, &qkv).unwrap();
        let out = poisoned::<bf16>(&gpu, &q, tokens * heads * dim);
        let token_tables = TokenTables {
            block_tables: dt.span(),
            max_blocks,
            token_tables: dr.span(),
            positions: dp.span(),
            slots: ds.span(),
        };
        let cache = LayerCache { k: dk.span(), v: dv.span(), codes: None };
        let slopes: Vec<f32> = (0..heads).map(|head| 0.6f32.powi(head as i32 + 1)).collect();
        let slope_buffer = DeviceBuffer::from_slice(&gpu, &slopes).unwrap();
        let sinks: Vec<f32> = (0..heads).map(|head| head as f32 % 3.0 - 1.0).collect();
        let sink_buffer = DeviceBuffer::from_slice(&gpu, &sinks).unwrap();
        let attend = |change: ScoreChange, sinks: Option<Span>| {
            q.fill(out.span(), 0xff).unwrap();
            let scores = Scores { scale, window, chunk, change, sinks };
            let (qkv, tables) = (dq.span(), token_tables);
            let attention = PagedAttention { out: out.span(), qkv, cache, tables, shape, scores };
            paged_attention(&q, &attention, tokens).unwrap();
            q.wait().unwrap();
            floats(&out.span().read(tokens * heads * dim).unwrap())
        };
        for (alibi, cap, has_sinks) in
            [(false, 0.0, false), (true, 0.0, false), (false, 0.6, false), (false, 0.0, true)]
        {
            let mut expected = vec![0.0f32; tokens * heads * dim];
            for (t, h) in
                (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h))).filter(|&(t, _)| slots[t] != u32::MAX)
            {
                let end = positions[t] as usize + 1;
                let in_window = if window > 0 { end.saturating_sub(window as usize) } else { 0 };
                let begin = in_window.max(if chunk > 0 { (end - 1) / chunk as usize * chunk as usize } else { 0 });
                let at = |p: usize| {
                    let b = tables[rows[t] as usize * max_blocks + p / block] as usize;
                    ((b * kv_heads + h / (heads / kv_heads)) * block + p % block) * dim
                };
                let query = &qkv[t * cols + h * dim..][..dim];
                let slope = if alibi { f64::from(slopes[h]) } else { 0.0 };
                let score = |p: usize| -> f64 {
                    let dot: f64 = (0..dim).map(|d| query[d].to_f64() * k[at(p) + d].to_f64()).sum();
                    let score = dot * f64::from(scale);
                    let capped = if cap == 0.0 { score } else { f64::from(cap) * (score / f64::from(cap)).tanh() };
                    capped - slope * (end - 1 - p) as f64
                };
                let scores: Vec<f64> = (begin..end).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sink = if has_sinks { (f64::from(sinks[h]) - most).exp() } else { 0.0 };
                let mass: f64 = scores.iter().map(|s| (s - most).exp()).sum::<f64>() + sink;
                for d in 0..dim {
                    let sum: f64 =
                        (begin..end).zip(&scores).map(|(p, s)| (s - most).exp() * v[at(p) + d].to_f64()).sum();
                    expected[(t * heads + h) * dim + d] = (sum / mass) as f32;
                }
            }
            let change = match (alibi, cap) {
                (true, _) => ScoreChange::Alibi(slope_buffer.span()),
                (false, 0.0) => ScoreChange::None,
                (false, cap) => ScoreChange::Capped(cap),
            };
            let found = attend(change, has_sinks.then(|| sink_buffer.span()));
            assert_close(
                &format!("{shape:?}, alibi {alibi}, cap {cap}, sinks {has_sinks}"),
                &found,
                &expected,
                ULP,
                1e-4,
            );
        }
    }
}

#[test]
fn the_librarys_product_agrees_with_fp64_with_bias_stride_and_f32() {
    let Some((gpu, q)) = open() else { return };
    let mut gemm = LibraryGemm::new(&gpu, &library_dirs(), None).unwrap();
    let mut random = Random::new(7);
    for (m, n, k, pad, to_f32, bias) in [
        (1, 8, 8, 0, false, false),
        (65, 264, 128, 0, false, true),
        (3, 129, 72, 7, true, false),
        (200, 64, 4096, 0, false, false),
    ] {
        let (x, w, b) = (random.bf16s(m * k, 1.0), random.bf16s(n * k, 1.0), random.bf16s(n, 4.0));
        let on_device = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dx, dw, db) = (on_device(&x), on_device(&w), on_device(&b));
        let stride = n + pad;
        let y = poisoned::<f32>(&gpu, &q, m * stride);
        let shape = GemmShape { m, n, k, stride, to_f32 };
        let bias_span = if bias { db.span() } else { Span::NULL };
        gemm.run(&q, shape, GemmBuffers { y: y.span(), x: dx.span(), w: dw.span(), bias: bias_span }).unwrap();
        q.wait().unwrap();
        let found: Vec<f32> = if to_f32 {
            y.span().read(m * stride).unwrap()
        } else {
            floats(&y.span().read::<bf16>(m * stride).unwrap())
        };
        let found: Vec<f32> = found.chunks(stride).flat_map(|row| row[..n].to_vec()).collect();
        let expected: Vec<f32> = (0..m * n)
            .map(|i| {
                let (row, col) = (i / n, i % n);
                let dot: f64 = (0..k).map(|j| x[row * k + j].to_f64() * w[col * k + j].to_f64()).sum();
                (dot + if bias { b[col].to_f64() } else { 0.0 }) as f32
            })
            .collect();
        let relative = if to_f32 { 1e-5 } else { ULP };
        // fp32 sums of k products of size 1 have errors of about sqrt(k) * 2^-24; the factor allows for any order.
        assert_close(&format!("{shape:?}"), &found, &expected, relative, 1e-5 * (k as f32).sqrt());
    }
}

/// Directories of NVIDIA's libraries on a machine that has them only in a Python environment.
fn library_dirs() -> Vec<std::path::PathBuf> {
    std::env::var_os("TRIREME_CUDA_LIBS").map(|dirs| std::env::split_paths(&dirs).collect()).unwrap_or_default()
}
