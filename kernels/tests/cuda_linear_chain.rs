//! Compares chains of products with the plain formulas, link by link, for odd shapes.

mod gpu;
#[path = "gpu/quantized.rs"]
mod quantized;

use std::sync::Arc;

use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::linear_chain::{
    AddBranch, AddNorm, BranchBefore, ChainScratch, Link, LinkEnd, LinkWeight, RowScale, branch_squares_bytes,
    has_kernel, linear_chain, norm_slices,
};
use kernels::cuda::quantized_gemm::PackedFormat;
use kernels::cuda::skinny_gemm::{Epilogue, LinearWeight};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use kernels::reference;
use quantized::{FORMATS, QuantizedWeight};

const EPS: f32 = 1e-5;

/// The products between two attentions of a decoder: out, gate and up, down, and the next layer's qkv. The first has
/// `attended` inputs.
struct Shape {
    attended: usize,
    hidden: usize,
    inner: usize,
    qkv: usize,
}

struct Weight {
    values: Vec<f32>,
    bias: Option<Vec<bf16>>,
    n: usize,
    k: usize,
    on_gpu: OnGpu,
}

enum OnGpu {
    Plain { values: DeviceBuffer, bias: Option<DeviceBuffer> },
    Packed(QuantizedWeight),
}

impl Weight {
    /// In bf16 if there is no format.
    fn new(
        gpu: &Arc<Gpu>,
        random: &mut Random,
        [n, k]: [usize; 2],
        format: Option<PackedFormat>,
        with_bias: bool,
    ) -> Self {
        if let Some(format) = format {
            let packed = QuantizedWeight::random(gpu, random, [n, k], format, with_bias);
            let bias = packed.bias.as_ref().map(|(bias, _)| bias.clone());
            return Self { values: packed.values.clone(), bias, n, k, on_gpu: OnGpu::Packed(packed) };
        }
        let values = random.bf16s(n * k, 2.0 / (k as f32).sqrt());
        let bias = with_bias.then(|| random.bf16s(n, 0.5));
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let on_gpu = OnGpu::Plain { values: upload(&values), bias: bias.as_deref().map(upload) };
        Self { on_gpu, values: floats(&values), bias, n, k }
    }

    fn linear(&self) -> LinkWeight {
        match &self.on_gpu {
            OnGpu::Plain { values, bias } => {
                let bias = bias.as_ref().map_or(Span::NULL, DeviceBuffer::span);
                LinkWeight::Plain(LinearWeight { weight: values.span(), bias, n: self.n, k: self.k })
            }
            OnGpu::Packed(packed) => LinkWeight::Packed(packed.packed()),
        }
    }

    /// Products of `x [rows, k]`, with rows multiplied by `scales`, and the tolerance for sums in another order.
    fn multiply(&self, x: &[f32], scales: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let x: Vec<f32> = x.chunks(self.k).zip(scales).flat_map(|(row, s)| row.iter().map(move |v| v * s)).collect();
        let weight = &self.values;
        let bias = self.bias.as_deref().map(floats);
        let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<f32>>();
        let sums = reference::linear(&x, weight, bias.as_deref(), self.k);
        let sizes = reference::linear(&magnitudes(&x), &magnitudes(weight), None, self.k);
        let slack =
            |(sum, size): (&f32, &f32)| size * self.k as f32 * 2.0f32.powi(-24) + sum.abs() * 2.0f32.powi(-20) + 1e-6;
        let slacks = sums.iter().zip(&sizes).map(slack).collect();
        (sums, slacks)
    }
}

fn check(what: &str, found: &[f32], expected: &[f32], tolerances: &[f32]) {
    for (i, ((&found, &expected), &tolerance)) in found.iter().zip(expected).zip(tolerances).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance,
            "{what}: element {i} is {found}, {expected} was expected within {tolerance}"
        );
    }
}

