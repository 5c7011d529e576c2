//! Compares the kernels of experts with plain formulas: order, grouped products and sum.

mod gpu;

use std::sync::Arc;

use gpu::{CHOSEN, Listed, Random, assert_close, floats, poisoned, rows_of_tokens};
use half::bf16;
use kernels::cuda::expert_rows::{ExpertRows, GroupedRows, RowInputs};
use kernels::cuda::gate_rows::gate_rows;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::grouped_gemm::{Gate, GroupedEpilogue, GroupedWeight, Kernel, grouped_gemm, has_hopper_kernels};
use kernels::cuda::route_tokens::Choices;
use kernels::cuda::scale_routes::scale_routes;
use kernels::cuda::sort_routes::{SortedRoutes, SortedRows, sort_routes};
use kernels::cuda::sum_experts::{ExpertOutputs, sum_experts, sum_experts_add_norm};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use kernels::reference::{self, Choosing};

/// Tokens, experts, experts of a token.
const ROUTINGS: [[usize; 3]; 6] = [[1, 4, 2], [3, 8, 2], [17, 60, 4], [64, 128, 8], [200, 512, 10], [1500, 32, 8]];

fn upload<T: bytemuck::Pod>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, values).expect("memory")
}

/// Routes of a step, on the host and on the GPU.
struct Routes {
    top_k: usize,
    experts: Vec<u32>, // [tokens, top_k]
    probabilities: Vec<f32>,
    experts_on: DeviceBuffer,
    probabilities_on: DeviceBuffer,
}

impl Routes {
    fn new(gpu: &Arc<Gpu>, random: &mut Random, [tokens, count, top_k]: [usize; 3]) -> Self {
        let mut experts = Vec::new();
        for token in 0..tokens {
            // Low experts are likelier, and every sixth token is padding.
            let logits: Vec<f32> = (0..count).map(|expert| random.unit() - expert as f32 / count as f32).collect();
            let own = reference::choose_experts(&logits, &Choosing::softmax(top_k, false))
                .into_iter()
                .map(|(expert, _)| expert);
            experts.extend(own.map(|expert| if token % 6 == 5 { count as u32 } else { expert }));
        }
        let probabilities: Vec<f32> = (0..tokens * top_k).map(|_| random.unit().abs()).collect();
        let (experts_on, probabilities_on) = (upload(gpu, &experts), upload(gpu, &probabilities));
        Self { top_k, experts, probabilities, experts_on, probabilities_on }
    }

    fn choices(&self) -> Choices {
        Choices { experts: self.experts_on.span(), probabilities: self.probabilities_on.span(), top_k: self.top_k }
    }

    /// Routes of a range of experts, sorted.
    fn sorted(&self, range: std::ops::Range<usize>) -> Vec<usize> {
        let is_own = |route: &usize| range.contains(&(self.experts[*route] as usize));
        let mut routes: Vec<usize> = (0..self.experts.len()).filter(is_own).collect();
        routes.sort_by_key(|&route| (self.experts[route], route));
        routes
    }
}

#[test]
fn rows_are_sorted_by_expert_and_copied() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(2);
    for shape @ [tokens, count, top_k] in ROUTINGS {
        let routes = Routes::new(&gpu, &mut random, shape);
        let (num_routes, cols) = (tokens * top_k, 72);
        let x = random.bf16s(tokens * cols, 1.0);
        let x_on = upload(&gpu, &x);
        for range in [0..count, count / 4..count / 2] {
            let offsets = poisoned::<u32>(&gpu, &q, range.len() + 1);
            let (tokens_on, places) = (poisoned::<u32>(&gpu, &q, num_routes), poisoned::<u32>(&gpu, &q, num_routes));
            let rows = poisoned::<bf16>(&gpu, &q, num_routes * cols);
            let to = SortedRoutes {
                offsets: offsets.span(),
                tokens: tokens_on.span(),
                places: places.span(),
                first_expert: range.start,
                num_experts: range.len(),
            };
            let copied = SortedRows { rows: rows.span(), x: x_on.span(), cols };
            sort_routes(&q, to, routes.choices(), tokens, Some(copied)).expect("a launch");
            q.wait().expect("the kernel runs");
            let expected = routes.sorted(range.clone());
            let offsets: Vec<u32> = offsets.span().read(range.len() + 1).expect("a copy");
            for (index, expert) in range.clone().chain([range.end]).enumerate() {
                let lower = expected.iter().filter(|&&route| (routes.experts[route] as usize) < expert).count();
                assert_eq!(offsets[index] as usize, lower, "offset of expert {expert}, {shape:?}");
            }
            let tokens_of: Vec<u32> = tokens_on.span().read(num_routes).expect("a copy");
            let places: Vec<u32> = places.span().read(num_routes).expect("a copy");
            let rows: Vec<bf16> = rows.span().read(num_routes * cols).expect("a copy");
            for (row, &route) in expected.iter().enumerate() {
                assert_eq!((tokens_of[row] as usize, places[route] as usize), (route / top_k, row), "{shape:?}");
                assert_eq!(rows[row * cols..][..cols], x[route / top_k * cols..][..cols], "row {row}, {shape:?}");
            }
        }
    }
}

