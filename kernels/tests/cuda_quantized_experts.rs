//! Compares products of experts whose weights are in 8 or 4 bits with the plain formula over the values of their codes.

#[path = "gpu/fp8_rows.rs"]
mod fp8_rows;
mod gpu;
#[path = "gpu/quantized.rs"]
mod quantized;

use std::sync::Arc;

use fp8_rows::{quantize, quantized_values};
use gpu::{CHOSEN, Listed, Random, floats, poisoned, rows_of_tokens};
use half::bf16;
use kernels::cuda::expert_rows::{ExpertRows, GroupedRows, RowInputs};
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::grouped_fp8_gemm::{grouped_fp8_gemm, has_grouped_fp8_kernel};
use kernels::cuda::grouped_gemm::{Gate, GroupedEpilogue, GroupedWeight, Kernel, grouped_gemm, has_hopper_kernels};
use kernels::cuda::quantized_gemm::PackedFormat;
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use kernels::reference;
use quantized::{FORMATS, QuantizedWeight};

/// Experts with random weights `[n, k]`.
struct Experts {
    weight: QuantizedWeight,
    n: usize,
    bias: Vec<bf16>,
}

impl Experts {
    fn new(gpu: &Arc<Gpu>, random: &mut Random, count: usize, [n, k]: [usize; 2], format: PackedFormat) -> Self {
        let weight = QuantizedWeight::random(gpu, random, [count * n, k], format, false);
        Self { weight, n, bias: random.bf16s(count * n, 1.0) }
    }

    /// The products of `x`, whose rows are sorted; `counts` has the rows of each expert. Without a kernel, inputs are rounded to e4m3.
    /// Then they also have the same bits if they are rows of tokens.
    fn run(
        &self,
        on: (&Arc<Gpu>, &Queue),
        x: &[bf16],
        counts: &[usize],
        epilogue: GroupedEpilogue,
        kernel: Option<Kernel>,
    ) -> Vec<f32> {
        let found = self.run_on(on, x, counts, epilogue, kernel, false);
        if kernel.is_none() {
            assert_eq!(found, self.run_on(on, x, counts, epilogue, kernel, true), "rows of tokens, {counts:?}");
        }
        found
    }

    /// The products of listed experts for rows of tokens.
    fn run_listed(
        &self,
        (gpu, q): (&Arc<Gpu>, &Queue),
        x: &[bf16],
        listed: &Listed,
        epilogue: GroupedEpilogue,
        kernel: Option<Kernel>,
    ) -> Vec<f32> {
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let (k, routes) = (self.weight.k, listed.tokens.len());
        let (bias, x_on, (_codes, rounded)) = (upload(&self.bias), upload(x), quantize((gpu, q), x, k));
        let weight = self.grouped(listed.counts.len(), bias.span());
        let rows = GroupedRows { experts: ExpertRows::Listed(listed.list.span()), tokens: x.len() / k, routes };
        let count = routes * epilogue.outputs(self.n);
        let y = poisoned::<bf16>(gpu, q, count);
        match kernel {
            Some(kernel) => {
                grouped_gemm(q, y.span(), RowInputs::OfAllTokens(x_on.span()), &weight, rows, epilogue, kernel)
            }
            None => grouped_fp8_gemm(q, y.span(), RowInputs::OfAllTokens(rounded), &weight, rows, epilogue),
        }
        .expect("a launch");
        q.wait().expect("the kernel runs");
        floats(&y.span().read::<bf16>(count).expect("a copy"))
    }

    fn grouped(&self, num_experts: usize, bias: Span) -> GroupedWeight {
        let packed = self.weight.packed();
        GroupedWeight {
            weight: packed.codes,
            packed: Some((packed.scales, packed.format)),
            bias,
            num_experts,
            n: self.n,
            k: self.weight.k,
        }
    }

    fn run_on(
        &self,
        (gpu, q): (&Arc<Gpu>, &Queue),
        x: &[bf16],
        counts: &[usize],
        epilogue: GroupedEpilogue,
        kernel: Option<Kernel>,
        are_of_tokens: bool,
    ) -> Vec<f32> {
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let (k, routes) = (self.weight.k, x.len() / self.weight.k);
        let (of_tokens, of_rows) = rows_of_tokens(x, k);
        let of_rows = DeviceBuffer::from_slice(gpu, &of_rows).expect("memory");
        let (bias, (_codes, rounded)) =
            (upload(&self.bias), quantize((gpu, q), if are_of_tokens { &of_tokens } else { x }, k));
        let rounded = match are_of_tokens {
            true => RowInputs::OfTokens { x: rounded, of_rows: of_rows.span() },
            false => RowInputs::Sorted(rounded),
        };
        let x = upload(x);
        let starts: Vec<u32> = (0..=counts.len()).map(|expert| counts[..expert].iter().sum::<usize>() as u32).collect();
        let offsets = DeviceBuffer::from_slice(gpu, &starts).expect("memory");
        let weight = self.grouped(counts.len(), bias.span());
        let expanded = DeviceBuffer::with_count::<bf16>(gpu, weight.elements()).expect("memory");
        let weight = match kernel {
            Some(Kernel::Skinny | Kernel::InOrder) | None => weight,
            _ => weight.expanded(q, expanded.span()).expect("a launch"),
        };
        let tokens = if are_of_tokens { routes } else { counts.iter().copied().max().expect("an expert") };
        let rows = GroupedRows { experts: ExpertRows::Offsets(offsets.span()), tokens, routes };
        let count = routes * epilogue.outputs(self.n);
        let y = poisoned::<bf16>(gpu, q, count);
        match kernel {
            Some(kernel) => grouped_gemm(q, y.span(), RowInputs::Sorted(x.span()), &weight, rows, epilogue, kernel),
            None => grouped_fp8_gemm(q, y.span(), rounded, &weight, rows, epilogue),
        }
        .expect("a launch");
        q.wait().expect("the kernel runs");
        floats(&y.span().read::<bf16>(count).expect("a copy"))
    }