/// The activation of interleaved gates and ups, with tolerances.
fn gated_of(sums: &[f32], slacks: &[f32], inner: usize) -> (Vec<f32>, Vec<f32>) {
    let pair = |o: usize| {
        let (row, column) = (o / inner, o % inner);
        let gate = row * 2 * inner + column / 8 * 16 + column % 8;
        let (g, u) = (reference::silu(sums[gate]), sums[gate + 8]);
        let slack = 1.2 * slacks[gate] * u.abs() + slacks[gate + 8] * g.abs();
        (g * u, (g * u).abs() * 2.0f32.powi(-8) * 1.05 + slack * 2.0 + 1e-6)
    };
    (0..sums.len() / 2).map(pair).unzip()
}

/// A residual r, a branch p, and the weights of the norms of p and of the sum.
struct Summed<'a> {
    residual: &'a [f32],
    branch: &'a [f32],
    gains: [&'a [f32]; 2],
}

impl Summed<'_> {
    /// For each row the scales of the branch and of the sum.
    fn scales(&self) -> Vec<[f32; 2]> {
        let [branch_gain, _] = self.gains;
        let n = branch_gain.len();
        let scale = |row: &[f32]| (row.iter().map(|v| v * v).sum::<f32>() / n as f32 + EPS).sqrt().recip();
        let rows = self.residual.chunks(n).zip(self.branch.chunks(n));
        rows.map(|(residual, branch)| {
            let s = scale(branch);
            let sum: Vec<f32> = (0..n).map(|i| residual[i] + s * branch[i] * branch_gain[i]).collect();
            [s, scale(&sum)]
        })
        .collect()
    }

    /// The residual with the branch.
    fn sum(&self) -> Vec<f32> {
        let (n, scales) = (self.gains[0].len(), self.scales());
        let value = |(i, r): (usize, &f32)| r + scales[i / n][0] * self.branch[i] * self.gains[0][i % n];
        self.residual.iter().enumerate().map(value).collect()
    }

    /// The two rows that are stored for each: those of the residual, then those of the branch.
    fn rows(&self) -> Vec<f32> {
        let ([u, v], n) = (self.gains, self.gains[0].len());
        let residual = self.residual.iter().enumerate().map(|(i, r)| r * v[i % n]);
        residual.chain(self.branch.iter().enumerate().map(|(i, p)| p * u[i % n] * v[i % n])).collect()
    }

    /// The normed sum, as products read it from these rows.
    fn normed(&self, rows: &[f32]) -> Vec<f32> {
        let (n, scales) = (self.gains[0].len(), self.scales());
        let (residual, branch) = rows.split_at(rows.len() / 2);
        let value = |i: usize| scales[i / n][1] * (residual[i] + scales[i / n][0] * branch[i]);
        (0..residual.len()).map(value).collect()
    }
}

struct Case {
    queue: Queue,
    scratch: ChainScratch,
    weights: [Weight; 4],
    gains: [Vec<bf16>; 2],
    gains_on_gpu: [DeviceBuffer; 2],
}

impl Case {
    fn new(gpu: &Arc<Gpu>, random: &mut Random, shape: &Shape, format: Option<PackedFormat>, with_bias: bool) -> Self {
        let Shape { attended, hidden, inner, qkv } = *shape;
        let mut weight = |n, k| Weight::new(gpu, random, [n, k], format, with_bias);
        let weights = [weight(hidden, attended), weight(2 * inner, hidden), weight(hidden, inner), weight(qkv, hidden)];
        let gains = [random.bf16s(hidden, 1.0), random.bf16s(hidden, 1.0)];
        let gains_on_gpu = gains.each_ref().map(|gain| DeviceBuffer::from_slice(gpu, gain).expect("memory"));
        let (queue, scratch) = (Queue::new(gpu).expect("a queue"), ChainScratch::new(gpu).expect("memory"));
        Self { queue, scratch, weights, gains, gains_on_gpu }
    }

