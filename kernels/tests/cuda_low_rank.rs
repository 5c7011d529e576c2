//! Compares low-rank products of adapters with the plain formula: alone, and within products for few rows.

mod gpu;
#[path = "gpu/quantized.rs"]
mod quantized;

use std::sync::Arc;

use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::low_rank::{
    LowRankOperands, LowRankStep, LowRankWeight, Modules, NO_SLOT, SLICE, expand, has_fused_kernel, max_slots,
    padded_rank, shrink, shrink_simple, slice_bit, slot_cols,
};
use kernels::cuda::quantized_gemm::{quantized_gemm, quantized_gemm_low_rank};
use kernels::cuda::skinny_gemm::{Epilogue, LinearWeight, skinny_gemm, skinny_gemm_low_rank};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Span};
use kernels::reference;
use quantized::{FORMATS, QuantizedWeight};

const ONE: Modules = Modules::Stacked { count: 1, starts: [usize::MAX; 2] };

/// Sizes of a layer and of its slots.
#[derive(Debug, Clone, Copy)]
struct Shape {
    n: usize,
    k: usize,
    modules: Modules,
    num_slots: usize,
    max_rank: usize,
}

/// A layer with random adapters in some of its slots, on the GPU and as numbers.
struct Layer {
    shape: Shape,
    rank: usize,
    cols: usize,
    a: Vec<bf16>,
    b: Vec<bf16>,
    scales: Vec<f32>,
    in_layer: u64,
    buffers: [DeviceBuffer; 4],
}

impl Layer {
    /// The slots of the last slice, if there are several, have no product: their part of B may be anything.
    fn new(gpu: &Arc<Gpu>, random: &mut Random, shape: Shape) -> Self {
        let Shape { n, k, modules, num_slots, max_rank } = shape;
        let (rank, count) = (padded_rank(max_rank), modules.count());
        let cols = slot_cols(num_slots, rank);
        let kept = (cols / SLICE - 1).max(1);
        let in_layer = (0..num_slots as u32).map(|slot| slice_bit(slot, rank)).filter(|&bit| bit < 1 << kept);
        let in_layer = in_layer.fold(0, |mask, bit| mask | bit);
        let a = random.bf16s(num_slots * count * rank * k, 1.0 / (k as f32).sqrt());
        let mut b = random.bf16s(n * cols, 0.5);
        for (index, b) in b.iter_mut().enumerate() {
            let slot = index % cols / rank;
            match index % cols / SLICE {
                slice if in_layer >> slice & 1 == 0 => *b = bf16::NAN,
                _ if slot >= num_slots || index % cols % rank >= max_rank => *b = bf16::ZERO,
                _ => {}
            }
        }
        let scales: Vec<f32> = (0..num_slots * count).map(|_| 1.5 + random.unit()).collect();
        let buffers = [
            DeviceBuffer::from_slice(gpu, &a),
            DeviceBuffer::from_slice(gpu, &b),
            DeviceBuffer::from_slice(gpu, &scales),
            DeviceBuffer::from_slice(gpu, &[in_layer]),
        ];
        let buffers = buffers.map(|buffer| buffer.expect("memory"));
        Self { shape, rank, cols, a, b, scales, in_layer, buffers }
    }

    fn weight(&self) -> LowRankWeight {
        let [a, b, scales, in_layer] = self.buffers.each_ref().map(DeviceBuffer::span);
        let Shape { n, k, modules, num_slots, .. } = self.shape;
        LowRankWeight { a, b, scales, in_layer, num_slots, rank: self.rank, n, k, modules }
    }

    fn has(&self, slot: u32) -> bool {
        slot != NO_SLOT && self.in_layer & slice_bit(slot, self.rank) != 0
    }

    fn module(&self, n: usize) -> usize {
        match self.shape.modules {
            Modules::Gated => n / 8 % 2,
            Modules::Stacked { starts, .. } => starts.iter().filter(|&&start| n >= start).count(),
        }
    }