    /// Products and, as their tolerance before the rounding of the result, fp32 sums in any order. Expanded weights are
    /// rounded to bf16.
    fn expected(&self, x: &[f32], counts: &[usize], kernel: Option<Kernel>) -> Vec<(f32, f32)> {
        let (n, k) = (self.n, self.weight.k);
        let rounded = if kernel.is_none() { quantized_values(x, k) } else { x.to_vec() };
        let x = &rounded;
        // The tensor cores cut the terms of a slice at 2^-13 of the largest.
        let term_error = if kernel.is_none() { 2f32.powi(-10) } else { k as f32 * 2f32.powi(-24) };
        let values: Vec<f32> = match kernel {
            Some(Kernel::Skinny | Kernel::InOrder) | None => self.weight.values.clone(),
            _ => self.weight.values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect(),
        };
        let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<f32>>();
        let mut first = 0;
        let mut out = Vec::new();
        for (expert, &count) in counts.iter().enumerate() {
            let (x, own) = (&x[first * k..][..count * k], &values[expert * n * k..][..n * k]);
            let sums = reference::linear(x, own, Some(&floats(&self.bias[expert * n..][..n])), k);
            let sizes = reference::linear(&magnitudes(x), &magnitudes(own), None, k);
            out.extend(sums.iter().zip(&sizes).map(|(&sum, &size)| (sum, size * term_error + 1e-6)));
            first += count;
        }
        out
    }
}

/// The kernels of this GPU for a format; none is the one whose inputs are rounded to e4m3.
fn kernels_of(gpu: &Gpu, format: PackedFormat) -> Vec<Option<Kernel>> {
    let exact = match has_hopper_kernels(gpu) {
        true => [Kernel::Simple, Kernel::Skinny, Kernel::InOrder, Kernel::Wide].map(Some).to_vec(),
        false => vec![Some(Kernel::Simple)],
    };
    let rounding = has_grouped_fp8_kernel(gpu, format).then_some(None);
    exact.into_iter().chain(rounding).collect()
}