/// A gated product of the two halves.
type Formula = fn(f32, f32) -> f32;

/// A product of all rows by one kernel.
struct Product {
    rows: usize,
    n: usize,
    k: usize,
    counts: Vec<usize>, // rows of each expert
    x: Vec<bf16>,
    weight: Vec<bf16>,
    bias: Option<Vec<bf16>>,
}

impl Product {
    fn new(random: &mut Random, counts: &[usize], [n, k]: [usize; 2], has_bias: bool) -> Self {
        let rows = counts.iter().sum();
        Self {
            rows,
            n,
            k,
            counts: counts.to_vec(),
            x: random.bf16s(rows * k, 1.0),
            weight: random.bf16s(counts.len() * n * k, 0.05),
            bias: has_bias.then(|| random.bf16s(counts.len() * n, 1.0)),
        }
    }

    fn run(&self, gpu: &Arc<Gpu>, q: &Queue, epilogue: GroupedEpilogue, kernel: Kernel) -> Vec<bf16> {
        let (x, offsets) = (upload(gpu, &self.x), self.offsets(gpu));
        let tokens = self.counts.iter().copied().max().expect("an expert");
        let rows = GroupedRows { experts: ExpertRows::Offsets(offsets.span()), tokens, routes: self.rows };
        self.run_with(gpu, q, (RowInputs::Sorted(x.span()), rows), epilogue, kernel)
    }

    /// The first row of each expert.
    fn offsets(&self, gpu: &Arc<Gpu>) -> DeviceBuffer {
        let starts = std::iter::once(0).chain(self.counts.iter().scan(0, |sum, count| {
            *sum += *count as u32;
            Some(*sum)
        }));
        upload(gpu, &starts.collect::<Vec<u32>>())
    }

    /// The same if the rows are found through the tokens of rows.
    fn run_gathered(&self, gpu: &Arc<Gpu>, q: &Queue, epilogue: GroupedEpilogue) -> Vec<bf16> {
        let (x, of_rows) = rows_of_tokens(&self.x, self.k);
        let (x, of_rows) = (upload(gpu, &x), upload(gpu, &of_rows));
        let inputs = RowInputs::OfTokens { x: x.span(), of_rows: of_rows.span() };
        let offsets = self.offsets(gpu);
        let experts = ExpertRows::Offsets(offsets.span());
        let rows = GroupedRows { experts, tokens: self.rows, routes: self.rows };
        self.run_with(gpu, q, (inputs, rows), epilogue, Kernel::Wide)
    }

    fn run_with(
        &self,
        gpu: &Arc<Gpu>,
        q: &Queue,
        (inputs, rows): (RowInputs<Span>, GroupedRows),
        epilogue: GroupedEpilogue,
        kernel: Kernel,
    ) -> Vec<bf16> {
        let weight = upload(gpu, &self.weight);
        let bias = self.bias.as_deref().map(|bias| upload(gpu, bias));
        let weight = GroupedWeight {
            weight: weight.span(),
            packed: None,
            bias: bias.as_ref().map_or(Span::NULL, DeviceBuffer::span),
            num_experts: self.counts.len(),
            n: self.n,
            k: self.k,
        };
        let count = self.rows * epilogue.outputs(self.n);
        let y = poisoned::<bf16>(gpu, q, count);
        grouped_gemm(q, y.span(), inputs, &weight, rows, epilogue, kernel).expect("a launch");
        q.wait().expect("the kernel runs");
        y.span().read(count).expect("a copy")
    }

