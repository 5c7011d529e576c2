//! Compares ops that only some decoders need (layer norm, learned positions, plain activations, head norms, gathered columns) with plain
//! formulas, for odd shapes. Outputs are filled with NaN first.

mod gpu;

use gpu::{Random, assert_close, floats, open, poisoned};
use half::bf16;
use kernels::cuda::activation::{Xielu, activate, activate_xielu};
use kernels::cuda::add_positions::add_positions;
use kernels::cuda::branch_norm::{BranchNorm, add, branch_norm};
use kernels::cuda::cap_logits::cap_logits;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::gather_columns::gather_columns;
use kernels::cuda::head_norm::{HeadNorm, HeadNormWeights, head_norm};
use kernels::cuda::layer_norm::{LayerNormWeight, add_layer_norm, layer_norm};
use kernels::cuda::rope_cache::HeadShape;
use kernels::cuda::scale::{Columns, multiply_columns, put_columns, scale};
use kernels::cuda::wide_head_norm::{Squares, head_squares, scale_heads};
use kernels::cuda::{DeviceBuffer, Span};
use kernels::reference;

/// One bf16 rounding.
const ULP: f32 = 1.0 / 128.0;

#[test]
fn layer_norm_and_its_sum_agree_with_fp64() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(21);
    for (rows, cols) in [(1, 8), (3, 40), (2, 768), (1, 4096), (7, 4104), (2, 8192), (5, 16384), (1, 32768), (257, 64)]
    {
        // A mean that is large compared with the differences.
        let shifted = |random: &mut Random, count| -> Vec<bf16> {
            random.bf16s(count, 2.0).iter().map(|x| bf16::from_f32(x.to_f32() + 5.0)).collect()
        };
        let (x, p) = (shifted(&mut random, rows * cols), random.bf16s(rows * cols, 1.0));
        let (w, b) = (random.bf16s(cols, 1.0), random.bf16s(cols, 1.0));
        let on_device = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dx, dp, dw, db) = (on_device(&x), on_device(&p), on_device(&w), on_device(&b));
        let y = poisoned::<bf16>(&gpu, &q, rows * cols);
        let norm = LayerNormWeight { weight: dw.span(), bias: db.span() };
        let normed = |x: &[f32]| reference::layer_norm(x, &floats(&w), &floats(&b), 1e-5);
        layer_norm(&q, y.span(), dx.span(), norm, rows, cols, 1e-5).unwrap();
        q.wait().unwrap();
        let found = floats(&y.span().read(rows * cols).unwrap());
        // Product and bias may cancel, so their fp32 roundings remain.
        assert_close(&format!("layer_norm {rows} x {cols}"), &found, &normed(&floats(&x)), ULP, 1e-5);

        q.fill(y.span(), 0xff).unwrap();
        add_layer_norm(&q, y.span(), dx.span(), dp.span(), norm, rows, cols, 1e-5).unwrap();
        q.wait().unwrap();
        let sum: Vec<f32> = x.iter().zip(&p).map(|(x, p)| x.to_f32() + p.to_f32()).collect();
        let found = floats(&y.span().read(rows * cols).unwrap());
        assert_close(&format!("add_layer_norm {rows} x {cols}"), &found, &normed(&sum), ULP, 1e-5);
        let residual: Vec<bf16> = dx.span().read(rows * cols).unwrap();
        let rounded: Vec<bf16> = sum.iter().map(|&v| bf16::from_f32(v)).collect();
        assert!(residual == rounded, "the residual is the rounded sum, {rows} x {cols}");
    }
}