    /// `scale * A x` of a token, and the sums of the terms' sizes.
    fn inner(&self, slot: u32, module: usize, x: &[f32]) -> Vec<(f64, f64)> {
        let index = slot as usize * self.shape.modules.count() + module;
        let k = self.shape.k;
        let of_row = |r: usize| {
            let row = &self.a[(index * self.rank + r) * k..][..k];
            let terms = || row.iter().zip(x).map(|(a, x)| f64::from(a.to_f32()) * f64::from(*x));
            let scale = f64::from(self.scales[index]);
            (scale * terms().sum::<f64>(), scale * terms().map(f64::abs).sum::<f64>())
        };
        (0..self.rank).map(of_row).collect()
    }

    /// `B h` of a token's outputs with the given h, and the sums of the terms' sizes.
    fn outer(&self, slot: u32, h: &[f32]) -> Vec<(f64, f64)> {
        let of_output = |n: usize| {
            let from = slot as usize * self.rank;
            let b = &self.b[n * self.cols + from..][..self.rank];
            let h = &h[self.module(n) * self.cols + from..][..self.rank];
            let terms = || b.iter().zip(h).map(|(b, h)| f64::from(b.to_f32()) * f64::from(*h));
            (terms().sum(), terms().map(f64::abs).sum())
        };
        (0..self.shape.n).map(of_output).collect()
    }
}

/// The tokens of a step, with an h full of NaN.
struct Step {
    slots: Vec<u32>,
    buffers: [DeviceBuffer; 3],
}

impl Step {
    fn new((gpu, queue): (&Arc<Gpu>, &Queue), layer: &Layer, slots: Vec<u32>) -> Self {
        let used = slots.iter().filter(|&&slot| slot != NO_SLOT).map(|&slot| slice_bit(slot, layer.rank));
        let in_step = used.fold(0u64, |mask, bit| mask | bit);
        let h = poisoned::<bf16>(gpu, queue, slots.len() * layer.shape.modules.count() * layer.cols);
        let upload = DeviceBuffer::from_slice(gpu, &slots).expect("memory");
        Self { buffers: [upload, DeviceBuffer::from_slice(gpu, &[in_step]).expect("memory"), h], slots }
    }

    fn operands(&self) -> LowRankStep {
        let [slots, in_step, h] = self.buffers.each_ref().map(DeviceBuffer::span);
        LowRankStep { slots, in_step, h }
    }

    fn h(&self, layer: &Layer) -> Vec<bf16> {
        let count = self.slots.len() * layer.shape.modules.count() * layer.cols;
        self.buffers[2].span().read(count).expect("a copy")
    }
}

/// A slot for each row: mostly few, in any order, some rows without one.
fn random_slots(random: &mut Random, rows: usize, num_slots: usize) -> Vec<u32> {
    let slot = |random: &mut Random| if random.below(4) == 0 { NO_SLOT } else { random.below(num_slots) as u32 };
    let runs = rows > 64;
    let mut slots = Vec::new();
    while slots.len() < rows {
        let (next, count) = (slot(random), if runs { 1 + random.below(90) } else { 1 });
        slots.extend(std::iter::repeat_n(next, count.min(rows - slots.len())));
    }
    slots
}

fn stacked(starts: &[usize]) -> Modules {
    let at = |index: usize| starts.get(index).copied().unwrap_or(usize::MAX);
    Modules::Stacked { count: 1 + starts.len(), starts: [at(0), at(1)] }
}

fn shapes() -> Vec<Shape> {
    let shape = |n, k, modules, num_slots, max_rank| Shape { n, k, modules, num_slots, max_rank };
    vec![
        shape(64, 64, ONE, 1, 8),
        shape(208, 136, stacked(&[128, 168]), 3, 5),
        shape(1008, 520, Modules::Gated, 8, 16),
        shape(96, 2752, ONE, 5, 64),
        shape(48, 8, stacked(&[16, 32]), 9, 16),
        shape(272, 1032, stacked(&[8]), 20, 17),
        shape(768, 4096, Modules::Gated, 2, 32),
    ]
}