    /// `[rows, n]`, in fp32.
    fn expected(&self) -> Vec<f32> {
        let (x, weight) = (floats(&self.x), floats(&self.weight));
        let mut first = 0;
        let mut out = Vec::new();
        for (expert, &count) in self.counts.iter().enumerate() {
            let own = &weight[expert * self.n * self.k..][..self.n * self.k];
            let bias = self.bias.as_deref().map(|bias| floats(&bias[expert * self.n..][..self.n]));
            out.extend(reference::linear(&x[first * self.k..][..count * self.k], own, bias.as_deref(), self.k));
            first += count;
        }
        out
    }
}

/// An activation of a sum.
type Curve = fn(f32) -> f32;

/// Activations of products without gates.
const ACTIVATIONS: [(GateActivation, Curve); 3] = [
    (GateActivation::Silu, reference::silu),
    (GateActivation::GeluTanh, reference::gelu_tanh),
    (GateActivation::ReluSquared, |x| x.max(0.0) * x.max(0.0)),
];

#[test]
fn every_expert_multiplies_its_rows() {
    let Some((gpu, q)) = gpu::open() else { return };
    let kernels: &[Kernel] = match has_hopper_kernels(&gpu) {
        true => &[Kernel::Simple, Kernel::Skinny, Kernel::Wide],
        false => &[Kernel::Simple],
    };
    let mut random = Random::new(3);
    // The last one has tiles of 192 rows.
    let counts: [&[usize]; 6] = [
        &[1],
        &[0, 3, 0, 1],
        &[9, 0, 17, 64, 65, 2, 0, 1, 1, 1, 4],
        &[130, 0, 1, 64, 257],
        &[0, 0, 5, 0, 0, 0],
        &[200, 1, 97],
    ];
    for (index, counts) in counts.into_iter().enumerate() {
        for [n, k] in
            [[16, 8], [64, 64], [80, 136], [528, 264], [256, 768], [1008, 520], [928, 264], [264, 928], [2048, 2056]]
        {
            let product = Product::new(&mut random, counts, [n, k], (index + n / 16) % 2 == 0);
            let sums = product.expected();
            let slack = k as f32 * 2.0f32.powi(-24) * 4.0;
            for &kernel in kernels {
                let what = format!("{kernel:?}, {n} x {k}, {counts:?}");
                let found = floats(&product.run(&gpu, &q, GroupedEpilogue::Store, kernel));
                assert_close(&what, &found, &sums, 2.0f32.powi(-8), slack);
                for (activation, formula) in ACTIVATIONS {
                    let expected: Vec<f32> = sums.iter().copied().map(formula).collect();
                    let found = floats(&product.run(&gpu, &q, GroupedEpilogue::Activated(activation), kernel));
                    // The slope of a square is twice the sum.
                    let (what, slack) = (format!("{what}, {activation:?}"), 16.0 * slack + 1e-5);
                    assert_close(&what, &found, &expected, 2.0f32.powi(-7), slack);
                }
                let gates: [(Gate, Formula); 3] = [
                    (Gate::Activation(GateActivation::Silu), |gate, up| reference::silu(gate) * up),
                    (Gate::Activation(GateActivation::GeluTanh), |gate, up| reference::gelu_tanh(gate) * up),
                    (Gate::Clamped { alpha: 1.7, limit: 1.5 }, |gate, up| {
                        let (gate, up) = (gate.min(1.5), up.clamp(-1.5, 1.5));
                        gate / (1.0 + (-1.7 * gate).exp()) * (up + 1.0)
                    }),
                ];
                // Gates alternate with what they are for in groups of 16 rows.
                for (gate, formula) in gates.into_iter().filter(|_| n.is_multiple_of(16)) {
                    let pair = |o: usize| {
                        let (row, column) = (o / (n / 2), o % (n / 2));
                        let at = row * n + column / 8 * 16 + column % 8;
                        formula(sums[at], sums[at + 8])
                    };
                    let expected: Vec<f32> = (0..product.rows * n / 2).map(pair).collect();
                    let found = floats(&product.run(&gpu, &q, GroupedEpilogue::Gated(gate), kernel));
                    assert_close(&format!("{what}, {gate:?}"), &found, &expected, 2.0f32.powi(-7), 8.0 * slack + 1e-5);
                }
            }
        }
    }
}