#[test]
fn plain_activations_agree_with_fp64_and_touch_nothing_behind() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(22);
    for count in [8, 3072, 3 * 2056, 2048 + 8] {
        let x = random.bf16s(count, 4.0);
        use GateActivation::{Gelu, GeluTanh, Relu, ReluSquared, Silu};
        for activation in [Silu, GeluTanh, Gelu, Relu, ReluSquared] {
            let y = poisoned::<bf16>(&gpu, &q, count + 8);
            y.span().write(&x).unwrap();
            activate(&q, y.span(), activation, count).unwrap();
            q.wait().unwrap();
            let formula = match activation {
                Silu => reference::silu,
                GeluTanh => reference::gelu_tanh,
                Gelu => reference::gelu,
                Relu => |x: f32| x.max(0.0),
                ReluSquared => |x: f32| x.max(0.0) * x.max(0.0),
            };
            let formula: fn(f32) -> f32 = formula;
            let expected: Vec<f32> = x.iter().map(|x| formula(x.to_f32())).collect();
            let found = floats(&y.span().read(count + 8).unwrap());
            assert_close(&format!("{activation:?} of {count}"), &found[..count], &expected, ULP, 1e-6);
            assert!(found[count..].iter().all(|x| x.is_nan()), "{activation:?} writes {count} elements and no more");
        }
        let y = poisoned::<bf16>(&gpu, &q, count + 8);
        y.span().write(&x).unwrap();
        let xielu = Xielu { positive: 0.75, negative: 1.5, slope: 0.5, edge: -1e-6 };
        activate_xielu(&q, y.span(), xielu, count).unwrap();
        q.wait().unwrap();
        let expected: Vec<f32> = x.iter().map(|x| reference::xielu(x.to_f32())).collect();
        let found = floats(&y.span().read(count + 8).unwrap());
        assert_close(&format!("xIELU of {count}"), &found[..count], &expected, ULP, 1e-5);
        assert!(found[count..].iter().all(|x| x.is_nan()), "xIELU writes {count} elements and no more");
    }
}

#[test]
fn positions_are_added_to_each_token() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(23);
    for (table_rows, cols, tokens) in [(1, 8, 1), (50, 264, 33), (1024, 768, 7), (9, 4104, 5)] {
        let (table, x) = (random.bf16s(table_rows * cols, 1.0), random.bf16s(tokens * cols, 1.0));
        let positions: Vec<u32> = (0..tokens).map(|_| random.below(table_rows) as u32).collect();
        let (dt, dp) =
            (DeviceBuffer::from_slice(&gpu, &table).unwrap(), DeviceBuffer::from_slice(&gpu, &positions).unwrap());
        let dx = DeviceBuffer::from_slice(&gpu, &x).unwrap();
        add_positions(&q, dx.span(), dt.span(), dp.span(), tokens, cols).unwrap();
        q.wait().unwrap();
        let expected: Vec<bf16> = (0..tokens * cols)
            .map(|i| bf16::from_f32(x[i].to_f32() + table[positions[i / cols] as usize * cols + i % cols].to_f32()))
            .collect();
        assert!(dx.span().read::<bf16>(tokens * cols).unwrap() == expected, "{tokens} tokens of {cols}");
    }
}

