//! Compares linear layers for few rows with the plain formula, for both kernels and odd shapes.

mod gpu;

use std::sync::Arc;

use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::skinny_gemm::{
    Epilogue, LinearWeight, Split, has_hopper_kernel, skinny_gemm, skinny_gemm_simple, skinny_gemm_split,
};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use kernels::reference;

const EPILOGUES: [Epilogue; 4] = [
    Epilogue::Store,
    Epilogue::StoreF32,
    Epilogue::Gated(GateActivation::Silu),
    Epilogue::Gated(GateActivation::GeluTanh),
];

struct Case {
    gpu: Arc<Gpu>,
    queue: Queue,
    x: Vec<bf16>,
    weight: Vec<bf16>,
    bias: Option<Vec<bf16>>,
    rows: usize,
    n: usize,
    k: usize,
}

impl Case {
    fn new(gpu: &Arc<Gpu>, queue: Queue, random: &mut Random, [rows, n, k]: [usize; 3], with_bias: bool) -> Self {
        Self {
            gpu: gpu.clone(),
            queue,
            x: random.bf16s(rows * k, 1.0),
            weight: random.bf16s(n * k, 0.05),
            bias: with_bias.then(|| random.bf16s(n, 1.0)),
            rows,
            n,
            k,
        }
    }

    /// Runs `kernel` with an output filled with NaN and returns the whole output.
    fn run(&self, epilogue: Epilogue, kernel: &dyn Fn(&Queue, Span, Span, &LinearWeight)) -> Vec<f32> {
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(&self.gpu, values).expect("memory");
        let (x, weight, bias) = (upload(&self.x), upload(&self.weight), self.bias.as_deref().map(upload));
        let bias_span = bias.as_ref().map_or(Span::NULL, DeviceBuffer::span);
        let linear = LinearWeight { weight: weight.span(), bias: bias_span, n: self.n, k: self.k };
        let count = self.rows * if matches!(epilogue, Epilogue::Gated(_)) { self.n / 2 } else { self.n };
        let y = poisoned::<f32>(&self.gpu, &self.queue, count);
        kernel(&self.queue, y.span(), x.span(), &linear);
        self.queue.wait().expect("the kernel runs");
        match epilogue {
            Epilogue::StoreF32 => y.span().read::<f32>(count).expect("a copy"),
            _ => floats(&y.span().read::<bf16>(count).expect("a copy")),
        }
    }

    /// Expected value and tolerance of each element: the rounding on store, and fp32 sums in any order, through the
    /// gate if there is one.
    fn expected(&self, epilogue: Epilogue) -> Vec<(f32, f32)> {
        let (x, weight, bias) = (floats(&self.x), floats(&self.weight), self.bias.as_deref().map(floats));
        let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<f32>>();
        let sums = reference::linear(&x, &weight, bias.as_deref(), self.k);
        let sizes = reference::linear(&magnitudes(&x), &magnitudes(&weight), None, self.k);
        let slack = |i: usize| sizes[i] * self.k as f32 * 2.0f32.powi(-24) + sums[i].abs() * 2.0f32.powi(-22);
        let Epilogue::Gated(activation) = epilogue else {
            let rounding = if epilogue == Epilogue::Store { 2.0f32.powi(-8) } else { 0.0 };
            return (0..sums.len()).map(|i| (sums[i], sums[i].abs() * rounding + slack(i))).collect();
        };
        let pair = |o: usize| {
            let (row, column) = (o / (self.n / 2), o % (self.n / 2));
            let gate = row * self.n + column / 8 * 16 + column % 8;
            let (g, u) = (activate(activation, sums[gate]), sums[gate + 8]);
            let tolerance = (g * u).abs() * 2.0f32.powi(-8) * 1.05;
            // Both activation functions have slopes below 1.2.
            (g * u, tolerance + 1.2 * slack(gate) * u.abs() + slack(gate + 8) * g.abs() + 1e-6)
        };
        (0..self.rows * self.n / 2).map(pair).collect()
    }