#[test]
fn every_expert_multiplies_its_rows_by_its_codes() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(31);
    let counts: [&[usize]; 6] =
        [&[1], &[0, 3, 0, 1], &[16, 0, 12, 1], &[5, 17, 32], &[9, 0, 17, 64, 65, 2, 0, 1, 1, 1, 4], &[70, 0, 130]];
    let gated = GroupedEpilogue::Gated(Gate::Activation(GateActivation::Silu));
    let activated = GroupedEpilogue::Activated(GateActivation::ReluSquared);
    for format in FORMATS {
        for counts in counts {
            for [n, k] in [[64, 8], [128, 136], [320, 1032], [64, 2880]] {
                let experts = Experts::new(&gpu, &mut random, counts.len(), [n, k], format);
                let x = random.bf16s(counts.iter().sum::<usize>() * k, 1.0);
                for kernel in kernels_of(&gpu, format) {
                    let what = format!("{format:?}, {kernel:?}, {n} x {k}, {counts:?}");
                    let expected = experts.expected(&floats(&x), counts, kernel);
                    let found = experts.run((&gpu, &q), &x, counts, GroupedEpilogue::Store, kernel);
                    for (i, (&found, &(sum, slack))) in found.iter().zip(&expected).enumerate() {
                        let tolerance = sum.abs() * 2f32.powi(-8) + slack;
                        assert!((found - sum).abs() <= tolerance, "{what}: element {i} is {found}, expected {sum}");
                    }
                    let found = experts.run((&gpu, &q), &x, counts, activated, kernel);
                    for (i, (&found, &(sum, slack))) in found.iter().zip(&expected).enumerate() {
                        let (root, slope) = (sum.max(0.0), 2.0 * sum.max(0.0) + slack);
                        let (square, tolerance) = (root * root, root * root * 2f32.powi(-8) + slope * slack);
                        assert!((found - square).abs() <= tolerance, "{what}: square {i} is {found}, not {square}");
                    }
                    let found = experts.run((&gpu, &q), &x, counts, gated, kernel);
                    for (o, &found) in found.iter().enumerate() {
                        let (row, column) = (o / (n / 2), o % (n / 2));
                        let at = row * n + column / 8 * 16 + column % 8;
                        let [(g, g_slack), (u, u_slack)] = [expected[at], expected[at + 8]];
                        let product = reference::silu(g) * u;
                        // The activation has a slope below 1.2.
                        let tolerance =
                            product.abs() * 2f32.powi(-7) + 1.2 * g_slack * u.abs() + u_slack * g.abs() + 1e-5;
                        assert!(
                            (found - product).abs() <= tolerance,
                            "{what}: output {o} is {found}, expected {product}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn listed_experts_give_the_bits_of_sorted_rows() {
    let Some((gpu, q)) = gpu::open() else { return };
    if !has_hopper_kernels(&gpu) {
        println!("skipped: the kernels need a GPU of compute capability 9");
        return;
    }
    let mut random = Random::new(34);
    let gated = GroupedEpilogue::Gated(Gate::Activation(GateActivation::Silu));
    for format in FORMATS {
        for chosen in CHOSEN {
            let listed = Listed::new(&gpu, chosen);
            let tokens = listed.num_tokens();
            for [n, k] in [[64, 8], [128, 136], [320, 1032]] {
                let experts = Experts::new(&gpu, &mut random, chosen.len(), [n, k], format);
                let x = random.bf16s(tokens * k, 1.0);
                let sorted = listed.sorted(&x, k);
                let is_taken =
                    |kernel: &Option<Kernel>| matches!(kernel, None | Some(Kernel::Skinny | Kernel::InOrder));
                for kernel in kernels_of(&gpu, format).into_iter().filter(is_taken) {
                    for epilogue in [GroupedEpilogue::Store, gated] {
                        let expected = experts.run((&gpu, &q), &sorted, &listed.counts, epilogue, kernel);
                        let found = experts.run_listed((&gpu, &q), &x, &listed, epilogue, kernel);
                        assert!(found == expected, "{format:?}, {kernel:?}, {n} x {k}, {chosen:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_alone_gets_the_bits_it_gets_among_others() {
    let Some((gpu, q)) = gpu::open() else { return };
    if !has_hopper_kernels(&gpu) {
        println!("skipped: the kernel needs a GPU of compute capability 9");
        return;
    }
    let mut random = Random::new(32);
    let k = 1024;
    // Each line is of one division of the work: up to 16 tokens, and more. `InOrder` has one for any number.
    let cases =
        [([3, 16, 0, 9], [(1, 0, 1), (3, 1, 1), (20, 3, 8)]), ([3, 90, 0, 33], [(1, 0, 17), (80, 1, 64), (93, 3, 17)])];
    for (format, (counts, rows)) in FORMATS.into_iter().flat_map(|format| cases.map(|case| (format, case))) {
        let experts = Experts::new(&gpu, &mut random, counts.len(), [512, k], format);
        let x = random.bf16s(counts.iter().sum::<usize>() * k, 1.0);
        let takes_codes = |kernel: &Option<Kernel>| !matches!(kernel, Some(Kernel::Simple | Kernel::Wide));
        for kernel in kernels_of(&gpu, format).into_iter().filter(takes_codes) {
            let together = experts.run((&gpu, &q), &x, &counts, GroupedEpilogue::Store, kernel);
            for (row, expert, num_copies) in rows {
                let num_copies = if kernel == Some(Kernel::InOrder) { 1 } else { num_copies };
                let mut copies = [0; 4];
                copies[expert] = num_copies;
                let x = x[row * k..][..k].repeat(num_copies);
                let apart = experts.run((&gpu, &q), &x, &copies, GroupedEpilogue::Store, kernel);
                assert_eq!(apart[..experts.n], together[row * experts.n..][..experts.n], "row {row}, {format:?}");
            }
        }
    }
}

#[test]
fn packed_weights_are_refused_by_kernels_that_do_not_take_them() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(33);
    let experts = Experts::new(&gpu, &mut random, 1, [64, 128], PackedFormat::Mxfp4);
    let packed = experts.weight.packed();
    let weight = GroupedWeight {
        weight: packed.codes,
        packed: Some((packed.scales, packed.format)),
        bias: Span::NULL,
        num_experts: 1,
        n: 64,
        k: 128,
    };
    let buffer = DeviceBuffer::new(&gpu, 64 * 128 * 2).expect("memory");
    let rows = GroupedRows { experts: ExpertRows::Offsets(buffer.span()), tokens: 1, routes: 1 };
    let refused = grouped_gemm(
        &q,
        buffer.span(),
        RowInputs::Sorted(buffer.span()),
        &weight,
        rows,
        GroupedEpilogue::Store,
        Kernel::Wide,
    );
    assert!(refused.unwrap_err().to_string().contains("packed weights"));
}