#[test]
fn heads_of_q_and_k_are_normed_and_those_of_v_where_they_have_a_norm() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(24);
    for (heads, kv_heads, dim, tokens) in
        [(4, 2, 64, 5), (32, 8, 128, 3), (6, 1, 96, 19), (3, 3, 256, 40), (2, 1, 16, 3), (8, 2, 512, 6), (5, 1, 264, 4)]
    {
        let on_device = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        for kind in 0..16 {
            let [has_each, is_layer, has_v, has_kv] = [1, 2, 4, 8].map(|bit| kind & bit != 0);
            let shape = HeadShape { num_heads: heads, num_kv_heads: kv_heads, head_dim: dim, block_size: 16, has_kv };
            let (cols, kv_heads, has_v) = (shape.qkv_cols(), if has_kv { kv_heads } else { 0 }, has_v && has_kv);
            let qkv: Vec<bf16> =
                random.bf16s(tokens * cols, 2.0).iter().map(|x| bf16::from_f32(x.to_f32() + 0.5)).collect();
            let counts = [heads, kv_heads, kv_heads];
            let weights = [has_each, has_each, false].into_iter().zip(counts);
            let weights: Vec<Vec<bf16>> =
                weights.map(|(each, count)| random.bf16s(if each { count * dim } else { dim }, 1.0)).collect();
            let (dx, dw) = (on_device(&qkv), [0, 1, 2].map(|part| on_device(&weights[part])));
            let norm = HeadNorm {
                weights: HeadNormWeights { q: dw[0].span(), k: if has_kv { dw[1].span() } else { Span::NULL } },
                v: if has_v { dw[2].span() } else { Span::NULL },
                has_each,
                is_layer,
                eps: 1e-6,
            };
            head_norm(&q, dx.span(), &norm, shape, tokens).unwrap();
            q.wait().unwrap();
            let found: Vec<bf16> = dx.span().read(tokens * cols).unwrap();
            for t in 0..tokens {
                let (found, x) = (&found[t * cols..(t + 1) * cols], &qkv[t * cols..(t + 1) * cols]);
                let mut first = 0;
                for (part, count) in counts.into_iter().enumerate() {
                    let what = format!("{shape:?}, kind {kind}, part {part} of token {t}");
                    let own = first..first + count * dim;
                    first = own.end;
                    if part == 2 && !has_v {
                        assert!(found[own.clone()] == x[own], "{what} is as it was");
                        continue;
                    }
                    let normed = |(head, x): (usize, &[bf16])| {
                        let start = if weights[part].len() > dim { head * dim } else { 0 };
                        let weight = floats(&weights[part][start..start + dim]);
                        match is_layer {
                            true => reference::layer_norm(&floats(x), &weight, &vec![0.0; dim], 1e-6),
                            false => reference::rms_norm(&floats(x), &weight, 1e-6),
                        }
                    };
                    let expected: Vec<f32> = x[own.clone()].chunks_exact(dim).enumerate().flat_map(normed).collect();
                    assert_close(&what, &floats(&found[own]), &expected, ULP, 1e-6);
                }
            }
        }
    }
}

#[test]
fn all_heads_of_q_and_all_of_k_are_normed_together() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(25);
    for (heads, kv_heads, dim, tokens, workers) in
        [(4, 2, 64, 5, 1), (32, 32, 128, 3, 1), (6, 1, 96, 19, 2), (3, 3, 256, 40, 4), (2, 1, 16, 3, 1)]
    {
        let shape = HeadShape { num_heads: heads, num_kv_heads: kv_heads, head_dim: dim, block_size: 16, has_kv: true };
        let (cols, widths) = (shape.qkv_cols(), [heads * dim, kv_heads * dim]);
        let (wq, wk) = (random.bf16s(widths[0], 1.0), random.bf16s(widths[1], 1.0));
        let on_device = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dq, dk) = (on_device(&wq), on_device(&wk));
        let weights = HeadNormWeights { q: dq.span(), k: dk.span() };
        // The workers' parts of one model, on one device.
        let parts: Vec<Vec<bf16>> = (0..workers).map(|_| random.bf16s(tokens * cols, 2.0)).collect();
        let sums = poisoned::<f32>(&gpu, &q, workers * tokens * 2);
        for (worker, part) in parts.iter().enumerate() {
            let own = sums.span().elements::<f32>(worker * tokens * 2, tokens * 2);
            head_squares(&q, own, on_device(part).span(), shape, tokens).unwrap();
            q.wait().unwrap();
        }
        let dx = on_device(&parts[0]);
        let squares = Squares { sums: sums.span(), workers };
        scale_heads(&q, dx.span(), squares, weights, shape, tokens, 1e-6).unwrap();
        q.wait().unwrap();
        let found: Vec<bf16> = dx.span().read(tokens * cols).unwrap();
        for t in 0..tokens {
            let row = |part: &[bf16]| part[t * cols..(t + 1) * cols].to_vec();
            let normed = |start: usize, width: usize, weight: &[bf16]| -> Vec<f32> {
                let squares =
                    |part: &Vec<bf16>| row(part)[start..start + width].iter().map(|x| x.to_f64().powi(2)).sum::<f64>();
                let mean = parts.iter().map(squares).sum::<f64>() / (width * workers) as f64;
                let scale = 1.0 / (mean + 1e-6).sqrt();
                let own = row(&parts[0])[start..start + width].to_vec();
                own.iter().zip(weight).map(|(x, w)| (x.to_f64() * scale * w.to_f64()) as f32).collect()
            };
            let expected = [normed(0, widths[0], &wq), normed(widths[0], widths[1], &wk)].concat();
            let (found, rotated) = (&found[t * cols..(t + 1) * cols], widths[0] + widths[1]);
            assert_close(&format!("{shape:?}, token {t}"), &floats(&found[..rotated]), &expected, ULP, 1e-6);
            assert!(found[rotated..] == row(&parts[0])[rotated..], "{shape:?}, token {t}: v is as it was");
        }
    }
}