/// The same, and some whose modules begin or end within eight outputs, which products for few rows do not add themselves.
fn shapes_of_expand() -> Vec<Shape> {
    let apart = Shape { n: 24, k: 64, modules: stacked(&[12]), num_slots: 4, max_rank: 16 };
    shapes()
        .into_iter()
        .chain([
            apart,
            Shape { n: 72, modules: stacked(&[4, 70]), ..apart },
            Shape { n: 12, modules: stacked(&[6]), ..apart },
        ])
        .collect()
}

fn assert_within(what: &str, found: &[f32], expected: impl Iterator<Item = (f64, f64)>) {
    let mut count = 0;
    for (i, (&found, (expected, tolerance))) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= tolerance, "{what}: element {i} is {found}, {expected} was expected within {tolerance}");
        count += 1;
    }
    assert_eq!(count, found.len(), "{what}: lengths");
}

#[test]
fn products_with_a_agree_with_the_formula_and_other_columns_become_zero() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(41);
    for shape in shapes() {
        let layer = Layer::new(&gpu, &mut random, shape);
        for rows in [1, 7, 33, 64, 65, 300] {
            let slots = random_slots(&mut random, rows, shape.num_slots);
            let x = random.bf16s(rows * shape.k, 1.0);
            let on_gpu = DeviceBuffer::from_slice(&gpu, &x).expect("memory");
            let run = |kernel: fn(&Queue, &LowRankWeight, &LowRankStep, Span, usize) -> Result<(), CudaError>| {
                let step = Step::new((&gpu, &queue), &layer, slots.clone());
                kernel(&queue, &layer.weight(), &step.operands(), on_gpu.span(), rows).expect("a launch");
                queue.wait().expect("the kernel runs");
                step.h(&layer)
            };
            let (found, simple) = (run(shrink), run(shrink_simple));
            let bits = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&simple), "{shape:?}, {rows} rows: the versions differ");
            let used = slots.iter().filter(|&&slot| layer.has(slot)).map(|&slot| slice_bit(slot, layer.rank));
            let used = used.fold(0u64, |mask, bit| mask | bit);
            let count = shape.modules.count();
            for (token, (x, &slot)) in floats(&x).chunks_exact(shape.k).zip(&slots).enumerate() {
                for module in 0..count {
                    let what = format!("{shape:?}, {rows} rows, token {token}, module {module}");
                    let row = floats(&found[(token * count + module) * layer.cols..][..layer.cols]);
                    let inner = if layer.has(slot) { layer.inner(slot, module, x) } else { Vec::new() };
                    for (column, &value) in row.iter().enumerate() {
                        let is_own = layer.has(slot) && column / layer.rank == slot as usize;
                        let is_read = used >> (column / SLICE) & 1 == 1;
                        if !is_own {
                            assert!(!is_read || value == 0.0, "{what}: column {column} is {value}");
                            continue;
                        }
                        let (expected, size) = inner[column % layer.rank];
                        let tolerance = expected.abs() * 2f64.powi(-8) + size * shape.k as f64 * 2f64.powi(-24);
                        let error = (f64::from(value) - expected).abs();
                        assert!(error <= tolerance, "{what}: column {column} is {value} and not {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn products_with_b_are_added_to_the_rows_that_have_an_adapter() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(42);
    for shape in shapes_of_expand() {
        let layer = Layer::new(&gpu, &mut random, shape);
        for rows in [1, 7, 33, 64, 65, 300] {
            let step = Step::new((&gpu, &queue), &layer, random_slots(&mut random, rows, shape.num_slots));
            let x = DeviceBuffer::from_slice(&gpu, &random.bf16s(rows * shape.k, 1.0)).expect("memory");
            let before = random.bf16s((rows + 1) * shape.n, 1.0);
            let y = DeviceBuffer::from_slice(&gpu, &before).expect("memory");
            shrink(&queue, &layer.weight(), &step.operands(), x.span(), rows).expect("a launch");
            expand(&queue, &layer.weight(), &step.operands(), y.span(), rows).expect("a launch");
            queue.wait().expect("the kernels run");
            let found: Vec<bf16> = y.span().read(before.len()).expect("a copy");
            let h = floats(&step.h(&layer));
            let width = shape.modules.count() * layer.cols;
            for (token, (found, before)) in found.chunks_exact(shape.n).zip(before.chunks_exact(shape.n)).enumerate() {
                let what = format!("{shape:?}, {rows} rows, token {token}");
                match step.slots.get(token).filter(|&&slot| layer.has(slot)) {
                    None => assert_eq!(found, before, "{what}"),
                    Some(&slot) => {
                        let terms = layer.outer(slot, &h[token * width..][..width]).into_iter().zip(floats(before));
                        let expected = terms.map(|((sum, size), before)| {
                            let y = sum + f64::from(before);
                            (y, y.abs() * 2f64.powi(-8) + size * 64.0 * 2f64.powi(-24) + 1e-6)
                        });
                        assert_within(&what, &floats(found), expected);
                    }
                }
            }
        }
    }
}

#[test]
fn a_token_alone_gets_the_bits_it_gets_among_others() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(43);
    let shape = Shape { n: 512, k: 2048, modules: stacked(&[256, 384]), num_slots: 8, max_rank: 16 };
    let layer = Layer::new(&gpu, &mut random, shape);
    let slots = random_slots(&mut random, 300, 4);
    let (x, y) = (random.bf16s(300 * shape.k, 1.0), random.bf16s(300 * shape.n, 1.0));
    let run = |tokens: std::ops::Range<usize>| {
        let part = |values: &[bf16], width: usize| {
            DeviceBuffer::from_slice(&gpu, &values[tokens.start * width..tokens.end * width]).expect("memory")
        };
        let (x, y) = (part(&x, shape.k), part(&y, shape.n));
        let step = Step::new((&gpu, &queue), &layer, slots[tokens.clone()].to_vec());
        shrink(&queue, &layer.weight(), &step.operands(), x.span(), tokens.len()).expect("a launch");
        expand(&queue, &layer.weight(), &step.operands(), y.span(), tokens.len()).expect("a launch");
        queue.wait().expect("the kernels run");
        y.span().read::<bf16>(tokens.len() * shape.n).expect("a copy")
    };
    let together = run(0..300);
    for token in [0, 13, 64, 131, 299] {
        assert_eq!(run(token..token + 1), together[token * shape.n..][..shape.n], "token {token}");
    }
    assert_eq!(run(100..150), together[100 * shape.n..150 * shape.n], "a part of the tokens");
}

/// A product into y, with those of adapters or without.
type Product<'a> = dyn Fn(Span, Option<LowRankOperands<'_>>) -> Result<(), CudaError> + 'a;

/// Checks a product that adds `B h` itself. `product(y, low_rank)` computes it, or without adapters, and `sums` are those of the
/// weight with the sizes of their terms.
fn check_fused(
    (gpu, queue): (&Arc<Gpu>, &Queue),
    (layer, slots): (&Layer, &[u32]),
    x: Span,
    epilogue: Epilogue,
    sums: &[(f32, f32)],
    product: &Product<'_>,
) {
    let (rows, n) = (slots.len(), layer.shape.n);
    let is_gated = matches!(epilogue, Epilogue::Gated(_));
    let width = if is_gated { n / 2 } else { n };
    let step = Step::new((gpu, queue), layer, slots.to_vec());
    let weight = layer.weight();
    shrink(queue, &weight, &step.operands(), x, rows).expect("a launch");
    let run = |low_rank: Option<LowRankOperands<'_>>| {
        let y = poisoned::<bf16>(gpu, queue, rows * width);
        product(y.span(), low_rank).expect("a launch");
        queue.wait().expect("the kernels run");
        y.span().read::<bf16>(rows * width).expect("a copy")
    };
    let (found, plain) = (run(Some((&weight, &step.operands()))), run(None));
    let h = floats(&step.h(layer));
    let h_width = layer.shape.modules.count() * layer.cols;
    for token in 0..rows {
        let what = format!("{:?}, {rows} rows, {epilogue:?}, token {token} in slot {}", layer.shape, slots[token]);
        let found = &found[token * width..][..width];
        if !layer.has(slots[token]) {
            assert_eq!(found, &plain[token * width..][..width], "{what}");
            continue;
        }
        let outer = layer.outer(slots[token], &h[token * h_width..][..h_width]);
        let both = outer.iter().zip(&sums[token * n..][..n]).map(|(&(low, low_size), &(sum, size))| {
            let slack = (f64::from(size) + low_size) * layer.shape.k as f64 * 2f64.powi(-24);
            (low + f64::from(sum), slack + (low + f64::from(sum)).abs() * 2f64.powi(-20) + 1e-6)
        });
        let both: Vec<(f64, f64)> = both.collect();
        let expected = |o: usize| {
            if !is_gated {
                return (both[o].0, both[o].0.abs() * 2f64.powi(-8) + both[o].1);
            }
            let gate = o / 8 * 16 + o % 8;
            let ((g, g_slack), (u, u_slack)) = (both[gate], both[gate + 8]);
            let activated = f64::from(reference::silu(g as f32));
            let y = activated * u;
            (y, y.abs() * 2f64.powi(-8) * 1.05 + 1.2 * g_slack * (u.abs() + u_slack) + u_slack * activated.abs() + 1e-6)
        };
        assert_within(&what, &floats(found), (0..width).map(expected));
    }
}