#[test]
fn a_row_alone_gets_the_bits_it_gets_among_others() {
    let Some((gpu, q)) = gpu::open() else { return };
    if !has_hopper_kernels(&gpu) {
        return;
    }
    let (n, k) = (512, 1024);
    let mut random = Random::new(4);
    let all = Product::new(&mut random, &[3, 90, 0, 33], [n, k], false);
    for kernel in [Kernel::Simple, Kernel::Skinny, Kernel::Wide] {
        let together = all.run(&gpu, &q, GroupedEpilogue::Store, kernel);
        for (row, expert) in [(1, 0), (3, 1), (80, 1), (125, 3)] {
            let mut counts = vec![0; 4];
            counts[expert] = 1;
            let alone = Product {
                rows: 1,
                counts,
                x: all.x[row * k..][..k].to_vec(),
                weight: all.weight.clone(),
                bias: None,
                ..all
            };
            let alone = alone.run(&gpu, &q, GroupedEpilogue::Store, kernel);
            assert_eq!(alone, together[row * n..][..n], "row {row}, {kernel:?}");
        }
    }
}

/// The number of rows decides between them, so steps of any size give a row the same bits only if both do.
#[test]
fn both_kernels_of_hopper_have_the_same_bits() {
    let Some((gpu, q)) = gpu::open() else { return };
    if !has_hopper_kernels(&gpu) {
        return;
    }
    let mut random = Random::new(5);
    let counts: [&[usize]; 2] = [&[3, 90, 0, 33, 1], &[200, 1, 97]];
    let shapes = [([512, 1024], false), ([1536, 2048], true), ([80, 136], true)];
    for (counts, ([n, k], has_bias)) in counts.into_iter().flat_map(|counts| shapes.map(|shape| (counts, shape))) {
        let product = Product::new(&mut random, counts, [n, k], has_bias);
        let activated = GroupedEpilogue::Activated(GateActivation::ReluSquared);
        let gated = GroupedEpilogue::Gated(Gate::Activation(GateActivation::Silu));
        for epilogue in [GroupedEpilogue::Store, activated, gated] {
            let [skinny, wide] = [Kernel::Skinny, Kernel::Wide].map(|kernel| product.run(&gpu, &q, epilogue, kernel));
            assert_eq!(skinny, wide, "{n} x {k}, {epilogue:?}");
        }
    }
}

#[test]
fn gathered_rows_give_the_bits_of_sorted_rows() {
    let Some((gpu, q)) = gpu::open() else { return };
    if !has_hopper_kernels(&gpu) {
        return;
    }
    let mut random = Random::new(6);
    let counts: [&[usize]; 4] = [&[1], &[9, 0, 17, 64, 65, 2, 0, 1], &[130, 0, 1, 64, 257], &[192, 193, 500, 0, 128]];
    for (index, counts) in counts.into_iter().enumerate() {
        for [n, k] in [[16, 8], [80, 136], [256, 768], [528, 264], [1536, 2056]] {
            let product = Product::new(&mut random, counts, [n, k], index % 2 == 0);
            for epilogue in [GroupedEpilogue::Store, GroupedEpilogue::Gated(Gate::Activation(GateActivation::Silu))] {
                let sorted = product.run(&gpu, &q, epilogue, Kernel::Wide);
                let gathered = product.run_gathered(&gpu, &q, epilogue);
                assert_eq!(sorted, gathered, "{n} x {k}, {counts:?}, {epilogue:?}");
            }
        }
    }
}