#[test]
fn a_branch_is_normed_before_it_is_added() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(26);
    for (rows, cols) in [(1, 8), (3, 40), (2, 2304), (7, 4104), (2, 8192), (1, 32768), (257, 64)] {
        let (r, p) = (random.bf16s(rows * cols, 2.0), random.bf16s(rows * cols, 1.0));
        let (wp, wn) = (random.bf16s(cols, 1.0), random.bf16s(cols, 1.0));
        let on_device = |values: &[bf16]| DeviceBuffer::from_slice(&gpu, values).unwrap();
        let (dp, dwp, dwn) = (on_device(&p), on_device(&wp), on_device(&wn));
        let normed = reference::rms_norm(&floats(&p), &floats(&wp), 1e-6);
        let sum: Vec<f32> = r.iter().zip(&normed).map(|(r, n)| r.to_f32() + n).collect();
        for has_next in [false, true] {
            let (dr, y) = (on_device(&r), poisoned::<bf16>(&gpu, &q, rows * cols));
            let norm = BranchNorm {
                residual: dr.span(),
                branch: dp.span(),
                branch_weight: dwp.span(),
                next: has_next.then(|| [y.span(), dwn.span()]),
                eps: 1e-6,
            };
            branch_norm(&q, norm, rows, cols).unwrap();
            q.wait().unwrap();
            let (found, after) =
                (floats(&dr.span().read(rows * cols).unwrap()), floats(&y.span().read(rows * cols).unwrap()));
            // The sum may cancel, so the fp32 roundings of its terms remain.
            assert_close(&format!("residual {rows} x {cols}"), &found, &sum, ULP, 1e-5);
            match has_next {
                true => {
                    let expected = reference::rms_norm(&sum, &floats(&wn), 1e-6);
                    assert_close(&format!("norm {rows} x {cols}"), &after, &expected, ULP, 1e-5);
                }
                false => assert!(after.iter().all(|x| x.is_nan()), "{rows} x {cols}: nothing else is written"),
            }
        }
    }
}

#[test]
fn branches_are_added_and_logits_are_capped() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(27);
    for count in [8, 3 * 2056, 4096 * 5] {
        let (x, y) = (random.bf16s(count, 2.0), random.bf16s(count, 2.0));
        let (dx, dy) = (DeviceBuffer::from_slice(&gpu, &x).unwrap(), DeviceBuffer::from_slice(&gpu, &y).unwrap());
        add(&q, dx.span(), dy.span(), count).unwrap();
        q.wait().unwrap();
        let sum = |(x, y): (&bf16, &bf16)| bf16::from_f32(x.to_f32() + y.to_f32());
        let expected: Vec<bf16> = x.iter().zip(&y).map(sum).collect();
        assert!(dx.span().read::<bf16>(count).unwrap() == expected, "{count} elements");
        let logits: Vec<f32> = (0..count).map(|_| random.normal() * 40.0).collect();
        let capped = DeviceBuffer::from_slice(&gpu, &logits).unwrap();
        cap_logits(&q, capped.span(), 30.0).unwrap();
        q.wait().unwrap();
        let expected: Vec<f32> = logits.iter().map(|x| (30.0 * (f64::from(*x) / 30.0).tanh()) as f32).collect();
        assert_close("capped", &capped.span().read::<f32>(count).unwrap(), &expected, 2f32.powi(-20), 1e-6);
    }
}