    /// The residual and its norm without scale after a product, with tolerances; then each row's scale.
    fn normed(
        &self,
        link: usize,
        residual: &[f32],
        sums: &[f32],
        slacks: &[f32],
    ) -> (Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>) {
        let hidden = self.weights[link].n;
        let gain = floats(&self.gains[link / 2]);
        let total: Vec<f32> = residual.iter().zip(sums).map(|(r, s)| r + s).collect();
        let y: Vec<f32> = total.iter().enumerate().map(|(i, v)| v * gain[i % hidden]).collect();
        // The residual was rounded before, perhaps in the other direction, and y is rounded now.
        let off = |i: usize| {
            (slacks[i] + (residual[i].abs() + total[i].abs()) * 2.0f32.powi(-7)) * gain[i % hidden].abs() + 1e-6
        };
        let tolerances = (0..y.len()).map(off).collect();
        let scale = |row: &[f32]| (row.iter().map(|v| v * v).sum::<f32>() / hidden as f32 + EPS).sqrt().recip();
        let scales = total.chunks(hidden).map(scale).collect();
        (total, y, tolerances, scales)
    }

    fn run(&self, gpu: &Arc<Gpu>, random: &mut Random, rows: usize) {
        let [out, gate_up, down, qkv] = &self.weights;
        let (hidden, inner) = (out.n, down.k);
        let (x, residual) = (random.bf16s(rows * out.k, 1.0), random.bf16s(rows * hidden, 1.0));
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let (x_on_gpu, residual_on_gpu) = (upload(&x), upload(&residual));
        let output = |count: usize| poisoned::<bf16>(gpu, &self.queue, count);
        let pitch = qkv.n + 8;
        let ys = [
            output(rows * hidden),
            output(rows * inner),
            output(rows * hidden),
            poisoned::<f32>(gpu, &self.queue, rows * pitch),
        ];
        let squares = poisoned::<f32>(gpu, &self.queue, rows * norm_slices(hidden));
        let add = |i: usize| {
            LinkEnd::AddNorm(AddNorm {
                residual: residual_on_gpu.span(),
                gain: self.gains_on_gpu[i].span(),
                squares: squares.span(),
            })
        };
        let scale = Some(RowScale { squares: squares.span(), cols: hidden, eps: EPS, is_of_branch: false });
        let link = |i: usize, x: Span, end: LinkEnd, scale: Option<RowScale>| Link {
            y: ys[i].span(),
            pitch,
            x,
            linear: self.weights[i].linear(),
            end,
            scale,
        };
        let links = [
            link(0, x_on_gpu.span(), add(0), None),
            link(1, ys[0].span(), LinkEnd::Store(Epilogue::Gated(GateActivation::Silu)), scale),
            link(2, ys[1].span(), add(1), None),
            link(3, ys[2].span(), LinkEnd::Store(Epilogue::StoreF32), scale),
        ];
        linear_chain(&self.queue, &links, rows, &self.scratch, None).expect("a launch");
        self.queue.wait().expect("the kernel runs");

        let what = |link: &str| format!("{rows} rows, {} -> {hidden} -> {inner} -> {}, {link}", out.k, qkv.n);
        let read = |i: usize, count: usize| ys[i].span().read::<bf16>(count).expect("a copy");
        let ones = vec![1.0; rows];
        let (sums, slacks) = out.multiply(&floats(&x), &ones);
        let (total, y, tolerances, scales) = self.normed(0, &floats(&residual), &sums, &slacks);
        let normed = read(0, rows * hidden);
        check(&what("out"), &floats(&normed), &y, &tolerances);

        let (sums, slacks) = gate_up.multiply(&floats(&normed), &scales);
        let (y, tolerances) = gated_of(&sums, &slacks, inner);
        let gated = read(1, rows * inner);
        check(&what("gate and up"), &floats(&gated), &y, &tolerances);

        let rounded: Vec<f32> = total.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
        let (sums, slacks) = down.multiply(&floats(&gated), &ones);
        let (total, y, tolerances, scales) = self.normed(2, &rounded, &sums, &slacks);
        let normed = read(2, rows * hidden);
        check(&what("down"), &floats(&normed), &y, &tolerances);
        let after = floats(&residual_on_gpu.span().read::<bf16>(rows * hidden).expect("a copy"));
        let tolerances: Vec<f32> =
            total.iter().zip(&rounded).map(|(t, r)| (t.abs() + r.abs()) * 2.0f32.powi(-7) + 1e-4).collect();
        check(&what("residual"), &after, &total, &tolerances);

        let (sums, slacks) = qkv.multiply(&floats(&normed), &scales);
        let tolerances: Vec<f32> =
            sums.iter().zip(&slacks).map(|(s, slack)| 2.0 * slack + s.abs() * 2.0f32.powi(-9)).collect();
        let stored = ys[3].span().read::<f32>(rows * pitch).expect("a copy");
        let found: Vec<f32> = stored.chunks(pitch).flat_map(|row| &row[..qkv.n]).copied().collect();
        check(&what("qkv"), &found, &sums, &tolerances);
    }
}