    /// Asserts that the output of `kernel` is as `expected`.
    fn check(
        &self,
        what: &str,
        epilogue: Epilogue,
        expected: &[(f32, f32)],
        kernel: &dyn Fn(&Queue, Span, Span, &LinearWeight),
    ) {
        let found = self.run(epilogue, kernel);
        for (i, (&found, &(expected, tolerance))) in found.iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() <= tolerance,
                "{what}, {} x {} x {}, {epilogue:?}: element {i} is {found}, {expected} was expected within {tolerance}",
                self.rows,
                self.n,
                self.k
            );
        }
    }
}

fn activate(activation: GateActivation, x: f32) -> f32 {
    match activation {
        GateActivation::Silu => reference::silu(x),
        GateActivation::GeluTanh => reference::gelu_tanh(x),
        other => unreachable!("{other:?} is no epilogue"),
    }
}

#[test]
fn few_rows_through_a_linear_layer_agree_with_the_formula() {
    let Some((gpu, _)) = gpu::open() else { return };
    let mut random = Random::new(1);
    for [n, k] in [[64, 64], [192, 136], [1008, 520], [96, 2752], [48, 8], [16, 4096], [272, 1032]] {
        for rows in [1, 2, 7, 8, 9, 17, 33, 64] {
            let queue = Queue::new(&gpu).expect("a queue");
            let case = Case::new(&gpu, queue, &mut random, [rows, n, k], (rows + n / 16) % 2 == 0);
            for epilogue in EPILOGUES {
                let expected = case.expected(epilogue);
                case.check("chosen", epilogue, &expected, &|q, y, x, linear| {
                    skinny_gemm(q, y, x, linear, rows, epilogue).expect("a launch");
                });
                case.check("simple", epilogue, &expected, &|q, y, x, linear| {
                    skinny_gemm_simple(q, y, x, linear, rows, epilogue).expect("a launch");
                });
                if !has_hopper_kernel(&gpu) {
                    continue;
                }
                for (parts, groups) in [(1, 1), (2, 2), (4, 4), (1, 4), (4, 1)] {
                    let split = Split { parts, groups, ring_bytes: 64 << 10 };
                    case.check(&format!("{split:?}"), epilogue, &expected, &|q, y, x, linear| {
                        skinny_gemm_split(q, y, x, linear, rows, epilogue, split).expect("a launch");
                    });
                }
            }
        }
    }
}

#[test]
fn a_row_alone_gets_the_bits_it_gets_among_others() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let (n, k) = (1024, 2048);
    let mut random = Random::new(2);
    let mut case = Case::new(&gpu, queue, &mut random, [32, n, k], false);
    let run = |case: &Case| {
        let rows = case.rows;
        case.run(Epilogue::Store, &|q, y, x, linear| {
            skinny_gemm(q, y, x, linear, rows, Epilogue::Store).expect("a launch");
        })
    };
    let together = run(&case);
    let all = case.x.clone();
    case.rows = 1;
    for row in [0, 13, 31] {
        case.x = all[row * k..(row + 1) * k].to_vec();
        assert_eq!(run(&case), together[row * n..(row + 1) * n], "row {row}");
    }
}

#[test]
fn shapes_that_a_kernel_was_not_written_for_are_refused() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let buffer = DeviceBuffer::with_count::<bf16>(&gpu, 4096).expect("memory");
    let all = buffer.span();
    let try_shape = |rows: usize, n: usize, k: usize, epilogue: Epilogue| {
        let linear = LinearWeight { weight: all, bias: Span::NULL, n, k };
        skinny_gemm(&queue, all, all, &linear, rows, epilogue)
    };
    assert!(try_shape(65, 8, 8, Epilogue::Store).is_err(), "more rows than the kernel has");
    assert!(try_shape(1, 8, 12, Epilogue::Store).is_err(), "inputs not a multiple of 8");
    assert!(try_shape(1, 8, 8, Epilogue::Gated(GateActivation::Silu)).is_err(), "half a group of gate rows");
    assert!(try_shape(1, 4096, 8, Epilogue::Store).is_err(), "a weight shorter than its shape");
}
