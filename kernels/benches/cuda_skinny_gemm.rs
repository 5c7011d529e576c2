//! Linear layers with few rows on the first GPU, compared with the memory bandwidth.
//!
//! `cargo bench -p kernels --bench cuda_skinny_gemm [-- READ_TB_S]`; the default bandwidth is 4.47 TB/s, an H200's. The
//! shapes are those of a Llama with 7 billion parameters. Each layer runs repeatedly with different weights, which
//! together are larger than the L2 cache.

mod gpu;

use gpu::{ROTATED_BYTES, microseconds, random};
use half::bf16;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::skinny_gemm::{Epilogue, LinearWeight, skinny_gemm, skinny_gemm_simple};
use kernels::cuda::{DeviceBuffer, Span};

/// Name, `N`, `K`.
const SHAPES: [(&str, usize, usize); 5] =
    [("qkv", 12288, 4096), ("o", 4096, 4096), ("gate_up", 22016, 4096), ("down", 4096, 11008), ("head", 32000, 4096)];
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let read = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    println!("{:>8} {:>5} {:>9} {:>7} {:>7} {:>10}", "op", "rows", "us", "TB/s", "% read", "simple us");
    for (name, n, k) in SHAPES {
        let copies = (ROTATED_BYTES / (n * k * 2)).max(2);
        let weights: Vec<DeviceBuffer> = (0..copies).map(|_| random(&gpu, n * k)).collect();
        for rows in ROWS {
            let (x, y) = (random(&gpu, rows * k), DeviceBuffer::with_count::<bf16>(&gpu, rows * n).expect("memory"));
            let epilogue = if name == "gate_up" { Epilogue::Gated(GateActivation::Silu) } else { Epilogue::Store };
            let linear = |i: usize| LinearWeight { weight: weights[i % copies].span(), bias: Span::NULL, n, k };
            let us = microseconds(&queue, 2 * copies, |i| {
                skinny_gemm(&queue, y.span(), x.span(), &linear(i), rows, epilogue)
            });
            let simple = microseconds(&queue, 2 * copies, |i| {
                skinny_gemm_simple(&queue, y.span(), x.span(), &linear(i), rows, epilogue)
            });
            let rate = (n * k * 2) as f64 / us / 1e6;
            println!("{name:>8} {rows:>5} {us:>9.1} {rate:>7.2} {:>7.0} {simple:>10.1}", 100.0 * rate / read);
        }
    }
}