impl Case {
    /// The same chain with norms behind branches, whose weights are the other gains.
    fn run_branches(&self, gpu: &Arc<Gpu>, random: &mut Random, rows: usize) {
        let [out, gate_up, down, qkv] = &self.weights;
        let (hidden, inner) = (out.n, down.k);
        let (x, residual) = (random.bf16s(rows * out.k, 1.0), random.bf16s(rows * hidden, 1.0));
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let (x_on_gpu, residual_on_gpu) = (upload(&x), upload(&residual));
        let output = |count: usize| poisoned::<bf16>(gpu, &self.queue, count);
        let (branch, pitch) = (output(rows * hidden), qkv.n + 8);
        let logits = poisoned::<f32>(gpu, &self.queue, rows * pitch);
        let ys = [output(2 * rows * hidden), output(rows * inner), output(2 * rows * hidden), logits];
        let squares = [(); 2].map(|()| poisoned::<f32>(gpu, &self.queue, branch_squares_bytes(rows, hidden) / 4));
        let gains = self.gains_on_gpu.each_ref().map(DeviceBuffer::span);
        let scales = squares.each_ref().map(|squares| RowScale {
            squares: squares.span(),
            cols: hidden,
            eps: EPS,
            is_of_branch: true,
        });
        let add = |i: usize, before: Option<BranchBefore>| {
            LinkEnd::AddBranch(AddBranch {
                residual: residual_on_gpu.span(),
                branch: branch.span(),
                branch_gain: gains[1 - i],
                before,
                gain: gains[i],
                squares: squares[i].span(),
            })
        };
        let link = |i: usize, x: Span, end: LinkEnd, scale: Option<RowScale>| Link {
            y: ys[i].span(),
            pitch,
            x,
            linear: self.weights[i].linear(),
            end,
            scale,
        };
        let gated = LinkEnd::Store(Epilogue::Gated(GateActivation::Silu));
        let links = [
            link(0, x_on_gpu.span(), add(0, None), None),
            link(1, ys[0].span(), gated, Some(scales[0])),
            link(2, ys[1].span(), add(1, Some(BranchBefore { gain: gains[1], scale: scales[0] })), None),
            link(3, ys[2].span(), LinkEnd::Store(Epilogue::StoreF32), Some(scales[1])),
        ];
        linear_chain(&self.queue, &links, rows, &self.scratch, None).expect("a launch");
        self.queue.wait().expect("the kernel runs");

        let what = |link: &str| format!("{rows} rows, {} -> {hidden} -> {inner} -> {}, branches, {link}", out.k, qkv.n);
        let read = |buffer: &DeviceBuffer, count: usize| floats(&buffer.span().read::<bf16>(count).expect("a copy"));
        let (ones, gains) = (vec![1.0; rows], self.gains.each_ref().map(|gain| floats(gain)));
        // Values are rounded once, after sums whose order differs.
        let rounded = |values: &[f32], slacks: &[f32], factor: f32| -> Vec<f32> {
            let slack = |(i, v): (usize, &f32)| v.abs() * 2.0f32.powi(-8) + slacks[i % slacks.len()] * factor + 1e-5;
            values.iter().enumerate().map(slack).collect()
        };
        let products = |weight: &Weight, summed: &Summed<'_>, stored: &[f32]| {
            let (sums, slacks) = weight.multiply(&summed.normed(stored), &ones);
            let slacks: Vec<f32> =
                slacks.iter().zip(&sums).map(|(slack, sum)| 8.0 * slack + sum.abs() * 1e-4).collect();
            (sums, slacks)
        };