#[test]
fn listed_experts_give_the_bits_of_sorted_rows() {
    let Some((gpu, q)) = gpu::open() else { return };
    if !has_hopper_kernels(&gpu) {
        println!("skipped: the kernel needs a GPU of compute capability 9");
        return;
    }
    let mut random = Random::new(14);
    let gated = GroupedEpilogue::Gated(Gate::Activation(GateActivation::Silu));
    for chosen in CHOSEN {
        let listed = Listed::new(&gpu, chosen);
        let tokens = listed.num_tokens();
        for [n, k] in [[16, 8], [80, 136], [1536, 2048]] {
            let x = random.bf16s(tokens * k, 1.0);
            let product = Product::new(&mut random, &listed.counts, [n, k], n == 80);
            let product = Product { x: listed.sorted(&x, k), ..product };
            let rows = GroupedRows { experts: ExpertRows::Listed(listed.list.span()), tokens, routes: product.rows };
            let (x_on, sorted_on) = (upload(&gpu, &x), upload(&gpu, &product.x));
            for epilogue in [GroupedEpilogue::Store, gated] {
                let expected = product.run(&gpu, &q, epilogue, Kernel::Skinny);
                for inputs in [RowInputs::OfAllTokens(x_on.span()), RowInputs::Sorted(sorted_on.span())] {
                    let found = product.run_with(&gpu, &q, (inputs, rows), epilogue, Kernel::Skinny);
                    assert!(found == expected, "{n} x {k}, {tokens} tokens, {chosen:?}, {inputs:?}");
                }
            }
        }
    }
}

#[test]
fn outputs_are_added_by_their_probabilities() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(5);
    for shape @ [tokens, count, top_k] in ROUTINGS {
        let routes = Routes::new(&gpu, &mut random, shape);
        let (num_routes, cols) = (tokens * top_k, 136);
        let range = 0..count.div_ceil(2);
        let expected_order = routes.sorted(range.clone());
        let mut places = vec![u32::MAX; num_routes];
        expected_order.iter().enumerate().for_each(|(row, &route)| places[route] = row as u32);
        let y = random.bf16s(num_routes * cols, 1.0);
        let (places_on, y_on) = (upload(&gpu, &places), upload(&gpu, &y));
        let sorted = SortedRoutes {
            offsets: Span::NULL,
            tokens: Span::NULL,
            places: places_on.span(),
            first_expert: 0,
            num_experts: range.len(),
        };
        let out = poisoned::<bf16>(&gpu, &q, tokens * cols);
        let (also, also_factors) = (Span::NULL, Span::NULL);
        let outputs = ExpertOutputs { y: y_on.span(), choices: routes.choices(), sorted, cols, also, also_factors };
        sum_experts(&q, out.span(), &outputs, tokens).expect("a launch");
        q.wait().expect("the kernel runs");
        let mut expected = vec![0.0f32; tokens * cols];
        for route in (0..num_routes).filter(|&route| places[route] != u32::MAX) {
            let row = &y[places[route] as usize * cols..][..cols];
            let to = &mut expected[route / top_k * cols..][..cols];
            to.iter_mut().zip(row).for_each(|(to, from)| *to += routes.probabilities[route] * from.to_f32());
        }
        let found = floats(&out.span().read::<bf16>(tokens * cols).expect("a copy"));
        assert_close("sum", &found, &expected, 2.0f32.powi(-8), 1e-5);
        // Beside something else, where that is.
        let other = random.bf16s(tokens * cols, 1.0);
        let other_on = upload(&gpu, &other);
        let outputs = ExpertOutputs { also: other_on.span(), ..outputs };
        sum_experts(&q, other_on.span(), &outputs, tokens).expect("a launch");
        q.wait().expect("the kernel runs");
        let with_other: Vec<f32> = expected.iter().zip(&other).map(|(sum, other)| sum + other.to_f32()).collect();
        let found = floats(&other_on.span().read::<bf16>(tokens * cols).expect("a copy"));
        assert_close("sum beside something else", &found, &with_other, 2.0f32.powi(-8), 1e-5);
        // The same with factors.
        let (factors, other_on) = ((0..tokens).map(|_| random.unit()).collect::<Vec<f32>>(), upload(&gpu, &other));
        let factors_on = upload(&gpu, &factors);
        let outputs = ExpertOutputs { also: other_on.span(), also_factors: factors_on.span(), ..outputs };
        let scaled = other.iter().enumerate().map(|(i, other)| factors[i / cols] * other.to_f32());
        let expected: Vec<f32> = expected.iter().zip(scaled).map(|(sum, other)| sum + other).collect();

        let (residual, gain) = (random.bf16s(tokens * cols, 1.0), random.bf16s(cols, 1.0));
        let (residual_on, gain_on) = (upload(&gpu, &residual), upload(&gpu, &gain));
        let normed = poisoned::<bf16>(&gpu, &q, tokens * cols);
        let (to, sums_on) = (normed.span(), residual_on.span());
        sum_experts_add_norm(&q, to, sums_on, &outputs, gain_on.span(), tokens, 1e-5).expect("a launch");
        q.wait().expect("the kernel runs");
        let sums: Vec<f32> = expected.iter().zip(&residual).map(|(sum, own)| sum + own.to_f32()).collect();
        let found = floats(&sums_on.read::<bf16>(tokens * cols).expect("a copy"));
        assert_close("residual", &found, &sums, 2.0f32.powi(-8), 1e-5);
        let gain = floats(&gain);
        let normed_rows = sums.chunks_exact(cols).flat_map(|row| reference::rms_norm(row, &gain, 1e-5));
        let found = floats(&to.read::<bf16>(tokens * cols).expect("a copy"));
        assert_close("norm", &found, &normed_rows.collect::<Vec<f32>>(), 2.0f32.powi(-7), 1e-5);
    }
}