const EPILOGUES: [Epilogue; 2] = [Epilogue::Store, Epilogue::Gated(GateActivation::Silu)];

fn has_fused(gpu: &Gpu) -> bool {
    if !has_fused_kernel(gpu) {
        println!("skipped: the kernels need a GPU of compute capability 9");
    }
    has_fused_kernel(gpu)
}

fn magnitudes(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| value.abs()).collect()
}

#[test]
fn products_of_few_rows_add_those_of_adapters_before_the_activation() {
    let Some((gpu, queue)) = gpu::open() else { return };
    if !has_fused(&gpu) {
        return;
    }
    let mut random = Random::new(44);
    for shape in shapes() {
        let Shape { n, k, .. } = shape;
        let layer = Layer::new(&gpu, &mut random, shape);
        let values = random.bf16s(n * k, 1.0 / (k as f32).sqrt());
        let weight = DeviceBuffer::from_slice(&gpu, &values).expect("memory");
        let bias = random.bf16s(n, 1.0);
        let on_gpu = DeviceBuffer::from_slice(&gpu, &bias).expect("memory");
        let linear = LinearWeight { weight: weight.span(), bias: on_gpu.span(), n, k };
        for rows in [1, 7, 9, 17, 32, 33, 64] {
            let x = random.bf16s(rows * k, 1.0);
            let slots = random_slots(&mut random, rows, shape.num_slots);
            let (x_floats, w_floats) = (floats(&x), floats(&values));
            let sums = reference::linear(&x_floats, &w_floats, Some(&floats(&bias)), k);
            let sizes = reference::linear(&magnitudes(&x_floats), &magnitudes(&w_floats), None, k);
            let sums: Vec<_> = sums.into_iter().zip(sizes).collect();
            let x = DeviceBuffer::from_slice(&gpu, &x).expect("memory");
            for epilogue in EPILOGUES {
                check_fused(
                    (&gpu, &queue),
                    (&layer, &slots),
                    x.span(),
                    epilogue,
                    &sums,
                    &|y, low_rank| match low_rank {
                        None => skinny_gemm(&queue, y, x.span(), &linear, rows, epilogue),
                        Some(low_rank) => {
                            skinny_gemm_low_rank(&queue, [y, x.span()], &linear, rows, epilogue, low_rank)
                        }
                    },
                );
            }
        }
    }
}