        let (sums, slacks) = out.multiply(&floats(&x), &ones);
        let residual = floats(&residual);
        let first = Summed { residual: &residual, branch: &sums, gains: [&gains[1], &gains[0]] };
        let stored = read(&ys[0], 2 * rows * hidden);
        check(&what("out"), &stored, &first.rows(), &rounded(&first.rows(), &slacks, 1.0));
        let (sums, slacks) = products(gate_up, &first, &stored);
        let (y, tolerances) = gated_of(&sums, &slacks, inner);
        let gated = read(&ys[1], rows * inner);
        check(&what("gate and up"), &gated, &y, &tolerances);

        let total = first.sum();
        let after = read(&residual_on_gpu, rows * hidden);
        let tolerances: Vec<f32> =
            total.iter().zip(&residual).map(|(t, r)| (t.abs() + (t - r).abs()) * 2.0f32.powi(-7) + 1e-3).collect();
        check(&what("residual"), &after, &total, &tolerances);
        let (sums, slacks) = down.multiply(&gated, &ones);
        check(&what("branch"), &read(&branch, rows * hidden), &sums, &rounded(&sums, &slacks, 1.0));
        let second = Summed { residual: &total, branch: &sums, gains: [&gains[0], &gains[1]] };
        let stored = read(&ys[2], 2 * rows * hidden);
        let mut tolerances = rounded(&second.rows(), &slacks, 2.0);
        // The branch before was rounded, too.
        for (i, tolerance) in tolerances.iter_mut().take(total.len()).enumerate() {
            *tolerance += (total[i] - residual[i]).abs() * gains[1][i % hidden].abs() * 2.0f32.powi(-7);
        }
        check(&what("down"), &stored, &second.rows(), &tolerances);
        let (sums, slacks) = products(qkv, &second, &stored);
        let found = ys[3].span().read::<f32>(rows * pitch).expect("a copy");
        let found: Vec<f32> = found.chunks(pitch).flat_map(|row| &row[..qkv.n]).copied().collect();
        let tolerances: Vec<f32> =
            slacks.iter().zip(&sums).map(|(slack, sum)| slack + sum.abs() * 2.0f32.powi(-9)).collect();
        check(&what("qkv"), &found, &sums, &tolerances);
    }
}

#[test]
fn every_link_of_a_chain_agrees_with_its_formula() {
    let Some((gpu, _)) = gpu::open() else { return };
    if !has_kernel(&gpu) {
        println!("skipped: no kernel for this GPU");
        return;
    }
    let mut random = Random::new(7);
    let shapes = [
        Shape { attended: 64, hidden: 64, inner: 64, qkv: 96 },
        Shape { attended: 264, hidden: 520, inner: 1032, qkv: 776 },
        Shape { attended: 1024, hidden: 1000, inner: 136, qkv: 2048 },
        Shape { attended: 4096, hidden: 2048, inner: 2752, qkv: 6144 },
    ];
    for format in FORMATS.map(Some).into_iter().chain([None]) {
        for (index, shape) in shapes.iter().enumerate() {
            let case = Case::new(&gpu, &mut random, shape, format, index % 2 == 1);
            for rows in [1, 2, 7, 8, 9, 16, 3, 1] {
                case.run(&gpu, &mut random, rows);
            }
            for rows in [1, 2, 4, 3, 1] {
                case.run_branches(&gpu, &mut random, rows);
            }
        }
    }
}
