//! Linear layers in bf16 for many rows have the same bits as those for few rows, which `cuda_skinny_gemm.rs` compares with the
//! plain formula.

mod gpu;

use std::sync::Arc;

use gpu::{Random, poisoned};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::skinny_gemm::{Epilogue, LinearWeight, MAX_ROWS, skinny_gemm_split};
use kernels::cuda::sum_order::SumOrder;
use kernels::cuda::wide_gemm::{WideSplit, has_kernel, wide_gemm, wide_gemm_split};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};

const EPILOGUES: [Epilogue; 4] = [
    Epilogue::Store,
    Epilogue::StoreF32,
    Epilogue::Gated(GateActivation::Silu),
    Epilogue::Gated(GateActivation::GeluTanh),
];

fn open() -> Option<(Arc<Gpu>, Queue)> {
    let (gpu, queue) = gpu::open()?;
    if !has_kernel(&gpu) {
        println!("skipped: the kernel needs a GPU of compute capability 9");
        return None;
    }
    Some((gpu, queue))
}

/// A layer on the GPU, and rows for it.
struct Case {
    gpu: Arc<Gpu>,
    queue: Queue,
    x: DeviceBuffer,
    weight: DeviceBuffer,
    bias: Option<DeviceBuffer>,
    rows: usize,
    n: usize,
    k: usize,
}

impl Case {
    fn new(gpu: &Arc<Gpu>, queue: Queue, random: &mut Random, [rows, n, k]: [usize; 3]) -> Self {
        let mut upload =
            |count: usize, scale| DeviceBuffer::from_slice(gpu, &random.bf16s(count, scale)).expect("memory");
        let (x, weight) = (upload(rows * k, 1.0), upload(n * k, 0.05));
        let bias = (n / 16).is_multiple_of(2).then(|| upload(n, 1.0));
        Self { gpu: gpu.clone(), queue, x, weight, bias, rows, n, k }
    }

    fn linear(&self) -> LinearWeight {
        let bias = self.bias.as_ref().map_or(Span::NULL, DeviceBuffer::span);
        LinearWeight { weight: self.weight.span(), bias, n: self.n, k: self.k }
    }

    /// Bytes of a row of y.
    fn row_bytes(&self, epilogue: Epilogue) -> usize {
        match epilogue {
            Epilogue::Store => 2 * self.n,
            Epilogue::StoreF32 => 4 * self.n,
            Epilogue::Gated(_) => self.n,
        }
    }

    /// The whole output of `kernel`, which was filled with NaN.
    fn run(&self, epilogue: Epilogue, kernel: impl Fn(Span)) -> Vec<u8> {
        let bytes = self.rows * self.row_bytes(epilogue);
        let y = poisoned::<u8>(&self.gpu, &self.queue, bytes);
        kernel(y.span());
        self.queue.wait().expect("the kernel runs");
        y.span().read::<u8>(bytes).expect("a copy")
    }

    /// The output by the kernel for few rows, in groups of different sizes.
    fn by_few(&self, epilogue: Epilogue, order: SumOrder) -> Vec<u8> {
        self.run(epilogue, |y| {
            let mut first = 0;
            for count in [1, 7, 64, 17, 33].into_iter().cycle() {
                let count = count.min(self.rows - first).min(MAX_ROWS);
                let x = self.x.span().elements::<bf16>(first * self.k, count * self.k);
                let bytes = self.row_bytes(epilogue);
                let own = y.part(first * bytes, count * bytes);
                let split = order.split();
                skinny_gemm_split(&self.queue, own, x, &self.linear(), count, epilogue, split).expect("a launch");
                first += count;
                if first == self.rows {
                    return;
                }
            }
        })
    }
}

/// Number of values of `found` whose bits differ, and the first of them; zeros of both signs are equal.
fn differing(found: &[u8], expected: &[u8], epilogue: Epilogue) -> (usize, usize) {
    let is_zero = |bytes: &[u8]| bytes[..bytes.len() - 1].iter().all(|&b| b == 0) && bytes[bytes.len() - 1] & 0x7f == 0;
    let size = if epilogue == Epilogue::StoreF32 { 4 } else { 2 };
    let pairs = found.chunks(size).zip(expected.chunks(size)).enumerate();
    let wrong: Vec<usize> =
        pairs.filter(|(_, (a, b))| a != b && !(is_zero(a) && is_zero(b))).map(|(index, _)| index).collect();
    (wrong.len(), wrong.first().copied().unwrap_or_default())
}

/// Prints every case that differs, so that one run shows all of them.
#[test]
fn many_rows_have_the_bits_of_few_rows() {
    let Some((gpu, _)) = open() else { return };
    let mut random = Random::new(41);
    let mut failures = 0;
    for [n, k] in [[64, 64], [192, 136], [1008, 520], [96, 2752], [48, 8], [16, 4096], [4608, 1032], [6144, 4096]] {
        for rows in [1, 5, 65, 128, 129, 300] {
            let case = Case::new(&gpu, Queue::new(&gpu).expect("a queue"), &mut random, [rows, n, k]);
            for (parts, groups) in [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 4), (1, 4)] {
                let order = SumOrder { parts, groups };
                let mut splits = [128, 256].map(|cols| WideSplit { cols, is_split: false }).to_vec();
                if order.runs() == 1 {
                    splits.push(WideSplit { cols: 224, is_split: false });
                }
                if parts > 1 {
                    splits.push(WideSplit { cols: 128, is_split: true });
                }
                for epilogue in EPILOGUES {
                    let expected = case.by_few(epilogue, order);
                    for &split in &splits {
                        let found = case.run(epilogue, |y| {
                            let (x, linear) = (case.x.span(), case.linear());
                            let queue = &case.queue;
                            wide_gemm_split(queue, y, x, &linear, rows, epilogue, order, split).expect("a launch");
                        });
                        let (count, first) = differing(&found, &expected, epilogue);
                        if count > 0 {
                            failures += 1;
                            println!(
                                "{rows} x {n} x {k}, {order:?}, {split:?}, {epilogue:?}: {count} differ, first {first}"
                            );
                        }
                    }
                }
            }
        }
    }
    assert_eq!(failures, 0, "products with other bits");
}

#[test]
fn the_order_of_a_layer_is_that_of_few_rows_for_real_sizes() {
    let Some((gpu, _)) = open() else { return };
    let mut random = Random::new(42);
    for [n, k] in [[6144, 4096], [4096, 4096], [28672, 4096], [4096, 14336], [512, 4096]] {
        let order = SumOrder::for_shape(n, k);
        let case = Case::new(&gpu, Queue::new(&gpu).expect("a queue"), &mut random, [333, n, k]);
        let epilogue = if n > 16384 { EPILOGUES[2] } else { Epilogue::Store };
        let expected = case.by_few(epilogue, order);
        let found = case.run(epilogue, |y| {
            wide_gemm(&case.queue, y, case.x.span(), &case.linear(), case.rows, epilogue, order).expect("a launch");
        });
        assert_eq!(differing(&found, &expected, epilogue), (0, 0), "{n} x {k}");
    }
}