#[test]
fn products_with_quantized_weights_add_those_of_adapters_before_the_activation() {
    let Some((gpu, queue)) = gpu::open() else { return };
    if !has_fused(&gpu) {
        return;
    }
    let mut random = Random::new(45);
    for format in FORMATS {
        for shape in shapes() {
            let Shape { n, k, .. } = shape;
            let layer = Layer::new(&gpu, &mut random, shape);
            let weight = QuantizedWeight::random(&gpu, &mut random, [n, k], format, true);
            let bias = weight.bias.as_ref().map(|(bias, _)| floats(bias));
            for rows in [1, 8, 17, 33] {
                let x = random.bf16s(rows * k, 1.0);
                let slots = random_slots(&mut random, rows, shape.num_slots);
                let sums = reference::linear(&floats(&x), &weight.values, bias.as_deref(), k);
                let sizes = reference::linear(&magnitudes(&floats(&x)), &magnitudes(&weight.values), None, k);
                let sums: Vec<_> = sums.into_iter().zip(sizes).collect();
                let x = DeviceBuffer::from_slice(&gpu, &x).expect("memory");
                let packed = weight.packed();
                for epilogue in EPILOGUES {
                    let product = |y: Span, low_rank: Option<LowRankOperands<'_>>| match low_rank {
                        None => quantized_gemm(&queue, y, x.span(), &packed, rows, epilogue),
                        Some(it) => quantized_gemm_low_rank(&queue, [y, x.span()], &packed, rows, epilogue, it),
                    };
                    check_fused((&gpu, &queue), (&layer, &slots), x.span(), epilogue, &sums, &product);
                }
            }
        }
    }
}