#[test]
fn inputs_are_multiplied_by_their_probabilities_and_outputs_then_added_as_they_are() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(9);
    for shape @ [tokens, count, top_k] in ROUTINGS {
        let routes = Routes::new(&gpu, &mut random, shape);
        let (num_routes, cols) = (tokens * top_k, 136);
        let range = count / 4..count / 2;
        let mut places = vec![u32::MAX; num_routes];
        routes.sorted(range.clone()).iter().enumerate().for_each(|(row, &route)| places[route] = row as u32);
        let y = random.bf16s(num_routes * cols, 1.0);
        let (places_on, scaled) = (upload(&gpu, &places), upload(&gpu, &y));
        let sorted = SortedRoutes {
            offsets: Span::NULL,
            tokens: Span::NULL,
            places: places_on.span(),
            first_expert: range.start,
            num_experts: range.len(),
        };
        let out = poisoned::<bf16>(&gpu, &q, tokens * cols);
        scale_routes(&q, scaled.span(), routes.choices(), sorted, num_routes, cols).expect("a launch");
        let (also, also_factors) = (Span::NULL, Span::NULL);
        let outputs = ExpertOutputs { y: scaled.span(), choices: routes.choices(), sorted, cols, also, also_factors };
        sum_experts(&q, out.span(), &outputs, tokens).expect("a launch");
        q.wait().expect("the kernels run");
        let mut rows = y.clone();
        for route in (0..num_routes).filter(|&route| places[route] != u32::MAX) {
            let row = &mut rows[places[route] as usize * cols..][..cols];
            row.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * routes.probabilities[route]));
        }
        assert!(scaled.span().read::<bf16>(num_routes * cols).expect("a copy") == rows, "{shape:?}: rows are scaled");
        let mut sums = vec![0.0f32; tokens * cols];
        for route in (0..num_routes).filter(|&route| places[route] != u32::MAX) {
            let row = &rows[places[route] as usize * cols..][..cols];
            let to = &mut sums[route / top_k * cols..][..cols];
            to.iter_mut().zip(row).for_each(|(to, from)| *to += from.to_f32());
        }
        let found = floats(&out.span().read::<bf16>(tokens * cols).expect("a copy"));
        assert_close("sum of scaled rows", &found, &sums, 2.0f32.powi(-8), 1e-5);
    }
}

#[test]
fn rows_are_scaled_by_their_gate() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(6);
    for [rows, cols, width] in [[1, 64, 64], [5, 2056, 136], [33, 8, 4096]] {
        let (values, x, gate) =
            (random.bf16s(rows * cols, 1.0), random.bf16s(rows * width, 1.0), random.bf16s(width, 0.1));
        let (out, x_on, gate_on) = (upload(&gpu, &values), upload(&gpu, &x), upload(&gpu, &gate));
        gate_rows(&q, out.span(), x_on.span(), gate_on.span(), rows, cols, width).expect("a launch");
        q.wait().expect("the kernel runs");
        let gates = reference::linear(&floats(&x), &floats(&gate), None, width);
        let scaled = |(i, v): (usize, &bf16)| v.to_f32() / (1.0 + (-gates[i / cols]).exp());
        let expected: Vec<f32> = values.iter().enumerate().map(scaled).collect();
        let found = floats(&out.span().read::<bf16>(rows * cols).expect("a copy"));
        assert_close("gated rows", &found, &expected, 2.0f32.powi(-8), 1e-4);
    }
}