#[test]
fn elements_are_multiplied_by_a_number_and_by_columns_and_copied_to_them() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(28);
    for (rows, cols, width, first) in [(1, 8, 8, 0), (5, 264, 1320, 528), (33, 256, 8960, 8704), (3, 2056, 4112, 2056)]
    {
        let (x, y) = (random.bf16s(rows * cols, 2.0), random.bf16s(rows * width, 2.0));
        let (dx, dy) = (DeviceBuffer::from_slice(&gpu, &x).unwrap(), DeviceBuffer::from_slice(&gpu, &y).unwrap());
        let columns = Columns { matrix: dy.span(), width, first };
        multiply_columns(&q, dx.span(), columns, rows, cols).unwrap();
        q.wait().unwrap();
        let factor = |i: usize| y[i / cols * width + first + i % cols].to_f32();
        let product = |(i, x): (usize, &bf16)| bf16::from_f32(x.to_f32() * factor(i));
        let expected: Vec<bf16> = x.iter().enumerate().map(product).collect();
        assert!(dx.span().read::<bf16>(rows * cols).unwrap() == expected, "{rows} x {cols} of {width}");
        put_columns(&q, columns, dx.span(), rows, cols).unwrap();
        q.wait().unwrap();
        let mut y = y;
        for (to, from) in y.chunks_mut(width).zip(expected.chunks(cols)) {
            to[first..first + cols].copy_from_slice(from);
        }
        assert!(dy.span().read::<bf16>(rows * width).unwrap() == y, "{rows} x {cols} to {width}");
        scale(&q, dy.span(), 0.7, rows * cols).unwrap();
        q.wait().unwrap();
        let scaled = |(i, y): (usize, &bf16)| if i < rows * cols { bf16::from_f32(y.to_f32() * 0.7) } else { *y };
        let expected: Vec<bf16> = y.iter().enumerate().map(scaled).collect();
        assert!(dy.span().read::<bf16>(rows * width).unwrap() == expected, "{rows} x {cols} elements and no more");
    }
}

#[test]
fn gathered_columns_are_in_the_order_asked_for() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(7);
    for (rows, cols) in [(1, 8), (3, 264), (2, 2048), (5, 2056), (1, 4104), (70, 4096), (300, 72)] {
        let x = random.bf16s(rows * cols, 1.0);
        let mut order: Vec<u32> = (0..cols as u32).collect();
        for last in (1..cols).rev() {
            order.swap(last, random.below(last + 1));
        }
        let (dx, from) = (DeviceBuffer::from_slice(&gpu, &x).unwrap(), DeviceBuffer::from_slice(&gpu, &order).unwrap());
        // A row more than are gathered.
        let y = poisoned::<bf16>(&gpu, &q, (rows + 1) * cols);
        let before = y.span().read::<bf16>((rows + 1) * cols).unwrap();
        gather_columns(&q, y.span(), dx.span(), from.span(), rows, cols).unwrap();
        q.wait().unwrap();
        let gathered = x.chunks(cols).flat_map(|row| order.iter().map(|&from| row[from as usize]));
        let expected: Vec<u16> = gathered.chain(before[rows * cols..].iter().copied()).map(bf16::to_bits).collect();
        let found = y.span().read::<bf16>((rows + 1) * cols).unwrap();
        assert!(found.into_iter().map(bf16::to_bits).eq(expected), "{rows} x {cols}");
    }
}