#[test]
fn slots_that_the_kernels_were_not_written_for_are_refused() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let buffer = DeviceBuffer::with_count::<bf16>(&gpu, 1 << 16).expect("memory");
    let all = buffer.span();
    let step = LowRankStep { slots: all, in_step: all, h: all };
    let good = LowRankWeight {
        a: all,
        b: all,
        scales: all,
        in_layer: all,
        num_slots: 2,
        rank: 16,
        n: 64,
        k: 64,
        modules: stacked(&[32]),
    };
    let refused = |weight: LowRankWeight, rows: usize| {
        shrink(&queue, &weight, &step, all, rows).is_err() && expand(&queue, &weight, &step, all, rows).is_err()
    };
    assert!(refused(LowRankWeight { rank: 24, ..good }, 1), "a rank that divides no slice");
    assert!(refused(LowRankWeight { num_slots: max_slots(16) + 1, ..good }, 1), "more slots than a mask has");
    assert!(refused(LowRankWeight { k: 12, ..good }, 1), "inputs not a multiple of 8");
    assert!(refused(LowRankWeight { n: 0, ..good }, 1), "no outputs");
    assert!(refused(LowRankWeight { modules: stacked(&[64]), ..good }, 1), "a module that begins behind the outputs");
    let within = LowRankWeight { modules: stacked(&[36]), ..good };
    assert!(expand(&queue, &within, &step, all, 1).is_ok(), "a module that begins within eight outputs");
    assert!(refused(LowRankWeight { n: 2048, ..good }, 1), "a B that is shorter than its shape");
    assert!(refused(good, 1 << 15), "an h that is shorter than its rows");
    assert!(refused(good, 0), "no rows");
}
